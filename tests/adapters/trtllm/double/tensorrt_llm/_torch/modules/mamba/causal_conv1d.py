"""The short convolution: a chunk of each sequence, and one token of each."""

import torch
import torch.nn.functional as F
from tensorrt_llm._torch.modules.mamba import PAD_SLOT_ID


def causal_conv1d_fn(
    x,
    weight,
    bias=None,
    query_start_loc=None,
    cache_indices=None,
    has_initial_state=None,
    conv_states=None,
    activation="silu",
    pad_slot_id=PAD_SLOT_ID,
):
    out = torch.empty_like(x)
    for row, slot in enumerate(cache_indices.tolist()):
        first, last = query_start_loc[row : row + 2].tolist()
        past = conv_states[slot] if has_initial_state[row] else torch.zeros_like(conv_states[slot])
        whole = torch.cat([past, x[:, first:last]], 1)
        out[:, first:last] = F.silu(F.conv1d(whole[None], weight[:, None], groups=len(weight))[0])
        conv_states[slot] = whole[:, whole.shape[1] - past.shape[1] :]
    return out


def causal_conv1d_update(
    x,
    conv_state,
    weight,
    bias=None,
    activation=None,
    cache_seqlens=None,
    conv_state_indices=None,
    pad_slot_id=PAD_SLOT_ID,
):
    slots = conv_state_indices.long()
    whole = torch.cat([conv_state[slots], x[:, :, None]], 2)
    conv_state[slots] = whole[:, :, 1:]
    return F.silu((whole * weight).sum(2))

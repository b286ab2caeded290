"""The short convolution over drafts, with the window after each of them."""

import torch
import torch.nn.functional as F
from tensorrt_llm._torch.modules.mamba import PAD_SLOT_ID


def causal_conv1d_update(
    x,
    conv_state,
    weight,
    bias=None,
    activation=None,
    cache_seqlens=None,
    conv_state_indices=None,
    num_accepted_tokens=None,
    intermediate_conv_window=None,
    intermediate_state_indices=None,
    pad_slot_id=PAD_SLOT_ID,
    launch_dependent_kernels=False,
):
    width = conv_state.shape[-1]
    whole = torch.cat([conv_state[conv_state_indices.long()], x], 2)
    for token in range(x.shape[2]):
        window = whole[:, :, token + 1 : token + 1 + width]
        intermediate_conv_window[intermediate_state_indices.long(), token] = window
    return F.silu(F.conv1d(whole, weight[:, None], groups=len(weight)))

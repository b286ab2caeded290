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
    retrieve_next_token=None,
    retrieve_next_sibling=None,
    retrieve_parent_token=None,
    pad_slot_id=PAD_SLOT_ID,
    launch_dependent_kernels=False,
):
    width = conv_state.shape[-1]
    if retrieve_next_token is not None:
        links = retrieve_next_token, retrieve_next_sibling, retrieve_parent_token
        first = conv_state[conv_state_indices.long()]
        return _tree(x, first, weight, intermediate_conv_window, intermediate_state_indices.long(), *links)
    whole = torch.cat([conv_state[conv_state_indices.long()], x], 2)
    for token in range(x.shape[2]):
        window = whole[:, :, token + 1 : token + 1 + width]
        intermediate_conv_window[intermediate_state_indices.long(), token] = window
    return F.silu(F.conv1d(whole, weight[:, None], groups=len(weight)))


def _tree(x, first, weight, windows, rows, next_token, next_sibling, parents):
    """Each node follows its parent; the parents are found on the way and written out, zero for the root."""
    parents.zero_()
    out = torch.empty_like(x)
    for row, at in enumerate(rows.tolist()):
        for node in range(x.shape[2]):
            child, sibling = int(next_token[row, node]), int(next_sibling[row, node])
            if child != -1:
                parents[row, child] = node
            if sibling != -1:
                parents[row, sibling] = parents[row, node]
            before = windows[at, parents[row, node]] if node else first[row]
            whole = torch.cat([before, x[row, :, node : node + 1]], 1)
            windows[at, node] = whole[:, 1:]
            out[row, :, node] = F.silu((whole * weight).sum(1))
    return out

"""The gated delta rule over whole chunks, for prefill and for mixed batches."""

import torch
from tensorrt_llm._torch.modules.fla.fused_sigmoid_gating_recurrent import delta_scan, turn, turn_back


def chunk_gated_delta_rule(
    q,
    k,
    v,
    g,
    beta,
    scale=None,
    initial_state=None,
    initial_state_indices=None,
    inplace_indexed_state_update=False,
    output_final_state=False,
    cu_seqlens=None,
    head_first=False,
    use_qk_l2norm_in_kernel=False,
    output=None,
):
    """Keys come normalised. With `inplace_indexed_state_update` states are read and written in the pool."""
    out = torch.empty_like(v) if output is None else output
    finals = []
    for row in range(len(cu_seqlens) - 1):
        chunk = slice(*cu_seqlens[row : row + 2].tolist())
        slot = int(initial_state_indices[row]) if inplace_indexed_state_update else row
        query = q[0, chunk] * q.shape[-1] ** -0.5
        state, y = delta_scan(
            turn(initial_state[slot]).float(), query, k[0, chunk], v[0, chunk], g[0, chunk], beta[0, chunk]
        )
        out[0, chunk] = y.to(out.dtype)
        if inplace_indexed_state_update:
            initial_state[slot] = turn_back(state).to(initial_state.dtype)
        finals.append(turn_back(state))
    return out, torch.stack(finals) if output_final_state else None

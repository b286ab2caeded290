"""Verification by a Gated DeltaNet layer, one state kept for each draft token."""

import torch
from tensorrt_llm._torch.modules.fla.fused_sigmoid_gating_recurrent import delta_scan, turn, turn_back, unit


def fused_recurrent_gated_delta_rule_update(
    q,
    k,
    v,
    g,
    beta=None,
    scale=None,
    initial_state_source=None,
    initial_state_indices=None,
    cu_seqlens=None,
    use_qk_l2norm_in_kernel=False,
    disable_state_update=False,
    disable_output_calculation=False,
    intermediate_states_buffer=None,
    cache_steps=None,
    output=None,
):
    out = torch.empty(v.shape, dtype=v.dtype) if output is None else output
    for row, slot in enumerate(initial_state_indices.tolist()):
        state = turn(initial_state_source[slot]).float()
        for token in range(q.shape[1]):
            now = slice(token, token + 1)
            query = unit(q[row, now]) * q.shape[-1] ** -0.5
            state, y = delta_scan(
                state, query, unit(k[row, now]), v[row, now], g[row, now], beta[row, now].float()
            )
            out[row, token] = y[0].to(out.dtype)
            intermediate_states_buffer[row, token] = turn_back(state).to(intermediate_states_buffer.dtype)
    return out

"""The engine's own replay for Gated DeltaNet: solved updates, unit keys and summed decays in two buffers."""

import torch
from tensorrt_llm._torch.modules.fla.fused_sigmoid_gating_recurrent import gates, unit

CACHED_REPLAY_PARTITION_MIN_BATCH_SIZE = 3
"""16 in the engine; the test's batches are small."""


def _fold(state, u, k, G):
    """State after all records: `u [n, HV, V]`, unit `k [n, H, K]`, `G [HV, n]`, the sums of log-decays."""
    if len(u) == 0:
        return state
    k = k.float().repeat_interleave(u.shape[1] // k.shape[1], 1)
    weights = (G[:, -1:] - G).exp()
    total = G[:, -1].exp()[:, None, None]
    return total * state + torch.einsum("hn,nhv,nhk->hvk", weights, u.float(), k)


def fused_recurrent_gated_delta_rule_cached_replay_update(
    q,
    k,
    v,
    g,
    beta,
    ssm_states,
    state_indices,
    old_u,
    old_k,
    old_G,
    old_beta,
    cache_buf_idx,
    prev_num_accepted_tokens,
    history_size,
    scale=None,
    use_qk_l2norm_in_kernel=False,
    A_log=None,
    dt_bias=None,
    launch_with_pdl=False,
    replay_work_items=None,
    n_writes=None,
    block_v=None,
    num_warps=None,
    use_l2_state_cache=None,
    use_l2_streaming_inputs=None,
    use_l2_shared_inputs=None,
    main_num_stages=None,
    packed_qkv=None,
    use_all_layer_commit=False,
    output=None,
):
    g, beta = gates(A_log, g, dt_bias, beta)
    q, k = unit(q) * q.shape[-1] ** -0.5, unit(k)
    out = torch.empty(v.shape, dtype=v.dtype) if output is None else output
    T, repeat = v.shape[1], v.shape[2] // k.shape[2]
    for row, slot in enumerate(state_indices.tolist()):
        count, buffer = int(prev_num_accepted_tokens[slot]), int(cache_buf_idx[slot])
        past = (old_u[slot, buffer, :count], old_k[slot, buffer, :count], old_G[slot, buffer, :, :count])
        state = _fold(ssm_states[slot].float(), *past)
        first = count
        if count + T > history_size:
            if not use_all_layer_commit:
                ssm_states[slot] = state.to(ssm_states.dtype)
            buffer, first = 1 - buffer, 0
        for token in range(T):
            query, key = (each[row, token].repeat_interleave(repeat, 0) for each in (q, k))
            state = g[row, token].exp()[:, None, None] * state
            u = beta[row, token][:, None] * (v[row, token].float() - (state * key[:, None]).sum(-1))
            state = state + u[:, :, None] * key[:, None]
            out[row, token] = (state * query[:, None]).sum(-1).to(out.dtype)
            at = first + token
            old_u[slot, buffer, at] = u.to(old_u.dtype)
            old_k[slot, buffer, at] = k[row, token].to(old_k.dtype)
            before = old_G[slot, buffer, :, at - 1] if at else 0.0
            old_G[slot, buffer, :, at] = before + g[row, token]
    return out


def commit_gdn_cached_replay_history_layers(
    *,
    ssm_states,
    old_u,
    old_k,
    old_G,
    replay_work_items,
    n_writes,
    history_size,
    persistent_waves=2,
    commit_block_v=None,
    commit_num_warps=None,
    commit_pipeline_stages=None,
):
    for _, slot, count, buffer in replay_work_items[: int(n_writes)].tolist():
        for layer, states in enumerate(ssm_states):
            past = (
                old_u[layer, slot, buffer, :count],
                old_k[layer, slot, buffer, :count],
                old_G[layer, slot, buffer, :, :count],
            )
            states[slot] = _fold(states[slot].float(), *past).to(states.dtype)

"""The gated delta rule over the tokens of a step, with its gates."""

import torch
import torch.nn.functional as F

TURNED = False
"""Whether a state lies as `[HV, K, V]` in the memory of `[HV, V, K]`, as in older generations."""


def turn(state):
    """A state or several, from how they lie to `[HV, V, K]` and back."""
    if not TURNED:
        return state
    V, K = state.shape[-2:]
    return state.flatten(-2).unflatten(-1, (K, V)).transpose(-1, -2)


def turn_back(state):
    if not TURNED:
        return state
    V, K = state.shape[-2:]
    return state.transpose(-1, -2).flatten(-2).unflatten(-1, (V, K))


def delta_scan(state, q, k, v, g, beta):
    """State `[HV, V, K]` and outputs of tokens `q`, `k [T, H, K]`, `v [T, HV, V]`, `g`, `beta [T, HV]`."""
    outputs = []
    repeat = v.shape[1] // k.shape[1]
    for token in range(len(v)):
        query, key = (value[token].float().repeat_interleave(repeat, 0) for value in (q, k))
        state = g[token].exp()[:, None, None] * state
        u = beta[token][:, None] * (v[token].float() - (state * key[:, None]).sum(-1))
        state = state + u[:, :, None] * key[:, None]
        outputs.append((state * query[:, None]).sum(-1))
    return state, torch.stack(outputs)


def gates(A_log, a, dt_bias, b):
    return -A_log.exp() * F.softplus(a.float() + dt_bias), b.float().sigmoid()


def unit(x):
    return x.float() / torch.sqrt((x.float() ** 2).sum(-1, keepdim=True) + 1e-6)


def fused_sigmoid_gating_delta_rule_update(
    A_log,
    a,
    dt_bias,
    softplus_beta,
    softplus_threshold,
    q,
    k,
    v,
    b,
    initial_state_source,
    initial_state_indices,
    scale=None,
    use_qk_l2norm_in_kernel=False,
    cu_seqlens=None,
    output=None,
):
    g, beta = gates(A_log, a, dt_bias, b)
    out = torch.empty_like(v) if output is None else output
    for row, slot in enumerate(initial_state_indices.tolist()):
        now = slice(row, row + 1)
        query = unit(q[0, now]) * q.shape[-1] ** -0.5
        state = turn(initial_state_source[slot]).float()
        state, y = delta_scan(state, query, unit(k[0, now]), v[0, now], g[now], beta[now])
        initial_state_source[slot] = turn_back(state).to(initial_state_source.dtype)
        out[0, row] = y[0].to(out.dtype)
    return out


def _can_use_flashinfer_gdn_verify(initial_state_source, head_k_dim, head_v_dim, draft_token_num):
    return False


def _flashinfer_gdn_verify(
    A_log,
    a,
    dt_bias,
    softplus_beta,
    softplus_threshold,
    q,
    k,
    v,
    b,
    initial_state_source,
    initial_state_indices,
    intermediate_states_buffer,
    scale,
    use_qk_l2norm_in_kernel,
    output=None,
):
    raise AssertionError("a GPU kernel")

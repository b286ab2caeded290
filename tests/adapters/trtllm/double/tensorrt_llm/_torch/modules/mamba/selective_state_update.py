"""Mamba-2's recurrence over the tokens of a step."""

import torch
import torch.nn.functional as F
from tensorrt_llm._torch.modules.mamba import PAD_SLOT_ID


def scan(state, x, dt, A, B, C, D):
    """State `[H, P, N]` and outputs of tokens `x [T, H, P]`, `dt [T, H]` final, `B`, `C [T, G, N]`."""
    outputs = []
    repeat = x.shape[1] // B.shape[1]
    for token in range(len(x)):
        b, c = (value[token].float().repeat_interleave(repeat, 0) for value in (B, C))
        value = x[token].float()
        decay = torch.exp(A * dt[token])
        state = decay[:, None, None] * state + (dt[token][:, None] * value)[:, :, None] * b[:, None]
        outputs.append((state * c[:, None]).sum(-1) + D[:, None] * value)
    return state, torch.stack(outputs)


def selective_state_update(
    state,
    x,
    dt,
    A,
    B,
    C,
    D=None,
    z=None,
    dt_bias=None,
    dt_softplus=False,
    state_batch_indices=None,
    pad_slot_id=PAD_SLOT_ID,
    out=None,
    disable_state_update=False,
    intermediate_states_buffer=None,
    cache_steps=None,
    retrieve_parent_token=None,
    intermediate_state_indices=None,
    rand_seed=None,
    philox_rounds=10,
):
    tokens = x.dim() == 4
    x, dt, B, C, result = (value if tokens else value.unsqueeze(1) for value in (x, dt, B, C, out))
    dt = dt[..., 0] + dt_bias[:, 0]
    dt = F.softplus(dt) if dt_softplus else dt
    for row, slot in enumerate(state_batch_indices.tolist()):
        current = state[slot].float()
        for token in range(x.shape[1]):
            now = slice(token, token + 1)
            if retrieve_parent_token is not None and token:
                kept = intermediate_states_buffer[intermediate_state_indices[row]]
                current = kept[retrieve_parent_token[row, token]].float()
            current, y = scan(
                current, x[row, now], dt[row, now], A[:, 0, 0], B[row, now], C[row, now], D[:, 0]
            )
            result[row, token] = y[0].to(result.dtype)
            if disable_state_update:
                intermediate_states_buffer[intermediate_state_indices[row], token] = current.to(state.dtype)
        if not disable_state_update:
            state[slot] = current.to(state.dtype)
    return out

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
):
    out = torch.empty_like(x)
    dt = dt[..., 0].float() + dt_bias[:, 0]
    dt = F.softplus(dt) if dt_softplus else dt
    for row, slot in enumerate(state_batch_indices.tolist()):
        now = slice(row, row + 1)
        current, y = scan(state[slot].float(), x[now], dt[now], A[:, 0, 0], B[now], C[now], D[:, 0])
        state[slot] = current.to(state.dtype)
        out[row] = (y[0] * F.silu(z[row].float())).to(out.dtype)
    return out

"""The engine's own replay for Mamba-2: two buffers of inputs for each slot, the state written at a flush."""

import torch
import torch.nn.functional as F
from tensorrt_llm._torch.modules.mamba import PAD_SLOT_ID
from tensorrt_llm._torch.modules.mamba.selective_state_update import scan


def replay_selective_state_update(
    state,
    old_x,
    old_B,
    old_dt,
    old_dA_cumsum,
    cache_buf_idx,
    prev_num_accepted_tokens,
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
    n_writes=None,
    replay_work_items=None,
    rand_seed=None,
    philox_rounds=0,
    launch_with_pdl=False,
    use_internal_pdl=True,
    mode=None,
    rectangle_for_nowrite=None,
    _block_size=None,
):
    rates, skip, T = A[:, 0, 0], D[:, 0], x.shape[1]
    history_size = old_x.shape[2]
    dt = dt[..., 0].float() + dt_bias[:, 0]
    dt = F.softplus(dt) if dt_softplus else dt
    for position, slot, count, buffer in replay_work_items.tolist():
        current = state[slot].float()
        past = (
            old_x[slot, buffer, :count],
            old_dt[slot, buffer, :, :count].t(),
            rates,
            old_B[slot, buffer, :count],
            old_B[slot, buffer, :count],
            skip,
        )
        if count:
            current, _ = scan(current, *past)
        first = count
        if count + T > history_size:
            state[slot] = current.to(state.dtype)
            buffer, first = 1 - buffer, 0
        now = slice(first, first + T)
        new = (x[position], dt[position], rates, B[position], C[position], skip)
        _, y = scan(current, *new)
        out[position] = y.to(out.dtype)
        old_x[slot, buffer, now] = x[position]
        old_B[slot, buffer, now] = B[position]
        old_dt[slot, buffer, :, now] = dt[position].t()
        before = old_dA_cumsum[slot, buffer, :, first - 1 : first] if first else 0.0
        old_dA_cumsum[slot, buffer, :, now] = before + torch.cumsum(rates[:, None] * dt[position].t(), 1)
    return out

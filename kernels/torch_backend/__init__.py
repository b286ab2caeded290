"""The `torch` backend: the mathematics of design section 3, vectorised, on any device.

It is the readable backend and the one that runs anywhere. It allocates freely but never waits for an
accelerator. The functions take what `replayssm.kernels`' public functions have checked.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from replayssm.core.cursors import Cursors
from replayssm.core.formats import PackedState, StateCopy
from replayssm.core.rows import write_rows, zero_where
from replayssm.core.skipping import Skipping
from replayssm.kernels.layer_table import LayerTable, RingTable
from replayssm.kernels.registry import StepCall
from replayssm.kernels.step_index import StepIndex
from replayssm.kernels.torch_backend import delta, mamba2
from replayssm.kernels.torch_backend.checkpoint import Checkpoint
from replayssm.kernels.torch_backend.folding import FoldRows, after_step, before_step, fold
from replayssm.kernels.torch_backend.formats import decode
from replayssm.kernels.torch_backend.layer import Layer
from replayssm.kernels.torch_backend.step_rows import StepRows

SERVES_COPIES = SERVES_SKIPPING = True


def unavailable(device_type: str) -> str | None:
    """Why this backend cannot run on a device: it always can."""
    return None


def refuses(call: StepCall) -> str | None:
    """Why this backend does not serve a step: it serves all."""
    return None


def mamba2_step(
    state: StateCopy,
    x_cache: torch.Tensor,
    B_cache: torch.Tensor,
    dt_cache: torch.Tensor,
    ring_start: torch.Tensor,
    hist_len: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    out: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    dt_softplus: bool,
    *,
    window: int,
    index: StepIndex,
    rand_seed: torch.Tensor | None = None,
    layer: int = 0,
    read_state: StateCopy | None = None,
    skipping: Skipping | None = None,
) -> torch.Tensor:
    """See `replayssm.kernels.mamba2_step`."""
    rings = {"x_cache": x_cache, "B_cache": B_cache, "dt_cache": dt_cache}
    stored = Layer(Checkpoint(state, read_state, rand_seed, layer), rings, A, skipping=skipping)
    rows = before_step(stored, _rows(x, x_cache, ring_start, hist_len, window, index))
    mamba2.step(rows, stored, x, dt, A, B, C, out, D, z, dt_bias, dt_softplus)
    after_step(stored, rows)
    return out


def gdn_step(
    state: StateCopy,
    u_cache: torch.Tensor,
    k_cache: torch.Tensor,
    g_cache: torch.Tensor,
    ring_start: torch.Tensor,
    hist_len: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    out: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    scale: float,
    use_qk_l2norm: bool,
    *,
    window: int,
    index: StepIndex,
    rand_seed: torch.Tensor | None = None,
    layer: int = 0,
    read_state: StateCopy | None = None,
    beta_cache: torch.Tensor | None = None,
    skipping: Skipping | None = None,
) -> torch.Tensor:
    """See `replayssm.kernels.gdn_step`."""
    rings = _delta_rings(u_cache, k_cache, g_cache, beta_cache)
    checkpoint = Checkpoint(state, read_state, rand_seed, layer)
    stored = Layer(checkpoint, rings, qk_l2norm=use_qk_l2norm, skipping=skipping)
    rows = before_step(stored, _rows(q, k_cache, ring_start, hist_len, window, index))
    g, beta = rows.tokens(g), rows.tokens(beta)
    if A_log is not None:
        g, beta = delta.gdn_gates(g, beta, A_log, dt_bias)
    delta.step(rows, stored, q, k, v, g, beta, out, scale)
    after_step(stored, rows)
    return out


def kda_step(
    state: StateCopy,
    u_cache: torch.Tensor,
    k_cache: torch.Tensor,
    g_cache: torch.Tensor,
    ring_start: torch.Tensor,
    hist_len: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    out: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    lower_bound: float | None,
    scale: float,
    use_qk_l2norm: bool,
    *,
    window: int,
    index: StepIndex,
    rand_seed: torch.Tensor | None = None,
    layer: int = 0,
    read_state: StateCopy | None = None,
    beta_cache: torch.Tensor | None = None,
    skipping: Skipping | None = None,
) -> torch.Tensor:
    """See `replayssm.kernels.kda_step`."""
    rings = _delta_rings(u_cache, k_cache, g_cache, beta_cache)
    checkpoint = Checkpoint(state, read_state, rand_seed, layer)
    stored = Layer(checkpoint, rings, qk_l2norm=use_qk_l2norm, skipping=skipping)
    rows = before_step(stored, _rows(q, k_cache, ring_start, hist_len, window, index))
    g, beta = rows.tokens(g), rows.tokens(beta)
    if A_log is not None:
        g, beta = delta.kda_gates(g, beta, A_log, dt_bias, lower_bound)
    delta.step(rows, stored, q, k, v, g, beta, out, scale)
    after_step(stored, rows)
    return out


def materialize(
    layers: LayerTable,
    ring_start: torch.Tensor,
    count: torch.Tensor,
    source: torch.Tensor,
    target: torch.Tensor,
    *,
    window: int,
    ring_indices: torch.Tensor,
    use_qk_l2norm: bool,
    rand_seed: torch.Tensor | None = None,
    layer: int = 0,
    hist_len: torch.Tensor | None = None,
) -> None:
    """See `replayssm.kernels.materialize`."""
    live = (source >= 0) & (target >= 0) & (ring_indices >= 0)
    slot, ring = zero_where(~live, source.long()), zero_where(~live, ring_indices.long())
    past = torch.arange(window, device=ring_start.device)
    applied = live[:, None] & (past < count[:, None])
    held = applied if hist_len is None else live[:, None] & (past < hist_len[ring][:, None])
    for number, (state, caches) in enumerate(zip(layers.states, layers.rings, strict=True)):
        ring_rows = next(iter(caches.values())).shape[2]
        records = (ring_start[ring].long()[:, None] + past) % ring_rows
        read_state = None if layers.read_states is None else layers.read_states[number]
        A = None if layers.A is None else layers.A[number]
        checkpoint = Checkpoint(state, read_state, rand_seed, layer + number)
        rows = FoldRows(slot, target, ring, live, records, held, applied)
        fold(Layer(checkpoint, caches, A, use_qk_l2norm), rows)


materialize_whole = materialize
"""Of rows in place that leave no records; here it is all one."""


def load_states(state: StateCopy) -> torch.Tensor:
    """See `replayssm.kernels.load_states`."""
    return decode(state) if isinstance(state, PackedState) else state.float()


def store_states(
    state: StateCopy,
    values: torch.Tensor,
    read_state: StateCopy | None,
    rand_seed: torch.Tensor | None,
    layer: int,
) -> None:
    """See `replayssm.kernels.store_states`."""
    Checkpoint(state, read_state, rand_seed, layer).store_all(values)


def renew(states: Sequence[StateCopy], read_states: Sequence[StateCopy], slots: torch.Tensor) -> None:
    """See `replayssm.kernels.renew`."""
    for state, read_state in zip(states, read_states, strict=True):
        Checkpoint(state, read_state, None, 0).renew(slots, slots >= 0)


def compact(
    layers: RingTable,
    ring_start: torch.Tensor,
    hist_len: torch.Tensor,
    path: torch.Tensor,
    path_len: torch.Tensor,
    ring_indices: torch.Tensor,
) -> None:
    """See `replayssm.kernels.compact`."""
    live = ring_indices >= 0
    ring = zero_where(~live, ring_indices.long())
    place = torch.arange(path.shape[1], device=path.device)
    moved = live[:, None] & (place < path_len[:, None])
    origin = (ring_start[ring] + hist_len[ring]).long()[:, None]
    node = zero_where(~moved, path.long())
    every = ring.repeat_interleave(path.shape[1])
    for cache in layers.tensors:
        ring_rows = cache.shape[2]
        records = cache[ring[:, None], :, (origin + node) % ring_rows]
        position = ((origin + place) % ring_rows).flatten()
        write_rows(cache, every, records.flatten(0, 1), moved.flatten(), position)


def commit(
    ring_start: torch.Tensor,
    hist_len: torch.Tensor,
    slots: torch.Tensor,
    draft_lens: torch.Tensor | int,
    accepted: torch.Tensor | int | None,
    *,
    window: int,
    rows: int,
    pad_slot_id: int,
) -> None:
    """See `replayssm.kernels.commit`."""
    if isinstance(draft_lens, int):
        draft_lens = torch.full_like(slots, draft_lens, dtype=torch.int32)
    if accepted is None:
        accepted = draft_lens
    elif isinstance(accepted, int):
        accepted = torch.full_like(slots, accepted, dtype=torch.int32)
    slots = torch.where(slots == pad_slot_id, -1, slots)
    Cursors(ring_start, hist_len, window, rows).commit(slots, draft_lens, accepted)


def _delta_rings(
    u_cache: torch.Tensor, k_cache: torch.Tensor, g_cache: torch.Tensor, beta_cache: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    rings = {"u_cache": u_cache, "k_cache": k_cache, "g_cache": g_cache}
    return rings if beta_cache is None else rings | {"beta_cache": beta_cache}


def _rows(
    tokens: torch.Tensor,
    cache: torch.Tensor,
    ring_start: torch.Tensor,
    hist_len: torch.Tensor,
    window: int,
    index: StepIndex,
) -> StepRows:
    lead = (tokens.shape[0], tokens.shape[1])
    return StepRows.build(index, lead, cache.shape[2], window, ring_start, hist_len)

"""The kernels' public functions: validation, then one call into a backend.

In FlashInfer's manner: state first and mutated in place, a preallocated `out` returned, slot indices
with a pad value, dense `[B, T, ...]` or packed `[1, total, ...]` inputs with `cu_seqlens`. No function
here reads a tensor's values back to the host; what indices and cursors hold is the caller's duty. They
are for inference: no gradient is recorded, whatever their inputs ask for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from replayssm.core.formats import PackedState, StateCopy, state_tensors
from replayssm.core.geometry import Rule
from replayssm.core.skipping import Skipping
from replayssm.kernels import torch_backend
from replayssm.kernels.checks import (
    check_commit,
    check_heads,
    check_indices,
    check_read_state,
    check_seed,
    check_skipping,
    check_state,
    check_step,
    copies_of,
    expect,
    is_aligned,
    is_dense,
)
from replayssm.kernels.layer_table import LayerTable, RingTable
from replayssm.kernels.registry import StepCall, resolve, resolve_operation
from replayssm.kernels.step_index import EVERY_ROW, StepIndex


@torch.no_grad()
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
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    *,
    window: int,
    index: StepIndex = EVERY_ROW,
    rand_seed: torch.Tensor | None = None,
    layer: int = 0,
    read_state: StateCopy | None = None,
    skipping: Skipping | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """One decode or verification step of a Mamba-2 layer.

    Writes the outputs of every token to `out`, appends the tokens' records to the ring, and folds the
    history of those rows with `hist_len + T > window` into `state`. Cursors are not moved. A plain state is
    read before that fold; where states are packed, or split by a `read_state`, the fold comes first, and the
    step goes on from the copy that it left, with no history.

    Args:
        state: `[slots, H, P, N]` fp32, bf16 or fp16, or a `PackedState` of that shape, the checkpoints;
            mutated. Slot stride free.
        x_cache: `[rings, H, R, P]`, recorded `x`; mutated. Slot, head and row strides free.
        B_cache: `[rings, G, R, N]`, recorded `B`; mutated.
        dt_cache: `[rings, H, R]` fp32, recorded `dt` after bias and softplus; mutated.
        ring_start: `[rings]` int32, ring row of the oldest live record.
        hist_len: `[rings]` int32, live records `h`, at most `window`.
        x: `[B, T, H, P]`, or `[1, total, H, P]` with `index.cu_seqlens`; fp32, bf16 or fp16.
        dt: `[B, T, H]`, raw, or final where `dt_bias` and `dt_softplus` are left out.
        A: `[H]` fp32, negative.
        B: `[B, T, G, N]`.
        C: `[B, T, G, N]`.
        out: as `x`; every element is written, zero where there is no token.
        D: `[H]`, skip weight.
        z: as `x`, output gate: `out * silu(z)`.
        dt_bias: `[H]`.
        dt_softplus: apply softplus to `dt + dt_bias`.
        window: L.
        index: which slots and how many tokens, see `StepIndex`.
        rand_seed: `[1]` int64 on the device; given, folds into an fp16 or packed state round
            stochastically, by the scheme in `replayssm.kernels.torch_backend.rounding`. The caller changes
            it at every step.
        layer: number of the layer, so that layers with one seed round differently.
        read_state: as `state` in another format, the read copy: outputs and records of all rows come from
            it and never from `state`. Rows that must flush fold into both first, and go on from the renewed
            copy. It holds `state` rounded to nearest; whoever else writes `state` renews it
            (`store_states`, or `materialize` of no records in place). Mutated.
        skipping: norms of the checkpoints and the tolerance below which a step leaves them unread, see
            `replayssm.core.skipping`; a fold in the step writes the norms. Mutated.
        backend: `"auto"`, `"torch"`, `"triton"`, `"cuda"` or `"flashinfer"`.

    Returns:
        `out`.

    Raises:
        ValueError: a shape, dtype or stride is wrong; the message names the tensor.
        BackendUnavailable: the backend named cannot run here or does not serve such a step.
    """
    check_state("state", state, (None, None, None, None))
    expect("B_cache", B_cache, (None, None, None, None))
    H, P, N = state.shape[1:]
    G, R = B_cache.shape[1:3]
    check_heads(H, G)
    lead = x.shape[:2]
    expect("x_cache", x_cache, (None, H, R, P), x.dtype)
    expect("B_cache", B_cache, (x_cache.shape[0], G, R, N), B.dtype)
    expect("dt_cache", dt_cache, (x_cache.shape[0], H, R), torch.float32)
    expect("x", x, (*lead, H, P))
    expect("dt", dt, (*lead, H))
    expect("A", A, (H,))
    expect("B", B, (*lead, G, N))
    expect("C", C, (*lead, G, N))
    expect("D", D, (H,))
    expect("z", z, (*lead, H, P))
    expect("dt_bias", dt_bias, (H,))
    check_step(
        state, read_state, ring_start, hist_len, lead, out, x.shape, window, R, x_cache.shape[0], index
    )
    check_seed(rand_seed, state)
    check_skipping(skipping, x_cache.shape[0], H, P)
    batch, tokens = index.rows_and_tokens((lead[0], lead[1]))
    call = StepCall(
        Rule.MAMBA2, H, G, P, N, R, window, tokens, index.parents is not None, index.cu_seqlens is not None,
        index.draft_lens is not None, dt_softplus or dt_bias is not None, False, z is not None, state.dtype,
        _common_dtype(x, B, C, out, out if z is None else z), batch,
        _dense((state, read_state), (x_cache, B_cache), (dt_cache,), out, index, ring_start, hist_len, A, D,
               dt_bias),
        all(map(is_aligned, (*_pools(state, read_state), x_cache, B_cache, out))), rand_seed is not None,
        copies=copies_of(state, read_state), skips=skipping is not None,
    )  # fmt: skip
    return resolve(backend, x.device, call).mamba2_step(
        state, x_cache, B_cache, dt_cache, ring_start, hist_len, x, dt, A, B, C, out, D, z, dt_bias,
        dt_softplus, window=window, index=index, rand_seed=rand_seed, layer=layer,
        **_given(read_state=read_state, skipping=skipping),
    )  # fmt: skip


@torch.no_grad()
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
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    scale: float | None = None,
    use_qk_l2norm: bool = True,
    *,
    window: int,
    index: StepIndex = EVERY_ROW,
    rand_seed: torch.Tensor | None = None,
    layer: int = 0,
    read_state: StateCopy | None = None,
    beta_cache: torch.Tensor | None = None,
    skipping: Skipping | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """One decode or verification step of a Gated DeltaNet layer.

    As `mamba2_step`: outputs, records, and the exact fold of the rows that must flush; both take history's
    `u` from the ring, in fp32 as it was computed.

    Args:
        state: `[slots, HV, V, K]` fp32, bf16 or fp16, or a `PackedState` of that shape; mutated. Slot
            stride free.
        u_cache: `[rings, HV, R, V]` fp32, recorded `u`, whatever dtype the inputs have; mutated.
        k_cache: `[rings, H, R, K]`, recorded keys before normalisation; mutated.
        g_cache: `[rings, HV, R]` fp32, recorded log-decays; mutated.
        ring_start: `[rings]` int32.
        hist_len: `[rings]` int32.
        q: `[B, T, H, K]`, or `[1, total, H, K]` with `index.cu_seqlens`; fp32, bf16 or fp16.
        k: as `q`.
        v: `[B, T, HV, V]`.
        g: `[B, T, HV]`, the log-decay, or with `A_log` the raw gate input `a`.
        beta: `[B, T, HV]`, or with `A_log` its logit `b`.
        out: as `v`; every element is written, zero where there is no token.
        A_log: `[HV]`; given, the gates `-e^A_log softplus(g + dt_bias)` and `sigmoid(beta)` are
            computed here in fp32.
        dt_bias: `[HV]`, with `A_log` only.
        scale: factor of `q`, `K ** -0.5` by default.
        use_qk_l2norm: l2-normalise `q` and `k` (eps 1e-6 inside the root).
        window: L.
        index: which slots and how many tokens, see `StepIndex`.
        rand_seed: `[1]` int64 on the device; given, folds into an fp16 or packed state round
            stochastically, by the scheme in `replayssm.kernels.torch_backend.rounding`. The caller changes
            it at every step.
        layer: number of the layer, so that layers with one seed round differently.
        read_state: as `state` in another format, the read copy: outputs and records of all rows come from
            it and never from `state`. Rows that must flush fold into both first, and go on from the renewed
            copy. It holds `state` rounded to nearest; whoever else writes `state` renews it
            (`store_states`, or `materialize` of no records in place). Mutated.
        beta_cache: `[rings, HV, R]` fp32, with `read_state` only: recorded `beta`; zero where `materialize`
            has replaced `u`. Mutated. See `replayssm.kernels.torch_backend.delta`.
        skipping: norms of the checkpoints and the tolerance below which a step leaves them unread, see
            `replayssm.core.skipping`; a fold in the step writes the norms. Mutated.
        backend: `"auto"`, `"torch"`, `"triton"`, `"cuda"` or `"flashinfer"`.

    Returns:
        `out`.

    Raises:
        ValueError: a shape, dtype or stride is wrong; the message names the tensor.
        BackendUnavailable: the backend named cannot run here or does not serve such a step.
    """
    _check_delta(
        state, u_cache, k_cache, g_cache, ring_start, hist_len, q, k, v, g, beta,
        out, A_log, dt_bias, window, index, rand_seed, read_state, beta_cache, skipping, per_channel=False,
    )  # fmt: skip
    expect("dt_bias", dt_bias, (state.shape[1],))
    call = _delta_call(
        Rule.GDN, state, read_state, k_cache, q, k, v, out, index, window, A_log is not None, False,
        use_qk_l2norm,
        _dense((state, read_state), (u_cache, k_cache), (g_cache,), out, index, ring_start, hist_len,
               A_log, dt_bias),
        all(map(is_aligned, (*_pools(state, read_state), u_cache, k_cache, out))), rand_seed is not None,
        skipping is not None,
    )  # fmt: skip
    return resolve(backend, q.device, call).gdn_step(
        state, u_cache, k_cache, g_cache, ring_start, hist_len, q, k, v, g, beta,
        out, A_log, dt_bias, _scale(scale, state), use_qk_l2norm, window=window, index=index,
        rand_seed=rand_seed, layer=layer,
        **_given(read_state=read_state, beta_cache=beta_cache, skipping=skipping),
    )  # fmt: skip


@torch.no_grad()
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
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    lower_bound: float | None = None,
    scale: float | None = None,
    use_qk_l2norm: bool = True,
    *,
    window: int,
    index: StepIndex = EVERY_ROW,
    rand_seed: torch.Tensor | None = None,
    layer: int = 0,
    read_state: StateCopy | None = None,
    beta_cache: torch.Tensor | None = None,
    skipping: Skipping | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """One decode or verification step of a Kimi Delta Attention layer.

    As `gdn_step`, with a log-decay per key channel.

    Args:
        state: `[slots, HV, V, K]`; mutated.
        u_cache: `[rings, HV, R, V]` fp32; mutated.
        k_cache: `[rings, H, R, K]`; mutated.
        g_cache: `[rings, HV, R, K]` fp32; mutated.
        ring_start: `[rings]` int32.
        hist_len: `[rings]` int32.
        q: `[B, T, H, K]`, or `[1, total, H, K]` with `index.cu_seqlens`.
        k: as `q`.
        v: `[B, T, HV, V]`.
        g: `[B, T, HV, K]`, the log-decay, or with `A_log` the raw gate input.
        beta: `[B, T, HV]`, or with `A_log` its logit.
        out: as `v`.
        A_log: `[HV]`; given, the gates are computed here in fp32.
        dt_bias: `[HV, K]` or `[HV * K]`, with `A_log` only.
        lower_bound: negative; the bounded gate `lower_bound * sigmoid(e^A_log (g + dt_bias))` in place
            of the softplus gate. With `A_log` only.
        scale: factor of `q`, `K ** -0.5` by default.
        use_qk_l2norm: l2-normalise `q` and `k`.
        window: L.
        index: which slots and how many tokens, see `StepIndex`.
        rand_seed: `[1]` int64 on the device; given, folds into an fp16 or packed state round
            stochastically, by the scheme in `replayssm.kernels.torch_backend.rounding`. The caller changes
            it at every step.
        layer: number of the layer, so that layers with one seed round differently.
        read_state: as `state` in another format, the read copy: outputs and records of all rows come from
            it and never from `state`. Rows that must flush fold into both first, and go on from the renewed
            copy. It holds `state` rounded to nearest; whoever else writes `state` renews it
            (`store_states`, or `materialize` of no records in place). Mutated.
        beta_cache: `[rings, HV, R]` fp32, with `read_state` only: recorded `beta`; zero where `materialize`
            has replaced `u`. Mutated. See `replayssm.kernels.torch_backend.delta`.
        skipping: norms of the checkpoints and the tolerance below which a step leaves them unread, see
            `replayssm.core.skipping`; a fold in the step writes the norms. Mutated.
        backend: `"auto"`, `"torch"`, `"triton"`, `"cuda"` or `"flashinfer"`.

    Returns:
        `out`.

    Raises:
        ValueError: a shape, dtype or stride is wrong; the message names the tensor.
        BackendUnavailable: the backend named cannot run here or does not serve such a step.
    """
    _check_delta(
        state, u_cache, k_cache, g_cache, ring_start, hist_len, q, k, v, g, beta,
        out, A_log, dt_bias, window, index, rand_seed, read_state, beta_cache, skipping, per_channel=True,
    )  # fmt: skip
    HV, _, K = state.shape[1:]
    if dt_bias is not None and tuple(dt_bias.shape) not in ((HV, K), (HV * K,)):
        raise ValueError(f"dt_bias: expected [{HV}, {K}] or [{HV * K}], got {list(dt_bias.shape)}")
    if lower_bound is not None and (A_log is None or lower_bound >= 0):
        raise ValueError(
            f"lower_bound must be negative and comes with A_log, got {lower_bound} "
            f"{'without' if A_log is None else 'with'} A_log"
        )
    call = _delta_call(
        Rule.KDA, state, read_state, k_cache, q, k, v, out, index, window, A_log is not None,
        lower_bound is not None, use_qk_l2norm,
        _dense((state, read_state), (u_cache, k_cache, g_cache), (), out, index, ring_start, hist_len,
               A_log, dt_bias),
        all(map(is_aligned, (*_pools(state, read_state), u_cache, k_cache, g_cache, out))),
        rand_seed is not None, skipping is not None,
    )  # fmt: skip
    return resolve(backend, q.device, call).kda_step(
        state, u_cache, k_cache, g_cache, ring_start, hist_len, q, k, v, g, beta,
        out, A_log, dt_bias, lower_bound, _scale(scale, state), use_qk_l2norm,
        window=window, index=index, rand_seed=rand_seed, layer=layer,
        **_given(read_state=read_state, beta_cache=beta_cache, skipping=skipping),
    )  # fmt: skip


@torch.no_grad()
def materialize(
    rule: Rule | str,
    states: Sequence[StateCopy] | LayerTable,
    rings: Sequence[Mapping[str, torch.Tensor]] | None,
    ring_start: torch.Tensor,
    count: torch.Tensor,
    source: torch.Tensor,
    target: torch.Tensor,
    *,
    window: int,
    ring_indices: torch.Tensor | None = None,
    A: Sequence[torch.Tensor] | None = None,
    use_qk_l2norm: bool = True,
    rand_seed: torch.Tensor | None = None,
    layer: int = 0,
    read_states: Sequence[StateCopy] | None = None,
    hist_len: torch.Tensor | None = None,
    whole: bool = False,
    backend: str = "auto",
) -> None:
    """Write the state after the first `count` records of each row into any slot, in all layers.

    Exact, as a flush. `source == target` folds in place; the caller then advances the cursors
    (`Cursors.advance`). Rows with a negative slot are skipped. A target must not be another row's
    source. Norms of a ring whose checkpoint it writes are the caller's to forget (`Skipping.forget`). One
    launch on a GPU for all layers of equal shapes, strides and dtypes. Lists of buffers cost
    a copy of their addresses to the device at each call; a `LayerTable` costs it once, and a call with one
    can be captured in a CUDA graph.

    Args:
        rule: the layers' rule.
        states: per layer `[slots, HV, V, K]`; mutated at `target`. Or a `LayerTable` of that rule, which
            stands for `states`, `rings` and `A`.
        rings: per layer the ring tensors by name, as `RingLayout.allocate` gives them. `None` with a
            `LayerTable`. Only read, but for a delta rule with `read_states`: there a fold in place that
            leaves records writes their `u` anew, as solved from the recurrence copy, and zero for `beta`.
        ring_start: `[rings]` int32.
        count: `[B]` int, records to apply, `0 <= count <= h`; 0 copies the checkpoint.
        source: `[B]` int, slot of the checkpoint.
        target: `[B]` int, slot to write.
        window: L.
        ring_indices: `[B]` int, ring of each row; `source` by default.
        A: per layer `[H]` fp32, for Mamba-2.
        use_qk_l2norm: as in the steps that wrote the records.
        rand_seed: `[1]` int64 on the device; given, fp16 and packed states are rounded stochastically, as in
            the steps.
        layer: number of the first layer; the others follow.
        read_states: per layer the read copy, as `read_state` of the steps; mutated at `target`, also where
            no records are applied.
        hist_len: `[rings]` int32, live records; needed for a delta rule with `read_states`.
        whole: the caller promises that no row in place leaves records: those with `source == target` apply
            all that their ring holds. With `read_states` the CUDA kernels then serve it.
        backend: `"auto"`, `"torch"` or `"triton"`; `"cuda"` and `"flashinfer"` take the Triton one, or where
            states are packed or split the torch one, but for what is `whole`.

    Raises:
        ValueError: `A` is missing for Mamba-2, layers and rings differ in number, an index has another
            shape than `source`, a seed comes with fp32 or bf16 states, copies do not match, `hist_len` is
            missing, or the table is for another rule.
        RuntimeError: lists of buffers, while a CUDA graph is being captured.
        BackendUnavailable: the backend named cannot run here.
    """
    layers = _layers(Rule(rule), states, rings, A, read_states)
    if not layers.states:
        return
    ring_indices = source if ring_indices is None else ring_indices
    check_indices(source=source, count=count, target=target, ring_indices=ring_indices)
    for number, state in enumerate(layers.states):
        check_seed(rand_seed, state)
        check_read_state(state, None if layers.read_states is None else layers.read_states[number])
    corrects = layers.read_states is not None and layers.rule is not Rule.MAMBA2
    if corrects and (hist_len is None or hist_len.shape != ring_start.shape):
        raise ValueError(
            f"hist_len: expected {list(ring_start.shape)} int32 beside read copies of a delta rule, got "
            f"{None if hist_len is None else list(hist_len.shape)}"
        )
    operation = "materialize_whole" if whole and layers.read_states is not None else "materialize"
    module = resolve_operation(backend, layers.states[0].device, operation, layers.copies)
    getattr(module, operation)(
        layers, ring_start, count, source, target,
        window=window, ring_indices=ring_indices, use_qk_l2norm=use_qk_l2norm,
        rand_seed=rand_seed, layer=layer, **_given(hist_len=hist_len if corrects else None),
    )  # fmt: skip


def load_states(state: StateCopy) -> torch.Tensor:
    """The states of every slot in fp32, `[slots, HV, V, K]`; `state` itself where it is fp32.

    Args:
        state: `[slots, HV, V, K]` fp32, bf16 or fp16, or a `PackedState`.

    Raises:
        ValueError: it is none of these.
    """
    check_state("state", state, (None, None, None, None))
    return torch_backend.load_states(state)


@torch.no_grad()
def store_states(
    state: StateCopy,
    values: torch.Tensor,
    read_state: StateCopy | None = None,
    *,
    rand_seed: torch.Tensor | None = None,
    layer: int = 0,
) -> None:
    """Write the states of every slot, as a prefill leaves them, into all copies.

    Args:
        state: `[slots, HV, V, K]`, the recurrence copy; mutated.
        values: `[slots, HV, V, K]` fp32.
        read_state: the read copy; mutated.
        rand_seed: `[1]` int64 on the device; given, `state` is rounded stochastically, as by the steps.
        layer: number of the layer.

    Raises:
        ValueError: a shape or dtype is wrong; the message names the tensor.
    """
    check_state("state", state, (None, None, None, None))
    check_read_state(state, read_state)
    check_seed(rand_seed, state)
    expect("values", values, tuple(state.shape), torch.float32)
    torch_backend.store_states(state, values, read_state, rand_seed, layer)


@torch.no_grad()
def renew(
    states: Sequence[StateCopy] | LayerTable,
    slots: torch.Tensor,
    *,
    read_states: Sequence[StateCopy] | None = None,
    backend: str = "auto",
) -> None:
    """Make the read copies of slots anew from their states, in all layers.

    For states that others have written, such as a prefill or a copy of a slot. `materialize` without records
    does the same and more; this is a small launch a layer on a GPU.

    Args:
        states: per layer `[slots, HV, V, K]`; only read. Or a `LayerTable`, with its read copies.
        slots: `[B]` int; negative ones are skipped.
        read_states: per layer the read copy; mutated at `slots`. `None` with a `LayerTable`.
        backend: `"auto"`, `"torch"` or `"cuda"`; others, which do not know read copies, take the torch one.

    Raises:
        ValueError: there are no read copies, they do not match the states, or `slots` is no `[B]` int tensor.
        BackendUnavailable: the backend named cannot run here.
    """
    if isinstance(states, LayerTable):
        read_states, states = states.read_states, states.states
    if not states:
        return
    if read_states is None or len(read_states) != len(states):
        given = "none" if read_states is None else len(read_states)
        raise ValueError(f"read_states: expected one for each of {len(states)} layers, got {given}")
    check_indices(slots=slots)
    for state, read_state in zip(states, read_states, strict=True):
        check_read_state(state, read_state)
    copies = copies_of(states[0], read_states[0])
    resolve_operation(backend, slots.device, "renew", copies).renew(states, read_states, slots)


@torch.no_grad()
def compact(
    rings: Sequence[Mapping[str, torch.Tensor]] | LayerTable,
    ring_start: torch.Tensor,
    hist_len: torch.Tensor,
    path: torch.Tensor,
    path_len: torch.Tensor,
    ring_indices: torch.Tensor,
    *,
    backend: str = "auto",
) -> None:
    """Move a draft tree's accepted records to the front of the step's ring rows, in all layers.

    Afterwards the accepted path is contiguous, as a chain's would be, and `commit` can follow. One launch
    on a GPU for all layers; a list of rings and a `LayerTable` differ as they do for `materialize`.

    Args:
        rings: per layer the ring tensors by name; mutated. Layers may differ in rule and shape, not in the
            ring's rows. Or a `LayerTable`.
        ring_start: `[rings]` int32, as the step saw it.
        hist_len: `[rings]` int32, as the step saw it.
        path: `[B, A]` int, node indices of the accepted path in order, ascending.
        path_len: `[B]` int, nodes accepted.
        ring_indices: `[B]` int, each ring once; negative rows are skipped.
        backend: `"auto"`, `"torch"` or `"triton"`; `"cuda"` and `"flashinfer"`, which have none, take
            the Triton one.

    Raises:
        ValueError: an index has another shape than `ring_indices`.
        RuntimeError: a list of rings, while a CUDA graph is being captured.
        BackendUnavailable: the backend named cannot run here.
    """
    layers = rings.ring_table if isinstance(rings, LayerTable) else RingTable(tuple(rings))
    if not layers.tensors:
        return
    check_indices(ring_indices=ring_indices, path_len=path_len)
    if path.dim() != 2 or len(path) != len(ring_indices):
        raise ValueError(f"path: expected [{len(ring_indices)}, A], got {list(path.shape)}")
    module = resolve_operation(backend, ring_start.device, "compact")
    module.compact(layers, ring_start, hist_len, path, path_len, ring_indices)


@torch.no_grad()
def commit(
    ring_start: torch.Tensor,
    hist_len: torch.Tensor,
    slots: torch.Tensor,
    draft_lens: torch.Tensor | int,
    accepted: torch.Tensor | int | None = None,
    *,
    window: int,
    rows: int,
    pad_slot_id: int = -1,
    backend: str = "auto",
) -> None:
    """End a step: move the cursors, once for all layers.

    A step is, on one stream: the step function of every layer; for draft trees `compact`; then `commit`.
    Rows that the layers flushed (`h + T > window`) get `start += h, h = 0`, then `h += accepted`. Standard
    decoding is `draft_lens=1`. One launch on a GPU, safe inside a captured CUDA graph.

    Args:
        ring_start: `[rings]` int32, strides free; mutated.
        hist_len: `[rings]` int32, strides free; mutated.
        slots: `[B]` int32 or int64, ring of each row of the step (`index.ring_indices` where given, else
            `index.state_indices`); negative or `pad_slot_id`: a pad, nothing is touched. Rows that
            repeat a slot must bring the same numbers.
        draft_lens: `[B]` int32 or int64, `T` of each row as the layers saw it, or one int for all rows.
        accepted: `[B]` int32 or int64, `0 <= accepted <= T`, or one int for all rows; `None`: all drafts.
        window: L.
        rows: R, rows of the ring.
        pad_slot_id: value in `slots` that marks a pad besides the negative ones.
        backend: `"auto"`, `"torch"` or `"triton"`; `"cuda"` and `"flashinfer"`, which have none, take
            the Triton one.

    Raises:
        ValueError: a shape or dtype is wrong, or a number is out of range; the message names it.
        BackendUnavailable: the backend named cannot run here.
    """
    check_commit(ring_start, hist_len, slots, draft_lens, accepted, window, rows)
    resolve_operation(backend, ring_start.device, "commit").commit(
        ring_start, hist_len, slots, draft_lens, accepted, window=window, rows=rows, pad_slot_id=pad_slot_id
    )


def _layers(
    rule: Rule,
    states: Sequence[StateCopy] | LayerTable,
    rings: Sequence[Mapping[str, torch.Tensor]] | None,
    A: Sequence[torch.Tensor] | None,
    read_states: Sequence[StateCopy] | None,
) -> LayerTable:
    if isinstance(states, LayerTable):
        if states.rule is not rule or rings is not None or A is not None or read_states is not None:
            raise ValueError(
                "a LayerTable stands for states, rings and A: pass None for the latter two, and its own "
                f"rule {states.rule}; got rule {rule}, rings {'None' if rings is None else 'given'}, "
                f"A {'None' if A is None else 'given'}"
            )
        return states
    if rings is None:
        raise ValueError("rings: expected one mapping per layer, got None, which goes with a LayerTable")
    rates = None if A is None else tuple(A)
    copies = None if read_states is None else tuple(read_states)
    return LayerTable(rule, tuple(states), tuple(rings), rates, copies)


def _given(**options: Any) -> dict[str, Any]:
    """The options that were given: backends that do not know them are called without."""
    return {name: value for name, value in options.items() if value is not None}


def _pools(*copies: StateCopy | None) -> tuple[torch.Tensor, ...]:
    """What of each copy kernels take by vectors: its values, or its codes and their scales."""
    given = (copy for copy in copies if copy is not None)
    return tuple(
        tensor
        for copy in given
        for tensor in ((copy.codes, copy.scales) if isinstance(copy, PackedState) else (copy,))
    )


def _scale(scale: float | None, state: StateCopy) -> float:
    return state.shape[-1] ** -0.5 if scale is None else scale


def _common_dtype(*tensors: torch.Tensor) -> torch.dtype | None:
    first = tensors[0].dtype
    return first if all(tensor.dtype is first for tensor in tensors) else None


def _dense(
    copies: tuple[StateCopy | None, ...],
    rows: tuple[torch.Tensor, ...],
    scalars: tuple[torch.Tensor, ...],
    out: torch.Tensor,
    index: StepIndex,
    *vectors: torch.Tensor | None,
) -> bool:
    """`StepCall.dense`; `rows` are ring tensors `[.., R, dim]`, `scalars` those `[.., R]`."""
    plain = (
        *vectors, index.state_indices, index.ring_indices, index.draft_lens, index.cu_seqlens, index.parents,
    )  # fmt: skip
    return (
        all(
            is_dense(pool, pool.dim() - 1)
            for copy in copies
            if copy is not None
            for pool in state_tensors(copy)
        )
        and all(is_dense(ring, 2) for ring in rows)
        and all(is_dense(ring, 1) for ring in scalars)
        and is_dense(out, 2)
        and all(tensor is None or tensor.is_contiguous() for tensor in plain)
    )


def _delta_call(
    rule: Rule,
    state: StateCopy,
    read_state: StateCopy | None,
    k_cache: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    index: StepIndex,
    window: int,
    raw_gates: bool,
    lower_bound: bool,
    use_qk_l2norm: bool,
    dense: bool,
    aligned: bool,
    stochastic: bool,
    skips: bool,
) -> StepCall:
    HV, V, K = state.shape[1:]
    H, R = k_cache.shape[1:3]
    batch, tokens = index.rows_and_tokens((q.shape[0], q.shape[1]))
    return StepCall(
        rule, HV, H, V, K, R, window, tokens, index.parents is not None, index.cu_seqlens is not None,
        index.draft_lens is not None, raw_gates, lower_bound, False, state.dtype,
        _common_dtype(q, k, v, out), batch, dense, aligned, stochastic, use_qk_l2norm,
        copies_of(state, read_state), skips,
    )  # fmt: skip


def _check_delta(
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
    window: int,
    index: StepIndex,
    rand_seed: torch.Tensor | None,
    read_state: StateCopy | None,
    beta_cache: torch.Tensor | None,
    skipping: Skipping | None,
    *,
    per_channel: bool,
) -> None:
    """The checks that GDN and KDA share; `per_channel` says whether decays have a key dimension."""
    check_state("state", state, (None, None, None, None))
    expect("k_cache", k_cache, (None, None, None, None))
    HV, V, K = state.shape[1:]
    rings, H, R = k_cache.shape[:3]
    check_heads(HV, H)
    lead, channel = q.shape[:2], (K,) if per_channel else ()
    expect("u_cache", u_cache, (rings, HV, R, V), torch.float32)
    expect("k_cache", k_cache, (rings, H, R, K), k.dtype)
    expect("g_cache", g_cache, (rings, HV, R, *channel), torch.float32)
    expect("q", q, (*lead, H, K))
    expect("k", k, (*lead, H, K))
    expect("v", v, (*lead, HV, V))
    expect("g", g, (*lead, HV, *channel))
    expect("beta", beta, (*lead, HV))
    expect("A_log", A_log, (HV,))
    if dt_bias is not None and A_log is None:
        raise ValueError("dt_bias comes with A_log, which is missing: pass both, or finished gates")
    if (beta_cache is None) != (read_state is None):
        raise ValueError(
            "beta_cache and read_state come together: pass both or neither, got "
            f"{'read_state' if beta_cache is None else 'beta_cache'} alone"
        )
    expect("beta_cache", beta_cache, (rings, HV, R), torch.float32)
    check_step(state, read_state, ring_start, hist_len, lead, out, v.shape, window, R, rings, index)
    check_seed(rand_seed, state)
    check_skipping(skipping, rings, HV, V)

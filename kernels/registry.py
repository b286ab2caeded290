"""Backends by name and by call. `auto` takes the first that serves the call and says so; a name is an order.

A backend is a module with the step functions, `unavailable(device_type)` and `refuses(call)`. It may also
have the slot operations `materialize`, `compact` and `commit`. One that serves packed states and read copies
has `SERVES_COPIES = True`; the others never see them. So it is with `SERVES_SKIPPING` and norms.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module
from types import ModuleType

import torch

from replayssm.core.formats import FORMATS
from replayssm.core.geometry import Rule
from replayssm.core.layout import RingLayout
from replayssm.core.precision import Precision, Rounding

logger = logging.getLogger(__name__)

BACKENDS: dict[str, str] = {
    "torch": "replayssm.kernels.torch_backend",
    "triton": "replayssm.kernels.triton_backend",
    "cuda": "replayssm.kernels.cuda_backend",
    "flashinfer": "replayssm.kernels.flashinfer_backend",
}
PREFERENCE: dict[str, tuple[str, ...]] = {"cuda": ("cuda", "triton", "torch")}
"""What `auto` tries on a kind of device, in this order; on any other device the torch backend."""
NAMES = ("auto", "torch", "triton", "cuda", "flashinfer")
STAND_IN, COPIES_STAND_IN = "triton", "torch"
"""The backends whose slot operations serve a backend that was named and has none, the latter for states that
are packed or split."""


@dataclass(frozen=True, slots=True)
class StepCall:
    """What is known of a step on the host: all that a backend may decide by whether to serve it.

    Attributes:
        rule: which recurrence.
        value_heads: HV (Mamba-2: H).
        key_heads: H (Mamba-2: groups G).
        value_dim: V (Mamba-2: P).
        state_dim: K (Mamba-2: N).
        rows: R, rows of the ring.
        window: L.
        tokens: T, the most tokens of a row.
        tree: draft trees, `index.parents` is given.
        varlen: packed inputs, `index.cu_seqlens` is given.
        draft_lens: rows of different T in dense inputs, `index.draft_lens` is given.
        raw_gates: the step computes the gates: `A_log` is given, or for Mamba-2 `dt_bias` or
            `dt_softplus`.
        lower_bound: KDA's bounded gate.
        z: Mamba-2's output gate is given.
        state_dtype: dtype of the checkpoints.
        activation_dtype: dtype of `x`, `B`, `C`, `z` or of `q`, `k`, `v`, and of `out`; `None` where they
            differ. Recorded inputs have it too; a delta rule's `u` is always fp32.
        batch: B.
        dense: states are dense within a slot, ring tensors within a head, `out` within a token, cursors,
            index and parameters altogether.
        aligned: states, scales and vectors of the rings begin on 16-byte boundaries in every slot and head,
            `out` in every token.
        stochastic: folds round stochastically.
        use_qk_l2norm: the step normalises `q` and `k`; false for Mamba-2.
        copies: the formats, `"READ/RECURRENCE"` or one, where states are packed or steps read a copy of their
            own; `None` for one plain copy.
        skips: checkpoints that norms allow to leave unread are left unread.
    """

    rule: Rule
    value_heads: int
    key_heads: int
    value_dim: int
    state_dim: int
    rows: int
    window: int
    tokens: int
    tree: bool
    varlen: bool
    draft_lens: bool
    raw_gates: bool
    lower_bound: bool
    z: bool
    state_dtype: torch.dtype
    activation_dtype: torch.dtype | None
    batch: int
    dense: bool = True
    aligned: bool = True
    stochastic: bool = False
    use_qk_l2norm: bool = False
    copies: str | None = None
    skips: bool = False

    @classmethod
    def of_decoding(cls, layout: RingLayout, precision: Precision) -> StepCall:
        """A step of one token in one row, by which an engine asks at its start who will serve its states.

        Args:
            layout: the layers' rings.
            precision: of their states; the recurrence copy is plain.
        """
        g = layout.geometry
        return cls(
            g.rule, g.value_heads, g.key_heads, g.value_dim, g.key_dim, layout.rows, layout.window, tokens=1,
            tree=False, varlen=False, draft_lens=False, raw_gates=True, lower_bound=False, z=False,
            state_dtype=FORMATS[precision.recurrence], activation_dtype=layout.activation_dtype, batch=1,
            stochastic=precision.rounding is Rounding.STOCHASTIC, use_qk_l2norm=g.rule is not Rule.MAMBA2,
            copies=f"{precision.read}/{precision.recurrence}" if precision.split else None,
            skips=layout.skip_tolerance > 0,
        )  # fmt: skip


class BackendUnavailable(RuntimeError):
    """A backend that was asked for by name cannot run here, or does not serve the call."""


def resolve(name: str, device: torch.device, call: StepCall | None = None) -> ModuleType:
    """The backend module for a step.

    Args:
        name: `"auto"`, `"torch"`, `"triton"`, `"cuda"` or `"flashinfer"`.
        device: where the tensors are.
        call: the step; `None` asks by device alone, before there is a step.

    Raises:
        ValueError: no such name.
        BackendUnavailable: the backend named cannot run here, or refuses the call; says why.
    """
    return _resolve(name, device.type, call)


def resolve_serving(name: str, device: torch.device, call: StepCall | None = None) -> ModuleType:
    """As `resolve`, for an engine that is about to serve: with `auto` a GPU is not left to the torch backend.

    That serves every call, many times slower than kernels do; who wants it names it.

    Raises:
        ValueError: as `resolve`.
        BackendUnavailable: as `resolve`; or with `auto` no backend of the device's own serves the call.
    """
    module = resolve(name, device, call)
    *kernels, last = PREFERENCE.get(device.type, ("torch",))
    if call is None or name != "auto" or not kernels or module.__name__ != BACKENDS[last]:
        return module
    reasons = "; ".join(f"{each}: {_serves(each, device.type, call)[1]}" for each in kernels)
    raise BackendUnavailable(
        f"no kernels on {device.type} serve this {call.rule} step, and the {last} backend is many times "
        f"slower ({reasons}): change precision or skip_tolerance, or name backend '{last}'"
    )


def resolve_operation(
    name: str, device: torch.device, operation: str, copies: str | None = None
) -> ModuleType:
    """The backend module for a slot operation.

    Backends that lack the operation are passed over by `auto`; named, they leave it to the Triton backend,
    which reads and writes the same layout, or where states are packed or split to the torch backend.

    Args:
        name: as for `resolve`.
        device: where the tensors are.
        operation: `"materialize"`, `"compact"` or `"commit"`.
        copies: as in `StepCall`, where the operation touches states.

    Raises:
        ValueError: no such name.
        BackendUnavailable: the backend named, or the one in its place, cannot run here; says why.
    """
    return _resolve_operation(name, device.type, operation, copies)


@lru_cache(maxsize=8192)
def _resolve(name: str, device_type: str, call: StepCall | None) -> ModuleType:
    _known(name)
    if name != "auto":
        module, reason = _serves(name, device_type, call)
        if module is None:
            what = "cannot run" if call is None else f"cannot serve this {call.rule} step"
            raise BackendUnavailable(f"backend {name!r} {what} on {device_type}: {reason}")
        return module
    passed_over: list[str] = []
    for candidate in PREFERENCE.get(device_type, ("torch",)):
        module, reason = _serves(candidate, device_type, call)
        if module is not None:
            _say(candidate, device_type, None if call is None else call.rule, passed_over)
            return module
        passed_over.append(f"{candidate}: {reason}")
    raise BackendUnavailable(f"no backend can run on {device_type}: {'; '.join(passed_over)}")


@cache
def _resolve_operation(name: str, device_type: str, operation: str, copies: str | None) -> ModuleType:
    _known(name)
    if name != "auto":
        named = _load(name, device_type)
        if not hasattr(named, operation):
            name = STAND_IN if copies is None else COPIES_STAND_IN
            named = _load(name, device_type)
        if (reason := _lacks_copies(named, copies)) is not None:
            raise BackendUnavailable(f"backend {name!r} cannot run {operation}: {reason}")
        return named
    reasons: list[str] = []
    for candidate in PREFERENCE.get(device_type, ("torch",)):
        module, reason = _serves(candidate, device_type, None)
        if module is not None:
            reason = _lacks_copies(module, copies)
        if module is not None and reason is None and hasattr(module, operation):
            return module
        reasons.append(f"{candidate}: {reason or f'has no {operation}'}")
    raise BackendUnavailable(f"no backend can run {operation} on {device_type}: {'; '.join(reasons)}")


def _known(name: str) -> None:
    if name not in NAMES:
        raise ValueError(f"unknown backend {name!r}: expected one of {', '.join(NAMES)}")


def _load(name: str, device_type: str) -> ModuleType:
    module, reason = _serves(name, device_type, None)
    if module is None:
        raise BackendUnavailable(f"backend {name!r} cannot run on {device_type}: {reason}")
    return module


def _serves(name: str, device_type: str, call: StepCall | None) -> tuple[ModuleType | None, str | None]:
    """The module, or why it cannot serve the call."""
    if name not in BACKENDS:
        return None, "this release does not include it; use backend='torch' or 'auto'"
    module = import_module(BACKENDS[name])
    reason: str | None = module.unavailable(device_type)
    if reason is None and call is not None:
        reason = (
            _lacks_copies(module, call.copies) or _lacks_skipping(module, call.skips) or module.refuses(call)
        )
    return (module, None) if reason is None else (None, reason)


def _lacks_copies(module: ModuleType, copies: str | None) -> str | None:
    """Why a backend does not serve states of these formats; `None` when it does."""
    if copies is None or getattr(module, "SERVES_COPIES", False):
        return None
    return f"it has no kernels for {copies} states yet; use backend='torch' or 'auto'"


def _lacks_skipping(module: ModuleType, skips: bool) -> str | None:
    """Why a backend does not leave checkpoints unread; `None` when it does, or need not."""
    if not skips or getattr(module, "SERVES_SKIPPING", False):
        return None
    return (
        "it keeps no norms of checkpoints, which skip_tolerance needs; use another backend or 'auto', or "
        "leave skip_tolerance out"
    )


_said: set[tuple[str, str, Rule | None]] = set()


def _say(name: str, device_type: str, rule: Rule | None, passed_over: list[str]) -> None:
    """One log line for each rule and backend that `auto` chose."""
    if (name, device_type, rule) in _said:
        return
    _said.add((name, device_type, rule))
    purpose = "" if rule is None else f" for {rule}"
    because = f" ({'; '.join(passed_over)})" if passed_over else ""
    logger.info("replayssm: backend auto chose %s%s on %s%s", name, purpose, device_type, because)

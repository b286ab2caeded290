"""The flashinfer backend: what it refuses, what FlashInfer's kernel is given, and parity on a GPU.

Without a GPU a double of FlashInfer's function stands in. It does the step in torch by FlashInfer's contract,
from what it is given alone, and checks what FlashInfer would check.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from replayssm import kernels
from replayssm.core import LayerGeometry, Rule
from replayssm.kernels import BackendUnavailable, StepCall, StepIndex, flashinfer_backend, registry
from tests.kernels.device.walk import BatchWalk, Layer, bits

GEOMETRY = LayerGeometry.mamba2(4, 64, 128, 2)
CALL = StepCall(
    Rule.MAMBA2, 4, 2, 64, 128, 12, 8, 4, False, False, False, True, False, False, torch.float32,
    torch.bfloat16, 3,
)  # fmt: skip


def double(
    state: torch.Tensor,
    x_cache: torch.Tensor,
    B_cache: torch.Tensor,
    dt_cache: torch.Tensor,
    ring_start: torch.Tensor,
    prev_num_accepted_tokens: torch.Tensor,
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
    state_batch_indices: torch.Tensor | None = None,
    pad_slot_id: int = -1,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    algorithm: str = "auto",
) -> torch.Tensor:
    """FlashInfer's `checkpointing_ssu`, as its documentation has it: skipped rows keep their output."""
    slots, H, P, N = state.shape
    rows = x_cache.shape[2]
    batch, predicted = (x.shape[0], x.shape[1]) if cu_seqlens is None else (len(cu_seqlens) - 1, max_seqlen)
    assert predicted is not None
    window = rows - predicted
    assert predicted <= window <= 16
    assert x.dtype in (torch.bfloat16, torch.float16)
    assert {each.dtype for each in (x, B, C, out, x_cache, B_cache)} == {x.dtype}
    assert len(x_cache) == len(B_cache) == len(dt_cache) == len(ring_start) == slots
    assert state.stride()[1:] == (P * N, N, 1)
    assert all(each.stride()[2:] == (each.shape[3], 1) for each in (x, B, C, out, x_cache, B_cache))
    assert z is None or (z.stride()[2:] == (P, 1) and z.dtype == x.dtype)
    assert dt.stride()[2:] == (1, 0)
    assert dt.shape == x.shape
    assert A.stride() == (1, 0, 0)
    assert A.shape == (H, P, N)
    assert all(each is None or (each.shape == (H, P) and each.stride() == (1, 0)) for each in (D, dt_bias))
    assert D is None or dt_bias is None or D.dtype == dt_bias.dtype
    assert cu_seqlens is None or cu_seqlens.dtype == torch.int32
    chosen = range(batch) if state_batch_indices is None else state_batch_indices.tolist()
    for row, slot in enumerate(chosen):
        first = 0 if cu_seqlens is None else int(cu_seqlens[row])
        length = predicted if cu_seqlens is None else int(cu_seqlens[row + 1]) - first
        if slot == pad_slot_id or length <= 0:
            continue
        assert slot >= 0, "FlashInfer would read before the pool"
        lead = row if cu_seqlens is None else 0
        history = int(prev_num_accepted_tokens[slot])
        place = [(int(ring_start[slot]) + j) % rows for j in range(history + length)]
        new = slice(first, first + length)
        step = dt[lead, new, :, 0].float()
        step = step if dt_bias is None else step + dt_bias[:, 0].float()
        step = torch.nn.functional.softplus(step) if dt_softplus else step
        x_cache[slot][:, place[history:]] = x[lead, new].transpose(0, 1)
        B_cache[slot][:, place[history:]] = B[lead, new].transpose(0, 1)
        dt_cache[slot][:, place[history:]] = step.T
        S = state[slot].float()
        for j, at in enumerate(place):
            if j == history and history + length > window:
                state[slot] = S.to(state.dtype)
            key = B_cache[slot][:, at].float().repeat_interleave(H // B.shape[2], 0)
            amount = dt_cache[slot][:, at]
            S = S * torch.exp(A[:, 0, 0] * amount)[:, None, None]
            S = S + (amount[:, None] * x_cache[slot][:, at].float())[:, :, None] * key[:, None, :]
            if j < history:
                continue
            token = first + j - history
            query = C[lead, token].float().repeat_interleave(H // B.shape[2], 0)
            y = torch.einsum("hpn,hn->hp", S, query)
            y = y if D is None else y + D.float() * x[lead, token].float()
            y = y if z is None else y * torch.nn.functional.silu(z[lead, token].float())
            out[lead, token] = y.to(out.dtype)
    return out


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[..., Any]], None]]:
    """Puts a double into the place of `flashinfer.mamba`; the backend takes the CPU for a GPU."""

    def install(kernel: Callable[..., Any]) -> None:
        package, module = ModuleType("flashinfer"), ModuleType("flashinfer.mamba")
        module.checkpointing_ssu = kernel  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "flashinfer", package)
        monkeypatch.setitem(sys.modules, "flashinfer.mamba", module)
        forget()

    def forget() -> None:
        flashinfer_backend._checkpointing_ssu.cache_clear()
        registry._resolve.cache_clear()

    yield install
    monkeypatch.undo()
    forget()


def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_backend, "unavailable", lambda device: None)


class FlashInferWalk(BatchWalk):
    """A walk whose steps are this backend's, while all else is the torch backend's."""

    def call(self, inputs: dict[str, torch.Tensor], index: StepIndex, out: torch.Tensor) -> None:
        self.backend, backend = "flashinfer", self.backend
        super().call(inputs, index, out)
        self.backend = backend


@pytest.mark.parametrize("form", ["full", "varlen"])
@pytest.mark.parametrize("gates", ["final", "skip", "softplus", "gated"])
@pytest.mark.parametrize("pool", ["plain", "dense", "strided"])
def test_steps(
    form: str, gates: str, pool: str, installed: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs, records and states by the oracle; pads, packed rows, a dummy slot, pools as engines' are."""
    installed(double)
    on_cpu(monkeypatch)
    walk = FlashInferWalk(Layer(GEOMETRY, 8, 4, gates=gates, pool=pool), "torch", "cpu", slots=4)
    walk.give_history([8, 5, 0, 4], [11, 3, 0, 7])
    for rows in ([0, 1, 2, 3], [2, -1, 0, 3], [-1, 3, -1, 1]):
        rows = [0, 1, 2, 3] if pool == "plain" else rows
        lens = [4] * 4 if form == "full" else [3, 1, 0, 4]
        walk.step(rows, lens, form=form, width=4, index_dtype=torch.int32)
    walk.finish()


def test_every_negative_slot_is_a_pad(
    installed: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also beside a dummy slot, in either integer type, and the caller's index stays as it is."""
    installed(double)
    on_cpu(monkeypatch)
    for dtype in (torch.int32, torch.int64):
        walk = BatchWalk(Layer(GEOMETRY, 8, 4), "flashinfer", "cpu", slots=2)
        inputs = walk.draw(4, 4)
        rows = walk.ints([-7, 1, 0, -1], dtype)
        out = torch.full_like(inputs["x"], float("nan"))
        walk.call(inputs, StepIndex(rows, pad_slot_id=1), out)
        assert (out[[0, 1, 3]] == 0).all()
        assert out[2].isfinite().all()
        assert out[2].abs().sum() > 0
        assert rows.tolist() == [-7, 1, 0, -1]
        assert walk.state[1].isnan().all()


def test_nothing_to_do(installed: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed rows that bring nothing, and no rows at all, do not reach FlashInfer."""
    installed(double)
    on_cpu(monkeypatch)
    walk = BatchWalk(Layer(GEOMETRY, 8, 4), "flashinfer", "cpu", slots=2)
    inputs = {name: value.flatten(0, 1)[None] for name, value in walk.draw(2, 4).items()}
    for bounds, longest in (([0], 4), ([0, 0, 0], 0)):
        out = torch.full_like(inputs["x"], float("nan"))
        index = StepIndex(
            walk.ints([0] * (len(bounds) - 1)), cu_seqlens=walk.ints(bounds), max_seqlen=longest
        )
        walk.call(inputs, index, out)
        assert (out == 0).all()


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"rule": Rule.GDN}, "normalised keys"),
        ({"rule": Rule.KDA}, "no ring kernel for KDA"),
        ({"value_dim": 80}, "head dimension of 64, got 80"),
        ({"state_dim": 64}, "state dimension of 128, got 64"),
        ({"window": 32, "rows": 36}, "windows to 16, got 32"),
        ({"window": 4, "rows": 12, "tokens": 8}, "at most L more rows, got 8 beside L=4"),
        ({"tree": True}, "not draft trees"),
        ({"draft_lens": True}, "must come packed"),
        ({"tokens": 1}, "T = R - L = 4 tokens, got 1"),
        ({"activation_dtype": torch.float32}, "got torch.float32"),
        ({"activation_dtype": None}, "got None"),
        ({"dense": False}, "dense"),
        ({"stochastic": True}, "stochastic"),
    ],
)
def test_refusals(changed: dict[str, Any], reason: str) -> None:
    said = flashinfer_backend.refuses(replace(CALL, **changed))
    assert said is not None
    assert reason in said


@pytest.mark.parametrize(
    "changed", [{}, {"varlen": True, "tokens": 1}, {"z": True}, {"state_dtype": torch.float16}]
)
def test_what_it_serves(changed: dict[str, Any]) -> None:
    assert flashinfer_backend.refuses(replace(CALL, **changed)) is None


def test_what_only_the_step_can_see(installed: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    installed(double)
    on_cpu(monkeypatch)
    walk = BatchWalk(Layer(GEOMETRY, 8, 4, gates="softplus"), "flashinfer", "cpu", slots=2)
    inputs, rows = walk.draw(2, 4), walk.ints([0, 2])
    packed = {name: value.flatten(0, 1)[None] for name, value in inputs.items()}
    bounds = walk.ints([0, 4, 8], torch.int64)
    out = torch.empty_like(inputs["x"])
    for given, index, reason in (
        (inputs, StepIndex(rows, ring_indices=rows), "leave ring_indices out"),
        (packed, StepIndex(rows, cu_seqlens=bounds, max_seqlen=4), "cu_seqlens in int32"),
    ):
        with pytest.raises(BackendUnavailable, match=reason):
            walk.call(given, index, torch.empty_like(given["x"]))
    walk.options["D"] = walk.options["D"].bfloat16()
    with pytest.raises(BackendUnavailable, match="D and dt_bias in one dtype"):
        walk.call(inputs, StepIndex(rows), out)
    apart = BatchWalk(Layer(GEOMETRY, 8, 4, pool="rings apart"), "flashinfer", "cpu", slots=2)
    with pytest.raises(BackendUnavailable, match="3 rings, 4 slots"):
        apart.call(apart.draw(2, 4), StepIndex(rows), out)


def test_it_says_how_to_install(installed: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Absent, or with the double buffer of older versions (L27): the reason and the remedy."""
    assert flashinfer_backend.unavailable("cpu") == "it needs an NVIDIA GPU"
    installed(lambda state, old_x, old_B, cache_buf_idx: state)
    assert "has no ring_start" in str(flashinfer_backend.unavailable("cuda"))
    installed(double)
    assert flashinfer_backend.unavailable("cuda") is None
    monkeypatch.setitem(sys.modules, "flashinfer.mamba", None)
    flashinfer_backend._checkpointing_ssu.cache_clear()
    assert "pip install 'flashinfer-python>=0.7.4'" in str(flashinfer_backend.unavailable("cuda"))


def test_auto_never_takes_it() -> None:
    assert all("flashinfer" not in names for names in registry.PREFERENCE.values())


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4, 8])
def test_parity(tokens: int, record_property: Callable[[str, object], None]) -> None:
    """Nemotron-3-Super's layer, fp32 checkpoints: the same records, outputs and states to bf16's grade.

    FlashInfer takes the state through bf16 products, so its error is above ours.
    """
    ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)  # kernels built without a driver find it so
    reason = flashinfer_backend.unavailable("cuda")
    if reason is not None:
        pytest.skip(reason)
    layer = Layer(LayerGeometry.mamba2(128, 64, 128, 8), 16, tokens, gates="softplus")
    names = ("triton", "flashinfer")
    walks = [BatchWalk(layer, name, slots=4, seed=2) for name in names]
    for walk in walks:
        walk.give_history([16, 17 - tokens, 0, 16 - tokens], [3, layer.layout.rows - 2, 0, 9])
        for ring in walk.rings.values():  # FlashInfer multiplies dead rows by zero
            ring.nan_to_num_(0.0)
    differences = []
    for rows in ([2, -1, 0, 3], [1, 3, -1, 2], [0, 1, 2, 3]):
        outs = []
        for walk in walks:
            inputs, index = walk.draw(4, tokens), walk.index(rows, [tokens] * 4, "full", None, tokens)
            outs.append(torch.full_like(inputs["x"], float("nan")))
            walk.call(inputs, index, outs[-1])
            assert index.state_indices is not None
            kernels.commit(
                walk.start, walk.hist, index.state_indices, tokens, window=16, rows=layer.layout.rows
            )
        differences.append(relative(outs[1], outs[0]))
        for name in ("x_cache", "B_cache"):
            assert torch.equal(*(bits(walk.rings[name]) for walk in walks))
        steps = [walk.rings["dt_cache"].nan_to_num() for walk in walks]
        torch.testing.assert_close(*steps, rtol=1e-5, atol=1e-6)
    states = [walk.state[walk.slot_of] for walk in walks]
    assert all(difference < 2e-2 for difference in differences)
    record_property("output_difference", round(max(differences), 6))
    record_property("state_difference", round(relative(states[1], states[0]), 6))
    assert relative(states[1], states[0]) < 1e-2


def relative(mine: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference as a part of the largest value."""
    return ((mine.float() - other.float()).abs().max() / other.float().abs().max()).item()

"""Packed and split states by CUDA kernels on a GPU, at the models' shapes: steps, and what writes states.

Both kernels of a step are judged by what they left: states against an fp32 fold, read copies against their
own recurrence copies bit for bit, and outputs and records against the torch backend from those states. All
but the kernels runs on the CPU, so that a tool that watches every launch has few to watch.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from replayssm import kernels
from replayssm.cli.bench.precisions import largest_rounding
from replayssm.core import LayerBuffers, LayerGeometry, RingLayout, Rule
from replayssm.core.formats import PackedState, StateCopy, state_tensors
from replayssm.core.precision import Precision, Rounding
from replayssm.kernels import StepIndex
from replayssm.kernels.cuda_backend import fold
from replayssm.kernels.torch_backend.formats import encode
from tests.kernels import emulated
from tests.kernels.device.walk import STEP, geometry

WINDOW, ROWS = 16, 6
PRECISIONS = ("nvfp4/fp16+sr", "nvfp4/fp32", "fp8/fp16+sr", "int8/fp32", "mxfp4/fp16", "fp8+sr", "nvfp4+sr")
SEED = 2**35 + 7


def layer_of(geo: LayerGeometry, precision: Precision, tokens: int) -> LayerBuffers:
    """Random states and rings for all rows; `A` of a trained model's size."""
    layout = RingLayout(geo, WINDOW, tokens, split=precision.split)
    A = None if geo.rule is not Rule.MAMBA2 else -torch.linspace(0.2, 8.0, geo.value_heads)
    layer = LayerBuffers.allocate(layout, ROWS, precision, "cpu", A)
    generator = torch.Generator().manual_seed(1)

    def normal(shape: torch.Size) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    for name, ring in layer.rings.items():
        ring.copy_(normal(ring.shape))
        if name in ("g_cache", "dt_cache", "beta_cache"):
            ring.sigmoid_().mul_(-0.2 if name == "g_cache" else 0.2)
    values = normal(torch.Size((ROWS, *geo.state_shape)))
    values[..., ::9] *= 30.0
    kernels.store_states(layer.state, values, layer.read_state)
    return layer


def inputs_of(geo: LayerGeometry, tokens: int) -> dict[str, torch.Tensor]:
    """Inputs of one step with finished gates."""
    generator, act = torch.Generator().manual_seed(2), torch.bfloat16
    heads, keys = (ROWS, tokens, geo.value_heads), (ROWS, tokens, geo.key_heads, geo.key_dim)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    value, one, two = normal(*heads, geo.value_dim).to(act), normal(*keys).to(act), normal(*keys).to(act)
    if geo.rule is Rule.MAMBA2:
        return {"x": value, "B": one, "C": two, "dt": 0.2 * normal(*heads).sigmoid()}
    channel = (geo.key_dim,) if geo.rule is Rule.KDA else ()
    decay = -0.2 * normal(*heads, *channel).sigmoid()
    return {"q": one, "k": two, "v": value, "g": decay, "beta": normal(*heads).sigmoid()}


def moved(layer: LayerBuffers, device: str) -> LayerBuffers:
    """The same bits in buffers of its own on a device."""

    def there(pool: StateCopy) -> StateCopy:
        if isinstance(pool, torch.Tensor):
            return pool.to(device, copy=True)
        heads = None if pool.head_scales is None else pool.head_scales.to(device, copy=True)
        codes, scales = (tensor.to(device, copy=True) for tensor in (pool.codes, pool.scales))
        return replace(pool, codes=codes, scales=scales, head_scales=heads)

    read = None if layer.read_state is None else there(layer.read_state)
    rings = {name: ring.to(device, copy=True) for name, ring in layer.rings.items()}
    A = None if layer.A is None else layer.A.to(device)
    return replace(layer, state=there(layer.state), read_state=read, rings=rings, A=A)


def as_bytes(copy: StateCopy) -> list[torch.Tensor]:
    return [tensor.contiguous().view(torch.uint8) for tensor in state_tensors(copy)]


def copies_of(layer: LayerBuffers) -> list[torch.Tensor]:
    return as_bytes(layer.state) + ([] if layer.read_state is None else as_bytes(layer.read_state))


def check_states(
    layer: LayerBuffers,
    before: LayerBuffers,
    precision: Precision,
    rows: tuple[torch.Tensor, ...],
    history: torch.Tensor,
) -> None:
    """The states that `materialize`'s `rows` ask for, to their rounding; no other slot has changed.

    States are those of a fold in fp32, as stored; a read copy is the encoding of what is stored.
    """
    exact = moved(before, "cpu")
    reference = kernels.load_states(exact.state)
    kernels.materialize(
        layer.layout.geometry.rule, [reference], [exact.rings], *rows, window=WINDOW,
        A=None if layer.A is None else [layer.A], read_states=None if exact.read_state is None else
        [exact.read_state], hist_len=history, backend="torch",
    )  # fmt: skip
    target = rows[-1][rows[-1] >= 0].long()
    states = kernels.load_states(layer.state)[target]
    wanted = reference[target]
    size = wanted.abs().amax((-1, -2), keepdim=True)
    rounded = largest_rounding(precision.recurrence, precision.rounding)
    assert ((states - wanted).abs() <= (rounded + 4e-6) * size).all()
    if layer.read_state is not None:
        check_read_copies(layer, precision, target)
    untouched = [slot for slot in range(ROWS) if slot not in target.tolist()]
    for mine, other in zip(copies_of(layer), copies_of(before), strict=True):
        assert torch.equal(mine[untouched], other[untouched])


def check_read_copies(layer: LayerBuffers, precision: Precision, slots: torch.Tensor) -> None:
    """Bit for bit the encodings of the states."""
    assert isinstance(layer.read_state, PackedState)
    again = encode(precision.read, kernels.load_states(layer.state))
    for mine, other in zip(as_bytes(layer.read_state), as_bytes(again), strict=True):
        assert torch.equal(mine[slots], other[slots])


def check_step(geo: LayerGeometry, precision: Precision, tokens: int, device: str) -> None:
    """One step of five rows and a pad; those in slots 3 and 1 flush, that in slot 2 just does not."""
    before = layer_of(geo, precision, tokens)
    slots = torch.tensor([3, 0, 5, -1, 2, 1], dtype=torch.int32)
    history = torch.tensor([5, WINDOW, WINDOW - tokens, WINDOW, WINDOW, 0], dtype=torch.int32)
    start = torch.tensor([4, 0, 7, 1, WINDOW, 2], dtype=torch.int32)
    inputs = inputs_of(geo, tokens)
    seed = torch.tensor([SEED]) if precision.rounding is Rounding.STOCHASTIC else None

    def step(buffers: LayerBuffers, backend: str, device: str) -> torch.Tensor:
        given = {name: value.to(device) for name, value in inputs.items()}
        given |= {"ring_start": start.to(device), "hist_len": history.to(device)}
        given |= {} if buffers.A is None else {"A": buffers.A}
        out = torch.full_like(given["x"] if "x" in given else given["v"], float("nan"))
        return STEP[geo.rule](
            buffers.state, **buffers.rings, **given, out=out, window=WINDOW, read_state=buffers.read_state,
            index=StepIndex(slots.to(device)), layer=3, backend=backend,
            rand_seed=None if seed is None else seed.to(device),
        ).cpu()  # fmt: skip

    there = moved(before, device)
    found = step(there, "cuda", device)
    layer = moved(there, "cpu")
    rows = torch.tensor([3, 1])

    check_states(layer, before, precision, (start, history[rows], rows, rows), history)

    # outputs and records: the torch backend's, from those states and with what was folded out of the ring
    start[rows] += history[rows]
    start %= layer.layout.rows
    history[rows] = 0
    other_side = replace(moved(layer, "cpu"), rings=before.rings)
    expected = step(other_side, "torch", "cpu")
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=4e-6 * expected.abs().max().item())
    for name, ring in layer.rings.items():
        mine, other = ring.float(), other_side.rings[name].float()
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=4e-6 * other.abs().max().item())


def check_renewed(geo: LayerGeometry, precision: Precision, device: str) -> None:
    """Read copies of some slots, in any order and one twice, over what held anything."""
    before = layer_of(geo, precision, 1)
    assert before.read_state is not None
    for tensor in state_tensors(before.read_state):
        tensor.view(torch.uint8).fill_(0x5A)
    there = moved(before, device)
    slots = torch.tensor([4, -1, 0, 4, 3])
    assert there.read_state is not None
    assert fold.renews(there.state, there.read_state)
    kernels.renew([there.state], slots.to(device), read_states=[there.read_state], backend="cuda")
    layer = moved(there, "cpu")
    check_read_copies(layer, precision, torch.tensor([4, 0, 3]))
    for mine, other in zip(as_bytes(layer.state), as_bytes(before.state), strict=True):
        assert torch.equal(mine, other)
    assert layer.read_state is not None
    for tensor in state_tensors(layer.read_state):
        assert (tensor.view(torch.uint8)[[1, 2, 5]] == 0x5A).all()


def check_materialized(geo: LayerGeometry, precision: Precision, device: str) -> None:
    """A whole fold in place, some records and none to other slots, and a row that is skipped."""
    before = layer_of(geo, precision, 4)
    assert before.read_state is not None
    for tensor in state_tensors(before.read_state):
        tensor[5].view(torch.uint8).fill_(0x7F)  # no record is applied: it may hold anything yet
    history = torch.tensor([WINDOW, 9, 4, 0, 0, 0], dtype=torch.int32)
    start = torch.tensor([7, 0, WINDOW, 1, 0, 3], dtype=torch.int32)
    count, source = torch.tensor([WINDOW, 5, 0, 1], dtype=torch.int32), torch.tensor([0, 1, 5, 2])
    target = torch.tensor([0, 3, 4, -1])
    there = moved(before, device)
    assert there.read_state is not None
    assert fold.materializes(geo.rule, there.state, there.read_state, there.rings, WINDOW)
    seed = torch.tensor([SEED]) if precision.rounding is Rounding.STOCHASTIC else None
    kernels.materialize(
        geo.rule, [there.state], [there.rings], *(x.to(device) for x in (start, count, source, target)),
        window=WINDOW, A=None if there.A is None else [there.A], read_states=[there.read_state],
        hist_len=history.to(device), rand_seed=None if seed is None else seed.to(device), whole=True,
        backend="cuda",
    )  # fmt: skip
    check_states(moved(there, "cpu"), before, precision, (start, count, source, target), history)


MODELS = (
    "nemotron-3-super", "nemotron-3-nano-4b", "qwen3.5-122b", "qwen3.5-4b/8", "kimi-linear", "kimi-k3/8",
)  # fmt: skip
SPLIT = ("nvfp4/fp16+sr", "nvfp4/fp32", "fp8/fp16+sr", "int8/fp32", "mxfp4/fp16")


@pytest.mark.gpu
@pytest.mark.parametrize("precision", SPLIT)
@pytest.mark.parametrize("name", MODELS)
def test_renewed_by_cuda(name: str, precision: str) -> None:
    check_renewed(geometry(name), Precision.parse(precision), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("precision", SPLIT)
@pytest.mark.parametrize("name", MODELS)
def test_materialized_by_cuda(name: str, precision: str) -> None:
    check_materialized(geometry(name), Precision.parse(precision), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("tokens", [1, 4, 8])
@pytest.mark.parametrize("name", MODELS)
def test_cuda(name: str, tokens: int, precision: str) -> None:
    check_step(geometry(name), Precision.parse(precision), tokens, "cuda")


@pytest.mark.slow
@pytest.mark.skipif(emulated.COMPILER is None, reason="the emulator needs g++")
@pytest.mark.parametrize("rule", list(Rule))
def test_emulated(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, so that what is asked of a GPU is known to be right."""
    emulated.serve_on_cpu(monkeypatch)
    geo, precision = LayerGeometry(rule, 2, 1, 24, 128), Precision.parse("nvfp4/fp16+sr")
    check_step(geo, precision, 4, "cpu")
    check_renewed(geo, precision, "cpu")
    check_materialized(geo, precision, "cpu")

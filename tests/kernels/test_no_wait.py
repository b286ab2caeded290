"""Nothing waits for an accelerator (L21): its code path, run on the CPU and on tensors without values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from replayssm import kernels
from replayssm.core import ConvWindow, Cursors, LayerBuffers, RingLayout, rows
from replayssm.kernels import StepIndex
from tests import support
from tests.support import RULES, NoReadBack, Walk, draw, geometry, ints, make_layer, run_step, same_bits

COPIES = ("fp8/fp32", "int8/fp16+sr")
TREE = torch.tensor([[-1, -1, 0, 0], [-1, 0, 1, 2], [-1, -1, -1, -1], [-1, 0, 0, 1]])
PATH = torch.tensor([[0, 2, 0], [0, 1, 2], [3, 0, 0], [0, 0, 0]])
SLOTS, LENS, ACCEPTED = ints([3, -1, 0, 5]), ints([4, 4, 1, 0]), ints([2, 3, 1, 0])


def life(layer: LayerBuffers, state_index: bool = True) -> list[torch.Tensor]:
    """Steps, trees, commits and all that may happen to a slot; returns every output and buffer."""
    walk = Walk.of(layer)
    cache, outs = walk.cache, []
    cache.hand_out(ints([0, 3, 5, -1]))
    for step in range(6):
        inputs = draw(layer, 4, 4, walk.generator)
        parents = TREE if step % 2 else None
        outs.append(run_step(layer, cache, inputs, StepIndex(SLOTS, draft_lens=LENS, parents=parents)))
        if step % 2:
            kernels.compact(
                [layer.rings], cache.cursors.start, cache.cursors.history, PATH,
                ACCEPTED, SLOTS,
            )  # fmt: skip
        cache.commit(SLOTS, LENS, ACCEPTED)
    packed = support.pack(draw(layer, 4, 4, walk.generator), [4, 2, 1, 0], extra=2)
    index = StepIndex(SLOTS, cu_seqlens=ints([0, 4, 6, 7, 7]), max_seqlen=4)
    outs.append(run_step(layer, cache, packed, index))
    cache.commit(SLOTS, ints([4, 2, 1, 0]), ints([1, 2, 1, 0]))
    cache.rollback(ints([3, -1]), ints([1, 1]))
    cache.materialize(ints([3, -1, 0]), ints([1, 0, 1]), ints([1, 2, -1]))
    cache.copy(ints([0, -1]), ints([2, -1]))
    cache.materialize(ints([0]), ints([1]), ints([0]))
    cache.flush(ints([3, -1, 5, -1]))
    cache.flush(ints([-1]))
    cache.adopt(ints([2]))
    cache.evict(ints([5, -1]))
    return [*outs, *support.stored_tensors(layer), cache.cursors.start, cache.cursors.history, cache.seed]


@pytest.fixture
def as_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors are treated as ones whose values are not at hand."""
    monkeypatch.setattr(rows, "may_read_back", lambda tensor: False)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", *COPIES])
@pytest.mark.parametrize("rule", RULES)
def test_the_accelerators_path_gives_the_same_bits(
    rule: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path without shortcuts for the CPU leaves the same outputs, states, rings and cursors."""

    def make() -> LayerBuffers:
        return make_layer(geometry(rule), slots=6, precision=precision)

    here = life(make())
    monkeypatch.setattr(rows, "may_read_back", lambda tensor: False)
    there = life(make())
    assert all(same_bits(x, y) for x, y in zip(here, there, strict=True))


@pytest.mark.parametrize("precision", ["fp32", *COPIES])
@pytest.mark.parametrize("rule", RULES)
def test_no_value_is_read_back(rule: str, precision: str, as_on_an_accelerator: None) -> None:
    """L21: no operation of a whole life has a result that depends on values, so none can wait."""
    layer = make_layer(geometry(rule), slots=6, precision=precision)
    with NoReadBack():
        life(layer)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: x.nonzero(),
        lambda x: x[x > 1],
        lambda x: x[x[0]],
        lambda x: torch.unique(x),
        lambda x: x.masked_select(x > 1),
        lambda x: x.repeat_interleave(x),
        lambda x: torch.equal(x, x),
        lambda x: x.index_put_((x > 1,), x.new_zeros(())),
        int,
    ],
)
def test_the_guard_catches_reads(read) -> None:
    """`NoReadBack` fails on each way to wait, so that passing under it says something."""
    values = torch.tensor([2]) if read is int else torch.tensor([1, 2, 2])
    with pytest.raises(AssertionError, match="read"), NoReadBack():
        read(values)


def test_cursors_and_conv_window_read_nothing_back(as_on_an_accelerator: None) -> None:
    """L21: the pointers of the ring and of the convolution move by device arithmetic alone."""
    cursors = Cursors.allocate(4, 6, 10, "cpu")
    window = ConvWindow(4, 3, 2, "cpu")
    layer = window.add_layer(2, torch.float32)
    with NoReadBack():
        slots = ints([2, -1, 0])
        cursors.anchor(slots)
        cursors.commit(slots, ints([2, 2, 0]), ints([1, 2, 0]))
        cursors.rollback(slots, ints([1, 1, 0]))
        cursors.advance(slots, ints([0, 1, 0]))
        live = ints([2, 0])
        window.hand_out(live)
        window.append(layer, live, torch.ones(2, 2, 2))
        window.commit(live, ints([2, 1]))
        window.rollback(live, ints([1, 0]))
        assert window.window(layer, live).shape == (2, 3, 2)


class OnOneDevice(TorchDispatchMode):
    """Fails on an operation that mixes a tensor of the device with one of the host: a copy that waits."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        tensors = [t for t in torch.utils._pytree.tree_leaves((args, kwargs, result)) if torch.is_tensor(t)]
        devices = {t.device.type for t in tensors if t.dim()}
        assert len(devices) <= 1, f"{function} mixes {devices}"
        return result


@pytest.mark.parametrize("precision", ["bf16", "nvfp4/fp16+sr"])
@pytest.mark.parametrize("rule", RULES)
def test_everything_stays_on_the_device(rule: str, precision: str) -> None:
    """L21: `meta` tensors, which hold no values, go through a whole life: nothing needs the host."""
    with OnOneDevice():
        meta = torch.device("meta")
        stored = support.Precision.parse(precision)
        layout = RingLayout(geometry(rule, K=32), 6, 4, torch.bfloat16, split=stored.split)
        A = torch.empty(4, device=meta) if rule == "mamba2" else None
        layer = LayerBuffers.allocate(layout, 6, stored, meta, A)
        cache = support.ReplayCache([layer], kernels.materialize)
        slots = torch.empty(3, dtype=torch.int32, device=meta)
        parents = torch.empty(3, 4, dtype=torch.int32, device=meta)
        act = {"dtype": torch.bfloat16, "device": meta}
        cache.hand_out(slots)
        for index, lead in (
            (StepIndex(slots, draft_lens=slots), (3, 4)),
            (StepIndex(slots, ring_indices=slots, parents=parents), (3, 4)),
            (
                StepIndex(slots, cu_seqlens=torch.empty(4, dtype=torch.int32, device=meta), max_seqlen=4),
                (1, 9),
            ),
            (StepIndex(), (3, 0)),
        ):
            key, value = torch.empty(*lead, 2, 32, **act), torch.empty(*lead, 4, 5, **act)
            heads = torch.empty(*lead, 4, device=meta)
            common = {
                "state": layer.state, "ring_start": cache.cursors.start, "hist_len": cache.cursors.history,
                "out": torch.empty_like(value), "window": 6, "index": index, **layer.rings,
                "read_state": layer.read_state, "rand_seed": None if precision == "bf16" else cache.seed,
            }  # fmt: skip
            rates = torch.empty(4, device=meta)
            if rule == "mamba2":
                extras = {"D": rates, "z": value, "dt_bias": rates, "dt_softplus": True}
                out = kernels.mamba2_step(x=value, dt=heads, A=A, B=key, C=key, **extras, **common)
            else:
                channel = (32,) if rule == "kda" else ()
                g, bias = torch.empty(*lead, 4, *channel, **act), torch.empty(4, *channel, device=meta)
                raw = {"g": g, "beta": heads, "A_log": rates, "dt_bias": bias}
                out = support.STEP[rule](q=key, k=key, v=value, **raw, **common)
            assert out.device.type == "meta"
            kernels.compact([layer.rings], cache.cursors.start, cache.cursors.history, parents, slots, slots)
            cache.commit(slots, slots, slots)
        cache.copy(slots, slots)
        cache.flush(slots)
        cache.rollback(slots, slots)
        cache.adopt(slots)
        cache.evict(slots)

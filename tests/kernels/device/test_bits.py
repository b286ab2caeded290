"""Same bits every time, in any company, in a CUDA graph, and far apart; without waiting or allocating."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from replayssm import kernels
from replayssm.core import Rule
from replayssm.kernels import StepIndex
from tests.kernels.device.walk import STEP, BatchWalk, Layer, bits, geometry, histories

MODEL = {Rule.MAMBA2: "nemotron-3-super", Rule.GDN: "qwen3.5-122b", Rule.KDA: "kimi-linear"}
SHARD = {Rule.MAMBA2: "nemotron-3-nano-4b/8", Rule.GDN: "qwen3.5-122b/4", Rule.KDA: "kimi-linear/4"}
Inputs = dict[str, torch.Tensor]


def cursors(count: int, window: int, rows_of_ring: int) -> tuple[list[int], list[int]]:
    """Histories of every length in turn, and starts so that rings wrap."""
    return [n % (window + 1) for n in range(count)], [(5 * n) % rows_of_ring for n in range(count)]


def buffers(walk: BatchWalk) -> list[torch.Tensor]:
    return [walk.state, *walk.rings.values(), walk.start, walk.hist]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(bool((bits(a) == bits(b)).all()) for a, b in zip(left, right, strict=True))


class Launches:
    """One step over a pool that is put back before every launch."""

    def __init__(self, rule: Rule, tokens: int, batch: int, backend: str) -> None:
        layer = Layer(geometry(MODEL[rule]), 16, 4)
        self.walk = BatchWalk(layer, backend, slots=batch, seed=batch)
        self.walk.give_history(*cursors(batch, 16, layer.layout.rows))
        self.before = [tensor.clone() for tensor in buffers(self.walk)]
        self.tokens, self.batch = tokens, batch
        self.inputs = self.walk.draw(batch, tokens)

    def __call__(self, rows: list[int], inputs: Inputs) -> list[torch.Tensor]:
        """Output, then the pools after a step of these sequences."""
        for tensor, value in zip(buffers(self.walk), self.before, strict=True):
            tensor.copy_(value)
        value = inputs["x" if "x" in inputs else "v"]
        out = torch.full_like(value, float("nan"))
        self.walk.call(
            inputs, self.walk.index(rows, [self.tokens] * len(rows), "full", None, self.tokens), out
        )
        return [out, *(tensor.clone() for tensor in buffers(self.walk))]

    def of(self, after: list[torch.Tensor], place: int, sequence: int) -> list[torch.Tensor]:
        """What belongs to one row: its output, its state, its ring."""
        out, state, *rings = after[:-2]
        slot, ring = self.walk.slot_of[sequence], self.walk.ring_of[sequence]
        return [out[place], state[slot], *(each[ring] for each in rings)]


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [6, 48])
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("rule", list(Rule))
def test_same_bits_in_any_company(rule: Rule, tokens: int, batch: int, backend: str) -> None:
    """L22: over 20 launches, in another order, and beside other sequences, inputs and pads."""
    launch = Launches(rule, tokens, batch, backend)
    everyone = list(range(batch))
    first = launch(everyone, launch.inputs)
    assert first[0].isfinite().all()
    for _ in range(19):
        assert same(first, launch(everyone, launch.inputs))

    order = torch.randperm(batch, generator=torch.Generator().manual_seed(3)).tolist()
    shuffled = launch(order, {name: value[order] for name, value in launch.inputs.items()})
    assert same([first[0][order], *first[1:]], shuffled)

    others = launch.walk.draw(batch, launch.tokens)
    for kept in (0, 1, batch - 1):
        rows = [-1 if n % 3 == 1 else (n + 1) % batch for n in everyone]
        rows = [-1 if n == kept else n for n in rows]  # a sequence is in a batch once
        rows[kept] = kept
        mixed = {name: value.clone() for name, value in others.items()}
        for name, value in launch.inputs.items():
            mixed[name][kept] = value[kept]
        after = launch(rows, mixed)
        assert same(launch.of(first, kept, kept), launch.of(after, kept, kept))


class Captured:
    """A step or a commit as a CUDA graph: captured at the first call, then replayed with other values.

    Tensors that the pools own are used where they are; all others are copied into the graph's own.
    """

    def __init__(self, function: Callable[..., Any], owned: list[torch.Tensor]) -> None:
        self.function = function
        self.owned = {tensor.data_ptr() for tensor in owned}
        self.graph: torch.cuda.CUDAGraph | None = None
        self.given: dict[int | str, torch.Tensor] = {}
        self.captures = 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        tensors = self._tensors(args, options)
        if self.graph is None:
            self.given = {name: tensor.clone() for name, tensor in tensors.items()}
            args, options = self._replaced(args, options)
            # Pads alone: everything is compiled, nothing is touched.
            pads = self.given["state_indices" if "index" in options else 2]
            kept = pads.clone()
            pads.fill_(-1)
            self.function(*args, **options)
            pads.copy_(kept)
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.function(*args, **options)
            self.captures += 1
        assert tensors.keys() == self.given.keys()
        for name, tensor in tensors.items():
            self.given[name].copy_(tensor)
        self.graph.replay()
        if "out" not in tensors:
            return None
        return tensors["out"].copy_(self.given["out"])

    def _tensors(self, args: Any, options: dict[str, Any]) -> dict[int | str, torch.Tensor]:
        flat = dict(enumerate(args)) | options
        if "index" in flat:
            flat |= vars(flat.pop("index"))
        return {
            name: value
            for name, value in flat.items()
            if torch.is_tensor(value) and value.data_ptr() not in self.owned
        }

    def _replaced(self, args: Any, options: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        args = [self.given.get(number, value) for number, value in enumerate(args)]
        options = {name: self.given.get(name, value) for name, value in options.items()}
        if "index" in options:
            index: StepIndex = options["index"]
            fields = {name: self.given[name] for name in vars(index) if name in self.given}
            options["index"] = replace(index, **fields)
        return args, options


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("rule", list(Rule))
def test_one_graph_serves_every_step(rule: Rule, tokens: int, backend: str) -> None:
    """Captured once; cursors, slots, pads and draft lengths change under it, and the oracle agrees."""
    layer = Layer(geometry(SHARD[rule]), 16, tokens)
    walk = BatchWalk(layer, backend, slots=8, seed=1)
    parameters = [value for value in walk.options.values() if torch.is_tensor(value)]
    step = Captured(STEP[rule], [*buffers(walk), *parameters])
    commit = Captured(kernels.commit, buffers(walk))
    walk.step_function, walk.commit_function = step, commit
    walk.give_history(*histories(16, tokens, 8, layer.layout.rows))
    for number in range(10):
        live = 6 - number % 4  # as the batch drains, pads fill it up
        rows = [(number + 3 * row) % 8 if row < live else -1 for row in range(6)]
        lens = [max(tokens - (number + row) % (tokens + 1), 0) for row in range(6)]
        walk.step(rows, lens, form="lens", width=tokens)
    walk.finish()
    assert step.captures == commit.captures == 1


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("rule", list(Rule))
def test_layers_and_commit_in_a_graph(rule: Rule, tokens: int, backend: str) -> None:
    """Two layers and the commit, replayed past two flushes: the bits of the same launches made one by one."""
    layer = Layer(geometry(SHARD[rule]), 16, tokens)

    def make() -> tuple[list[BatchWalk], Callable[[], None], Inputs, torch.Tensor]:
        pair = [BatchWalk(layer, backend, slots=4, seed=seed) for seed in (1, 2)]
        for each in pair:
            each.give_history(*cursors(4, 16, layer.layout.rows))
        pair[1].start, pair[1].hist = pair[0].start, pair[0].hist  # layers share their cursors
        inputs = pair[0].draw(4, tokens)
        outs = torch.zeros_like(torch.stack([inputs["x" if "x" in inputs else "v"]] * 2))
        index = pair[0].index([2, -1, 0, 3], [tokens] * 4, "full", None, tokens)

        def decode() -> None:
            for each, out in zip(pair, outs, strict=True):
                each.call(inputs, index, out)
            assert index.state_indices is not None
            kernels.commit(
                pair[0].start,
                pair[0].hist,
                index.state_indices,
                tokens,
                window=16,
                rows=layer.layout.rows,
                backend=backend,
            )

        return pair, decode, inputs, outs

    plain, decode, inputs, outs = make()
    captured, decode_again, inputs_again, outs_again = make()
    with pads_only(captured):
        decode_again()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode_again()
    for _ in range(40 // tokens):
        fresh = plain[0].draw(4, tokens)
        for name, value in fresh.items():
            inputs[name].copy_(value)
            inputs_again[name].copy_(value)
        decode()
        graph.replay()
        assert same([outs], [outs_again])
    for left, right in zip(plain, captured, strict=True):
        assert same(buffers(left), buffers(right))


@contextmanager
def pads_only(walks: list[BatchWalk]) -> Iterator[None]:
    """Pools and cursors are put back afterwards, so that a warm-up leaves no trace."""
    kept = [[tensor.clone() for tensor in buffers(walk)] for walk in walks]
    yield
    for walk, values in zip(walks, kept, strict=True):
        for tensor, value in zip(buffers(walk), values, strict=True):
            tensor.copy_(value)


@contextmanager
def no_waiting() -> Iterator[None]:
    """Fails on anything that waits for the device or takes memory from the allocator."""
    torch.cuda.synchronize()
    taken = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
    more = torch.cuda.memory_stats()["allocation.all.allocated"] - taken
    assert more == 0, f"{more} allocations"


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["decode", "chain", "lens", "varlen", "tree"])
@pytest.mark.parametrize("rule", list(Rule))
def test_steps_and_commit_neither_wait_nor_allocate(rule: Rule, form: str, backend: str) -> None:
    """L21: on pools that are strided, with activations that are slices, as engines bring them."""
    tokens = 1 if form == "decode" else 4
    layer = Layer(geometry(SHARD[rule]), 16, 4, pool="strided")
    walk = BatchWalk(layer, backend, slots=4)
    walk.give_history(*histories(16, tokens, 4, layer.layout.rows))
    rows, lens = [2, -1, 0, 3], [tokens] * 4 if form in ("decode", "chain", "tree") else [4, 2, 1, 0]
    parents = [[-1, -1, 0, 1]] * 4 if form == "tree" else None
    inputs = walk.draw(4, tokens)
    inputs = walk.pack(inputs, lens) if form == "varlen" else walk.fuse(inputs)
    out = torch.empty_like(inputs["x" if "x" in inputs else "v"]).contiguous()
    index = walk.index(rows, lens, form if form in ("lens", "varlen") else "full", parents, tokens)
    assert index.state_indices is not None
    length = index.draft_lens if form == "lens" else tokens
    accepted = walk.ints([1, 0, 1, 0])

    def step() -> None:
        walk.call(inputs, index, out)
        kernels.commit(
            walk.start,
            walk.hist,
            index.state_indices,
            length,
            accepted,
            window=16,
            rows=layer.layout.rows,
            pad_slot_id=index.pad_slot_id,
            backend=backend,
        )

    step()
    with no_waiting():
        for _ in range(3):
            step()


@pytest.mark.gpu
def test_the_guard_notices() -> None:
    """`no_waiting` fails on an allocation and on a read."""
    value = torch.ones(8, device="cuda")
    with pytest.raises(AssertionError, match="1 allocations"), no_waiting():
        value.clone()
    with pytest.raises(RuntimeError), no_waiting():
        value.sum().item()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("rule", list(Rule))
def test_offsets_beyond_32_bits(rule: Rule, tokens: int, backend: str) -> None:
    """L10: the second sequence lies more than 2^32 bytes and 2^31 bf16 values behind the first."""
    far_walk(Layer(geometry(SHARD[rule]), 16, tokens, state="bf16", pool="strided", page=2**31 + 64), backend)


def far_walk(layer: Layer, backend: str, device: str = "cuda") -> None:
    tokens = layer.max_draft
    walk = BatchWalk(layer, backend, device, slots=2)
    assert walk.slot_of[1] * walk.state.stride(0) * walk.state.element_size() >= 2 * layer.page
    walk.give_history([16, 16 - tokens], [3, layer.layout.rows - 2])
    for rows in ([1, 0], [0, 1], [-1, 1]):
        walk.step(rows, [tokens] * 2)
    walk.finish()


@pytest.mark.parametrize("rule", list(Rule))
def test_pages_far_apart_on_a_cpu(rule: Rule) -> None:
    small = replace(geometry(SHARD[rule]), value_heads=2, key_heads=2, value_dim=4, key_dim=8)
    far_walk(Layer(small, 16, 4, state="bf16", pool="strided", page=2**20), "torch", "cpu")

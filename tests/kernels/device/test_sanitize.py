"""A small representative set for compute-sanitizer: each rule, one token, several, trees; folds and none.

Everything but the kernels under test runs on the CPU, where the torch backend also does the same steps: a
tool that watches every launch has few to watch.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from replayssm import kernels
from replayssm.core import LayerGeometry, Rule
from replayssm.core.precision import Precision
from replayssm.kernels import StepIndex
from tests.kernels.device.test_packed import check_step
from tests.kernels.device.walk import STEP, BatchWalk, Layer

GEOMETRY = {
    Rule.MAMBA2: LayerGeometry.mamba2(6, 80, 128, 2),
    Rule.GDN: LayerGeometry(Rule.GDN, 4, 2, 128, 128),
    Rule.KDA: LayerGeometry(Rule.KDA, 2, 2, 128, 128),
}
ROWS = (2, -1, 0, 3)
TREE = [-1, -1, 0, 1]


def life(walk: BatchWalk, tokens: int, tree: bool, device: str, backend: str) -> list[torch.Tensor]:
    """Two steps with their ends, then all states materialized: outputs, states, cursors, on the CPU."""
    state, start, hist = (value.to(device, copy=True) for value in (walk.state, walk.start, walk.hist))
    rings = {name: ring.to(device, copy=True) for name, ring in walk.rings.items()}
    options = {
        name: value.to(device) if torch.is_tensor(value) else value for name, value in walk.options.items()
    }
    lens = walk.ints([tokens, tokens, max(tokens - 1, 1), tokens]).to(device)
    accepted = walk.ints([1, 1, 0, tokens // 2]).to(device)
    rows = walk.ints([walk.slot_of[n] if n >= 0 else -1 for n in ROWS]).to(device)
    parents = walk.ints([TREE] * 4).to(device) if tree else None
    index = StepIndex(rows, draft_lens=lens, parents=parents)
    generator = torch.Generator().manual_seed(5)
    walk.generator = generator
    outs = []
    for _ in range(2):
        inputs = {name: value.to(device) for name, value in walk.draw(4, tokens).items()}
        out = torch.full_like(inputs["x" if "x" in inputs else "v"], float("nan"))
        cursors = {"ring_start": start, "hist_len": hist}
        outs.append(
            STEP[walk.rule](
                state=state, out=out, window=16, index=index, backend=backend,
                **cursors, **rings, **inputs, **options,
            )
        )  # fmt: skip
        if tree:
            path = walk.ints([[1, 3], [0, 0], [0, 0], [0, 2]]).to(device)
            kernels.compact([rings], start, hist, path, accepted, rows, backend=backend)
        kernels.commit(start, hist, rows, lens, accepted, window=16, rows=walk.layout.rows, backend=backend)
    slots = walk.ints([walk.slot_of[n] for n in (0, 2, 3)]).to(device)
    count = hist[slots.long()]
    rates = None if walk.A is None else [walk.A.to(device)]
    kernels.materialize(
        walk.rule, [state], [rings], start, count, slots, slots, window=16, A=rates, backend=backend
    )
    return [each.cpu() for each in (*outs, state[slots.long()], start[slots.long()], hist[slots.long()])]


def sequences(rule: Rule, tokens: int, act: str) -> BatchWalk:
    """Four sequences on both sides of a flush, on the CPU."""
    walk = BatchWalk(Layer(GEOMETRY[rule], 16, 4, act=act), "torch", "cpu", slots=4, seed=tokens)
    histories: Sequence[int] = [16, 5, 16 - tokens, 0]
    walk.give_history(histories, [19, 0, 7, 3])
    return walk


@pytest.mark.gpu
@pytest.mark.parametrize("act", ["bf16", "fp32"])
@pytest.mark.parametrize("shape", ["T1", "T4", "tree"])
@pytest.mark.parametrize("rule", list(Rule))
def test_sanitize(rule: Rule, shape: str, act: str, backend: str) -> None:
    tokens = 1 if shape == "T1" else 4
    walk = sequences(rule, tokens, act)
    got = life(walk, tokens, shape == "tree", "cuda", backend)
    want = life(walk, tokens, shape == "tree", "cpu", "torch")
    unit = torch.finfo(walk.act).eps
    for mine, other in zip(got, want, strict=True):
        size = other.float().abs().max().item()
        torch.testing.assert_close(mine, other, rtol=4 * unit, atol=max(unit, 1e-5) * max(size, 1.0))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("precision", ["nvfp4/fp16+sr", "fp8/fp32", "int8+sr"])
@pytest.mark.parametrize("rule", list(Rule))
def test_sanitize_packed(rule: Rule, precision: str, tokens: int) -> None:
    check_step(GEOMETRY[rule], Precision.parse(precision), tokens, "cuda")


@pytest.mark.parametrize("shape", ["T1", "T4", "tree"])
@pytest.mark.parametrize("rule", list(Rule))
def test_the_set_folds_and_does_not(rule: Rule, shape: str) -> None:
    """Some rows fold, one does not; the life leaves the walk as it was, so that two backends can live it."""
    tokens = 1 if shape == "T1" else 4
    walk = sequences(rule, tokens, "fp32")
    assert [n + tokens > 16 for n in walk.histories].count(True) in (1, 2)
    before = [walk.state.clone(), walk.hist.clone()]
    first, second = (life(walk, tokens, shape == "tree", "cpu", "torch") for _ in range(2))
    for left, right in zip(first, second, strict=True):
        assert torch.equal(left, right)
        assert left.isfinite().all()
    assert torch.equal(walk.hist, before[1])
    assert torch.equal(walk.state.nan_to_num(), before[0].nan_to_num())

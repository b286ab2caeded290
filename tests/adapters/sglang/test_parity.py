"""The same tokens through this adapter and the one for transformers: outputs, states and rings to the bit.

Both get what their models' convolutions give; gates are raw here, and finished there, by the expressions of
transformers' own mixers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from replayssm import kernels
from replayssm.core import LayerBuffers, ReplayCache, RingLayout
from tests.adapters.scans import delta_call, mamba2_call
from tests.adapters.sglang.engine import RULES, Inputs
from tests.adapters.sglang.test_decode import WINDOW, start


def call(rule: str, tokens: Inputs, weights: Inputs) -> Any:
    """The translation by the transformers adapter of one token of each sequence."""
    one = {name: value[:, None] for name, value in tokens.items()}
    if rule == "mamba2":
        return mamba2_call(
            one["x"], one["dt"], weights["A"], one["B"], one["C"], weights["D"], weights["dt_bias"]
        )
    rate = -weights["A_log"].exp()
    bias = weights["dt_bias"]
    if rule == "kda":
        rate, bias = rate[:, None], bias.view_as(one["a"][0, 0])
    g = rate * F.softplus(one["a"] + bias)
    return delta_call(one["q"], one["k"], one["v"], g, one["b"].sigmoid())


@pytest.mark.parametrize("rule", RULES)
def test_the_same_bits_as_with_transformers(rule: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    engine = start(rule, tmp_path)
    pool = engine.slots.mamba_pool._replayssm
    layout: RingLayout = pool.layout
    rows, slots = [1, 2, 3], torch.tensor([3, 5, 2], dtype=torch.int32)
    engine.slots.req_index_to_mamba_index_mapping[rows] = slots
    buffers = [
        LayerBuffers(
            layout,
            torch.zeros(len(rows), *layout.geometry.state_shape),
            layout.allocate(len(rows), "cpu"),
            weights.get("A"),
        )
        for weights in engine.weights
    ]
    cache = ReplayCache(buffers, kernels.materialize)
    generator = torch.Generator().manual_seed(4)
    for _ in range(2 * WINDOW + 3):
        tokens = engine.draw(len(rows), generator)
        outputs = engine.decode(rows, tokens)
        for layer, out in enumerate(outputs):
            there = call(rule, tokens[layer], engine.weights[layer])
            expected = there.tail(0, 0, buffers[layer], cache, "torch")
            assert torch.equal(out, expected[:, 0])
        cursors = cache.cursors
        kernels.commit(
            cursors.start, cursors.history, torch.arange(3), 1, window=cursors.window, rows=cursors.rows,
            backend="torch",
        )  # fmt: skip
        at = slots.long()
        assert torch.equal(pool.cursors.start[at], cursors.start)
        assert torch.equal(pool.cursors.history[at], cursors.history)
        for layer, buffer in enumerate(buffers):
            assert torch.equal(engine.states[layer][at], buffer.state)
            for name, ring in buffer.rings.items():
                assert torch.equal(pool.rings[layer][name][at], ring), name
    assert engine.states[:, at].abs().sum() > 0, "states were flushed"

"""Steps over packed states by the CUDA backend, under the tests' emulator."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch

from replayssm.kernels import registry
from tests import support
from tests.kernels import emulated
from tests.support import RULES, Walk, geometry

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(emulated.COMPILER is None, reason="the emulator needs g++"),
]

make_layer = partial(support.make_layer, act=torch.bfloat16)


@pytest.fixture(autouse=True)
def by_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every step of a walk by the CUDA backend."""
    emulated.serve_on_cpu(monkeypatch)
    for rule, step in support.STEP.items():
        monkeypatch.setitem(support.STEP, rule, partial(step, backend="cuda"))
    yield
    registry._resolve.cache_clear()
    registry._resolve_operation.cache_clear()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("precision", ["nvfp4/fp32", "fp8/fp32", "int8/fp16", "mxfp4/fp32", "nvfp4+sr"])
def test_standard(rule: str, precision: str) -> None:
    walk = Walk.of(make_layer(geometry(rule, HV=4, H=2, V=40, K=128), window=3, max_draft=1, precision=precision))
    walk.hand_out(0, 2)
    for lens in ([1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 1, 1], [1, 0, 1]):
        walk.step([2, -1, 0], lens, width=1)
        walk.check()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("T", [4, 8])
def test_verify(rule: str, T: int) -> None:
    if rule == "kda" and T == 8:
        pytest.skip("not served")
    walk = Walk.of(make_layer(geometry(rule, HV=4, H=2, V=40, K=128), window=8, max_draft=T, precision="nvfp4/fp32"))
    walk.hand_out(0, 2)
    for n, (lens, acc) in enumerate([([T, 1, 2], [T - 1, 0, 2]), ([3, 1, T], [2, 0, 3]), ([4, 1, 4], [4, 0, 1]), ([1, 2, T], [1, 0, T])]):
        walk.step([2, -1, 0], lens, acc, width=T, packed=n % 2 == 1)
        walk.check()

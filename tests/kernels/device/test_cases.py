"""Every pair of settings on the models' shapes against the fp64 oracle, and that the comparison is sharp.

The same cases run on the CPU with the torch backend on shapes made small.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from replayssm.core import LayerGeometry, Rule
from replayssm.kernels import StepIndex, registry
from tests.kernels.device.cases import CASES, GEOMETRIES, Case, covering
from tests.kernels.device.walk import STEP, BatchWalk, Layer, geometry, histories

ROWS = ([3, -1, 0, 1, 5, 4], [0, 1, 2, -1, -1, 3], [5, 4, 3, 2, 1, 0])
"""Sequences of each step: idle ones, pads that repeat, another order every time."""


def small(geo: LayerGeometry) -> LayerGeometry:
    """The same kind of layer, small."""
    key_heads = min(geo.key_heads, 2)
    return replace(
        geo, value_heads=key_heads * min(geo.heads_per_key, 3), key_heads=key_heads, value_dim=6, key_dim=8
    )


def walk_case(case: Case, layer: Layer, backend: str, device: str, **options: Any) -> BatchWalk:
    """Three steps over histories on both sides of the flush, all checked."""
    walk = BatchWalk(layer, backend, device, seed=zlib.crc32(case.name.encode()), **options)
    walk.give_history(*histories(case.window, case.tokens, walk.slots, layer.layout.rows))
    for number, rows in enumerate([range(6)] * 3 if case.pool == "plain" else ROWS):
        lens = [case.tokens] * len(rows)
        if case.form != "full":
            mixed = [0, case.tokens, 1, case.tokens // 2, case.tokens, max(case.tokens - 1, 0)]
            lens = mixed[number:] + mixed[:number]
        dtype = torch.int64 if case.pool == "rings apart" else torch.int32
        walk.step(rows, lens, form=case.form, index_dtype=dtype, width=case.tokens)
    walk.finish()
    return walk


@pytest.mark.gpu
def test_every_backend_is_there(backend: str) -> None:
    """A backend that can't run would skip all other tests: here it fails, with its reason."""
    assert registry.resolve(backend, torch.device("cuda")).unavailable("cuda") is None


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_against_the_oracle(case: Case, backend: str, record_property: Callable[[str, object], None]) -> None:
    """L2, L3, L7, L10, L15, L23: outputs, records, states and all that must keep its bits."""
    walk = walk_case(case, case.layer(), backend, "cuda")
    record_property("error_to_limit", round(walk.ratio, 3))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_cases_on_a_cpu(case: Case) -> None:
    layer = case.layer()
    walk = walk_case(case, replace(layer, geometry=small(layer.geometry)), "torch", "cpu")
    assert walk.ratio > 0


def test_cases_hold_every_value_and_pair() -> None:
    for rule in Rule:
        cases = covering(rule)
        assert {case.model for case in cases} == set(GEOMETRIES[rule])
        for a, b in itertools.combinations(("tokens", "state", "act", "form", "gates", "pool"), 2):
            met = {(getattr(case, a), getattr(case, b)) for case in cases}
            values = [{getattr(case, name) for case in cases} for name in (a, b)]
            assert met == set(itertools.product(*values)), (rule, a, b)
        assert {case.window for case in cases} == {1, 5, 16, 32}


def test_geometries_are_shards_of_models() -> None:
    assert geometry("nemotron-3-nano-4b/4").value_heads == 24
    assert geometry("nemotron-3-nano-4b/16").key_heads == 1
    assert geometry("kimi-k3/8").value_heads == 12


# The comparison notices what it is there for.


def outputs_from(
    change: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[[Rule], Callable[..., torch.Tensor]]:
    """A step whose outputs alone come from a checkpoint of changed precision; all else is right."""

    def wrong(rule: Rule) -> Callable[..., torch.Tensor]:
        def step(state: torch.Tensor, out: torch.Tensor, **rest: Any) -> torch.Tensor:
            spare = {name: value.clone() for name, value in rest.items() if name.endswith("_cache")}
            STEP[rule](state=change(state), out=out, **(rest | spare))
            STEP[rule](state=state, out=torch.empty_like(out), **rest)
            return out

        return step

    return wrong


def short_mantissa(tensor: torch.Tensor) -> torch.Tensor:
    """fp32 rounded to the ten bits that a tf32 product reads."""
    return (tensor.view(torch.int32) + 0x1000 & ~0x1FFF).view(torch.float32)


def ring_off_by_one(rule: Rule) -> Callable[..., torch.Tensor]:
    def step(ring_start: torch.Tensor, **rest: Any) -> torch.Tensor:
        return STEP[rule](ring_start=ring_start + 1, **rest)

    return step


def pads_to_slot_zero(rule: Rule) -> Callable[..., torch.Tensor]:
    def step(index: StepIndex, **rest: Any) -> torch.Tensor:
        assert index.state_indices is not None
        return STEP[rule](index=replace(index, state_indices=index.state_indices.clamp(min=0)), **rest)

    return step


def early_flush(rule: Rule) -> Callable[..., torch.Tensor]:
    def step(window: int, **rest: Any) -> torch.Tensor:
        return STEP[rule](window=window - 1, **rest)

    return step


@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize(
    ("wrong", "act", "message"),
    [
        (outputs_from(short_mantissa), "fp32", "output: .* times"),
        (outputs_from(lambda state: state.bfloat16().float()), "bf16", "output: .* times"),
        (ring_off_by_one, "bf16", "nan times|times what"),
        (pads_to_slot_zero, "bf16", "a token is not zero"),
        (early_flush, "bf16", "changed without a fold|times what"),
    ],
    ids=["tf32", "bf16", "ring", "pad", "early flush"],
)
def test_wrong_steps_are_caught(
    wrong: Callable[[Rule], Callable[..., torch.Tensor]], act: str, message: str, rule: Rule
) -> None:
    """Heads as wide as the models': what a tolerance might hide."""
    model = {Rule.MAMBA2: "nemotron-3-super/8", Rule.GDN: "qwen3.5-4b/32", Rule.KDA: "kimi-linear/8"}[rule]
    case = Case(model, 4, 16, "fp32", act, "full", "final", "dense")
    layer = replace(case.layer(), strong=0.0)
    heads = {"value_heads": 2, "key_heads": 2 if rule is Rule.KDA else 1}
    layer = replace(layer, geometry=replace(layer.geometry, **heads))
    walk_case(case, layer, "torch", "cpu")
    with pytest.raises(AssertionError, match=message):
        walk_case(case, layer, "torch", "cpu", step_function=wrong(rule))


def test_short_mantissa_is_tf32() -> None:
    x = torch.tensor([1.0, 1 + 2.0**-10, 1 + 2.0**-12, -3 - 2.0**-12])
    assert short_mantissa(x).tolist() == [1.0, 1 + 2.0**-10, 1.0, -3.0]

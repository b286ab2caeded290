"""The Triton backend under Triton's interpreter: the oracle's walks over small shapes, every branch.

On a GPU the same kernels run compiled in `tests/kernels/device`, on the models' shapes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from replayssm import kernels
from replayssm.core import Rule
from replayssm.kernels import BackendUnavailable, StepIndex
from tests import oracle, support
from tests.kernels.device.test_accuracy import drift
from tests.support import RULES, Walk, draw, geometry, ints, make_layer, run_step, same_bits

triton = pytest.importorskip("triton", reason="triton is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]

TREE = [-1, -1, 0, 0, 1, 2, 2]


@pytest.fixture(autouse=True)
def by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that a walk calls, by the Triton backend."""
    for rule, step in support.STEP.items():
        monkeypatch.setitem(support.STEP, rule, partial(step, backend="triton"))
    for name in ("materialize", "compact"):
        monkeypatch.setattr(kernels, name, partial(getattr(kernels, name), backend="triton"))


def small(rule: str) -> support.LayerGeometry:
    """Heads and dims that are no powers of two, so that every mask is met."""
    return geometry(rule, HV=6, H=2, V=20, K=40)


@pytest.mark.parametrize("rule", RULES)
def test_standard_decoding(rule: str) -> None:
    """L2, L3, L15: one token a row, pads, idle rows, flushes, slot 0, NaN wherever nothing lives."""
    walk = Walk.of(make_layer(small(rule), window=3, max_draft=1), strong=-30.0)
    walk.hand_out(0, 2)
    for lens in ([1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 1, 1], [1, 0, 1]):
        walk.step([2, -1, 0], lens, width=1)
    walk.check()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "varlen"])
def test_verification_of_chains(rule: str, packed: bool) -> None:
    """Rows of different T, partial acceptance, flushes."""
    walk = Walk.of(make_layer(small(rule), window=4, max_draft=3), strong=-30.0)
    walk.hand_out(0, 2)
    for lens, accepted in (([3, 1, 2], [2, 0, 1]), ([2, 0, 3], [2, 0, 3]), ([3, 2, 1], [0, 0, 1])):
        walk.step([2, -1, 0], lens, accepted, width=3, packed=packed)
    walk.check()


@pytest.mark.parametrize("rule", RULES)
def test_verification_of_trees(rule: str) -> None:
    walk = Walk.of(make_layer(small(rule), window=8, max_draft=7))
    walk.hand_out(0)
    for path in ([0, 2, 6], [1, 4]):
        walk.step([0], [7], paths=[path], parents=[TREE])
    walk.check()


@pytest.mark.parametrize("rule", RULES)
def test_many_drafts(rule: str) -> None:
    """More than eight tokens a row, with a full window of history behind them."""
    walk = Walk.of(make_layer(geometry(rule), window=16, max_draft=11))
    walk.hand_out(1)
    walk.step([1], [5])
    walk.step([1], [11], [7])
    walk.step([1], [11], [11])
    walk.check()


@pytest.mark.parametrize("rule", RULES)
def test_raw_gates(rule: str) -> None:
    """Gates computed in the kernel are those that the torch backend computes."""
    layer = make_layer(small(rule), slots=2)
    walk = Walk.of(layer)
    walk.hand_out(0, 1)
    inputs = draw(layer, 2, 2, walk.generator)
    HV, K = layer.layout.geometry.value_heads, layer.layout.geometry.key_dim
    per_head = torch.linspace(-1.0, 1.0, HV)
    options: list[dict[str, object]]
    if rule == "mamba2":
        options = [{"dt_bias": per_head, "dt_softplus": True, "z": inputs["x"].flip(-1)}]
        inputs["dt"] = inputs["dt"] * 40 - 10
    else:
        inputs["g"], inputs["beta"] = inputs["g"] * 40 + 10, inputs["beta"] * 8 - 4
        bias = torch.linspace(-1.0, 1.0, HV * K).view(HV, K) if rule == "kda" else per_head
        options = [{"A_log": per_head, "dt_bias": bias}, {"A_log": per_head}]
        options += [{"A_log": per_head, "lower_bound": -5.0}] if rule == "kda" else []
    for option in options:
        outputs = []
        for backend in ("triton", "torch"):
            out = run_step(layer, walk.cache, inputs, StepIndex(), backend=backend, **option)
            recorded = layer.rings["dt_cache" if rule == "mamba2" else "g_cache"][:, :, :2].clone()
            outputs.append((out, recorded))
        for mine, other in zip(*outputs, strict=True):
            torch.testing.assert_close(mine, other, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("act", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_low_activations(rule: str, act: torch.dtype) -> None:
    """Against the torch backend: one unit in the last place, since the interpreter truncates to bf16."""
    layer = make_layer(small(rule), window=4, max_draft=2, act=act)
    walk = Walk.of(layer)
    walk.hand_out(0, 1)
    for width in (1, 2, 2, 1):
        inputs = draw(layer, 2, width, walk.generator)
        before = (layer.state.clone(), {name: ring.clone() for name, ring in layer.rings.items()})
        mine = run_step(layer, walk.cache, inputs, StepIndex(ints([0, 1])))
        layer.state.copy_(before[0])
        for name, ring in before[1].items():
            layer.rings[name].copy_(ring)
        other = run_step(layer, walk.cache, inputs, StepIndex(ints([0, 1])), backend="torch")
        torch.testing.assert_close(mine, other, rtol=torch.finfo(act).eps, atol=1e-5)
        walk.cache.commit(ints([0, 1]), ints([width] * 2), ints([width] * 2))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("state", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_low_checkpoints(rule: str, state: torch.dtype) -> None:
    """L24: the flush rounds once; fp16 saturates at its largest value instead of overflowing."""
    support.check_saturation(geometry(rule), state)


@pytest.mark.parametrize("rule", RULES)
def test_strided_pools(rule: str) -> None:
    """L10: slices of larger allocations."""
    support.check_strided_pools(small(rule))


def test_unavailable_without_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name it fails with the reason; `auto` never interprets."""
    assert kernels.registry.resolve("auto", torch.device("cpu")).__name__.endswith("torch_backend")
    kernels.registry._resolve.cache_clear()
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(BackendUnavailable, match="Triton needs a GPU"):
        kernels.registry.resolve("triton", torch.device("cpu"))
    kernels.registry._resolve.cache_clear()


@pytest.mark.parametrize("rule", RULES)
def test_what_is_not_dense_is_refused(rule: str) -> None:
    """An output with gaps between heads is another kernel's, not one written in the wrong places."""
    layer = make_layer(small(rule))
    walk = Walk.of(layer)
    walk.hand_out(0)
    inputs = draw(layer, 1, 1, walk.generator)
    gaps = torch.empty(1, 1, 6, 21)[..., 1:]
    with pytest.raises(BackendUnavailable, match=r"'triton' cannot serve .*: states must be dense within a"):
        run_step(layer, walk.cache, inputs, StepIndex(ints([0])), out=gaps)


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("rule", RULES)
def test_a_strong_decay_blurs_no_later_weight(rule: str, tree: bool) -> None:
    """A draft that forgets everything leaves the decays between the drafts behind it their last digits.

    As differences of sums from the history on, they would be off by 190 times fp32's rounding.
    """
    layer = make_layer(small(rule), slots=2, window=8, max_draft=8)
    walk = Walk.of(layer)
    walk.hand_out(0)
    inputs = draw(layer, 1, 8, walk.generator)
    if rule == "mamba2":
        assert layer.A is not None
        inputs["dt"] = inputs["dt"] / 5
        inputs["dt"][:, 0], inputs["x"][:, 0] = -190.3 / layer.A, 0.0
    else:
        inputs["g"] = inputs["g"] / 5
        inputs["g"][:, 0] = -190.3
    parents = [-1, 0, 1, 1, 2, 4, 4, 6] if tree else list(range(-1, 7))
    out = run_step(layer, walk.cache, inputs, StepIndex(ints([0]), parents=ints(parents)[None]))
    states = {-1: torch.zeros(layer.state.shape[1:], dtype=torch.double)}
    for node, parent in enumerate(parents):
        token = support.oracle_token(layer, inputs, 0, node)
        states[node], want = oracle.TOKEN[rule](states[parent], token)
        assert (out[0, node] - want).abs().max() <= 2e-6 * want.abs().max()


@pytest.mark.parametrize("rule", ["gdn", "kda"])
def test_large_decays_underflow_to_zero(rule: str) -> None:
    """Log-decays whose exponential underflows, -inf included, forget the past and make no NaN."""
    strong = torch.tensor([-200.0, -1e30, -float("inf")])
    for width in (1, 3):
        layers = [make_layer(small(rule), slots=2, window=3, max_draft=3) for _ in range(2)]
        outputs = []
        for layer, backend in zip(layers, ("triton", "torch"), strict=True):
            walk = Walk.of(layer)
            walk.hand_out(0, 1)
            for step in range(5):
                inputs = draw(layer, 2, width, walk.generator)
                row = inputs["g"][step % 2, 0]
                row.copy_(strong[(torch.arange(len(row)) + step) % 3].view(-1, *[1] * (row.dim() - 1)))
                outputs.append(run_step(layer, walk.cache, inputs, StepIndex(ints([0, 1])), backend=backend))
                walk.cache.commit(ints([0, 1]), ints([width] * 2), ints([width] * 2))
        for mine, other in zip(outputs[:5], outputs[5:], strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(layers[0].state, layers[1].state, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("rule", RULES)
def test_states_owe_nothing_to_approximations(rule: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exponentials, reciprocal roots and products are rough on a GPU: whatever they give, flushes and
    `materialize` store the same bits.

    A delta rule's outputs owe them nothing either, as `u` comes with them; its products reach states, at
    fp32's grade, which `test_drift` judges.
    """
    from triton.runtime.interpreter import InterpreterBuilder

    def off(exact: Any) -> Any:
        def rough(*args: Any) -> Any:
            result = exact(*args)
            result.data = result.data * result.data.dtype.type(1.001)
            return result

        return rough

    approximations = ("create_exp", "create_exp2", "create_rsqrt")
    products = ("create_dot",) if rule == "mamba2" else ()
    runs = []
    for rough in (False, True):
        with monkeypatch.context() as patch:
            for name in (*approximations, *products) if rough else ():
                patch.setattr(InterpreterBuilder, name, off(getattr(InterpreterBuilder, name)))
            layer = make_layer(small(rule), slots=2, window=3, max_draft=3)
            walk = Walk.of(layer)
            walk.hand_out(0)
            per_head = torch.linspace(-1.0, 1.0, 6)
            options: dict[str, Any] = {"A_log": per_head, "dt_bias": per_head}
            if rule == "kda":
                options["dt_bias"] = torch.linspace(-1.0, 1.0, 6 * 40).view(6, 40)
            elif rule == "mamba2":
                options = {"dt_bias": per_head, "dt_softplus": True}
            for _ in range(4):
                inputs = draw(layer, 1, width, walk.generator)
                out = run_step(layer, walk.cache, inputs, StepIndex(ints([0])), **options)
                walk.cache.commit(ints([0]), ints([width]), ints([width]))
            flushed = layer.state[0].clone()
            walk.cache.materialize(ints([0]), walk.cache.history(ints([0])), ints([1]))
            runs.append((flushed, layer.state[1], out))
    assert same_bits(runs[0][0], runs[1][0])
    assert same_bits(runs[0][1], runs[1][1])
    assert same_bits(runs[0][2], runs[1][2]) == (rule != "mamba2")


@pytest.mark.parametrize("rule", RULES)
def test_drift(rule: str) -> None:
    """L4: the bound of the requirement, which the GPU test has too; few heads and tokens are noisy."""
    heads, total = (2, 128) if rule == "kda" else (1, 64)
    geo = geometry(rule, 2, heads, 8, 16)
    assert 0 < drift(Rule(rule), geo, 8, "all", "triton", "cpu", total) <= 1.5

"""Numbers: the dtype matrix, exact flushes, one rounding at the store, saturation, products in fp32."""

from __future__ import annotations

import pytest
import torch

from replayssm import kernels
from replayssm.kernels import StepIndex
from replayssm.kernels.torch_backend.mathematics import ieee_fp32
from tests import support
from tests.support import DTYPES, RULES, Walk, draw, geometry, ints, make_layer, run_step, same_bits

ROWS = ints([0, 1])
FULL = ints([4, 4])


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("act", DTYPES, ids=short)
@pytest.mark.parametrize("state", DTYPES, ids=short)
@pytest.mark.parametrize("rule", RULES)
def test_dtype_matrix(rule: str, state: torch.dtype, act: torch.dtype) -> None:
    """L23: every checkpoint format with every activation format.

    The oracle is fed the rounded inputs. fp32 states stay within fp32's rounding whatever the activations;
    a low format adds one rounding for each flush to the state, and one to outputs.
    """
    walk = Walk.of(make_layer(geometry(rule), state=state, act=act))
    walk.hand_out(0, 1, 3)
    generator = torch.Generator().manual_seed(3)
    for _ in range(20):
        lens = torch.randint(0, 5, (3,), generator=generator).tolist()
        accepted = [int(torch.randint(0, length + 1, (), generator=generator)) for length in lens]
        walk.step([3, 0, 1], lens, accepted, width=4)
        walk.check()


def steps(layer: support.LayerBuffers, count: int, seed: int = 0, scale: float = 1.0) -> Walk:
    """`count` steps of four accepted tokens for two sequences, without an oracle."""
    walk = Walk.of(layer, seed=seed)
    walk.hand_out(0, 1)
    for _ in range(count):
        inputs = draw(layer, 2, 4, walk.generator)
        inputs = {name: value * scale if name in ("v", "x") else value for name, value in inputs.items()}
        run_step(layer, walk.cache, inputs, StepIndex(state_indices=ROWS))
        walk.cache.commit(ROWS, FULL, FULL)
    walk.cache.flush(ROWS)
    return walk


@pytest.mark.parametrize("rule", RULES)
def test_low_activations_cost_the_state_nothing(rule: str) -> None:
    """L5: bf16 inputs give the state that the same numbers give as fp32 inputs, after many flushes.

    A `u` recorded with less than fp32 would be seen here.
    """
    low, high = make_layer(geometry(rule), act=torch.bfloat16), make_layer(geometry(rule))
    walks = [Walk.of(low), Walk.of(high)]
    for walk in walks:
        walk.hand_out(0, 1)
    for _ in range(32):
        inputs = draw(low, 2, 4, walks[0].generator)
        for walk, given in zip(walks, (inputs, {n: v.float() for n, v in inputs.items()}), strict=True):
            run_step(walk.layers[0], walk.cache, given, StepIndex(state_indices=ROWS))
            walk.cache.commit(ROWS, FULL, FULL)
    for walk in walks:
        walk.cache.flush(ROWS)
    assert same_bits(low.state[:2], high.state[:2])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("state", [torch.bfloat16, torch.float16], ids=short)
@pytest.mark.parametrize("road", ["step", "flush", "copy"])
def test_one_rounding_at_the_store(rule: str, state: torch.dtype, road: str) -> None:
    """L4: a fold into a low format is the fp32 fold from the same checkpoint, rounded once."""
    low, high = make_layer(geometry(rule), state=state), make_layer(geometry(rule))
    generator = torch.Generator().manual_seed(6)
    start = torch.randn(low.state[:2].shape, generator=generator).to(state)
    walks = [Walk.of(low), Walk.of(high)]
    batches = [draw(low, 2, 4, generator) for _ in range(2)]
    for walk in walks:
        walk.hand_out(0, 1)
        walk.layers[0].state[:2] = start
        walk.cache.adopt(ROWS)
        run_step(walk.layers[0], walk.cache, batches[0], StepIndex(state_indices=ROWS))
        walk.cache.commit(ROWS, FULL, FULL)
        if road == "step":  # 4 + 4 > 6 folds the first four
            run_step(walk.layers[0], walk.cache, batches[1], StepIndex(state_indices=ROWS))
        elif road == "flush":
            walk.cache.flush(ROWS)
        else:
            walk.cache.copy(ROWS, ints([2, 3]))
    folded = slice(2, 4) if road == "copy" else slice(0, 2)
    assert same_bits(low.state[folded], high.state[folded].to(state))
    assert not same_bits(low.state[folded], start)


@pytest.mark.parametrize("rule", RULES)
def test_a_copy_of_no_records_is_the_checkpoint(rule: str) -> None:
    """`count = 0` copies bit for bit, in each format: nothing is rounded again."""
    for state in DTYPES:
        layer = make_layer(geometry(rule), state=state)
        walk = Walk.of(layer)
        walk.hand_out(0)
        layer.state[0] = torch.randn(layer.state[0].shape, generator=walk.generator).to(state)
        walk.cache.copy(ints([0]), ints([2]))
        assert same_bits(layer.state[0], layer.state[2])


@pytest.mark.parametrize("rule", RULES)
def test_fp16_saturates(rule: str) -> None:
    """L24: values beyond fp16 become its largest, in outputs and states; never inf or NaN."""
    layer = make_layer(geometry(rule), state=torch.float16, act=torch.float16)
    walk = Walk.of(layer)
    walk.hand_out(0, 1)
    name = "x" if rule == "mamba2" else "v"
    limit = torch.finfo(torch.float16).max
    reached = False
    for _ in range(8):
        inputs = draw(layer, 2, 4, walk.generator)
        inputs[name] = torch.full_like(inputs[name], 60000.0)
        if rule == "mamba2":
            inputs["B"], inputs["C"] = inputs["B"].abs() * 4, inputs["C"].abs() * 4
        else:
            # Every key alike and nearly no decay: what a state recalls grows beyond fp16 in outputs' scale.
            inputs["k"], inputs["q"] = torch.ones_like(inputs["k"]), torch.ones_like(inputs["q"])
        options = {} if rule == "mamba2" else {"scale": 8.0}
        out = run_step(layer, walk.cache, inputs, StepIndex(state_indices=ROWS), **options)
        assert out.isfinite().all()
        reached |= (out.abs() == limit).any().item()
        walk.cache.commit(ROWS, FULL, FULL)
    walk.cache.flush(ROWS)
    assert reached
    assert layer.state[:2].isfinite().all()


def test_fp16_state_saturates() -> None:
    """L24: a Mamba-2 state that outgrows fp16 stops at its largest value."""
    layer = make_layer(geometry("mamba2"), state=torch.float16)
    steps(layer, 4, scale=1e6)
    assert layer.state[:2].isfinite().all()
    assert (layer.state[:2].abs() == torch.finfo(torch.float16).max).any()


@pytest.mark.parametrize("rule", ["gdn", "kda"])
def test_u_may_outgrow_fp16_activations(rule: str) -> None:
    """L24: a `u` beyond the range of fp16 inputs is recorded as it is, and folded as it is."""
    layer = make_layer(geometry(rule), act=torch.float16)
    walk = Walk.of(layer)
    walk.hand_out(0)
    inputs = draw(layer, 1, 2, walk.generator)
    inputs["k"].fill_(1.0)
    inputs["g"].zero_()
    inputs["beta"].fill_(1.0)
    inputs["v"][:, 0], inputs["v"][:, 1] = 60000.0, -60000.0
    run_step(layer, walk.cache, inputs, StepIndex(ints([0])))
    walk.cache.commit(ints([0]), ints([2]), ints([2]))
    u = torch.tensor([60000.0, -120000.0]).expand(4, 5, 2).transpose(1, 2)
    torch.testing.assert_close(layer.rings["u_cache"][0, :, :2], u)
    walk.cache.flush(ints([0]))
    torch.testing.assert_close(layer.state[0], torch.full((4, 5, 8), -60000.0 / 8**0.5))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=short)
def test_autocast_does_not_reach_the_products(rule: str, low: torch.dtype) -> None:
    """L6, L7: a caller's autocast changes no bit of a step, a flush or a copy."""
    plain, inside = make_layer(geometry(rule)), make_layer(geometry(rule))
    steps(plain, 6)
    with torch.autocast("cpu", low):
        steps(inside, 6)
    assert same_bits(plain.state[:2], inside.state[:2])
    for name, ring in plain.rings.items():
        assert same_bits(ring, inside.rings[name]), name


@pytest.fixture
def matmul_precision():
    """Restores what the process had chosen."""
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    chosen = [backend.fp32_precision for backend in backends]
    yield backends
    for backend, precision in zip(backends, chosen, strict=True):
        backend.fp32_precision = precision


@pytest.mark.parametrize("choose", ["legacy name", "legacy flag", "new flag", "ieee"])
def test_tf32_is_off_inside_and_restored(choose: str, matmul_precision) -> None:
    """L6: however the process allowed low-precision products, the state path runs without them."""
    cuda, mkldnn = matmul_precision
    if choose == "legacy name":
        torch.set_float32_matmul_precision("medium")
    elif choose == "legacy flag":
        cuda.allow_tf32 = True
    else:
        cuda.fp32_precision = mkldnn.fp32_precision = "tf32" if choose == "new flag" else "ieee"
    before = [cuda.fp32_precision, mkldnn.fp32_precision]
    with ieee_fp32(torch.device("cpu")):
        assert cuda.fp32_precision == "ieee"
        assert mkldnn.fp32_precision in ("ieee", "none")
    assert [cuda.fp32_precision, mkldnn.fp32_precision] == before
    with pytest.raises(RuntimeError, match="within"), ieee_fp32(torch.device("cpu")):
        raise RuntimeError("within")
    assert [cuda.fp32_precision, mkldnn.fp32_precision] == before


@pytest.mark.parametrize("rule", RULES)
def test_low_matmul_precision_changes_no_bit(rule: str, matmul_precision) -> None:
    """L6: as above, seen from the results; CPUs with bf16 instructions take the hint as well."""
    plain, hinted = make_layer(geometry(rule, 4, 2, 64, 64)), make_layer(geometry(rule, 4, 2, 64, 64))
    steps(plain, 3)
    torch.set_float32_matmul_precision("medium")
    steps(hinted, 3)
    assert same_bits(plain.state[:2], hinted.state[:2])


@pytest.mark.parametrize("rule", ["gdn", "kda"])
def test_decays_and_u_are_recorded_in_fp32(rule: str) -> None:
    """L7: with bf16 activations the ring keeps every bit of the fp32 log-decays and of `u`."""
    layer, high = make_layer(geometry(rule), act=torch.bfloat16), make_layer(geometry(rule))
    walks = [Walk.of(layer), Walk.of(high)]
    inputs = draw(layer, 2, 4, walks[0].generator)
    for walk, given in zip(walks, (inputs, {n: v.float() for n, v in inputs.items()}), strict=True):
        walk.hand_out(0, 1)
        run_step(walk.layers[0], walk.cache, given, StepIndex())
    recorded = layer.rings["g_cache"][:2, :, :4].transpose(1, 2)
    assert same_bits(recorded, inputs["g"])
    assert not same_bits(inputs["g"], inputs["g"].bfloat16().float())
    u = layer.rings["u_cache"][:2, :, :4]
    assert same_bits(u, high.rings["u_cache"][:2, :, :4])
    assert not same_bits(u, u.bfloat16().float())


@pytest.mark.parametrize("rule", RULES)
def test_large_decays_underflow_to_zero(rule: str) -> None:
    """Log-decays whose exponential underflows, -inf included, forget the past and make no NaN."""
    for g in (-200.0, -1e30, -float("inf")):
        layer = make_layer(geometry(rule))
        walk = Walk.of(layer)
        walk.hand_out(0, 1)
        for step in range(4):
            inputs = draw(layer, 2, 4, walk.generator)
            if rule != "mamba2":
                inputs["g"][:, 1] = g
            elif g > -1e3:
                inputs["dt"][:, 1] = 1e3
                inputs["x"][:, 1] /= 1e3
            out = run_step(layer, walk.cache, inputs, StepIndex())
            assert out.isfinite().all(), (g, step)
            walk.cache.commit(ROWS, FULL, FULL)
        walk.cache.flush(ROWS)
        assert layer.state[:2].isfinite().all()


@pytest.mark.parametrize("rule", RULES)
def test_a_poisoned_row_stays_alone(rule: str) -> None:
    """L2: a live row whose own inputs are NaN harms no other row of the batch."""
    layers = [make_layer(geometry(rule)) for _ in range(2)]
    outs = []
    for number, layer in enumerate(layers):
        walk = Walk.of(layer)
        walk.hand_out(0, 1, 3)
        for _ in range(3):
            inputs = draw(layer, 3, 4, walk.generator)
            if number:
                for value in inputs.values():
                    value[1] = support.NAN
            out = run_step(layer, walk.cache, inputs, StepIndex(state_indices=ints([0, 1, 3])))
            walk.cache.commit(ints([0, 1, 3]), ints([4] * 3), ints([4] * 3))
        outs.append(out)
    assert outs[1][1].isnan().any()
    assert same_bits(outs[0][[0, 2]], outs[1][[0, 2]])
    assert same_bits(layers[0].state[[0, 3]], layers[1].state[[0, 3]])


def test_materialize_under_inference_mode() -> None:
    """Engines run under `inference_mode`; caches made before it can be used within it."""
    layer = make_layer(geometry("gdn"))
    with torch.inference_mode():
        steps(layer, 3)
    assert not layer.state.is_inference()
    assert kernels.materialize("gdn", [], [], ROWS, ROWS, ROWS, ROWS, window=6) is None

"""The step functions against the fp64 oracle: decode, chains, uneven rows, pads, packed inputs, options.

Rings, unowned states, absent tokens and `out` are NaN in all of these (L2), see `support`.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from replayssm.core import LayerGeometry
from replayssm.kernels import StepIndex
from tests import oracle, support
from tests.support import RULES, Walk, draw, geometry, ints, make_layer, run_step, same_bits

GEOMETRIES = {
    "grouped": {"HV": 4, "H": 2, "V": 5, "K": 8},
    "one to one": {"HV": 3, "H": 3, "V": 4, "K": 4},
    "one key head": {"HV": 6, "H": 1, "V": 3, "K": 7},
    "six heads of 10 x 12": {"HV": 6, "H": 3, "V": 10, "K": 12},
    "one of everything": {"HV": 1, "H": 1, "V": 1, "K": 1},
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", GEOMETRIES)
def test_standard_decode(rule: str, shape: str) -> None:
    """One token a step through several flushes, for any grouping of heads and any dimension."""
    walk = Walk.of(make_layer(geometry(rule, **GEOMETRIES[shape])))
    walk.hand_out(0, 1, 3)
    for _ in range(20):
        walk.step([0, 1, 3], [1, 1, 1])
        walk.check()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("window", [1, 2, 4, 16])
def test_window_and_draft_of_any_size(rule: str, window: int) -> None:
    """`T` up to `L`, the most that the flush rule needs; `L = 1` flushes at every step."""
    walk = Walk.of(make_layer(geometry(rule), window=window, max_draft=window))
    walk.hand_out(0, 2)
    for step in range(12):
        length = 1 + step % window
        walk.step([0, 2], [length, length], [step % (length + 1), length])
        walk.check()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "varlen"])
def test_rows_of_different_lengths(rule: str, packed: bool) -> None:
    """L15: `T` differs from row to row and from step to step, 0 and 1 included, after any acceptance."""
    walk = Walk.of(make_layer(geometry(rule), slots=5))
    walk.hand_out(0, 1, 2, 4)
    generator = torch.Generator().manual_seed(7)
    for _ in range(25):
        lens = torch.randint(0, 5, (4,), generator=generator).tolist()
        accepted = [int(torch.randint(0, length + 1, (), generator=generator)) for length in lens]
        walk.step([4, 0, 2, 1], lens, accepted, packed=packed, width=max(1, *lens))
        walk.check()


@pytest.mark.parametrize("rule", RULES)
def test_no_draft_after_a_long_accept(rule: str) -> None:
    """L15: the step after a multi-token accept brings nothing, then one token."""
    walk = Walk.of(make_layer(geometry(rule)))
    walk.hand_out(0)
    for lens in ([4], [0], [1], [3], [0], [0], [1], [4]):
        walk.step([0], lens, width=4)
        walk.check()


@pytest.mark.parametrize("rule", RULES)
def test_everything_rejected(rule: str) -> None:
    """Rejected drafts leave no trace: the same cursor, the same state, the next outputs unharmed."""
    walk = Walk.of(make_layer(geometry(rule)))
    walk.hand_out(0)
    walk.step([0], [3])
    for _ in range(6):
        walk.step([0], [4], [0])
        walk.check()
    assert walk.cache.history(ints([0])).tolist() == [0]  # 3 + 4 > 6 flushed the three
    walk.step([0], [1])
    walk.check()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("pad", [-1, -7])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "varlen"])
def test_pads_touch_nothing(rule: str, pad: int, packed: bool) -> None:
    """L3: negative rows, repeated ones too, give zeros; slot 0 is in use and stays right."""
    walk = Walk.of(make_layer(geometry(rule)))
    walk.hand_out(0, 3)
    for _ in range(8):
        layer = walk.layers[0]
        others = [layer.state[1:3].clone(), *(ring[1:3].clone() for ring in layer.rings.values())]
        walk.step([pad, 0, pad, 3, pad], [2, 2, 0, 1, 2], packed=packed)
        walk.check()
        after = [layer.state[1:3], *(ring[1:3] for ring in layer.rings.values())]
        assert all(same_bits(x, y) for x, y in zip(others, after, strict=True))
    assert walk.cache.history(ints([1, 2])).tolist() == [0, 0]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("road", ["pad_slot_id", "negative ring", "negative state"])
def test_three_roads_to_a_pad(rule: str, road: str) -> None:
    """L3: each of them zeroes the output and leaves states and rings as they are, bit for bit."""
    layer = make_layer(geometry(rule))
    walk = Walk.of(layer)
    walk.hand_out(0, 1, 2, 3)
    walk.step([0, 1, 2, 3], [4, 4, 4, 4])
    inputs = draw(layer, 2, 3, walk.generator)
    index = {
        "pad_slot_id": StepIndex(state_indices=ints([3, 1]), pad_slot_id=3),
        "negative ring": StepIndex(state_indices=ints([3, 1]), ring_indices=ints([-1, 1])),
        "negative state": StepIndex(state_indices=ints([-1, 1]), ring_indices=ints([3, 1])),
    }[road]
    before = [layer.state[3].clone(), *(ring[3].clone() for ring in layer.rings.values())]
    out = run_step(layer, walk.cache, inputs, index)
    assert (out[0] == 0).all()
    assert (out[1] != 0).any()
    after = [layer.state[3], *(ring[3] for ring in layer.rings.values())]
    assert all(same_bits(x, y) for x, y in zip(before, after, strict=True))


@pytest.mark.parametrize("rule", RULES)
def test_only_pads(rule: str) -> None:
    walk = Walk.of(make_layer(geometry(rule)))
    walk.hand_out(0)
    walk.step([-1, -1], [4, 4])
    walk.check()


@pytest.mark.parametrize("rule", RULES)
def test_every_row_by_default(rule: str) -> None:
    """Without indices row `b` is slot `b`, and every row brings all `T` tokens."""
    layer, twin = make_layer(geometry(rule)), make_layer(geometry(rule))
    walk, other = Walk.of(layer), Walk.of(twin)
    walk.hand_out(0, 1, 2)
    other.hand_out(0, 1, 2)
    inputs = draw(layer, 3, 4, walk.generator)
    plain = run_step(layer, walk.cache, inputs, StepIndex())
    index = StepIndex(state_indices=ints([0, 1, 2], torch.int64), draft_lens=ints([4, 4, 4], torch.int64))
    assert same_bits(plain, run_step(twin, other.cache, inputs, index))


@pytest.mark.parametrize("rule", RULES)
def test_no_tokens_at_all(rule: str) -> None:
    """Steps without a token, dense and packed, do nothing and fail nothing."""
    layer = make_layer(geometry(rule))
    walk = Walk.of(layer)
    walk.hand_out(0, 1)
    walk.step([0, 1], [2, 3])
    before = [layer.state.clone(), *(ring.clone() for ring in layer.rings.values())]
    assert run_step(layer, walk.cache, draw(layer, 2, 0, walk.generator), StepIndex()).numel() == 0
    assert run_step(layer, walk.cache, draw(layer, 0, 2, walk.generator), StepIndex()).numel() == 0
    for longest in (0, 2):
        index = StepIndex(state_indices=ints([0, 1]), cu_seqlens=ints([0, 0, 0]), max_seqlen=longest)
        assert run_step(layer, walk.cache, draw(layer, 1, 0, walk.generator), index).numel() == 0
        run_step(layer, walk.cache, draw(layer, 1, 3, walk.generator), index)
    after = [layer.state, *layer.rings.values()]
    assert all(same_bits(x, y) for x, y in zip(before, after, strict=True))
    walk.check()


@pytest.mark.parametrize("rule", RULES)
def test_varlen_equals_dense(rule: str) -> None:
    """Packed inputs give the bits of dense ones: outputs, states and records."""
    walks = [Walk.of(make_layer(geometry(rule), slots=5), seed=3) for _ in range(2)]
    for walk in walks:
        walk.hand_out(0, 1, 2, 4)
    for lens in ([4, 0, 1, 3], [1, 1, 1, 1], [2, 4, 0, 4], [4, 4, 4, 4]):
        dense, packed = (
            walk.step([4, -1, 0, 2], lens, packed=packed, width=4)
            for walk, packed in zip(walks, (False, True), strict=True)
        )
        assert same_bits(dense[0], packed[0])
    (dense_layer,), (packed_layer,) = (walk.layers for walk in walks)
    assert same_bits(dense_layer.state, packed_layer.state)
    assert all(same_bits(ring, packed_layer.rings[name]) for name, ring in dense_layer.rings.items())


@pytest.mark.parametrize("rule", RULES)
def test_rings_keyed_apart_from_states(rule: str) -> None:
    """A step and a fold with `ring_indices` of their own equal those where ring and slot coincide."""
    geo = geometry(rule)
    apart, rings = make_layer(geo, slots=6), make_layer(geo, slots=2)
    plain = make_layer(geo, slots=6)
    walk, small, other = Walk.of(apart), Walk.of(rings), Walk.of(plain)
    for each in (walk, other):
        each.hand_out(0, 5)
    state_of, ring_of = ints([5, 0]), ints([1, 0])
    for length in (3, 2, 4, 1, 4):
        inputs = draw(plain, 2, length, walk.generator)
        index = StepIndex(state_indices=state_of, ring_indices=ring_of)
        got = run_step(apart, small.cache, inputs, index, rings=rings.rings)
        want = run_step(plain, other.cache, inputs, StepIndex(state_indices=state_of))
        assert same_bits(got, want)
        lens = ints([length, length])
        small.cache.cursors.commit(ring_of, lens, lens)
        other.cache.commit(state_of, lens, lens)
    support.kernels.materialize(
        rule,
        [apart.state],
        [rings.rings],
        small.cache.cursors.start,
        small.cache.history(ring_of),
        state_of,
        state_of,
        window=6,
        ring_indices=ring_of,
        A=None if apart.A is None else [apart.A],
    )
    other.cache.flush(state_of)
    assert same_bits(apart.state[state_of.long()], plain.state[state_of.long()])


@pytest.mark.parametrize("rule", RULES)
def test_strong_decays(rule: str) -> None:
    """A head that forgets at once keeps exact weights for what follows: the bound stays the same."""
    walk = Walk.of(make_layer(geometry(rule), window=16, max_draft=4), strong=-80.0)
    walk.hand_out(0, 1)
    for step in range(40):
        walk.step([0, 1], [1 + step % 4, 4], [1, 1 + step % 4])
        walk.check()


def test_mamba2_gate_skip_bias_and_softplus() -> None:
    """`D`, `z`, `dt_bias` and `dt_softplus`, each alone and all together, and the recorded `dt`."""
    layer = make_layer(geometry("mamba2"))
    generator = torch.Generator().manual_seed(1)
    inputs = draw(layer, 2, 4, generator)
    inputs["dt"] = torch.randn(2, 4, 4, generator=generator)
    z, bias = torch.randn(2, 4, 4, 5, generator=generator), torch.randn(4, generator=generator)
    D = support.skip_weight(layer)
    for options in (
        {"D": D, "z": None, "dt_bias": None, "dt_softplus": True},
        {"D": None, "z": z, "dt_bias": None, "dt_softplus": True},
        {"D": None, "z": None, "dt_bias": bias, "dt_softplus": True},
        {"D": None, "z": None, "dt_bias": bias + 4, "dt_softplus": False},
        {"D": D, "z": z, "dt_bias": bias, "dt_softplus": True},
    ):
        walk = Walk.of(support.poisoned(layer))
        walk.hand_out(0, 1)
        out = run_step(layer, walk.cache, inputs, StepIndex(), **options)
        dt = inputs["dt"].double() + (0 if options["dt_bias"] is None else options["dt_bias"].double())
        dt = oracle.softplus(dt) if options["dt_softplus"] else dt
        assert torch.allclose(
            layer.rings["dt_cache"][:2, :, :4], dt.transpose(1, 2).float(), rtol=4e-7, atol=0
        )
        for row in range(2):
            S = torch.zeros(4, 5, 8, dtype=torch.double)
            for t in range(4):
                token = support.oracle_token(layer, inputs, row, t) | {"dt": dt[row, t]}
                token["D"] = torch.zeros(4) if options["D"] is None else options["D"]
                S, y = oracle.mamba2_token(S, token)
                if options["z"] is not None:
                    y = y * F.silu(z[row, t].double())
                bound = (8 + 4) * support.EPS * max(1.0, S.abs().max().item(), y.abs().max().item()) * 8
                assert (out[row, t] - y).abs().max().item() <= bound


def _delta_twice(rule: str, first: dict, second: dict, inputs_of_second: dict) -> None:
    """The same step with two spellings of its arguments: outputs, states and records agree in bits."""
    layers = [make_layer(geometry(rule)) for _ in range(2)]
    walks = [Walk.of(layer) for layer in layers]
    inputs = draw(layers[0], 2, 4, torch.Generator().manual_seed(5))
    outs = []
    for walk, layer, options, changed in zip(
        walks, layers, (first, second), ({}, inputs_of_second), strict=True
    ):
        walk.hand_out(0, 1)
        outs.append(run_step(layer, walk.cache, inputs | changed, StepIndex(), **options))
    assert same_bits(*outs)
    for name, ring in layers[0].rings.items():
        assert same_bits(ring, layers[1].rings[name]), name


RAW = torch.Generator().manual_seed(11)
A_LOG = torch.linspace(-1.0, 2.5, 4)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", support.DTYPES, ids=str)
@pytest.mark.parametrize("gate", ["gdn softplus", "kda softplus", "kda bounded"])
def test_raw_gates(gate: str, dtype: torch.dtype, bias: bool) -> None:
    """L7, L19: gates computed inside equal, bit for bit, fp32 gates computed outside from the same inputs."""
    rule = gate.split()[0]
    channel = (8,) if rule == "kda" else ()
    a = torch.randn(2, 4, 4, *channel, generator=RAW).to(dtype)
    b = torch.randn(2, 4, 4, generator=RAW).to(dtype)
    dt_bias = torch.randn(4, *channel, generator=RAW) if bias else None
    raw = a.float() if dt_bias is None else a.float() + dt_bias
    rate = A_LOG.exp().view(4, 1) if rule == "kda" else A_LOG.exp()
    options: dict[str, object] = {"A_log": A_LOG, "dt_bias": dt_bias}
    if gate == "kda bounded":
        options["lower_bound"] = -5.0
        g = -5.0 * torch.sigmoid(rate * raw)
    else:
        g = -rate * F.softplus(raw)
    finished = {"g": g, "beta": b.float().sigmoid()}
    layers = [make_layer(geometry(rule)) for _ in range(2)]
    inputs = draw(layers[0], 2, 4, torch.Generator().manual_seed(5))
    outs = []
    for layer, gates, given in zip(layers, ({"g": a, "beta": b}, finished), (options, {}), strict=True):
        walk = Walk.of(layer)
        walk.hand_out(0, 1)
        outs.append(run_step(layer, walk.cache, inputs | gates, StepIndex(), **given))
    assert same_bits(*outs)
    for name in ("g_cache", "u_cache"):
        assert same_bits(layers[0].rings[name][:2, :, :4], layers[1].rings[name][:2, :, :4]), name


def test_gates_against_the_definition() -> None:
    """Both gates of KDA and GDN's in fp64, from design section 3."""
    generator = torch.Generator().manual_seed(2)
    for rule, lower in (("gdn", None), ("kda", None), ("kda", -5.0)):
        layer = make_layer(geometry(rule))
        walk = Walk.of(layer)
        walk.hand_out(0)
        inputs = draw(layer, 1, 4, generator)
        inputs["g"], inputs["beta"] = (
            torch.randn(inputs[n].shape, generator=generator) for n in ("g", "beta")
        )
        bias = torch.randn(inputs["g"].shape[2:], generator=generator)
        options = {"A_log": A_LOG, "dt_bias": bias} | ({"lower_bound": lower} if lower else {})
        run_step(layer, walk.cache, inputs, StepIndex(), **options)
        raw = (inputs["g"] + bias).double()[0]
        rate = A_LOG.double().exp().view(4, *(1,) * (raw.dim() - 2))
        g = lower * torch.sigmoid(rate * raw) if lower else -rate * oracle.softplus(raw)
        torch.testing.assert_close(
            layer.rings["g_cache"][0, :, :4].transpose(0, 1).double(), g, rtol=8 * support.EPS, atol=1e-12
        )
        # The first token finds an empty state: its u is beta v.
        u = inputs["beta"][0, 0].double().sigmoid()[:, None] * inputs["v"][0, 0].double()
        torch.testing.assert_close(layer.rings["u_cache"][0, :, 0].double(), u, rtol=4 * support.EPS, atol=0)


def test_kda_bias_may_be_flat() -> None:
    bias = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))
    _delta_twice("kda", {"A_log": A_LOG, "dt_bias": bias}, {"A_log": A_LOG, "dt_bias": bias.flatten()}, {})


@pytest.mark.parametrize("rule", ["gdn", "kda"])
def test_scale(rule: str) -> None:
    """The default is `K ** -0.5`; a factor of two of the scale is a factor of two of the output."""
    _delta_twice(rule, {}, {"scale": 8**-0.5}, {})
    layer = make_layer(geometry(rule))
    inputs = draw(layer, 2, 4, torch.Generator().manual_seed(5))
    outs = []
    for scale in (1.0, 2.0):
        walk = Walk.of(support.poisoned(layer))
        walk.hand_out(0, 1)
        outs.append(run_step(layer, walk.cache, inputs, StepIndex(), scale=scale))
    assert same_bits(outs[0] * 2, outs[1])


@pytest.mark.parametrize("rule", ["gdn", "kda"])
def test_without_normalisation(rule: str) -> None:
    """`use_qk_l2norm=False` uses keys and queries as they come, in steps, flushes and materialize.

    The same vectors, normalised outside in fp32, give the same bits.
    """
    layers = [make_layer(geometry(rule)) for _ in range(2)]
    walks = [Walk.of(layer) for layer in layers]
    generator = torch.Generator().manual_seed(9)
    for walk in walks:
        walk.hand_out(0, 1)
    for _ in range(6):
        inputs = draw(layers[0], 2, 3, generator)
        unit = {
            name: inputs[name] * torch.rsqrt(inputs[name].square().sum(-1, keepdim=True) + 1e-6)
            for name in ("q", "k")
        }
        normal = run_step(layers[0], walks[0].cache, inputs, StepIndex())
        plain = run_step(layers[1], walks[1].cache, inputs | unit, StepIndex(), use_qk_l2norm=False)
        assert same_bits(normal, plain)
        for walk in walks:
            walk.cache.commit(ints([0, 1]), ints([3, 3]), ints([2, 3]))
    states = []
    for layer, walk, norm in zip(layers, walks, (True, False), strict=True):
        support.kernels.materialize(
            rule, [layer.state], [layer.rings], walk.cache.cursors.start, walk.cache.history(ints([0, 1])),
            ints([0, 1]), ints([0, 1]), window=6, use_qk_l2norm=norm,
        )  # fmt: skip
        states.append(layer.state[:2])
    assert same_bits(*states)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("out_dtype", [None, *support.DTYPES], ids=str)
def test_out_is_overwritten_whatever_its_strides(rule: str, out_dtype: torch.dtype | None) -> None:
    """A transposed or sliced `out` of any dtype gets the bits of a plain one; its gaps keep theirs."""
    layer = make_layer(geometry(rule))
    inputs = draw(layer, 3, 4, torch.Generator().manual_seed(5))
    index = StepIndex(state_indices=ints([2, -1, 0]), draft_lens=ints([4, 4, 1]))
    base = torch.empty(3, 4, 4, 5, dtype=out_dtype)
    wide = torch.full((3, 4, 6, 7), 9.0, dtype=out_dtype)
    outs = []
    for out in (base, base.new_empty(5, 4, 4, 3).permute(3, 1, 2, 0), wide[:, :, 1:5, 2:]):
        walk = Walk.of(support.poisoned(layer))
        walk.hand_out(0, 2)
        outs.append(run_step(layer, walk.cache, inputs, index, out=out).contiguous())
    assert same_bits(outs[0], outs[1])
    assert same_bits(outs[0], outs[2])
    assert (wide[:, :, [0, 5]] == 9).all()
    assert (wide[..., :2] == 9).all()
    assert outs[0].isfinite().all()


@pytest.mark.parametrize("rule", RULES)
def test_strided_inputs(rule: str) -> None:
    """Inputs cut from one fused projection, as engines bring them, give the bits of contiguous ones."""
    layers = [make_layer(geometry(rule)) for _ in range(2)]
    walks = [Walk.of(layer) for layer in layers]
    inputs = draw(layers[0], 3, 4, torch.Generator().manual_seed(5))
    sliced = {}
    for name, value in inputs.items():
        wide = torch.full((*value.shape[:2], value[0, 0].numel() + 3), support.NAN)
        wide[:, :, 3:] = value.flatten(2)
        sliced[name] = wide[:, :, 3:].unflatten(2, value.shape[2:])
        assert not sliced[name].is_contiguous()
    for walk in walks:
        walk.hand_out(0, 1, 2)
    plain = run_step(layers[0], walks[0].cache, inputs, StepIndex())
    cut = run_step(layers[1], walks[1].cache, sliced, StepIndex())
    assert same_bits(plain, cut)
    for name, ring in layers[0].rings.items():
        assert same_bits(ring, layers[1].rings[name]), name


@pytest.mark.parametrize("rule", RULES)
def test_records_are_what_arrived(rule: str) -> None:
    """The raw inputs are in the ring in head-major order, at `start + h + i`, and nowhere else."""
    layer = make_layer(geometry(rule), window=6, max_draft=4)
    walk = Walk.of(layer)
    walk.hand_out(1)
    walk.step([1], [4], [2])
    walk.step([1], [3], [3])
    assert walk.cache.cursors.history[1] == 5
    inputs = draw(layer, 1, 4, walk.generator)
    before = {name: ring.clone() for name, ring in layer.rings.items()}
    run_step(layer, walk.cache, inputs, StepIndex(state_indices=ints([1])))
    raw = {"x_cache": "x", "B_cache": "B", "dt_cache": "dt"}
    if rule != "mamba2":
        raw = {"k_cache": "k", "g_cache": "g"}
    rows = [(5 + i) % 10 for i in range(4)]
    for cache, name in raw.items():
        assert same_bits(layer.rings[cache][1][:, rows].transpose(0, 1), inputs[name][0])
    for name, ring in layer.rings.items():
        untouched = before[name]
        untouched[1][:, rows] = ring[1][:, rows]
        assert same_bits(ring, untouched), name


@pytest.mark.parametrize("rule", RULES)
def test_no_gradient_is_recorded(rule: str) -> None:
    """Weights that want gradients, outside `no_grad`, leave the caches plain tensors."""
    layer = make_layer(geometry(rule))
    walk = Walk.of(layer)
    walk.hand_out(0, 1)
    inputs = {name: value.requires_grad_() for name, value in draw(layer, 2, 4, walk.generator).items()}
    for _ in range(3):
        out = run_step(layer, walk.cache, inputs, StepIndex())
        walk.cache.commit(ints([0, 1]), ints([4, 4]), ints([4, 4]))
    assert not any(t.requires_grad for t in (out, layer.state, *layer.rings.values()))


def test_geometry_in_mamba_words() -> None:
    geo = LayerGeometry.mamba2(heads=4, head_dim=5, d_state=8, groups=2)
    assert geo == geometry("mamba2")

"""Stochastic rounding compiled: a GPU's kernels store the bits that the torch backend stores.

The torch backend is held against scalar arithmetic by `tests/kernels/test_stochastic.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from replayssm import kernels
from replayssm.core import LayerGeometry, RingLayout, Rule
from replayssm.kernels import LayerTable, StepIndex
from replayssm.kernels.torch_backend.rounding import random_words, round_to_half

pytestmark = pytest.mark.gpu

GEOMETRIES = {
    "nemotron-3-nano-4b": LayerGeometry.mamba2(96, 80, 128, 8),
    "nemotron-3-super": LayerGeometry.mamba2(128, 64, 128, 8),
    "qwen3.5-122b": LayerGeometry(Rule.GDN, 64, 16, 128, 128),
    "kimi-linear": LayerGeometry(Rule.KDA, 32, 32, 128, 128),
    "odd-keys": LayerGeometry(Rule.GDN, 4, 2, 20, 38),
}
STEPS = {Rule.MAMBA2: kernels.mamba2_step, Rule.GDN: kernels.gdn_step, Rule.KDA: kernels.kda_step}
SLOTS, ROWS, LAYER = 5, (3, -1, 0), 6
SEED = 2**40 + 17

Tensors = dict[str, torch.Tensor]


def device(values: tuple[int, ...], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device="cuda")


def exact_inputs(geometry: LayerGeometry, tokens: int) -> Tensors:
    """Tokens of which a fold of one is exact in fp32, and in three terms of tf32 as well.

    Nothing decays, keys have one nonzero value, factors are powers of two and no factor has more than 11
    bits. What a fold adds to a state has up to 4 bits more than fp16 has at the states' size.
    """
    HV, H, V, K = geometry.value_heads, geometry.key_heads, geometry.value_dim, geometry.key_dim
    lead = (len(ROWS), tokens)
    key = torch.nn.functional.one_hot(torch.randint(K, (*lead, H), device="cuda"), K).bfloat16()
    query = torch.randn(*lead, H, K, device="cuda").bfloat16()
    value = (torch.randint(-128, 129, (*lead, HV, V), device="cuda") / 128).bfloat16()
    if geometry.rule is Rule.MAMBA2:
        dt = torch.full((*lead, HV), 2.0**-7, device="cuda")
        return {"x": value, "dt": dt, "B": key, "C": query, "A": torch.zeros(HV, device="cuda")}
    g = torch.zeros(*lead, HV, *((K,) if geometry.rule is Rule.KDA else ()), device="cuda")
    beta = torch.full((*lead, HV), 2.0**-4, device="cuda")
    return {"q": query, "k": key, "v": value, "g": g, "beta": beta}


def states(geometry: LayerGeometry) -> torch.Tensor:
    """fp16 states of 11 bits between one and two."""
    return (torch.randint(1024, 1900, (SLOTS, *geometry.state_shape), device="cuda") / 1024).half()


def step(
    geometry: LayerGeometry, state: torch.Tensor, rings: Tensors, inputs: Tensors, **options: Any
) -> None:
    if geometry.rule is not Rule.MAMBA2:
        options["use_qk_l2norm"] = False
    STEPS[geometry.rule](
        state=state,
        **rings,
        **inputs,
        ring_start=device((2,) * SLOTS),
        out=torch.empty_like(inputs["x" if geometry.rule is Rule.MAMBA2 else "v"]),
        index=StepIndex(device(ROWS)),
        **options,
    )


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_a_flush_in_a_step(name: str, tokens: int, backend: str) -> None:
    """A step that folds one record, in decoding and in verification, and a copy of the same fold."""
    torch.manual_seed(0)
    geometry = GEOMETRIES[name]
    rings = RingLayout(geometry, 4, 4).allocate(SLOTS, "cuda")
    before, inputs = states(geometry), exact_inputs(geometry, tokens)
    window, seed = tokens, device((SEED,), torch.int64)
    empty, one = device((0,) * SLOTS), device((1,) * SLOTS)
    step(geometry, before.clone(), rings, inputs, hist_len=empty, window=window, backend="torch")
    folds = {}
    for each in ("torch", backend):
        folds[each] = before.clone()
        own = {key: ring.clone() for key, ring in rings.items()}
        step(
            geometry, folds[each], own, inputs, hist_len=one, window=window, rand_seed=seed, layer=LAYER,
            backend=each,
        )  # fmt: skip
    assert torch.equal(folds[backend], folds["torch"])
    changed = (folds["torch"] != before).flatten(1).any(1)
    assert changed.tolist() == [slot in ROWS for slot in range(SLOTS)]

    rates = [inputs["A"]] * 2 if geometry.rule is Rule.MAMBA2 else None
    other = before.flip(0).contiguous()
    table = LayerTable.build(geometry.rule, [other, before], [rings] * 2, rates)
    rows = (device((2,) * SLOTS), device((1, 1)), device((3, 0)), device((3, 0)))
    exact = before.float()
    kernels.materialize(
        geometry.rule, [exact], [rings], *rows, window=4, use_qk_l2norm=False, backend="torch",
        A=None if rates is None else rates[:1],
    )  # fmt: skip
    kernels.materialize(
        geometry.rule, table, None, *rows, window=4, use_qk_l2norm=False, backend=backend, rand_seed=seed,
        layer=LAYER - 1,
    )  # fmt: skip
    assert torch.equal(before, folds["torch"]), "the second layer folds as the step did"
    slots = device((3, 0))
    words = random_words(seed, slots, LAYER, before[0].numel()).view(2, *before.shape[1:])
    assert torch.equal(before[[3, 0]], round_to_half(exact[[3, 0]], words))
    assert not torch.equal(before[[3, 0]], exact[[3, 0]].half()), "rounding to nearest would pass too"


def test_every_kind_of_value(backend: str) -> None:
    """What a fold makes of values below and beyond what fp16 has, of infinities and of NaN."""
    torch.manual_seed(2)
    geometry = GEOMETRIES["nemotron-3-nano-4b"]
    rings = RingLayout(geometry, 4, 4).allocate(SLOTS, "cuda")
    before = torch.zeros(SLOTS, *geometry.state_shape, device="cuda").half()
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0, 65504.0, 2.0**-24, -3e-5], device="cuda")
    chosen = torch.rand(before.shape, device="cuda") < 0.01
    before[chosen] = special[torch.randint(len(special), (int(chosen.sum()),), device="cuda")].half()
    inputs = exact_inputs(geometry, 1)
    size = torch.randint(-40, 20, inputs["x"].shape, device="cuda").float()
    inputs["x"] = (torch.randn_like(inputs["x"]) * 2.0**size).bfloat16()
    inputs["x"][..., 0] = 3e38
    inputs["dt"].fill_(1.0)
    empty, one = device((0,) * SLOTS), device((1,) * SLOTS)
    step(geometry, before.clone(), rings, inputs, hist_len=empty, window=1, backend="torch")
    folds = {}
    for each in ("torch", backend):
        folds[each], own = before.clone(), {key: ring.clone() for key, ring in rings.items()}
        step(
            geometry, folds[each], own, inputs, hist_len=one, window=1, layer=LAYER, backend=each,
            rand_seed=device((SEED,), torch.int64),
        )  # fmt: skip
    assert torch.equal(folds[backend].isnan(), folds["torch"].isnan())
    assert torch.equal(folds[backend].nan_to_num(), folds["torch"].nan_to_num())
    live = folds["torch"][[3, 0]]
    for kind in (live.isnan(), live.isinf(), live.abs() == 65504.0, (live != 0) & (live.abs() < 2.0**-14)):
        assert kind.sum() > 100


@pytest.mark.parametrize("name", GEOMETRIES)
def test_random_states(name: str, backend: str) -> None:
    """Folds of whole histories of random inputs: now and then a neighbour, where fp32 sums differ."""
    torch.manual_seed(1)
    geometry = GEOMETRIES[name]
    layout = RingLayout(geometry, 16, 1)
    rings = layout.allocate(SLOTS, "cuda")
    for key, ring in rings.items():
        ring.normal_()
        if key in ("dt_cache", "g_cache"):
            ring.copy_(ring.abs().clamp(max=2.0) * (-0.3 if key == "g_cache" else 0.3))
    rates = [-torch.rand(geometry.value_heads, device="cuda")] if geometry.rule is Rule.MAMBA2 else None
    begin = torch.randn(SLOTS, *geometry.state_shape, device="cuda").half()
    rows = (device((20,) * SLOTS).remainder_(17), device((16, 7, 3)), device((1, -1, 4)), device((1, -1, 2)))
    stored = {}
    for each in ("torch", backend):
        stored[each] = begin.clone()
        kernels.materialize(
            geometry.rule, [stored[each]], [rings], *rows, window=16, A=rates, backend=each,
            rand_seed=device((SEED,), torch.int64),
        )  # fmt: skip
    mine, other = stored[backend].float(), stored["torch"].float()
    apart = (mine - other).abs()
    close = 1e-6 * other.abs().max() + 2 * torch.finfo(torch.float16).eps * other.abs()
    assert (apart <= close).all()
    assert (apart > 0).float().mean() < 0.02
    assert torch.equal(mine[[0, 3, 4]], begin.float()[[0, 3, 4]])

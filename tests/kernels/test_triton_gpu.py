"""The Triton kernels compiled, on the models' shapes, against the torch backend on the same GPU.

The torch backend is held against the fp64 oracle by the other tests.
"""

from __future__ import annotations

import pytest
import torch

from replayssm import kernels
from replayssm.core import LayerBuffers, LayerGeometry, Precision, ReplayCache, RingLayout, Rule
from replayssm.kernels import StepIndex

pytestmark = pytest.mark.gpu

GEOMETRIES = {
    "nemotron-3-nano-4b": LayerGeometry.mamba2(96, 80, 128, 8),
    "nemotron-3-nano-30b": LayerGeometry.mamba2(64, 64, 128, 8),
    "nemotron-3-super": LayerGeometry.mamba2(128, 64, 128, 8),
    "nemotron-3-ultra": LayerGeometry.mamba2(256, 64, 128, 8),
    "qwen3.5-4b": LayerGeometry(Rule.GDN, 32, 16, 128, 128),
    "qwen3.5-122b": LayerGeometry(Rule.GDN, 64, 16, 128, 128),
    "kimi-linear": LayerGeometry(Rule.KDA, 32, 32, 128, 128),
    "glm-5.3-flash": LayerGeometry(Rule.KDA, 64, 64, 128, 128),
    "kimi-k3": LayerGeometry(Rule.KDA, 96, 96, 128, 128),
}
SLOTS, ROWS = 6, (4, -1, 0, 2)


def make(geometry: LayerGeometry, act: torch.dtype, draft: int, seed: int = 0) -> ReplayCache:
    """A layer with random states and NaN rings."""
    torch.manual_seed(seed)
    A = -torch.rand(geometry.value_heads, device="cuda") - 0.1 if geometry.rule is Rule.MAMBA2 else None
    layout = RingLayout(geometry, 16, draft, act)
    layer = LayerBuffers.allocate(layout, SLOTS, Precision(), "cuda", A)
    layer.state.normal_()
    for ring in layer.rings.values():
        ring.fill_(float("nan"))
    return ReplayCache([layer], kernels.materialize)


def draw(geometry: LayerGeometry, act: torch.dtype, rows: int, tokens: int) -> dict[str, torch.Tensor]:
    """Random inputs of a step with finished gates."""
    HV, H, V, K = geometry.value_heads, geometry.key_heads, geometry.value_dim, geometry.key_dim

    def normal(*dims: int) -> torch.Tensor:
        return torch.randn(rows, tokens, *dims, device="cuda").to(act)

    def uniform(*dims: int) -> torch.Tensor:
        return torch.rand(rows, tokens, *dims, device="cuda")

    if geometry.rule is Rule.MAMBA2:
        return {"x": normal(HV, V), "dt": uniform(HV), "B": normal(H, K), "C": normal(H, K)}
    g = -uniform(HV, K) if geometry.rule is Rule.KDA else -uniform(HV)
    return {"q": normal(H, K), "k": normal(H, K), "v": normal(HV, V), "g": g, "beta": uniform(HV)}


def step(cache: ReplayCache, inputs: dict[str, torch.Tensor], index: StepIndex, backend: str) -> torch.Tensor:
    """One step of the cache's layer into a poisoned output."""
    layer = cache.layers[0]
    rule = layer.layout.geometry.rule
    value = inputs["x" if rule is Rule.MAMBA2 else "v"]
    options = {"A": layer.A, "D": layer.A} if rule is Rule.MAMBA2 else {}
    function = {Rule.MAMBA2: kernels.mamba2_step, Rule.GDN: kernels.gdn_step, Rule.KDA: kernels.kda_step}
    return function[rule](
        layer.state,
        **layer.rings,
        ring_start=cache.cursors.start,
        hist_len=cache.cursors.history,
        out=torch.full_like(value, float("nan")),
        window=cache.window,
        index=index,
        backend=backend,
        **inputs,
        **options,
    )


@pytest.mark.parametrize("draft", [1, 4, 8])
@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("act", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_against_torch(name: str, act: torch.dtype, draft: int) -> None:
    """Outputs to one rounding of the activations, states to fp32, over enough steps to flush twice."""
    geometry = GEOMETRIES[name]
    caches = {backend: make(geometry, act, draft) for backend in ("triton", "torch")}
    rows = torch.tensor(ROWS, device="cuda", dtype=torch.int32)
    index = StepIndex(rows)
    drafts = torch.full_like(rows, draft)
    for number in range(40 if draft == 1 else 12):
        inputs = draw(geometry, act, len(ROWS), draft)
        outputs = {backend: step(cache, inputs, index, backend).float() for backend, cache in caches.items()}
        scale = outputs["torch"].abs().max()
        error = (outputs["triton"] - outputs["torch"]).abs().max() / scale
        # Two kernels that err by fp32's rounding round to neighbours at worst, as do recorded u.
        limit = 2e-5 if act is torch.float32 else 2 * torch.finfo(act).eps
        assert error <= limit, f"step {number}: {error}"
        assert (outputs["triton"][1] == 0).all()
        accepted = torch.randint(1, draft + 1, rows.shape, device="cuda", dtype=torch.int32)
        for cache in caches.values():
            cache.commit(rows, drafts, accepted)
    for cache in caches.values():
        cache.flush(rows)
    mine, other = (caches[backend].layers[0].state for backend in ("triton", "torch"))
    assert (mine - other).norm() / other.norm() < 2e-6


@pytest.mark.parametrize("draft", [1, 4])
@pytest.mark.parametrize("name", ["nemotron-3-super", "qwen3.5-122b", "kimi-linear"])
def test_same_bits_every_time_and_in_a_graph(name: str, draft: int) -> None:
    """L22: 20 launches and a captured graph give the same bits; a row alone has those of the batch."""
    geometry, act = GEOMETRIES[name], torch.bfloat16
    rows = torch.tensor(ROWS, device="cuda", dtype=torch.int32)
    results = set()
    inputs = draw(geometry, act, len(ROWS), draft)
    for launch in range(20):
        cache = make(geometry, act, draft)
        for ring in cache.layers[0].rings.values():
            ring.fill_(0.25)
        cache.cursors.history.fill_(14)
        if launch == 19:
            step(cache, inputs, StepIndex(rows), "triton")
            cache = make(geometry, act, draft)
            for ring in cache.layers[0].rings.values():
                ring.fill_(0.25)
            cache.cursors.history.fill_(14)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = step(cache, inputs, StepIndex(rows), "triton")
            graph.replay()
        elif launch == 18:
            out = torch.zeros_like(inputs["x" if "x" in inputs else "v"])
            for row in range(len(ROWS)):
                alone = {key: value[row : row + 1] for key, value in inputs.items()}
                out[row : row + 1] = step(cache, alone, StepIndex(rows[row : row + 1]), "triton")
        else:
            out = step(cache, inputs, StepIndex(rows), "triton")
        layer = cache.layers[0]
        bits = [out, layer.state, *layer.rings.values()]
        results.add(b"".join(t.contiguous().view(torch.uint8).cpu().numpy().tobytes() for t in bits))
    assert len(results) == 1

"""Steps over packed states by the CUDA backend under the tests' emulator: `fold.cu`, then `read_blocks.cu` or
`read.cu`.

The torch backend reads the same codes, so outputs and records differ by the order of sums alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from importlib import import_module

import pytest
import torch

from replayssm.core import LayerBuffers
from replayssm.core.formats import PACKED, PackedState, state_tensors
from replayssm.kernels import BackendUnavailable, StepIndex, cuda_backend, store_states
from replayssm.kernels.cuda_backend.build import KernelConfig, ReadBlocksConfig, ReadConfig
from tests import support
from tests.kernels import emulated
from tests.support import RULES, Walk, draw, geometry, ints, run_step, same_bits

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(emulated.COMPILER is None, reason="the emulator needs g++"),
]

make_layer = partial(support.make_layer, act=torch.bfloat16)


@pytest.fixture(autouse=True)
def by_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from emulated.every_step_by_cuda(monkeypatch)


def small(rule: str, V: int = 40) -> support.LayerGeometry:
    """The last eight value rows of a head fill a quarter of their thirty-two."""
    return geometry(rule, HV=4, H=2, V=V, K=128)


def walked(layer: LayerBuffers, steps: int, tokens: int) -> Walk:
    """Two sequences whose states are not zero, and with history."""
    walk = Walk.of(layer)
    walk.hand_out(0, 2)
    values = torch.randn(layer.state.shape, generator=walk.generator)
    values[..., ::7] *= 40.0  # blocks of very different scales
    store_states(layer.state, values, layer.read_state)
    for _ in range(steps):
        inputs = draw(layer, 2, tokens, walk.generator)
        run_step(layer, walk.cache, inputs, StepIndex(ints([2, 0])), backend="torch")
        walk.cache.commit(ints([2, 0]), ints([tokens] * 2), ints([tokens, 1]))
    return walk


def check_against_torch(
    layer: LayerBuffers, walk: Walk, tokens: int, index: StepIndex, **options: object
) -> None:
    """One step by both backends, from the same buffers: outputs and records."""
    inputs = draw(layer, 2 if index.cu_seqlens is None else 1, tokens, walk.generator)
    found = []
    for backend in ("cuda", "torch"):
        copy = deepcopy(layer)
        out = run_step(copy, walk.cache, inputs, index, backend=backend, **options)
        found.append((out, *copy.rings.values()))
    for mine, other in zip(*found, strict=True):
        mine, other = mine.nan_to_num(nan=7.0), other.nan_to_num(nan=7.0)
        close = 4e-6 if other.dtype is torch.float32 else torch.finfo(other.dtype).eps
        torch.testing.assert_close(mine, other, rtol=close, atol=4e-6 * other.abs().max().item())


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("format", PACKED)
def test_one_token(rule: str, format: str) -> None:
    """Every format, full and empty histories, pads, a dead row."""
    layer = make_layer(small(rule), window=16, max_draft=1, precision=f"{format}/fp32")
    for steps in (0, 5, 15):
        check_against_torch(layer, walked(layer, steps, 1), 1, StepIndex(ints([2, 0])))
    check_against_torch(layer, walked(layer, 3, 1), 1, StepIndex(ints([-1, 0])))


@pytest.mark.parametrize(
    ("rule", "tokens", "precision"),
    [
        ("mamba2", 4, "nvfp4/fp32"),
        ("gdn", 4, "nvfp4/fp16"),
        ("kda", 4, "fp8/fp32"),
        ("kda", 4, "nvfp4/fp32"),
        ("mamba2", 8, "fp8/fp32"),
        ("gdn", 8, "nvfp4/fp32"),
        ("gdn", 4, "int8+sr"),
    ],
)
def test_several_tokens(rule: str, tokens: int, precision: str) -> None:
    """L15: rows of different T in one launch, none among them, with and without history."""
    layer = make_layer(small(rule), window=16, max_draft=tokens, precision=precision)
    for lens in ([tokens, 3], [1, 0], [2, tokens]):
        for steps in (0, 2):
            index = StepIndex(ints([2, 0]), draft_lens=ints(lens))
            check_against_torch(layer, walked(layer, steps, 2), tokens, index)


@pytest.mark.parametrize("rule", ["mamba2", "gdn"])
def test_packed_inputs(rule: str) -> None:
    """Varlen rows, one of them empty."""
    layer = make_layer(small(rule), window=16, max_draft=4, precision="nvfp4/fp32")
    index = StepIndex(ints([2, 0, 1]), cu_seqlens=ints([0, 3, 3, 7]), max_seqlen=4)
    check_against_torch(layer, walked(layer, 3, 2), 7, index)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[KernelConfig]:
    """Configurations of the steps that follow."""
    found: list[KernelConfig] = []
    original = cuda_backend.program
    monkeypatch.setattr(cuda_backend, "program", lambda *given: found.append(given[0]) or original(*given))
    return found


@pytest.mark.parametrize(
    ("rule", "format", "V", "tokens", "rows"),
    [
        ("kda", "nvfp4", 128, 1, 128),
        ("kda", "fp8", 72, 4, 64),
        ("mamba2", "mxfp4", 80, 8, 64),
        ("gdn", "nvfp4", 128, 8, 64),
    ],
)
def test_every_share(
    rule: str,
    format: str,
    V: int,
    tokens: int,
    rows: int,
    chosen: list[KernelConfig],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As many value rows a warp as in large steps, and heads that end within a warp's."""
    monkeypatch.setattr(import_module("replayssm.kernels.cuda_backend.cut"), "LARGE", 0)
    layer = make_layer(small(rule, V), window=16, max_draft=tokens, precision=f"{format}/fp32")
    check_against_torch(layer, walked(layer, 5, 1), tokens, StepIndex(ints([2, 0])))
    assert isinstance(chosen[0], ReadConfig)
    assert chosen[0].rows == rows


@pytest.mark.parametrize(
    ("rule", "format", "heads", "V", "tokens"),
    [
        ("gdn", "nvfp4", (8, 1), 128, 1),
        ("mamba2", "nvfp4", (12, 2), 80, 4),
        ("gdn", "int8", (12, 2), 80, 1),
        ("mamba2", "mxfp4", (8, 1), 64, 1),
        ("gdn", "mxfp4", (2, 1), 256, 4),
        ("mamba2", "fp8", (4, 1), 128, 4),
    ],
)
def test_blocks_in_turn(
    rule: str,
    format: str,
    heads: tuple[int, int],
    V: int,
    tokens: int,
    chosen: list[KernelConfig],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A warp serves several blocks: whole heads, parts of one, several of them, the last block not full."""
    monkeypatch.setattr(import_module("replayssm.kernels.cuda_backend.cut"), "ONE_WAVE", 0)
    HV, H = heads
    layer = make_layer(
        geometry(rule, HV=HV, H=H, V=V, K=128), window=16, max_draft=tokens, precision=f"{format}/fp32"
    )
    for steps in (5, 15):
        check_against_torch(layer, walked(layer, steps, 1), tokens, StepIndex(ints([2, 0])))
    assert isinstance(chosen[0], ReadBlocksConfig)
    assert chosen[0].blocks == (4 if format in ("nvfp4", "mxfp4") else 2)


def test_long_windows() -> None:
    layer = make_layer(small("gdn"), window=32, max_draft=1, precision="nvfp4/fp32")
    for steps in (9, 20, 31):
        check_against_torch(layer, walked(layer, steps, 1), 1, StepIndex(ints([2, 0])))


@pytest.mark.parametrize("rule", RULES)
def test_raw_gates(rule: str) -> None:
    """Gates of other dtypes are made in the kernel; outputs are gated; nothing is normalised."""
    layer = make_layer(small(rule), window=16, max_draft=4, precision="nvfp4/fp32")
    walk = walked(layer, 3, 1)
    inputs = draw(layer, 2, 1, walk.generator)
    heads, K = layer.layout.geometry.value_heads, layer.layout.geometry.key_dim
    per_head = torch.linspace(-1.0, 1.0, heads)
    options: dict[str, object]
    if rule == "mamba2":
        options = {
            "dt_bias": per_head.bfloat16(),
            "dt_softplus": True,
            "z": inputs["x"].flip(-1),
            "D": per_head,
        }
        inputs["dt"] = (inputs["dt"] * 40 - 10).bfloat16()
    else:
        inputs["g"], inputs["beta"] = (inputs["g"] * 40 + 10).half(), (inputs["beta"] * 8 - 4).bfloat16()
        bias = torch.linspace(-1.0, 1.0, heads * K).view(heads, K) if rule == "kda" else per_head
        options = {"A_log": per_head, "dt_bias": bias.bfloat16(), "use_qk_l2norm": False, "scale": 0.5}
        options |= {"lower_bound": -5.0} if rule == "kda" else {}
    found = []
    for backend in ("cuda", "torch"):
        copy = deepcopy(layer)
        out = run_step(copy, walk.cache, inputs, StepIndex(ints([2, 0])), backend=backend, **options)
        found.append((out, *copy.rings.values()))
    for mine, other in zip(*found, strict=True):
        mine, other = mine.nan_to_num(nan=7.0), other.nan_to_num(nan=7.0)
        close = 4e-6 if other.dtype is torch.float32 else torch.finfo(other.dtype).eps
        torch.testing.assert_close(mine, other, rtol=close, atol=4e-6 * other.abs().max().item())


@pytest.mark.parametrize(
    ("rule", "precision"), [("mamba2", "nvfp4/fp16+sr"), ("gdn", "nvfp4/fp16+sr"), ("kda", "fp8+sr")]
)
def test_decoding(rule: str, precision: str) -> None:
    """Folds and steps together, against the oracle: partial acceptance, pads, NaN wherever nothing lives."""
    walk = Walk.of(make_layer(small(rule), window=6, max_draft=4, precision=precision), strong=-30.0)
    walk.hand_out(0, 2)
    for lens, accepted in (
        ([4, 1, 2], [3, 0, 2]),
        ([3, 1, 4], [2, 0, 4]),
        ([4, 1, 1], [4, 0, 1]),
        ([1, 2, 4], [1, 0, 4]),
    ):
        walk.step([2, -1, 0], lens, accepted, width=4)
        walk.check()


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "fp8"])
def test_a_nan_stays_in_its_value_row(format: str) -> None:
    """A block that could not be stored makes the outputs of its row NaN, and no other."""
    layer = make_layer(small("gdn"), window=16, max_draft=1, precision=f"{format}/fp32")
    walk = walked(layer, 2, 1)
    read = layer.read_state
    assert isinstance(read, PackedState)
    values = torch.randn(layer.state.shape)
    values[2, 1, 5, 17] = torch.inf
    store_states(layer.state, values, read)
    out = run_step(layer, walk.cache, draw(layer, 1, 1, walk.generator), StepIndex(ints([2])))
    expected = torch.zeros(4, 40, dtype=torch.bool)
    expected[1, 5] = True
    assert torch.equal(out[0, 0].isnan(), expected)


@pytest.mark.parametrize("rule", RULES)
def test_lanes_in_either_order(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """L22: lanes leave keys, scales and products for each other."""
    outputs = []
    for backwards in (False, True):
        emulated.serve_on_cpu(monkeypatch, backwards)
        layer = make_layer(small(rule), window=16, max_draft=4, precision="nvfp4/fp32")
        walk = walked(layer, 3, 2)
        inputs = draw(layer, 2, 4, torch.Generator().manual_seed(1))
        outputs.append(run_step(layer, walk.cache, inputs, StepIndex(ints([2, 0]))))
        outputs.extend(state_tensors(layer.state))
    half = len(outputs) // 2
    assert all(map(same_bits, outputs[:half], outputs[half:]))


def test_refusals() -> None:
    cases = (
        ("gdn", "nvfp4/fp32", 9, {"window": 16, "max_draft": 9}, "at most 8 tokens"),
        ("kda", "nvfp4/fp32", 5, {"window": 16, "max_draft": 5}, "at most 4 tokens"),
        ("gdn", "bf16/fp32", 1, {}, "must be packed, got bf16"),
    )
    for rule, precision, tokens, options, reason in cases:
        layer = make_layer(small(rule), precision=precision, **options)
        walk = Walk.of(layer)
        with pytest.raises(BackendUnavailable, match=reason):
            run_step(layer, walk.cache, draw(layer, 1, tokens, walk.generator), StepIndex(ints([0])))

"""Every refusal of the public functions: the message names the tensor, what was expected and what came."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from replayssm.kernels import StepIndex
from tests import support
from tests.support import draw, geometry, ints, make_layer

B, T = 2, 3


def arguments(rule: str) -> dict[str, Any]:
    """Valid arguments of a step, every option given."""
    layer = make_layer(geometry(rule))
    inputs = draw(layer, B, T, torch.Generator().manual_seed(0))
    given = {
        "state": layer.state.zero_(),
        **layer.rings,
        **inputs,
        "ring_start": ints([0] * 4),
        "hist_len": ints([0] * 4),
        "out": torch.empty(B, T, 4, 5),
        "window": 6,
        "index": StepIndex(),
    }
    if rule == "mamba2":
        return given | {
            "A": layer.A,
            "D": torch.ones(4),
            "z": torch.ones(B, T, 4, 5),
            "dt_bias": torch.ones(4),
            "dt_softplus": True,
        }
    return given | {
        "A_log": torch.zeros(4),
        "dt_bias": torch.zeros(4, 8) if rule == "kda" else torch.zeros(4),
    }


def refuse(rule: str, message: str, **changed: Any) -> None:
    given = arguments(rule) | changed
    with pytest.raises(ValueError, match=re.escape(message)):
        support.STEP[rule](**given)


@pytest.mark.parametrize("rule", support.RULES)
def test_the_arguments_are_valid_unchanged(rule: str) -> None:
    assert support.STEP[rule](**arguments(rule)).isfinite().all()


TENSORS = [
    (rule, name)
    for rule in support.RULES
    for name, value in arguments(rule).items()
    if isinstance(value, torch.Tensor) and (rule, name) != ("kda", "dt_bias")
]


@pytest.mark.parametrize(("rule", "name"), TENSORS)
def test_one_dimension_too_many(rule: str, name: str) -> None:
    value = arguments(rule)[name]
    wrong = value[..., None]
    with pytest.raises(ValueError, match=rf"^({name}|x|q|v|out): expected .*got \[") as caught:
        support.STEP[rule](**(arguments(rule) | {name: wrong}))
    assert str(list(wrong.shape)) in str(caught.value)


@pytest.mark.parametrize(("rule", "name"), TENSORS)
def test_one_element_too_many(rule: str, name: str) -> None:
    """The last dimension is longer; whichever tensor that contradicts, one of the two is named."""
    wrong = torch.cat([arguments(rule)[name], arguments(rule)[name][..., :1]], -1)
    with pytest.raises(ValueError, match=r"^\w+: expected (shape )?\[.*\].*, got \["):
        support.STEP[rule](**(arguments(rule) | {name: wrong}))


@pytest.mark.parametrize(("rule", "name"), TENSORS)
def test_the_wrong_kind_of_number(rule: str, name: str) -> None:
    value = arguments(rule)[name]
    wrong = value.long() if value.dtype.is_floating_point or name in ("ring_start", "hist_len") else value
    with pytest.raises(
        ValueError, match=rf"^{name}: expected .*got .*torch.int64|^\w+: expected dtype torch.int64"
    ):
        support.STEP[rule](**(arguments(rule) | {name: wrong}))


@pytest.mark.parametrize(
    ("rule", "cache", "given"),
    [
        ("mamba2", "x_cache", "x"),
        ("mamba2", "B_cache", "B"),
        ("gdn", "k_cache", "k"),
        ("kda", "k_cache", "k"),
    ],
)
def test_records_have_the_inputs_dtype(rule: str, cache: str, given: str) -> None:
    """L23: a ring of another dtype than what is recorded in it would round; it is refused."""
    for dtype in (torch.bfloat16, torch.float16):
        changed = {given: arguments(rule)[given].to(dtype)}
        refuse(rule, f"{cache}: expected dtype {dtype}, got torch.float32", **changed)


@pytest.mark.parametrize(
    ("rule", "name"),
    [
        ("mamba2", "dt_cache"),
        ("gdn", "g_cache"),
        ("gdn", "u_cache"),
        ("kda", "g_cache"),
        ("kda", "u_cache"),
    ],
)
def test_gates_and_u_are_recorded_in_fp32_only(rule: str, name: str) -> None:
    """L7: a ring that would round gates, or the `u` that a flush folds, is refused."""
    changed = {name: arguments(rule)[name].bfloat16()}
    refuse(rule, f"{name}: expected dtype torch.float32, got torch.bfloat16", **changed)


@pytest.mark.parametrize("rule", support.RULES)
def test_step_refusals(rule: str) -> None:
    given = arguments(rule)
    refuse(
        rule,
        "state: expected fp32, bf16, fp16 or a PackedState, got torch.float64",
        state=given["state"].double(),
    )
    refuse(rule, "out: expected shape [2, 3, 4, 5], got [2, 3, 4, 4]", out=torch.empty(B, T, 4, 4))
    refuse(rule, "ring_start: expected [4] torch.int32, got [3] torch.int32", ring_start=ints([0] * 3))
    refuse(rule, "hist_len: expected [4] torch.int32, got [4] torch.int64", hist_len=given["hist_len"].long())
    message = "a ring of R=10 rows with window L={} takes at most {} tokens a step, got T=3: raise max_draft"
    refuse(rule, message.format(8, 2), window=8)
    refuse(rule, message.format(11, 0), window=11)
    refuse(rule, message.format(0, 10), window=0)


@pytest.mark.parametrize("rule", support.RULES)
def test_index_refusals(rule: str) -> None:
    together = "cu_seqlens and max_seqlen come together: pass both or neither"
    refuse(rule, together, index=StepIndex(cu_seqlens=ints([0, 3])))
    refuse(rule, together, index=StepIndex(max_seqlen=3))
    refuse(
        rule, "with cu_seqlens the inputs are [1, total, ...], got batch 2",
        index=StepIndex(cu_seqlens=ints([0, 3]), max_seqlen=3),
    )  # fmt: skip
    for wrong in (torch.zeros(3), ints([0, 3])[None]):
        refuse(
            rule,
            f"cu_seqlens: expected [B + 1] int32 or int64, got {list(wrong.shape)} {wrong.dtype}",
            index=StepIndex(cu_seqlens=wrong, max_seqlen=3),
        )
    for name, shape in (
        ("state_indices", [2]),
        ("ring_indices", [2]),
        ("draft_lens", [2]),
        ("parents", [2, 3]),
    ):
        short = torch.zeros(shape[0] - 1, *shape[1:], dtype=torch.int32)
        refuse(
            rule, f"{name}: expected {shape} int32 or int64, got {list(short.shape)} torch.int32",
            index=StepIndex(**{name: short}),
        )  # fmt: skip
        real = torch.zeros(shape)
        refuse(
            rule, f"{name}: expected {shape} int32 or int64, got {shape} torch.float32",
            index=StepIndex(**{name: real}),
        )  # fmt: skip


@pytest.mark.parametrize("rule", support.RULES)
def test_packed_inputs_take_no_draft_lens(rule: str) -> None:
    given = arguments(rule)
    packed = {
        name: value[:1]
        for name, value in given.items()
        if isinstance(value, torch.Tensor) and value.shape[:2] == (B, T)
    }
    index = StepIndex(cu_seqlens=ints([0, 2, 3]), max_seqlen=2, draft_lens=ints([2, 1]))
    refuse(rule, "draft_lens and cu_seqlens both say how long rows are: pass one", index=index, **packed)


@pytest.mark.parametrize("rule", support.RULES)
def test_more_rows_than_slots_or_rings(rule: str) -> None:
    given = arguments(rule)
    refuse(rule, "2 rows but 1 slots: pass state_indices", state=given["state"][:1])
    few = {
        name: given[name][:1]
        for name in given
        if name.endswith("_cache") or name in ("ring_start", "hist_len")
    }
    refuse(rule, "2 rows but 1 rings: pass ring_indices", **few)


@pytest.mark.parametrize("rule", support.RULES)
def test_value_heads_are_a_multiple_of_key_heads(rule: str) -> None:
    message = "state has 3 value heads, which must be a multiple of the 2 key heads (groups) of the ring"
    refuse(rule, message, state=arguments(rule)["state"][:, :3])


@pytest.mark.parametrize("rule", ["gdn", "kda"])
def test_a_bias_needs_its_gate(rule: str) -> None:
    refuse(rule, "dt_bias comes with A_log, which is missing: pass both, or finished gates", A_log=None)


def test_kda_refusals() -> None:
    for wrong in (torch.zeros(4), torch.zeros(8, 4), torch.zeros(1, 32)):
        refuse("kda", f"dt_bias: expected [4, 8] or [32], got {list(wrong.shape)}", dt_bias=wrong)
    message = "lower_bound must be negative and comes with A_log, got {} {} A_log"
    refuse("kda", message.format(0.0, "with"), lower_bound=0.0)
    refuse("kda", message.format(-5.0, "without"), lower_bound=-5.0, A_log=None, dt_bias=None)

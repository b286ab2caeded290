"""SGLang's own engine on a CPU where states move or are spread: the tokens of one plain engine.

Quantised checkpoints, host memory, servers that share the work, and several ranks. What carries states and
keys from one place to the other is torch, in `cpu_engine`; who sends what, when, and what becomes of a slot
is SGLang's and ours.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.adapters.sglang.test_engine import NO_BUFFER, Plain, assert_same, convert, serve

ON = {**NO_BUFFER, "enable_linear_replayssm": True, "linear_replayssm_cache_len": 7}

FEW = 6
"""Requests for two ranks, which share the cores of one."""

pytestmark = pytest.mark.slow


def test_int8_checkpoints(tmp_path: Path) -> None:
    """L12: the prefix cache keeps current states, in int8, and slots that are filled from it start anew."""
    model = convert("gdn", tmp_path / "gdn")
    given = {"enable_int8_mamba_checkpoint": True}
    off, _ = serve(model, **NO_BUFFER, **given)
    on, _ = serve(model, **ON, **given)
    assert_same(on, off)
    assert on["cached"] == off["cached"]
    assert sum(off["cached"]) > 100, "checkpoints were used"


def test_hierarchical_cache(plain: Plain, tmp_path: Path) -> None:
    """L13: states go to the host when the pool is full, and come back into slots that others have left."""
    model = convert("gdn", tmp_path / "gdn")
    on, _ = serve(
        model, **{**ON, "max_mamba_cache_size": 13}, enable_hierarchical_cache=True, hicache_ratio=4.0,
        hicache_io_backend="direct", hicache_mem_layout="page_first_direct",
    )  # fmt: skip
    off = plain("gdn")
    assert_same(on, off)
    assert on["cached"] == off["cached"]
    assert sum(on["host"]) > 30, "states that were on the host were used"


def test_prefill_and_decode_apart(plain: Plain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """L14: one server prefills, another decodes, both with the flag; one reads copies that it has made."""
    (tmp_path / "files").mkdir()
    monkeypatch.setenv("CPU_ENGINE_TRANSFERS", str(tmp_path / "files"))
    model = convert("gdn", tmp_path / "gdn")
    off = plain("gdn")
    given = {"prompts": off["prompts"], "disaggregation_transfer_backend": "nixl"}
    first, _ = serve(model, **ON, **given, disaggregation_mode="prefill")
    assert first["outputs"] == [tokens[:1] for tokens in off["outputs"]]
    monkeypatch.setenv("REPLAYSSM_PRECISION", "fp16/fp32")
    on, log = serve(model, **ON, **given, disaggregation_mode="decode")
    assert "window 7, no drafts; state fp16/fp32" in log
    assert_same(on, off)


@pytest.mark.parametrize(
    ("rule", "ranks"),
    [
        ("gdn", {"tp_size": 2}),
        ("gdn", {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}),
        ("kda", {"pp_size": 2}),
    ],
    ids=["tensor parallel", "data-parallel attention", "pipeline parallel"],
)
def test_two_ranks(
    rule: str, ranks: dict[str, Any], plain: Plain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank has the rings of its heads, its requests or its layers."""
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    off = {name: values[:FEW] for name, values in plain(rule).items()}
    on, log = serve(convert(rule, tmp_path / rule), **ON, **ranks, prompts=off["prompts"])
    assert log.count(f" {rule} layers of SGLang") == 2
    assert_same(on, off)

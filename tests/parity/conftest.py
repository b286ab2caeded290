"""The adapters that the stream is sent through: one fixture each, named in `ADAPTERS` or `GENERATIONS`.

A fixture gives a function that starts its `Side` for a stream, and raises `Absent` where there is none.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.trtllm.conftest import importable
from tests.adapters.trtllm.generations import DOUBLE, copy
from tests.parity.stream import Side, Stream

ADAPTERS = ("sglang", "trtllm_double_python", "trtllm_double_cpp", "trtllm_double_v2")
"""Sent every stream."""
GENERATIONS = {
    "trtllm_double_g0": ("drafts", "standard"),
    "trtllm_double_g2": ("drafts", "standard"),
    "trtllm_double_g4": ("drafts",),
    "trtllm_double_g4b": ("drafts", "standard"),
    "trtllm_double_g5": ("drafts", "standard", "away"),
}
"""Other generations of TensorRT-LLM than g3, with the streams they are sent: g4 has g3's functions
elsewhere, and one stream shows it."""

Start = Callable[[Stream], Side]


class Absent(Exception):
    """An adapter cannot take part; says why."""


@pytest.fixture
def sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """The real package, in the environment of `ci/sglang.sh`."""
    if find_spec("sglang") is None:
        assert "EXPECT_SGLANG" not in os.environ, "ci/sglang.sh runs these tests and SGLang can't be found"

        def refuse(stream: Stream) -> Side:
            raise Absent("SGLang is not installed here")

        return refuse
    from sglang.srt.plugins import load_plugins

    from tests.adapters.sglang.conftest import pass_convolutions
    from tests.adapters.sglang.test_verify import note_convolutions
    from tests.parity.sglang_side import SGLang

    load_plugins()
    pass_convolutions(monkeypatch)
    note_convolutions(monkeypatch)

    def start(stream: Stream) -> Side:
        monkeypatch.setenv("SGLANG_MAMBA_SSM_DTYPE", "float32")  # SGLang sets it; undone after the test
        monkeypatch.setenv("REPLAYSSM_PRECISION", stream.precision)
        return SGLang(stream, tmp_path)

    return start


def _trtllm(manager: str, generation: str = "g3") -> Any:
    @pytest.fixture
    def trtllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
        """The interface double of TensorRT-LLM, with one of its managers."""
        folder = DOUBLE if generation == "g3" else copy(tmp_path, generation).parent
        with importable(folder, monkeypatch):
            from tests.parity.trtllm_side import TensorRT, absent

            def start(stream: Stream) -> Side:
                why = absent(manager, stream)
                if why is not None:
                    raise Absent(why)
                return TensorRT(stream, manager, monkeypatch)

            yield start

    return trtllm


trtllm_double_python = _trtllm("python")
trtllm_double_cpp = _trtllm("cpp")
trtllm_double_v2 = _trtllm("v2")
trtllm_double_g0 = _trtllm("flat", "g0")
trtllm_double_g2 = _trtllm("cpp", "g2")
trtllm_double_g4 = _trtllm("cpp", "g4")
trtllm_double_g4b = _trtllm("v2", "g4b")
trtllm_double_g5 = _trtllm("v2", "g5")

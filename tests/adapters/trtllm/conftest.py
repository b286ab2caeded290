"""The interface double of TensorRT-LLM is importable in tests that ask for it, and gone after them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.adapters.trtllm.generations import DOUBLE, DOUBLES, copy


def forget() -> None:
    """Forget the double and what the adapter holds of it."""
    from replayssm.adapters.trtllm import activation

    activation.uninstall()
    ours = "replayssm.adapters.trtllm.served_models"
    for name in [name for name in sys.modules if name.split(".")[0] in ("tensorrt_llm", "replayssm_trtllm")]:
        del sys.modules[name]
    sys.modules.pop(ours, None)


@contextmanager
def importable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`import tensorrt_llm` finds the double in a folder."""
    monkeypatch.syspath_prepend(folder)
    yield
    forget()


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`import tensorrt_llm` finds the double."""
    with importable(DOUBLE, monkeypatch):
        yield


@pytest.fixture(scope="session")
def doubles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of each generation's double."""
    return {name: copy(tmp_path_factory.mktemp(name), name).parent for name in DOUBLES}


@pytest.fixture
def generation(
    request: pytest.FixtureRequest, doubles: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """`import tensorrt_llm` finds the double of the generation that an indirect parameter names."""
    with importable(doubles[request.param], monkeypatch):
        yield request.param

"""The tests marked `gpu` run for each compiled backend; a call that a backend refuses is skipped with its
reason.
"""

from __future__ import annotations

from collections.abc import Generator
from importlib.util import find_spec

import pytest
import torch

from replayssm.kernels import BackendUnavailable, registry

COMPILED = [
    name for name in ("triton", "cuda") if name in registry.BACKENDS and find_spec(registry.BACKENDS[name])
]


@pytest.fixture(params=COMPILED)
def backend(request: pytest.FixtureRequest) -> str:
    """A backend that is compiled for the GPU."""
    name: str = request.param
    return name


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    try:
        return (yield)
    except BackendUnavailable as error:
        if item.get_closest_marker("gpu") is None:
            raise
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def give_memory_back(request: pytest.FixtureRequest) -> Generator[None, None, None]:
    """Workers share one GPU: what a test took goes back."""
    yield
    if request.node.get_closest_marker("gpu") is not None:
        torch.cuda.empty_cache()

"""These tests run with the real SGLang, in the environment that `ci/sglang.sh` makes; elsewhere they skip."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.sglang.cpu_engine.cpu_speculation import fill_parents

if find_spec("sglang") is None:
    assert "EXPECT_SGLANG" not in os.environ, "ci/sglang.sh runs these tests and SGLang can't be found"
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def _plugins() -> None:
    """SGLang finds the adapter as it does in each of its processes."""
    from sglang.srt.plugins import load_plugins

    load_plugins()


@pytest.fixture(autouse=True)
def _no_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    pass_convolutions(monkeypatch)


def pass_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The update of the short convolution, a GPU kernel, passes its inputs on.

    In a verification step it also works out the parents in a draft tree, which stays.
    """
    from sglang.srt.layers.attention.linear import gdn_backend, kda_backend
    from sglang.srt.layers.attention.mamba import mamba

    def same(x: Any, *args: Any, **kwargs: Any) -> Any:
        parents = kwargs.get("retrieve_parent_token")
        if parents is not None:
            children, siblings = kwargs["retrieve_next_token"], kwargs["retrieve_next_sibling"]
            fill_parents(parents, children, siblings)
        return x

    for module in (gdn_backend, kda_backend, mamba):
        for name in ("causal_conv1d_update", "causal_conv1d_update_triton"):
            monkeypatch.setattr(module, name, same, raising=False)


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """By rule, what SGLang's engine gives without the flag; one run for all tests that compare with it."""
    from tests.adapters.sglang.test_engine import NO_BUFFER, convert, serve

    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own

    def run(rule: str) -> dict[str, Any]:
        kept = Path(shared, f"plain-{rule}.json")
        if not kept.exists():
            model = convert(rule, tmp_path_factory.mktemp("plain") / rule)
            found, log = serve(model, **NO_BUFFER)
            assert "replayssm:" not in log
            part = own / "part"
            part.write_text(json.dumps(found))
            part.replace(kept)
        result: dict[str, Any] = json.loads(kept.read_text())
        return result

    return run

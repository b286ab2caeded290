"""The real TensorRT-LLM on a GPU, with the adapter and without; `ci/gpu_trtllm.sh` runs these.

`TRTLLM_TEST_MODEL` names the model's folder, without it an example model is tried; `TRTLLM_TEST_CONFIG` the
engine's YAML file, if any; `TRTLLM_TEST_DRAFTS` how many tokens MTP drafts.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.adapters.trtllm.greedy import Compared, NotServed, absent, compare, has_mtp, write_settings

pytestmark = pytest.mark.gpu

EXAMPLES = Path(__file__).parents[3] / "examples" / "models"
FOLDERS = ("mamba2-nemotron-h", "gdn-qwen3-5")
GIVEN = os.environ.get("TRTLLM_TEST_MODEL")
MODELS = [Path(GIVEN)] if GIVEN else [EXAMPLES / folder for folder in FOLDERS]


@pytest.fixture(params=MODELS, ids=lambda model: model.name)
def model(request: pytest.FixtureRequest) -> Path:
    why = absent(os.environ)
    if why is not None:
        pytest.skip(why)
    found: Path = request.param
    return found


def check(model: Path, drafts: int, folder: Path, record: Callable[[str, object], None]) -> Compared:
    """Compare, and keep what was found."""
    config = os.environ.get("TRTLLM_TEST_CONFIG")
    settings = write_settings(Path(config) if config else None, drafts, folder / "engine.yaml")
    try:
        found = compare(str(model), settings)
    except NotServed as error:
        if GIVEN:
            raise
        pytest.skip(f"without the adapter the engine does not serve {model.name}: {error}")
    for name, value in vars(found).items():
        record(name, value)
    assert found.on <= found.allowed, found
    return found


def test_the_same_greedy_tokens(
    model: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Standard decoding."""
    check(model, 0, tmp_path, record_property)


def test_the_same_greedy_tokens_with_mtp(
    model: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Verification and commit; drafts are accepted as often as without the adapter."""
    if not has_mtp(model):
        pytest.skip(f"{model.name} has no layers for MTP")
    drafts = int(os.environ.get("TRTLLM_TEST_DRAFTS", "3"))
    found = check(model, drafts, tmp_path, record_property)
    assert found.iterations_on <= 1.1 * found.iterations_off, found

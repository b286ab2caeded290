"""The user guide's table names the classes that the parity tests run, and nothing else."""

from __future__ import annotations

from pathlib import Path

import transformers

from replayssm.adapters.transformers.patch_points import ASSISTED_SINCE, CHECKED_VERSIONS
from tests.adapters.transformers import zoo

GUIDE = Path(__file__).parents[3] / "docs" / "transformers.md"
RULES = {"gdn": "Gated DeltaNet", "mamba2": "Mamba-2", "kda": "Kimi Delta Attention"}


def rows() -> list[str]:
    """The table's rows as the parity tests' list implies them."""
    found = []
    for model in dict.fromkeys(zoo.BY_NAME.values()):
        since = max(model.since, model.assisted_since)
        found.append(f"| `{model.architecture}` | {RULES[model.rule]} | {model.since} | {since} |")
    return list(dict.fromkeys(found))


def test_the_table_lists_the_classes_that_are_tested() -> None:
    lines = [
        line for line in GUIDE.read_text().splitlines() if any(f"| {r} |" in line for r in RULES.values())
    ]
    assert lines == rows()


def test_the_guide_says_the_checked_versions() -> None:
    low, high = CHECKED_VERSIONS.replace(">=", "").replace("<=", "").split(",")
    assert f"transformers {low} to {high}" in GUIDE.read_text()


def test_every_class_exists_since_when_the_list_says() -> None:
    for model in zoo.MODELS:
        assert hasattr(transformers, model.architecture) is model.exists, model.name


def test_limits_of_assistance_are_those_of_the_adapter() -> None:
    limited = {model.config for model in zoo.MODELS if model.assisted_since != "5.19"}
    types = {getattr(transformers, config).model_type for config in limited}
    assert types <= set(ASSISTED_SINCE)
    for model in zoo.MODELS:
        model_type = getattr(transformers, model.config).model_type if model.exists else None
        assert ASSISTED_SINCE.get(model_type, ("5.19",))[0] == model.assisted_since, model.name

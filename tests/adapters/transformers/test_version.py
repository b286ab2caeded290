"""Which transformers these tests run with: a run meant for one version must not use another."""

import os

import pytest
import transformers


def test_runs_with_the_version_that_was_asked_for() -> None:
    expected = os.environ.get("EXPECT_TRANSFORMERS")
    if expected is None:
        pytest.skip("EXPECT_TRANSFORMERS is not set; ci/test.sh sets it")
    assert transformers.__version__ == expected, (
        f"expected transformers {expected}, imported {transformers.__version__} from {transformers.__file__}"
    )

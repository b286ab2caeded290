"""The adapter's file: what it may hold, and one clear error for everything else."""

from __future__ import annotations

from pathlib import Path

import pytest

from replayssm.adapters.trtllm.settings import ENV_CONFIG, TEMPLATE, Settings, load
from replayssm.core.config import ConfigError
from replayssm.core.precision import Precision


def loaded(tmp_path: Path, text: str, **env: str) -> Settings:
    path = tmp_path / "adapter.yaml"
    path.write_text(text)
    return load({ENV_CONFIG: str(path), **env})


def test_an_empty_file_means_the_defaults(tmp_path: Path) -> None:
    assert loaded(tmp_path, "") == Settings(16, "auto", None, None)


def test_the_template_is_the_defaults(tmp_path: Path) -> None:
    text = TEMPLATE.format(variable=ENV_CONFIG)
    assert loaded(tmp_path, text) == Settings(16, "auto", None, None)
    given = text.replace("# precision:", "precision:").replace("# max_draft:", "max_draft:")
    assert loaded(tmp_path, given) == Settings(16, "auto", Precision(), 4)


def test_every_key(tmp_path: Path) -> None:
    text = "mode: borrow\nwindow: 24\nbackend: torch\nprecision: bf16\nmax_draft: 5\n"
    assert loaded(tmp_path, text) == Settings(24, "torch", Precision.parse("bf16"), 5, "borrow")


def test_skip_tolerance(tmp_path: Path) -> None:
    assert loaded(tmp_path, "skip_tolerance: 0.01").skip_tolerance == 0.01


@pytest.mark.parametrize("given", ["{read: nvfp4, recurrence: fp16+sr}", "nvfp4/fp16+sr"])
def test_a_copy_to_read(given: str, tmp_path: Path) -> None:
    settings = loaded(tmp_path, f"precision: {given}")
    assert settings.precision == Precision.parse("nvfp4/fp16+sr")
    assert settings.copies


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "windw: 8",
            r"unknown key 'windw' in .*adapter.yaml \(did you mean 'window'\?\): expected one of mode",
        ),
        ("kv_cache_config: {}", "The engine's own settings belong in its own file"),
        ("mode: lend", "mode: expected own or borrow, got 'lend'$"),
        ("window: wide", "adapter.yaml: window: .* got 'wide'"),
        ("window: 4\nmax_draft: 8", "may accept up to 8 tokens but the window is L=4"),
        ("precision: nvfp4+sr", r"precision 'nvfp4\+sr': the states stay in TensorRT-LLM's own pool, where"),
        ("precision: {read: nvfp4, recurrence: fp8+sr}", r"precision 'nvfp4/fp8\+sr': the states stay in"),
        ("precision: fp16+sr\nmode: borrow", r"'fp16\+sr': under mode borrow of TensorRT-LLM the states are"),
        ("precision: nvfp4/fp32\nmode: borrow", r"adapter.yaml: precision 'nvfp4/fp32': under mode borrow"),
        (
            "skip_tolerance: 1e-3\nmode: borrow",
            "skip_tolerance 0.001: in mode borrow the engine empties rings",
        ),
        ("skip_tolerance: -1", "adapter.yaml: skip_tolerance: expected a finite number of at least 0"),
        ("- own", "expected lines 'name: value', got a list"),
        ("mode: [", "is not valid YAML"),
    ],
)
def test_what_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        loaded(tmp_path, text)


def test_without_a_file() -> None:
    with pytest.raises(ConfigError, match=r"TRTLLM_REPLAYSSM_CONFIG is not set: .*mpirun, Ray"):
        load({})
    with pytest.raises(ConfigError, match="cannot read /nowhere: No such file"):
        load({ENV_CONFIG: "/nowhere"})


def test_variables_that_workers_would_not_get_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"REPLAYSSM_WINDOW does not reach .*write 'window: 8' into"):
        loaded(tmp_path, "", REPLAYSSM_WINDOW="8")

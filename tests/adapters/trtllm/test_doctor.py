"""`replayssm doctor --engine trtllm`."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from replayssm.adapters.trtllm.settings import ENV_CONFIG
from replayssm.cli.main import app
from tests.adapters.trtllm.generations import DOUBLE, copy


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV_CONFIG, raising=False)


def doctor(*options: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["doctor", "--engine", "trtllm", *map(str, options)])
    return result.exit_code, result.output


def test_the_double() -> None:
    status, output = doctor("--source", DOUBLE)
    assert status == 0
    assert "ok   generation: g3, seen in 1.3.0rc20 to rc27" in output
    assert "FAIL" not in output


def test_a_difference_ends_with_1(tmp_path: Path) -> None:
    file = copy(tmp_path) / "_torch/modules/mamba/gdn_mixer.py"
    file.write_text(
        file.read_text().replace("_flashinfer_gdn_verify,\n", "_flashinfer_gdn_verify as other,\n")
    )
    status, output = doctor("--source", tmp_path)
    assert status == 1
    assert "FAIL _torch.modules.mamba.gdn_mixer._flashinfer_gdn_verify: expected this name" in output


def test_settings_are_looked_at_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "adapter.yaml"
    path.write_text("window: 12")
    monkeypatch.setenv(ENV_CONFIG, str(path))
    assert "ok   settings: mode own, window 12, backend auto" in doctor("--source", DOUBLE)[1]
    path.write_text("wndow: 12")
    status, output = doctor("--source", DOUBLE)
    assert status == 1
    assert "FAIL settings: unknown key 'wndow'" in output


def test_the_mode_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "adapter.yaml"
    path.write_text("mode: borrow")
    monkeypatch.setenv(ENV_CONFIG, str(path))
    status, output = doctor("--source", DOUBLE)
    assert status == 0
    assert "ok   generation: g3, seen in 1.3.0rc20 to rc27; mode borrow" in output
    copy(tmp_path, "g0")
    status, output = doctor("--source", tmp_path)
    assert status == 1
    assert "FAIL generation: g0, seen in 1.2: it is served in mode own, got borrow; expected the" in output


def test_an_installed_package_is_found_and_needs_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DOUBLE)
    status, output = doctor()
    assert status == 1
    assert "ok   contract" in output
    assert f"FAIL settings: {ENV_CONFIG} is not set" in output


def test_source_is_for_this_engine() -> None:
    result = CliRunner().invoke(app, ["doctor", "--engine", "sglang", "--source", str(DOUBLE)])
    assert result.exit_code == 2
    assert "expected --engine trtllm" in result.output

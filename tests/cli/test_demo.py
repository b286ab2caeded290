"""`replayssm demo`: its verdict, its figures, and the files that it writes."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("transformers")

from replayssm.cli import comparison, decode, record
from replayssm.cli.main import app
from replayssm.cli.model_config import load_model_config
from replayssm.cli.report import CONVENTIONAL, REPLAY, SPECULATION, Row
from replayssm.core.config import ReplayConfig

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "models"
TOKENS = 20
RECORD_FIELDS = ["topic", "date", "machine", "gpu", "versions", "commit", "command", "rows"]

runner = CliRunner()


def demo(models: Path, *options: str, tokens: int = TOKENS) -> Any:
    arguments = ["demo", "--models", str(models), "--max-new-tokens", str(tokens), *options]
    return runner.invoke(app, arguments, env={"COLUMNS": "100"})


@pytest.fixture(scope="module")
def shown(hybrids: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any], Path]:
    """What a run prints, and the two files that it writes."""
    folder = tmp_path_factory.mktemp("shown")
    result = demo(hybrids, "--json", str(folder / "f.json"), "--plot", str(folder / "f.png"))
    assert result.exit_code == 0, result.output
    return result.stdout, json.loads((folder / "f.json").read_text("utf-8")), folder / "f.png"


def test_equal_tokens_are_reported_per_model(shown: tuple[str, dict[str, Any], Path]) -> None:
    output = shown[0]
    total = len(comparison.PROMPT_MODULES) * TOKENS
    assert output.count(f"{total} equal") == 4
    assert "All tokens are equal in 2 models." in output
    words = ["gdn", "mamba2", "refused", "prompt lookup, T 6", "flushes", "state read per token"]
    words += ["drafts accepted per round", "not supported with stateful models", "not CPU speed"]
    assert not [word for word in words if word not in output]


def test_the_record_is_complete(shown: tuple[str, dict[str, Any], Path], hybrids: Path) -> None:
    content = shown[1]
    assert list(content) == RECORD_FIELDS
    assert content["topic"] == "e2e-transformers"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", content["date"])
    assert set(content["versions"]) == {"python", "replayssm-adapters", "torch", "transformers"}
    assert content["command"] == (f"replayssm demo --models {hybrids} --max-new-tokens {TOKENS} --window 8")
    expected = [(m, way) for m in ("gdn", "mamba2") for way in (CONVENTIONAL, REPLAY, SPECULATION)]
    assert [(row["model"], row["decoding"]) for row in content["rows"]] == expected
    for row in content["rows"]:
        assert list(row) == [field.name for field in fields(Row)]
        assert row["tokens_equal"] is (None if row["mode"] == "off" else True)
        assert row["tokens_per_s"] > 0


def test_bytes_are_those_of_the_geometry(shown: tuple[str, dict[str, Any], Path], hybrids: Path) -> None:
    """The conventional ones come from the stock cache, replay's account and the config alike."""
    for row in shown[1]["rows"]:
        layers = load_model_config(hybrids / row["model"] / "config.json").recurrent
        state = sum(4 * layer.state_elements for layer in layers)
        assert row["state_bytes"] == state
        if row["mode"] == "off":
            assert (row["read_per_token"], row["written_per_token"]) == (state, state)
        elif row["T"] == 1:
            assert state < row["read_per_token"] < 2 * state
        moved = row["read_per_token"] + row["written_per_token"]
        assert row["traffic_ratio"] == pytest.approx(moved / (2 * state))


def test_the_plot_is_a_picture(shown: tuple[str, dict[str, Any], Path]) -> None:
    assert shown[2].read_bytes().startswith(b"\x89PNG")


def test_nothing_is_written_unless_asked_for(
    hybrids: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert demo(hybrids / "gdn").exit_code == 0
    assert list(tmp_path.iterdir()) == []


def test_a_token_that_differs_ends_with_status_1(hybrids: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token of one replayed continuation is changed after it was decoded."""
    honest, calls = decode.decode, []

    def changed(model: Any, prompt: Any, settings: Any, handle: Any = None, **options: Any) -> Any:
        run = honest(model, prompt, settings, handle, **options)
        if handle is None or settings.new_tokens < TOKENS:
            return run
        calls.append(run)
        tokens = list(run.tokens)
        tokens[7] ^= len(calls) == 3  # The first prompt is replayed twice, the second time with drafts.
        return replace(run, tokens=tokens)

    monkeypatch.setattr(decode, "decode", changed)
    result = demo(hybrids / "gdn")
    assert result.exit_code == 1
    assert "gdn, replay, heapq.py: differs from token 7 on" in result.stdout
    assert f"{len(comparison.PROMPT_MODULES) * TOKENS} DIFFER" in result.stdout
    assert "All tokens are equal" not in result.stdout


def test_steps_add_up_and_flushes_show(hybrids: Path) -> None:
    model = decode.load(hybrids / "gdn")
    prompt = model.encode("x = 1\n" * 8)
    with decode.replaying(model.model, ReplayConfig(window=4, max_draft=4)) as handle:
        run = decode.decode(model.model, prompt, decode.Settings(TOKENS), handle)
        drafted = decode.decode(model.model, prompt, decode.Settings(TOKENS, draft_tokens=3), handle)
    state = run.account.conventional_read // run.account.kept
    moved = [b.bytes - a.bytes for a, b in zip(run.steps, run.steps[1:], strict=False)]
    assert sum(moved) == run.account.read + run.account.written
    assert sum(step > 2 * state for step in moved) == run.account.flushes == 4
    assert drafted.tokens == run.tokens
    assert [step.tokens for step in run.steps] == list(range(1, TOKENS + 1))
    assert drafted.steps[-1].bytes == drafted.account.read + drafted.account.written


def refusal(result: Any) -> str:
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return str(line)


def test_refusals(hybrids: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no model in" in refusal(demo(tmp_path))
    assert "LlamaForCausalLM has no layer" in refusal(demo(tiny / "llama"))
    assert "there is no folder" in refusal(demo(hybrids, "--json", str(tmp_path / "none" / "f.json")))
    assert "window of at least 2" in refusal(demo(hybrids, "--window", "1"))
    assert "window L must be at least 1" in refusal(demo(hybrids, "--window", "0"))
    monkeypatch.setattr("replayssm.cli.errors.find_spec", lambda name: None if name == "matplotlib" else name)
    text = refusal(demo(hybrids, "--plot", str(tmp_path / "f.png")))
    assert "pip install 'replayssm-adapters[plot]'" in text


def test_the_window_may_come_from_the_environment(hybrids: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPLAYSSM_WINDOW", "5")
    result = demo(hybrids / "gdn")
    assert "window 5, drafts up to 5" in result.stdout


def training_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("examples_train", ROOT / "examples" / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
    return module


def test_prompts_were_held_out_of_training() -> None:
    script = training_script()
    texts = comparison.prompt_texts()
    assert [name for name in texts if not script.is_held_out(name)] == []
    assert {len(text.encode()) for text in texts.values()} == {comparison.PROMPT_BYTES}


@pytest.mark.skipif(not EXAMPLES.is_dir(), reason="the trained models are not in this checkout")
def test_the_trained_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "PROMPT_BYTES", 96)
    result = demo(EXAMPLES, tokens=16)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("equal") == 2 * 3 + 1


def test_the_commit_is_that_of_the_checkout(tmp_path: Path) -> None:
    head = subprocess.run(
        ["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    if head.returncode:
        pytest.skip("not a git checkout")
    assert record.commit(ROOT) in (head.stdout.strip(), f"{head.stdout.strip()}-dirty")
    assert record.commit(tmp_path) is None

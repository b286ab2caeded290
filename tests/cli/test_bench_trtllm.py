"""`replayssm bench e2e --engine trtllm` without the engine: what is started, and the engine's process over a
stand-in for the functions of `tensorrt_llm` that it calls.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from replayssm.adapters.trtllm.settings import ENV_CONFIG
from replayssm.cli.bench import e2e, trtllm_engine
from replayssm.cli.errors import CommandError

ENGINE = """
import json
class _Args:
    max_batch_size = 4
class _Result:
    def __init__(self, tokens, iterations):
        self.outputs = [type("Output", (), {"token_ids": tokens})]
        self.decoding_iter = iterations
class SamplingParams:
    def __init__(self, **given):
        assert given.pop("top_k") == 1 and given.pop("ignore_eos") and given.pop("end_id") == -1
        self.count = given.pop("max_tokens")
class LLM:
    args = _Args
    def __init__(self, **given):
        print("made", json.dumps(given, sort_keys=True), flush=True)
        assert given["skip_tokenizer_init"] and "broken" not in given, given
    def generate(self, prompts, sampling, use_tqdm):
        tokens = [[len(prompt) + n for n in range(sampling.count)] for prompt in prompts]
        return [_Result(each, 1 + (sampling.count - 1) // 2) for each in tokens]
    def shutdown(self):
        print("ended", flush=True)
"""
ARGUMENTS = """
def update_llm_args_with_extra_dict(arguments, extra):
    return {**arguments, **extra}
"""
IMPORTS = """
def import_custom_module_from_dir(folder):
    assert (folder / "__init__.py").is_file()
    print("imported", folder.name, flush=True)
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """`import tensorrt_llm` finds it; the folder that it is in."""
    files = {
        "__init__.py": ENGINE, "llmapi/__init__.py": "", "llmapi/llm_args.py": ARGUMENTS,
        "tools/__init__.py": "", "tools/importlib_utils.py": IMPORTS,
    }  # fmt: skip
    for name, text in files.items():
        file = tmp_path / "stand_in" / "tensorrt_llm" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.syspath_prepend(tmp_path / "stand_in")
    yield tmp_path / "stand_in"
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorrt_llm"]:
        del sys.modules[name]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 50}}))
    return folder


def drive(
    arguments: Sequence[str], orders: Sequence[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Answers, and what else was printed."""
    trtllm_engine.main(arguments, [json.dumps(order) for order in orders])
    lines = capsys.readouterr().out.splitlines()
    answers = [json.loads(line.removeprefix(e2e.MARK)) for line in lines if line.startswith(e2e.MARK)]
    return answers, [line for line in lines if not line.startswith(e2e.MARK)]


@pytest.mark.usefixtures("stand_in")
def test_orders(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "engine.yaml"
    config.write_text("speculative_config: {decoding_type: MTP, max_draft_len: 3}\n")
    orders = [
        {"order": "facts"},
        {"order": "step", "batch": 2, "input": 5, "output": 9, "replays": 1},
        {"order": "step", "batch": 5, "input": 5, "output": 9, "replays": 1},
        {"order": "tokens", "prompts": [[1, 2, 3], [4]], "output": 3},
    ]
    given = ["--model", str(model), "--config", str(config)]
    (facts, step, refused, tokens), said = drive(given, orders, capsys)
    assert facts["vocabulary"] == 50
    assert "python" in facts["versions"]
    assert (step["batch"], step["T"], step["max_requests"], step["accept_length"]) == (2, 4, 4, 2.0)
    assert refused == {"refused": "batch 5: the engine runs at most 4 requests at a time"}
    assert tokens == {"tokens": [[3, 4, 5], [1, 2, 3]], "iterations": 4}
    speculation = {"decoding_type": "MTP", "max_draft_len": 3}
    made = {"model": str(model), "skip_tokenizer_init": True, "speculative_config": speculation}
    assert said == [f"made {json.dumps(made, sort_keys=True)}", "ended"]


@pytest.mark.usefixtures("stand_in")
def test_the_plug_in_comes_before_the_engine(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, said = drive(["--model", str(model), "--replay"], [], capsys)
    assert [line.split()[0] for line in said] == ["imported", "made", "ended"]
    assert said[0] == "imported replayssm_trtllm"


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ({}, 1),
        ({"speculative_config": None}, 1),
        ({"speculative_config": {"max_draft_len": 2}}, 3),
        ({"speculative_config": {"num_nextn_predict_layers": 1}}, 2),
    ],
)
def test_tokens_of_a_step(given: dict[str, Any], tokens: int) -> None:
    assert trtllm_engine.draft_tokens(given) == tokens


class Engines:
    """Stands for `Process`."""

    def __init__(self) -> None:
        self.started: list[tuple[list[str], dict[str, str]]] = []

    def __call__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> Engines:
        self.started.append((list(arguments), dict(environment)))
        return self

    def ask(self, **order: Any) -> dict[str, Any]:
        if order["order"] == "facts":
            return {"gpu": "a GPU", "versions": {"tensorrt_llm": "1.3.0rc24"}}
        return {"batch": order["batch"], "T": 1, "step_ms": 2.0}

    def end(self) -> None:
        pass


def test_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_CONFIG, "adapter.yaml")
    engines, file = Engines(), tmp_path / "e2e.json"
    options = ["--engine", "trtllm", "--model", "m", "--batch", "1", "--json", str(file)]
    e2e.main([*options, "--", "--config", "engine.yaml"], lambda line: None, engines)
    given = ["--model", "m", "--config", "engine.yaml"]
    assert [arguments for arguments, _ in engines.started] == [given, [*given, "--replay"]]
    off, on = (environment for _, environment in engines.started)
    assert off == {"TRTLLM_USE_MAMBA_REPLAY": "0", "TRTLLM_USE_GDN_REPLAY": "0", ENV_CONFIG: ""}
    assert on == {"TRTLLM_USE_MAMBA_REPLAY": "0", "TRTLLM_USE_GDN_REPLAY": "0"}
    record = json.loads(file.read_text())
    assert (record["topic"], record["rows"][0]["engine"]) == ("e2e-trtllm", "trtllm")
    assert [row["mode"] for row in record["rows"]] == ["off", "on"]
    e2e.main([*options, "--ways", "stock"], lambda line: None, engines)
    assert engines.started[-1][1]["TRTLLM_USE_GDN_REPLAY"] == "1"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "TRTLLM_REPLAYSSM_CONFIG is not set"),
        (["--ways", "off", "--prefix", "100"], "--prefix, --profile and --stagger are SGLang's"),
        (["--ways", "off", "--stagger"], "--prefix, --profile and --stagger are SGLang's"),
        (["--ways", "off", "--", "--replay"], "--replay is set by the way"),
    ],
)
def test_wrong_options(arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV_CONFIG, raising=False)
    with pytest.raises(CommandError, match=message):
        e2e.main(["--engine", "trtllm", "--model", "m", *arguments], lambda line: None, Engines())


def test_an_engine_that_fails_says_why(stand_in: Path, model: Path, tmp_path: Path) -> None:
    """The real process."""
    config = tmp_path / "engine.yaml"
    config.write_text("broken: true\n")
    found = [str(stand_in), os.environ.get("PYTHONPATH", "")]
    path = {"PYTHONPATH": os.pathsep.join(filter(None, found))}
    arguments = ["--model", str(model), "--config", str(config)]
    engine = e2e.Process(arguments, path, e2e.KINDS["trtllm"].module)
    with pytest.raises(e2e.EngineFailed, match=r"status 1: .*AssertionError"):
        engine.ask(order="facts")

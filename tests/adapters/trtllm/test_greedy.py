"""The comparison of greedy tokens, with an engine's process that knows its answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from replayssm.adapters.trtllm.settings import ENV_CONFIG
from replayssm.cli.bench.e2e import REPLAY, TRTLLM_SWITCHES, EngineFailed
from tests.adapters.trtllm.generations import DOUBLE
from tests.adapters.trtllm.greedy import REQUESTS, NotServed, absent, compare, has_mtp, write_settings


class Engine:
    """Repeats a prompt's length; with the adapter some requests part, in smaller batches others."""

    def __init__(self, on: bool, parting: int, noise: int, failing: bool) -> None:
        self.on, self.parting, self.noise, self.failing = on, parting, noise, failing
        self.ended = False

    def ask(self, **order: Any) -> dict[str, Any]:
        if self.failing:
            raise EngineFailed("status 1: no such layer")
        if order["order"] == "facts":
            return {"vocabulary": 100}
        prompts = order["prompts"]
        assert all(10 <= token < 100 for prompt in prompts for token in prompt)
        tokens = [[len(prompt)] * order["output"] for prompt in prompts]
        wrong = self.parting if self.on else self.noise if len(prompts) < REQUESTS else 0
        for row in tokens[:wrong]:
            row[-1] = 0
        return {"tokens": tokens, "iterations": len(prompts) * (3 if self.on else 2)}

    def end(self) -> None:
        self.ended = True


class Engines:
    """Starts them, and keeps with what."""

    def __init__(self, parting: int = 0, noise: int = 0, failing: str = "") -> None:
        self.parting, self.noise, self.failing = parting, noise, failing
        self.started: list[tuple[list[str], dict[str, str], Engine]] = []

    def __call__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> Engine:
        assert all(engine.ended for *_, engine in self.started), "two engines at a time"
        on = REPLAY in arguments
        engine = Engine(on, self.parting, self.noise, self.failing == ("on" if on else "off"))
        self.started.append((list(arguments), dict(environment), engine))
        return engine


def test_only_replay_differs(tmp_path: Path) -> None:
    engines = Engines()
    found = compare("m", tmp_path / "engine.yaml", engines)
    given = ["--model", "m", "--config", str(tmp_path / "engine.yaml")]
    assert [arguments for arguments, *_ in engines.started] == [given, [*given, REPLAY]]
    assert all(environment[name] == "0" for _, environment, _ in engines.started for name in TRTLLM_SWITCHES)
    assert all(engine.ended for *_, engine in engines.started)
    assert (found.requests, found.again, found.on) == (REQUESTS, 0, 0)
    assert (found.iterations_off, found.iterations_on) == (2 * REQUESTS, 3 * REQUESTS)


@pytest.mark.parametrize(
    ("parting", "noise", "fine"), [(2, 0, True), (3, 0, False), (12, 4, True), (13, 4, False)]
)
def test_not_many_more_part_than_without_the_adapter(parting: int, noise: int, fine: bool) -> None:
    """Both halves of the second run part by `noise`."""
    found = compare("m", Path("engine.yaml"), Engines(parting, noise))
    assert (found.again, found.on) == (2 * noise, parting)
    assert (found.on <= found.allowed) == fine


def test_an_engine_that_does_not_serve_the_model_is_told_apart() -> None:
    with pytest.raises(NotServed, match="no such layer"):
        compare("m", Path("engine.yaml"), Engines(failing="off"))
    engines = Engines(failing="on")
    with pytest.raises(EngineFailed, match="no such layer"):
        compare("m", Path("engine.yaml"), engines)
    assert all(engine.ended for *_, engine in engines.started)


def test_settings(tmp_path: Path) -> None:
    config, target = tmp_path / "given.yaml", tmp_path / "made.yaml"
    speculation = {"decoding_type": "MTP", "max_draft_len": 2}
    config.write_text("max_batch_size: 8\nspeculative_config: {decoding_type: Eagle}\n")
    made = {"max_batch_size": 8, "speculative_config": speculation}
    assert yaml.safe_load(write_settings(config, 2, target).read_text()) == made
    assert yaml.safe_load(write_settings(config, 0, target).read_text()) == {"max_batch_size": 8}
    assert yaml.safe_load(write_settings(None, 2, target).read_text()) == {"speculative_config": speculation}


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "tensorrt_llm is not installed" in str(absent({}))
    monkeypatch.syspath_prepend(DOUBLE)
    assert "names no adapter.yaml" in str(absent({}))
    assert absent({ENV_CONFIG: "adapter.yaml"}) is None


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"num_nextn_predict_layers": 1}, True),
        ({"text_config": {"mtp_num_hidden_layers": 1}}, True),
        ({"mtp_num_hidden_layers": 0}, False),
        ({}, False),
    ],
)
def test_layers_for_mtp(config: dict[str, Any], expected: bool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert has_mtp(tmp_path) == expected

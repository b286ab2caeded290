"""`replayssm bench recall`: the recurrence that is the measure, and what precisions do to recall."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from replayssm.cli.bench import recall
from replayssm.cli.bench.recall import measure
from replayssm.cli.bench.recall_stream import Layer, Stream, exact_steps
from replayssm.cli.errors import CommandError
from replayssm.cli.main import app
from replayssm.core.geometry import Rule
from tests import oracle

RULES = tuple(Rule)


def layer(rule: Rule) -> Layer:
    return Layer(rule, heads=2, key_dim=16, value_dim=8, decay=-1e-4)


@pytest.mark.parametrize("rule", RULES)
def test_the_measure_is_the_oracle(rule: Rule) -> None:
    """The stream's recurrence is that of the tests' oracle."""
    tested = layer(rule)
    inputs, _ = Stream(tested, seed=0).take(40)
    start = torch.zeros(tested.geometry.state_shape, dtype=torch.double)
    state, outputs = exact_steps(tested, start, inputs)
    expected, one = start, torch.ones(2)
    for at in range(40):
        q, k, v = (inputs[name][at] for name in "qkv")
        if rule is Rule.MAMBA2:
            token = {"x": v, "dt": one, "A": -1e-4 * one, "B": k, "C": q, "D": 0 * one}
        else:
            g = tested.rates if rule is Rule.KDA else tested.rates[:, 0]
            token = {"q": q, "k": k, "v": v, "g": g, "beta": inputs["beta"][at] * one}
        expected, y = oracle.TOKEN[rule](expected, token)
    scale = 1.0 if rule is Rule.MAMBA2 else 16**0.5  # the oracle scales queries
    torch.testing.assert_close(state, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(outputs[-1], y * scale, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_what_is_written_stays(rule: Rule) -> None:
    """Exactly, a pair of the start is what it was but for decay, whatever has been written since."""
    tested = layer(rule)
    stream = Stream(tested, seed=1)
    inputs, _ = stream.take(stream.pairs)
    key, value = inputs["k"][1].double(), inputs["v"][1].double()
    state = torch.zeros(tested.geometry.state_shape, dtype=torch.double)
    state, _ = exact_steps(tested, state, inputs)
    later, old = stream.take(200)
    state, outputs = exact_steps(tested, state, later)
    found = torch.einsum("hvk,hk->hv", state, key)
    assert (found - value).norm() < 0.05 * value.norm()
    assert old.tolist()[:2] == [True, False]
    again = [place for place in range(200) if torch.equal(later["q"][place], inputs["k"][1])]
    assert len(again) == 50  # every fourth query asks for the second of two pairs of the start
    assert all((outputs[place] - value).norm() < 0.05 * value.norm() for place in again)


def rows_of(rule: Rule, *precisions: str, step: int = 16, tokens: int = 256) -> dict[str, dict[str, Any]]:
    """The last bucket's row, by precision."""
    found = measure(layer(rule), precisions, tokens, window=16, step=step)
    return {row["precision"]: row for row in found if row["last"] == tokens}


@pytest.mark.parametrize("rule", RULES)
def test_precisions_differ_as_they_should(rule: Rule) -> None:
    """fp32 is exact; a read copy's error stays in what is read; one packed copy drifts, to nearest or not."""
    found = rows_of(rule, "fp32", "nvfp4/fp32", "nvfp4+sr", "nvfp4+force")
    assert found["fp32"]["error_old"] < 1e-5
    assert found["fp32"]["state_error"] < 1e-5
    split = found["nvfp4/fp32"]
    assert split["state_error"] < 1e-5
    assert split["read_state_error"] > 0.02
    assert 1e-3 < split["error_old"] < 0.2
    for shared in ("nvfp4+sr", "nvfp4+force"):
        assert found[shared]["error_old"] > 2 * split["error_old"]
        assert found[shared]["state_error"] == found[shared]["read_state_error"] > 0.05


def test_steps_of_several_tokens_are_those_of_one() -> None:
    one, many = (rows_of(Rule.GDN, "nvfp4/fp32", step=step, tokens=64)["nvfp4/fp32"] for step in (1, 16))
    assert many["error_old"] == pytest.approx(one["error_old"], rel=1e-3)
    assert many["read_state_error"] == pytest.approx(one["read_state_error"], rel=1e-3)


def test_inputs_in_bf16() -> None:
    """The measure takes inputs as rounded: what is left is the rounding of outputs."""
    found = list(measure(layer(Rule.GDN), ["fp32"], 64, step=4, dtype=torch.bfloat16))[-1]
    assert 1e-4 < found["error_old"] < 2**-8
    assert found["state_error"] < 1e-5


def test_a_whole_run(tmp_path: Path) -> None:
    said: list[str] = []
    file = tmp_path / "recall.json"
    given = ["--rule", "gdn,mamba2", "--precisions", "fp32,bf16", "--tokens", "64", "--step", "16"]
    given += ["--heads", "1", "--key-dim", "16", "--value-dim", "8", "--device", "cpu", "--json", str(file)]
    recall.main(given, said.append)
    record = json.loads(file.read_text())
    assert record["topic"] == "recall"
    assert record["command"] == f"replayssm bench recall {' '.join([*given[:-1], 'recall.json'])}"
    assert [(row["rule"], row["precision"], row["last"]) for row in record["rows"][:4]] == [
        ("gdn", "fp32", 16), ("gdn", "bf16", 16), ("gdn", "fp32", 64), ("gdn", "bf16", 64),
    ]  # fmt: skip
    assert said[-1].splitlines()[0].split()[:5] == ["precision", "to", "16", "to", "64"]
    assert record["rows"][0]["error_recent"] is None  # nothing that is asked for has been written by then


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rule", "rnn"], "unknown rule 'rnn'"),
        (["--precisions", "fp8"], "drifts away"),
        (["--step", "5"], "a divisor of the window 16"),
        (["--key-dim", "12"], "a multiple of 8"),
        (["--json", "nowhere/x.json"], "no folder nowhere"),
    ],
)
def test_wrong_options(arguments: list[str], message: str) -> None:
    with pytest.raises(CommandError, match=message):
        recall.main(["--device", "cpu", *arguments])


def test_the_command_reaches_it() -> None:
    result = CliRunner().invoke(app, ["bench", "recall", "--rule", "rnn"])
    assert result.exit_code == 2
    assert "unknown rule" in result.output

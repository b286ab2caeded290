"""The proof for TensorRT-LLM without the engine: what is run, the record, and the verdict."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from replayssm.adapters.trtllm.settings import ENV_CONFIG, read

ROOT = Path(__file__).resolve().parents[2]
PASSED = '<testcase name="test_tokens[m]"><properties><property name="on" value="3"/></properties></testcase>'
FAILED = '<testcase name="test_tokens[m]"><failure message="3 &gt; 2"/></testcase>'
SKIPPED = '<testcase name="test_mtp[m]"><skipped message="m has no layers for MTP"/></testcase>'
STEP = {"model": "m", "engine": "trtllm", "mode": "on", "batch": 1, "T": 1, "step_ms": 2.0}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = ROOT / "bench" / "trtllm_proof.py"
    spec = importlib.util.spec_from_file_location("bench_trtllm_proof", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Commands:
    """Stands for the commands that are run; the doctor's status, the tests' report, engines that failed."""

    def __init__(self, doctor: int, cases: str, failed: Sequence[str] = ()) -> None:
        self.doctor, self.cases, self.failed = doctor, cases, failed
        self.ran: list[tuple[str, list[str], dict[str, str]]] = []

    def __call__(
        self, command: Sequence[str], environment: dict[str, str]
    ) -> subprocess.CompletedProcess[str]:
        what = next(each for each in ("doctor", "pytest", "bench") if each in command)
        self.ran.append((what, list(command), environment))
        assert read(Path(environment[ENV_CONFIG])).window == 16
        if what == "pytest" and self.cases:
            report = next(each for each in command if each.startswith("--junitxml=")).partition("=")[2]
            Path(report).write_text(f"<testsuites><testsuite>{self.cases}</testsuite></testsuites>")
        if what == "bench":
            content = {"rows": [STEP], "failed": [{"reason": reason} for reason in self.failed]}
            Path(command[command.index("--json") + 1]).write_text(json.dumps(content))
        status = self.doctor if what == "doctor" else 0
        return subprocess.CompletedProcess(
            list(command), status, f"{what} said\nin /usr/lib/x/y.py, https://a/b\n", ""
        )


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV_CONFIG, raising=False)


def test_everything_passes(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, commands = tmp_path / "proof.json", Commands(0, PASSED + SKIPPED)
    arguments = [str(out), "--model", "/models/m", "--config", "/etc/engine.yaml", "--batch", "1,8"]
    assert script.main(arguments, commands) == 0
    assert [what for what, *_ in commands.ran] == ["doctor", "pytest", "bench"]
    _, bench, environment = commands.ran[2]
    assert bench[-2:] == ["--config", "/etc/engine.yaml"]
    assert bench[bench.index("--model") + 1] == environment["TRTLLM_TEST_MODEL"] == "/models/m"
    assert environment["TRTLLM_TEST_CONFIG"] == "/etc/engine.yaml"
    assert environment["TRTLLM_TEST_DRAFTS"] == "3"
    record = json.loads(out.read_text())
    assert record["topic"] == "gpu-trtllm"
    assert record["command"] == "bench/trtllm_proof.py proof.json --model m --config engine.yaml --batch 1,8"
    assert {"date", "machine", "gpu", "versions", "commit"} < record.keys()
    assert record["rows"] == [
        {"check": "doctor", "outcome": "passed", "told": ["doctor said", "in y.py, https://a/b"]},
        {"check": "test_tokens[m]", "outcome": "passed", "on": 3},
        {"check": "test_mtp[m]", "outcome": "not run", "told": ["m has no layers for MTP"]},
        {"check": "throughput", "outcome": "passed"},
        STEP,
    ]
    assert "not run  test_mtp[m]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("commands", "status"),
    [
        (Commands(1, PASSED), 1),
        (Commands(0, PASSED + FAILED), 1),
        (Commands(0, PASSED, failed=["status 1: out of memory"]), 1),
        (Commands(0, ""), 1),
        (Commands(1, SKIPPED), 2),
    ],
    ids=["doctor", "a test", "an engine of the throughput", "no report", "all skipped"],
)
def test_the_verdict(script: ModuleType, commands: Commands, status: int, tmp_path: Path) -> None:
    assert script.main([str(tmp_path / "proof.json"), "--model", "m"], commands) == status


def test_no_engine_no_throughput(script: ModuleType, tmp_path: Path) -> None:
    commands = Commands(1, SKIPPED)
    script.main([str(tmp_path / "proof.json"), "--model", "m"], commands)
    assert [what for what, *_ in commands.ran] == ["doctor", "pytest"]
    rows = json.loads((tmp_path / "proof.json").read_text())["rows"]
    assert rows[-1]["told"] == ["no test of the engine could run"]


def test_the_commands_on_a_machine_without_the_engine(tmp_path: Path) -> None:
    """The real ones: the doctor finds nothing, the tests are skipped with a reason, and so is the status."""
    out = tmp_path / "proof.json"
    done = subprocess.run(
        ["ci/gpu_trtllm.sh", out],
        cwd=ROOT,
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    rows = {row["check"]: row for row in json.loads(out.read_text())["rows"]}
    assert rows["doctor"]["outcome"] == "failed"
    assert "not found: expected it installed here" in "".join(rows["doctor"]["told"])
    tests = [row for check, row in rows.items() if check.startswith("test_")]
    assert len(tests) == 4
    assert all("needs a CUDA device" in "".join(row["told"]) for row in tests)

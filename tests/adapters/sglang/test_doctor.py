"""`replayssm doctor --engine sglang` with the real SGLang."""

from __future__ import annotations

import pytest

from replayssm.adapters.sglang.doctor import examine
from tests.adapters.sglang import processes

RUN = "from replayssm.cli.main import app; app()"
MISSING = """
import sglang.srt.runtime_context as context
def publish(server_args): ...
context.publish = publish
"""


def doctor(before: str = "", fresh: bool = False) -> tuple[int, dict[str, str]]:
    """Exit status, and lines by what they are about; in a process whose plugins are not loaded yet."""
    ended = processes.run(["-c", before + RUN, "doctor", "--engine", "sglang"], fresh=fresh)
    lines = [line for line in ended.stdout.splitlines() if line.startswith(("ok  ", "FAIL"))]
    assert lines, ended.log
    return ended.status, {line[5:].partition(":")[0]: line for line in lines}


def test_all_is_well() -> None:
    status, lines = doctor(fresh=True)
    assert status == 0
    assert list(lines) == ["SGLang", "switch", "plugin", "functions", "hooks", "settings", "kernels"]
    assert all(line.startswith("ok") for line in lines.values())
    assert "0.5.23" in lines["SGLang"]
    assert "torch_backend on cpu" in lines["kernels"]


@pytest.mark.parametrize(
    ("variable", "value", "failing", "message"),
    [
        ("REPLAYSSM_SGLANG", "off", {"switch"}, "is off: unset it"),
        ("SGLANG_PLUGINS", "another", {"plugin"}, "expected replayssm among the names"),
        ("REPLAYSSM_WINDOW", "wide", {"settings", "kernels"}, "window"),
        ("REPLAYSSM_BACKEND", "cuda", {"kernels"}, "backend 'cuda' cannot run on cpu"),
        ("REPLAYSSM_SMALL_BATCH", "few", {"settings", "kernels"}, "small_batch"),
        ("REPLAYSSM_PRECISION", "nvfp4+sr", {"settings"}, "recurs lies in SGLang's own pool"),
    ],
)
def test_what_stands_in_the_way(
    variable: str, value: str, failing: set[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    findings = [finding for finding in examine() if not finding.fine]
    assert {finding.what for finding in findings} == failing
    assert all(message in finding.detail for finding in findings), findings


def test_another_signature() -> None:
    status, lines = doctor(MISSING)
    assert status == 1
    assert "sglang.srt.runtime_context.publish" in lines["functions"]
    assert "missing role, found server_args" in lines["functions"]

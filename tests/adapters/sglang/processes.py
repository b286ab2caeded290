"""Processes for tests of what SGLang does in its own: forks of one that has imported it, or interpreters.

Importing takes longer than most of what is tested, and an engine's own processes import again. Fresh
interpreters are for the tests that show that nothing depends on the difference.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
ENVIRONMENT = dict(os.environ)
"""Before a test has changed it."""
_PORTS = iter(range(100))


@dataclass(frozen=True)
class Ended:
    """Exit status and output of a process."""

    status: int
    stdout: str
    stderr: str

    @property
    def log(self) -> str:
        return self.stdout + self.stderr


def run(
    command: Sequence[str],
    plugins: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    seconds: int = 600,
    fresh: bool = False,
) -> Ended:
    """Run `command`, a script or `-c` and code, with arguments, and wait for its end.

    Args:
        command: as for the interpreter.
        plugins: folders beside this file that the process finds modules and plugins in.
        environment: variables beside our own.
        seconds: the process is ended then.
        fresh: in an interpreter of its own.
    """
    path = [str(HERE / plugin) for plugin in plugins]
    joined = os.pathsep.join(filter(None, [*path, os.environ.get("PYTHONPATH", "")]))
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {}), "PYTHONPATH": joined}
    if fresh:
        found = subprocess.run(
            [sys.executable, *command],
            env=variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds,
            start_new_session=True,  # A scheduler that fails ends all processes of its group.
        )
        return Ended(found.returncode, found.stdout, found.stderr)
    with tempfile.TemporaryDirectory() as folder:
        stdout, stderr = Path(folder, "stdout"), Path(folder, "stderr")
        job = {
            "command": list(command), "environment": variables, "path": path, "seconds": seconds,
            "stdout": str(stdout), "stderr": str(stderr),
        }  # fmt: skip
        return Ended(_ask(json.dumps(job)), stdout.read_text(), stderr.read_text())


def port() -> int:
    """A port for an engine's ranks to meet at, another at each call.

    SGLang draws one itself and binds it seconds later: engines that start together may draw the same.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    for number in _PORTS:
        with socket.socket() as trial:
            if trial.connect_ex(("127.0.0.1", found := 20000 + 100 * (worker % 20) + number)):
                return found
    raise AssertionError("100 engines have had all ports of this process")


def _ask(job: str) -> int:
    host = _host()
    assert host.stdin is not None
    assert host.stdout is not None
    print(job, file=host.stdin, flush=True)
    answer = host.stdout.readline()
    assert answer, "the host of SGLang's processes has ended; what it wrote is above"
    return int(answer)


@cache
def _host() -> subprocess.Popen[str]:
    path = os.pathsep.join(filter(None, [str(HERE / "stubs"), ENVIRONMENT.get("PYTHONPATH", "")]))
    host = subprocess.Popen(
        [sys.executable, str(HERE / "process_host.py")],
        env={**ENVIRONMENT, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(host.kill)
    return host

"""Runs scripts in forks of one process that has imported SGLang; itself a script, which `processes` starts.

An engine has three processes: as interpreters they import for longer than they serve a few requests. Those
that a fork starts are forks again, where SGLang would start interpreters. No plugin is loaded here, so what a
fork runs loads them as in a server. Jobs come by standard input, one JSON object a line; each is answered
with its exit status.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from sglang.srt.environ import envs
from sglang.srt.managers import detokenizer_manager, scheduler

assert detokenizer_manager  # Imported for the forks.


def main() -> None:
    answers = os.dup(1)
    os.dup2(2, 1)
    for line in sys.stdin:
        process = os.fork()
        if process == 0:
            os.close(answers)
            os._exit(run(json.loads(line)))
        _, status = os.waitpid(process, 0)
        os.write(answers, f"{os.waitstatus_to_exitcode(status)}\n".encode())


def run(job: dict[str, Any]) -> int:
    """Run a job's script as the interpreter would; its exit status."""
    signal.alarm(job["seconds"])
    redirect(job["stdout"], job["stderr"])
    os.environ.clear()
    os.environ.update(job["environment"])
    sys.path[:0] = job["path"]
    # SGLang reads these with the import.
    scheduler.TEST_RETRACT = envs.SGLANG_TEST_RETRACT.get()
    scheduler.TEST_RETRACT_INTERVAL = envs.SGLANG_TEST_RETRACT_INTERVAL.get()
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *args, **given: None  # SGLang asks for new interpreters.
    try:
        execute(job["command"])
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def redirect(stdout: str, stderr: str) -> None:
    for number, path in enumerate((os.devnull, stdout, stderr)):
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(opened, number)
        os.close(opened)


def execute(command: Sequence[str]) -> None:
    """A script with its arguments, or `-c`, code and its arguments."""
    if command[0] == "-c":
        sys.argv = ["-c", *command[2:]]
        exec(compile(command[1], "<string>", "exec"), {"__name__": "__main__"})
        return
    sys.argv = list(command)
    runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    main()

"""Processes that run a script: forked from one that has imported torch, which is what takes their time.

Neither the engine nor anything of replayssm is imported there, so each of them imports both for itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory

_FORKED = get_context("forkserver")
_FORKED.set_forkserver_preload(["torch._dynamo"])

_BEGIN = """
import os, sys
assert not {name.partition(".")[0] for name in sys.modules} & {"replayssm", "tensorrt_llm"}
for number, stream in enumerate(streams):
    os.dup2(os.open(stream, os.O_RDWR), number)
sys.stdin = open(0)  # multiprocessing has closed it
sys.argv = ["-c", *arguments]
sys.path.insert(0, engine)
os.environ.clear()
os.environ.update(environment)
"""


def run(
    script: str, arguments: Sequence[str], stdin: bytes, engine: Path, environment: Mapping[str, str]
) -> CompletedProcess[bytes]:
    """A process with only `environment`, and with the folder `engine` before this one's path."""
    with TemporaryDirectory() as folder:
        streams = [Path(folder, name) for name in ("stdin", "stdout", "stderr")]
        for stream, content in zip(streams, (stdin, b"", b""), strict=True):
            stream.write_bytes(content)
        given = {
            "streams": [str(stream) for stream in streams], "arguments": arguments, "engine": str(engine),
            "environment": dict(environment), "__name__": "__main__",
        }  # fmt: skip
        process = _FORKED.Process(target=exec, args=(_BEGIN + script, given))
        process.start()
        process.join()
        output, errors = (stream.read_bytes() for stream in streams[1:])
    assert process.exitcode is not None
    return CompletedProcess(script, process.exitcode, output, errors)

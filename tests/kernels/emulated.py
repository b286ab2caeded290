"""The CUDA backend's kernels on a CPU: their sources, and an emulator of a program's warps, built by g++."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch

from replayssm.kernels import cuda_backend, registry
from replayssm.kernels.cuda_backend import build, fold
from replayssm.kernels.cuda_backend.build import KernelConfig
from tests import support

HERE = Path(__file__).with_name("emulator")
COMPILER = shutil.which("g++")


class EmulatedProgram:
    """A configuration's kernel, as `Program` is; blocks and lanes run one after another.

    Between two meetings of the lanes each runs alone, from the first to the last or `backwards`: what
    comes out the same in both orders does not depend on who is faster.
    """

    def __init__(self, config: KernelConfig, backwards: bool) -> None:
        kernel = build.source(config, machine=False)
        parts = ((HERE / "primitives.hpp").read_text(), kernel, (HERE / "main.hpp").read_text())
        folder = Path(mkdtemp(prefix="emulated"))
        source, library = folder / "step.cpp", folder / "step.so"
        source.write_text("\n".join(parts), encoding="utf-8")
        flags = ["-std=c++17", "-Og", "-shared", "-fPIC", "-w", f"-DKERNEL={config.entry}", *config.defines()]
        flags += ["-DBACKWARDS"] * backwards
        checks = ["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"]
        subprocess.run(["g++", *flags, *checks, "-o", library, source], check=True)
        self._library = ctypes.CDLL(str(library))
        shutil.rmtree(folder)
        assert self._library.shared_bytes() == config.shared_bytes

    def launch(self, blocks: tuple[int, int], params: ctypes.Structure, stream: int) -> None:
        assert stream == 0
        self._library.launch(*blocks, ctypes.byref(params))

    def stochastic_halves(self, x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        """The source's rounding of fp32 `x` by int64 `words`, as fp16; both dense and of one shape."""
        assert x.dtype is torch.float32
        assert words.dtype is torch.int64
        halves = torch.empty(x.shape, dtype=torch.float16)
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (x, words, halves)]
        self._library.stochastic_halves(x.numel(), *pointers)
        return halves


@cache
def emulated_program(config: KernelConfig, device: int, backwards: bool = False) -> EmulatedProgram:
    return EmulatedProgram(config, backwards)


def serve_on_cpu(monkeypatch: pytest.MonkeyPatch, backwards: bool = False) -> None:
    """Make backend "cuda" run here, emulated."""
    monkeypatch.setitem(registry.BACKENDS, "cuda", cuda_backend.__name__)
    monkeypatch.setattr(cuda_backend, "unavailable", lambda device_type: None)
    for module in (cuda_backend, fold):
        monkeypatch.setattr(module, "program", partial(emulated_program, backwards=backwards))
    registry._resolve.cache_clear()


def every_step_by_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For a fixture: every step of a walk by the CUDA backend, emulated."""
    serve_on_cpu(monkeypatch)
    for rule, step in support.STEP.items():
        monkeypatch.setitem(support.STEP, rule, partial(step, backend="cuda"))
    yield
    registry._resolve.cache_clear()
    registry._resolve_operation.cache_clear()

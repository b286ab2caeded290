"""The step kernel as a program: its compile-time configuration, its parameters, its build.

The source is compiled at first use by NVRTC, for the device at hand and one configuration, in a few
seconds; the machine code is kept in the user's cache folder (`$XDG_CACHE_HOME/replayssm`, by default
`~/.cache/replayssm`).
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from replayssm.core.geometry import Rule

try:
    from cuda.bindings import driver, nvrtc
except ImportError as error:
    _not_imported: str | None = str(error)
else:
    _not_imported = None

logger = logging.getLogger(__name__)

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
RULES = {Rule.MAMBA2: 0, Rule.GDN: 1, Rule.KDA: 2}
SOURCES = ("primitives.cuh", "step.cu")
UNIT = 16
"""Value rows of a unit, the piece of a checkpoint that a program works on at a time."""
KEY_DIM = 128
ACTIVATION_BYTES = 2
WARP = 32
SHARED_LIMIT = 227 * 1024
"""Bytes of shared memory of a Hopper multiprocessor."""
SHARED_RESERVED = 1024
"""Of these, what each program costs besides its own."""
_EARLY_LAUNCH = 9
"""Major compute capability from which on a kernel may be launched before the one it waits for has ended."""


@dataclass(frozen=True)
class Config:
    """What the kernel knows at compile time; the head of `step.cu` says what each means."""

    rule: Rule
    value_dim: int
    group: int
    state_dtype: torch.dtype
    tokens: int
    records: int
    units: int
    stochastic: bool

    def defines(self) -> list[str]:
        """The configuration as compiler options."""
        values = {
            "RULE": RULES[self.rule], "V": self.value_dim, "GROUP": self.group,
            "STATE": TYPES[self.state_dtype], "TOKENS": self.tokens,
            "RECORDS": self.records, "UNITS": self.units,
            "STOCHASTIC": int(self.stochastic), "PROGRAMS": self.programs,
        }  # fmt: skip
        return [f"-D{name}={value}" for name, value in values.items()]

    @property
    def programs(self) -> int:
        """Programs that a multiprocessor holds at a time: as many as keep their registers out of memory."""
        most = 8 if self.rule is Rule.KDA else 10
        return min(SHARED_LIMIT // (self.shared_bytes + SHARED_RESERVED), most)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a program, as the source lays it out."""
        kda, one = self.rule is Rule.KDA, self.tokens == 1
        unit = UNIT * KEY_DIM * self.state_dtype.itemsize
        stages = 2 if self.units > 1 else 1
        matrix, ring = self.tokens**2, 8 * self.records
        record = ACTIVATION_BYTES if self.rule is Rule.MAMBA2 else 4
        values = UNIT * (ring * record + self.tokens * ACTIVATION_BYTES)
        keys = 0 if kda else ring * KEY_DIM * ACTIVATION_BYTES
        shared = stages * (unit + values) + keys
        shared += 0 if one else 4 * matrix  # of tokens upon tokens
        if not kda:
            return shared
        own = 4 * KEY_DIM + (8 * ring if one else 0)  # decays, and one token's scores
        drafts, ring_keys = 8 * self.tokens * KEY_DIM, 4 * ring * KEY_DIM
        in_stage = ring_keys if one else drafts
        if stages == 2 and unit >= in_stage:
            own -= in_stage
        return shared + own + drafts + ring_keys


class Params(ctypes.Structure):
    """`struct Params` of the source, field by field."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in (
            "state", "u", "k", "g", "ring_start", "hist_len", "q_in", "k_in", "v_in", "g_in",
            "beta_in", "z_in", "out", "A", "D", "dt_bias", "state_indices", "ring_indices", "lens",
            "rand_seed",
        )]
        + [(name, ctypes.c_int64) for name in (
            "s_state", "s_u", "h_u", "s_k", "h_k", "s_g", "h_g",
            "b_q", "t_q", "b_k", "t_k", "b_v", "t_v", "b_g", "t_g", "b_beta", "t_beta", "b_z", "t_z",
            "b_out", "t_out",
        )]
        + [(name, ctypes.c_int) for name in (
            "R", "L", "T", "B", "pad_slot", "layer", "wide_state", "wide_ring", "wide_lens", "varlen",
            "g_type", "beta_type", "A_type", "D_type", "bias_type", "turns", "l2norm", "softplus", "bounded",
        )]
        + [("scale", ctypes.c_float), ("bound", ctypes.c_float)]
    )  # fmt: skip


@cache
def missing() -> str | None:
    """What the build lacks on this machine; `None` when it lacks nothing."""
    if _not_imported is not None:
        return f"cuda.bindings can't be imported ({_not_imported}); pip install cuda-bindings"
    try:
        _checked(nvrtc.nvrtcVersion())
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        return f"NVRTC, CUDA's run-time compiler, can't be loaded ({reason}); pip install nvidia-cuda-nvrtc"
    return None


def source() -> str:
    """The kernel's source text."""
    return "".join(Path(__file__).with_name(name).read_text(encoding="utf-8") for name in SOURCES)


class Program:
    """A configuration's kernel on one device."""

    def __init__(self, config: Config, device: int) -> None:
        major, minor = torch.cuda.get_device_capability(device)
        image = machine_code(config, f"sm_{major}{minor}")
        with torch.cuda.device(device):
            torch.cuda.current_stream()
            self._module = _checked(driver.cuModuleLoadData(image))
            self._function = _checked(driver.cuModuleGetFunction(self._module, b"replay_step"))
            attributes = driver.CUfunction_attribute
            for name, value in (
                (attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, config.shared_bytes),
                (attributes.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100),
            ):
                _checked(driver.cuFuncSetAttribute(self._function, name, value))
        self._device = device
        self._shape = driver.CUlaunchConfig()
        self._shape.blockDimX, self._shape.blockDimY, self._shape.blockDimZ = WARP, 1, 1
        self._shape.gridDimZ = 1
        self._shape.sharedMemBytes = config.shared_bytes
        if major >= _EARLY_LAUNCH:
            early = driver.CUlaunchAttribute()
            early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            early.value.programmaticStreamSerializationAllowed = 1
            self._shape.attrs, self._shape.numAttrs = [early], 1

    def launch(self, blocks: tuple[int, int], params: Params, stream: int) -> None:
        """One launch on the program's device; `params` are copied before the call returns.

        Where the GPU can, the launch is prepared while the kernel before it ends, which the kernel waits for.
        """
        if torch.cuda.current_device() != self._device:
            with torch.cuda.device(self._device):
                return self.launch(blocks, params, stream)
        pointer = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        self._shape.gridDimX, self._shape.gridDimY = blocks
        self._shape.hStream = stream
        _checked(driver.cuLaunchKernelEx(self._shape, self._function, ctypes.addressof(pointer), 0))


@cache
def program(config: Config, device: int) -> Program:
    """The kernel of a configuration on CUDA device `device`, built at the first call."""
    return Program(config, device)


def _checked(result: tuple[Any, ...]) -> Any:
    """The value of a call into CUDA.

    Raises:
        RuntimeError: the call failed.
    """
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(
            f"CUDA reports {status.name}; the step kernel cannot be used, choose backend='triton'"
        )
    return values[0] if values else None


def machine_code(config: Config, arch: str) -> bytes:
    """The kernel of a configuration for an architecture such as `sm_90`, compiled or from the cache."""
    text = source()
    plain = ("--std=c++17", "--device-as-default-execution-space", "--disable-warnings")
    options = [f"--gpu-architecture={arch}", *plain, *config.defines()]
    version = _checked_pair(nvrtc.nvrtcVersion())
    key = hashlib.sha256("\n".join([text, str(version), *options]).encode()).hexdigest()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    kept = Path(base, "replayssm", f"{key}.cubin")
    with suppress(OSError):
        return kept.read_bytes()
    code = _compile(text, options)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        own = kept.with_suffix(f".{os.getpid()}")
        own.write_bytes(code)
        own.replace(kept)
    except OSError as error:
        logger.warning("replayssm: a compiled kernel can't be kept in %s: %s", kept.parent, error)
    return code


def _checked_pair(result: tuple[Any, ...]) -> tuple[Any, ...]:
    _checked(result)
    return result[1:]


def _compile(text: str, options: list[str]) -> bytes:
    """Machine code of the source.

    Raises:
        RuntimeError: the compiler's own messages.
    """
    handle = _checked(nvrtc.nvrtcCreateProgram(text.encode(), b"step.cu", 0, [], []))
    status = nvrtc.nvrtcCompileProgram(handle, len(options), [option.encode() for option in options])[0]
    if int(status) != 0:
        log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(handle))
        _checked(nvrtc.nvrtcGetProgramLog(handle, log))
        messages = log.decode(errors="replace").rstrip("\0\n")
        raise RuntimeError(f"the step kernel did not compile with {' '.join(options)}:\n{messages}")
    code = b" " * _checked(nvrtc.nvrtcGetCUBINSize(handle))
    _checked(nvrtc.nvrtcGetCUBIN(handle, code))
    _checked(nvrtc.nvrtcDestroyProgram(handle))
    return code

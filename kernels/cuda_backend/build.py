"""Kernels as programs: their build, and of the step kernels the configurations and parameters.

The source is compiled at first use by NVRTC, for the device at hand and one configuration, in a few
seconds; the machine code is kept in the user's cache folder (`$XDG_CACHE_HOME/replayssm`, by default
`~/.cache/replayssm`).
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch

from replayssm.core.formats import PACKED
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
SHARED_SOURCES = ("primitives.cuh", "common.cuh")
READ_SOURCES = (*SHARED_SOURCES, "read.cuh")
UNIT = 16
"""Value rows of a unit, the piece of a checkpoint that a program works on at a time."""
KEY_DIM = 128
BLOCK_ROWS = 128
"""Value rows of a block of `read_blocks.cu`."""
ACTIVATION_BYTES = 2
WARP = 32
SHARED_LIMIT = 227 * 1024
"""Bytes of shared memory of a Hopper multiprocessor."""
SHARED_RESERVED = 1024
"""Of these, what each program costs besides its own."""
_SCORE_STRIDE = 40
_MEETING_STRIDE = 36
_EARLY_LAUNCH = 9
"""Major compute capability from which on a kernel may be launched before the one it waits for has ended."""


def _options(values: Mapping[str, int]) -> list[str]:
    return [f"-D{name}={value}" for name, value in values.items()]


@dataclass(frozen=True)
class StepConfig:
    """What `step.cu` knows at compile time; its head says what each means.

    Attributes:
        source: the file of the kernel.
        warps: of a program.
    """

    rule: Rule
    value_dim: int
    group: int
    state_dtype: torch.dtype
    tokens: int
    records: int
    units: int
    stochastic: bool
    skips: bool = False
    source: ClassVar[str] = "step.cu"
    headers: ClassVar[tuple[str, ...]] = SHARED_SOURCES
    entry: ClassVar[str] = "replay_step"
    warps: ClassVar[int] = 1

    def defines(self) -> list[str]:
        """The configuration as compiler options."""
        return _options({
            "RULE": RULES[self.rule], "V": self.value_dim, "GROUP": self.group,
            "STATE": TYPES[self.state_dtype], "WARPS": self.warps, "TOKENS": self.tokens,
            "RECORDS": self.records, "UNITS": self.units,
            "STOCHASTIC": int(self.stochastic), "PROGRAMS": self.programs, "SKIPS": int(self.skips),
        })  # fmt: skip

    @property
    def fills(self) -> bool:
        """Whether the step may be large, and a multiprocessor shall hold as many programs as it can."""
        return self.units > 1

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
        + [(name, ctypes.c_void_p) for name in ("scales", "head_scales", "beta")]
        + [(name, ctypes.c_int64) for name in ("s_scales", "s_heads", "s_beta", "h_beta")]
        + [("heads", ctypes.c_int), ("tolerance", ctypes.c_float), ("norms", ctypes.c_void_p)]
    )  # fmt: skip


@dataclass(frozen=True)
class Kinds:
    """Of a step's arguments what `small.cu` knows at compile time: which there are, and their types.

    Attributes:
        state_index: slots of the state, 0 if not given, 1 int32, 2 int64.
        ring_index: slots of the ring, likewise.
        lens: tokens of the rows, likewise.
        varlen: whether those are sums (`cu_seqlens`).
        g_type: of gates, as `TYPES`.
        beta_type: of beta, likewise.
        a_type: of `A`, likewise; -1 if not given.
        bias_type: of `dt_bias`, likewise.
        d_type: of `D`, likewise.
        has_z: whether outputs are gated.
        l2norm: whether keys and queries are normalised.
        softplus: whether `dt` is made positive.
        bounded: whether KDA's gate is the bounded one.
    """

    state_index: int
    ring_index: int
    lens: int
    varlen: bool
    g_type: int
    beta_type: int
    a_type: int
    bias_type: int
    d_type: int
    has_z: bool
    l2norm: bool
    softplus: bool
    bounded: bool

    @classmethod
    def of(cls, params: Params) -> Kinds:
        """Those of a step's parameters."""
        return cls(
            state_index=1 + params.wide_state if params.state_indices else 0,
            ring_index=1 + params.wide_ring if params.ring_indices else 0,
            lens=1 + params.wide_lens if params.lens else 0,
            varlen=bool(params.varlen),
            g_type=params.g_type,
            beta_type=params.beta_type,
            a_type=params.A_type if params.A else -1,
            bias_type=params.bias_type if params.dt_bias else -1,
            d_type=params.D_type if params.D else -1,
            has_z=bool(params.z_in),
            l2norm=bool(params.l2norm),
            softplus=bool(params.softplus),
            bounded=bool(params.bounded),
        )


@dataclass(frozen=True)
class SmallConfig:
    """What `small.cu` knows at compile time, likewise.

    Attributes:
        kinds: of the arguments.
    """

    rule: Rule
    value_dim: int
    group: int
    state_dtype: torch.dtype
    tokens: int
    ring: int
    rows: int
    stochastic: bool
    kinds: Kinds
    source: ClassVar[str] = "small.cu"
    headers: ClassVar[tuple[str, ...]] = SHARED_SOURCES
    entry: ClassVar[str] = "replay_step"
    warps: ClassVar[int] = 4
    fills: ClassVar[bool] = False

    def defines(self) -> list[str]:
        """The configuration as compiler options."""
        return _options({
            "RULE": RULES[self.rule], "V": self.value_dim, "GROUP": self.group,
            "STATE": TYPES[self.state_dtype], "WARPS": self.warps, "TOKENS": self.tokens,
            "RING": self.ring, "ROWS": self.rows, "STOCHASTIC": int(self.stochastic),
            **{name.upper(): int(value) for name, value in asdict(self.kinds).items()},
        })  # fmt: skip

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a program, as the source lays it out."""
        tokens = self.tokens
        queries = 4 if tokens <= 4 else 8
        columns = tokens * (1 if self.rule is Rule.MAMBA2 else 2)
        common = 2 * queries * (_SCORE_STRIDE + 8) + 32 + 32 + 16 + 20 + 2 * tokens**2
        rows = self.rows * (columns + 1) if tokens > 1 else 0
        shared = -(-4 * (common + rows) // 16) * 16
        if self.rule is not Rule.KDA:
            return shared
        return shared + self.ring * KEY_DIM * (4 + ACTIVATION_BYTES) + 4 * 3 * KEY_DIM


@dataclass(frozen=True)
class ReadConfig:
    """What `read.cu` knows at compile time, likewise.

    Attributes:
        format: of the states that are read.
        rows: value rows of a warp.
        split: whether there is another copy, and records keep beta.
        kinds: of the arguments.
    """

    rule: Rule
    value_dim: int
    group: int
    format: str
    tokens: int
    records: int
    rows: int
    split: bool
    kinds: Kinds
    source: ClassVar[str] = "read.cu"
    headers: ClassVar[tuple[str, ...]] = READ_SOURCES
    entry: ClassVar[str] = "replay_step"
    warps: ClassVar[int] = 4
    fills: ClassVar[bool] = False

    def defines(self) -> list[str]:
        """The configuration as compiler options."""
        return _options({
            "RULE": RULES[self.rule], "V": self.value_dim, "GROUP": self.group,
            "STATE": TYPES[torch.float32], "WARPS": self.warps, "FORMAT": list(PACKED).index(self.format),
            "TOKENS": self.tokens, "RECORDS": self.records, "ROWS": self.rows, "SPLIT": int(self.split),
            "STOCHASTIC": 0, **{name.upper(): int(value) for name, value in asdict(self.kinds).items()},
        })  # fmt: skip

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a program, as the source lays it out."""
        return 4 * self.warps * 2 * self.tokens * KEY_DIM if self.rule is Rule.KDA else 0

    def programs(self, heads: int) -> int:
        """Programs that serve so many heads of a row."""
        return -(-heads * -(-self.value_dim // self.rows) // self.warps)


@dataclass(frozen=True)
class ReadBlocksConfig:
    """What `read_blocks.cu` knows at compile time, likewise.

    Attributes:
        format: of the states that are read.
        tokens: 1 or 4, the most a row brings.
        blocks: of 128 value rows, that a warp serves in turn.
        split: whether there is another copy, and records keep beta.
        kinds: of the arguments.
    """

    rule: Rule
    value_dim: int
    group: int
    format: str
    tokens: int
    records: int
    blocks: int
    split: bool
    kinds: Kinds
    source: ClassVar[str] = "read_blocks.cu"
    headers: ClassVar[tuple[str, ...]] = READ_SOURCES
    entry: ClassVar[str] = "replay_step"
    warps: ClassVar[int] = 1
    fills: ClassVar[bool] = True

    def defines(self) -> list[str]:
        """The configuration as compiler options."""
        return _options({
            "RULE": RULES[self.rule], "V": self.value_dim, "GROUP": self.group,
            "STATE": TYPES[torch.float32], "WARPS": self.warps, "FORMAT": list(PACKED).index(self.format),
            "TOKENS": self.tokens, "RECORDS": self.records, "BLOCKS": self.blocks,
            "PROGRAMS": self.most_programs, "SPLIT": int(self.split), "STOCHASTIC": 0,
            **{name.upper(): int(value) for name, value in asdict(self.kinds).items()},
        })  # fmt: skip

    @property
    def most_programs(self) -> int:
        """Programs that a multiprocessor holds at a time, with 128 registers a lane; of more tokens, 168."""
        most = 16 if self.tokens == 1 else 12
        return min(most, SHARED_LIMIT // (self.shared_bytes + SHARED_RESERVED))

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a program, as the source lays it out."""
        packed, records, columns = PACKED[self.format], 8 * self.records, 2 * self.tokens
        touched = 126 // self.value_dim + 2
        if self.value_dim % BLOCK_ROWS == 0:
            touched = 1
        elif BLOCK_ROWS % self.value_dim == 0:
            touched = BLOCK_ROWS // self.value_dim
        head = -(-(records * columns + columns + columns * self.tokens + self.tokens) // 4) * 4
        shared = BLOCK_ROWS * KEY_DIM * packed.bits // 8 // 2  # half of a block's codes
        if packed.block is not None:
            shared += BLOCK_ROWS * KEY_DIM // packed.block // 2
        shared += records * BLOCK_ROWS * (2 if self.rule is Rule.MAMBA2 else 4)
        shared += 4 * (min(touched, self.group) * head + (columns + 1) * records)
        return shared + (0 if self.tokens == 1 else 4 * 4 * columns * _MEETING_STRIDE)

    def programs(self, heads: int) -> int:
        """Programs that serve so many heads of a row."""
        blocks = -(-self.group * self.value_dim // BLOCK_ROWS)
        return heads // self.group * -(-blocks // self.blocks)


Config = StepConfig | SmallConfig | ReadConfig | ReadBlocksConfig


class KernelConfig(Protocol):
    """What a kernel's source knows at compile time, and what a launch of it needs.

    Attributes:
        source: the file of the kernel.
        headers: files that go before it, those of the machine first.
        entry: the kernel's name.
        warps: of a program.
        fills: whether a multiprocessor shall hold as many programs as it can.
        shared_bytes: shared memory of a program.
    """

    @property
    def source(self) -> str: ...
    @property
    def headers(self) -> tuple[str, ...]: ...
    @property
    def entry(self) -> str: ...
    @property
    def warps(self) -> int: ...
    @property
    def fills(self) -> bool: ...
    @property
    def shared_bytes(self) -> int: ...
    def defines(self) -> list[str]:
        """The configuration as compiler options."""


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


def source(config: KernelConfig, machine: bool = True) -> str:
    """A kernel's source text, on request without the machine's primitives."""
    names = (*config.headers[0 if machine else 1 :], config.source)
    return "".join(Path(__file__).with_name(name).read_text(encoding="utf-8") for name in names)


class Program:
    """A configuration's kernel on one device."""

    def __init__(self, config: KernelConfig, device: int) -> None:
        major, minor = torch.cuda.get_device_capability(device)
        image = machine_code(config, f"sm_{major}{minor}")
        with torch.cuda.device(device):
            torch.cuda.current_stream()
            self._module = _checked(driver.cuModuleLoadData(image))
            self._function = _checked(driver.cuModuleGetFunction(self._module, config.entry.encode()))
            attributes = driver.CUfunction_attribute
            wanted = {attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: config.shared_bytes}
            if config.fills:
                wanted[attributes.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT] = 100
            for name, value in wanted.items():
                _checked(driver.cuFuncSetAttribute(self._function, name, value))
        self._device = device
        self._shape = driver.CUlaunchConfig()
        self._shape.blockDimX = WARP * config.warps
        self._shape.blockDimY, self._shape.blockDimZ = 1, 1
        self._shape.gridDimZ = 1
        self._shape.sharedMemBytes = config.shared_bytes
        if major >= _EARLY_LAUNCH:
            early = driver.CUlaunchAttribute()
            early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            early.value.programmaticStreamSerializationAllowed = 1
            self._shape.attrs, self._shape.numAttrs = [early], 1

    def launch(self, blocks: tuple[int, int], params: ctypes.Structure, stream: int) -> None:
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
def program(config: KernelConfig, device: int) -> Program:
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


def machine_code(config: KernelConfig, arch: str) -> bytes:
    """The kernel of a configuration for an architecture such as `sm_90`, compiled or from the cache."""
    text = source(config)
    plain = ("--std=c++17", "--device-as-default-execution-space", "--disable-warnings")
    options = [f"--gpu-architecture={arch}", *plain, *config.defines()]
    version = _checked_pair(nvrtc.nvrtcVersion())
    key = hashlib.sha256("\n".join([text, str(version), *options]).encode()).hexdigest()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    kept = Path(base, "replayssm", f"{key}.cubin")
    with suppress(OSError):
        return kept.read_bytes()
    code = _compile(config.source, text, options)
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


def _compile(name: str, text: str, options: list[str]) -> bytes:
    """Machine code of the source.

    Raises:
        RuntimeError: the compiler's own messages.
    """
    handle = _checked(nvrtc.nvrtcCreateProgram(text.encode(), name.encode(), 0, [], []))
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

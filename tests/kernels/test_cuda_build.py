"""The CUDA backend's host side without a GPU: parameters, configurations, cuts, the build with doubles."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import IntEnum
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from replayssm.core import Rule
from replayssm.kernels import cuda_backend
from replayssm.kernels.cuda_backend import build
from replayssm.kernels.cuda_backend.build import UNIT, Kinds, Params, Program, SmallConfig, StepConfig
from replayssm.kernels.cuda_backend.cut import Cut, cut

cut_module = import_module("replayssm.kernels.cuda_backend.cut")
PLAIN = StepConfig(Rule.GDN, 80, 2, torch.float32, 4, 2, 5, False)
KINDS = Kinds.of(Params(state_indices=1, wide_state=1, lens=1, varlen=1, g_type=1, A=1, l2norm=1, bounded=1))
SMALLEST_SHARED = 99 * 1024
"""Bytes of shared memory that a program may have on the smallest GPUs since compute capability 8.0."""


def struct_fields(text: str, struct: str = "Params", **structs: type) -> list[tuple[str, type]]:
    """Names and ctypes types of a struct's members, in order; `structs` are types of their own."""
    found = re.search(rf"^struct {struct} \{{\n(.*?)^\}};", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    body = re.sub(r"//[^\n]*", "", found[1])
    types: dict[str, type] = {"int": ctypes.c_int, "i64": ctypes.c_int64, "float": ctypes.c_float, **structs}
    members = []
    for declaration in filter(None, map(str.strip, body.split(";"))):
        parts = re.fullmatch(r"(?:const )?(\w+)\b(.*)", declaration, re.DOTALL)
        assert parts is not None
        kind, names = parts.groups()
        for name in names.split(","):
            pointer, plain = "*" in name, name.strip(" *\n")
            assert pointer or kind in types, f"{plain} has the unknown type {kind}"
            members.append((plain, ctypes.c_void_p if pointer else types[kind]))
    return members


def test_params_are_those_of_the_source() -> None:
    """The driver copies the structure as it lies in memory."""
    assert [(name, type_) for name, type_, *_ in Params._fields_] == struct_fields(build.source(PLAIN))


@pytest.mark.parametrize(
    ("config", "own"),
    [
        (
            StepConfig(Rule.KDA, 96, 1, torch.float16, 8, 2, 3, True),
            {"WARPS": "1", "TOKENS": "8", "RECORDS": "2", "UNITS": "3", "SKIPS": "0"},
        ),
        (
            SmallConfig(Rule.KDA, 96, 1, torch.float16, 1, 20, 32, True, KINDS),
            {
                "WARPS": "4",
                "TOKENS": "1",
                "RING": "20",
                "ROWS": "32",
                "STATE_INDEX": "2",
                "RING_INDEX": "0",
                "LENS": "1",
                "VARLEN": "1",
                "G_TYPE": "1",
                "BETA_TYPE": "0",
                "A_TYPE": "0",
                "BIAS_TYPE": "-1",
                "D_TYPE": "-1",
                "HAS_Z": "0",
                "L2NORM": "1",
                "SOFTPLUS": "0",
                "BOUNDED": "1",
            },
        ),
    ],
)
def test_defines(config: build.Config, own: dict[str, str]) -> None:
    """Every compile-time name of the sources has its value, and no other name is defined."""
    values = dict(define.removeprefix("-D").split("=") for define in config.defines())
    if isinstance(config, StepConfig):
        assert values.pop("PROGRAMS") == str(config.programs)
    assert values == {"RULE": "2", "V": "96", "GROUP": "1", "STATE": "2", "STOCHASTIC": "1", **own}
    said = re.findall(r"// Compile-time\b[^:]*: (.*?)\.\s", build.source(config).replace("\n// ", " "))
    assert len(said) == 2
    names = set(re.findall(r"\b[A-Z][A-Z0-9_]*\b", re.sub(r"\([^)]*\)", "", " ".join(said))))
    assert names - {"PROGRAMS"} == set(values)


def every_config() -> Iterator[StepConfig]:
    """What `refuses` lets pass, for the value dimensions that models have."""
    for rule in Rule:
        kda = rule is Rule.KDA
        for value_dim in (8, 40, 64, 80, 128):
            for units in range(1, -(-value_dim // UNIT) + 1):
                for state in (torch.float32, torch.bfloat16):
                    for tokens in (1, 4, 8) if kda else (1, 4, 8, 16):
                        for records in (2,) if kda else (2, 4):
                            yield StepConfig(rule, value_dim, 1, state, tokens, records, units, False)


def test_every_configuration_fits_every_gpu() -> None:
    too_large = [c for c in every_config() if c.shared_bytes > SMALLEST_SHARED or c.programs < 1]
    assert too_large == []


@pytest.mark.parametrize("value_dim", [8, 16, 24, 40, 64, 80, 96, 128, 256])
def test_cuts_cover_a_head(value_dim: int) -> None:
    """Programs cover all units of a head and none has nothing to do; more heads never mean smaller ones."""
    whole = -(-value_dim // UNIT)
    counts = (1, 8, 64, 256, 512, 1024, 4096, 8191, 8192, 65535)
    shares = [cut(Rule.GDN, value_dim, 1, heads, "a GPU without a table").units for heads in counts]
    for units in shares:
        assert 1 <= units <= whole
        programs = -(-value_dim // (UNIT * units))
        assert (programs - 1) * units < whole <= programs * units
    assert shares == sorted(shares)
    assert shares[0] == 1, "a few heads are cut as small as can be"
    assert shares[-1] == whole, "many are not cut at all"


def test_a_measured_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's table decides for the steps that it has; 16 tokens are cut as 8 are."""
    table = {"mamba2 V64 T1": [[64, 1, 4], [128, 1, 1], [512, 2, 1]], "mamba2 V64 T8": [[64, 4, 1]]}
    monkeypatch.setattr(cut_module, "tables", lambda: {"GPU": table})
    shares = [cut(Rule.MAMBA2, 64, 1, heads, "GPU") for heads in (64, 65, 128, 129, 512, 513)]
    assert shares == [Cut(1, 4), Cut(1), Cut(1), Cut(2), Cut(2), Cut(4)]
    assert cut(Rule.MAMBA2, 64, 16, 64, "GPU").units == 4
    assert cut(Rule.MAMBA2, 64, 4, 64, "GPU") == cut(Rule.MAMBA2, 64, 4, 64, "another")
    assert cut(Rule.MAMBA2, 80, 1, 64, "GPU") == cut(Rule.MAMBA2, 80, 1, 64, "another")


def test_the_tables_in_the_package() -> None:
    """Their heads ascend, their shares are parts of a head, and every key is one that a step can have."""
    keys = {
        cut_module.shape_key(rule, value_dim, tokens): -(-value_dim // UNIT)
        for rule in Rule
        for value_dim in range(8, 257, 8)
        for tokens in (1, 4, 8)
    }
    for table in cut_module.tables().values():
        for key, entries in table.items():
            heads = [most for most, *_ in entries]
            assert heads == sorted(set(heads))
            assert all(1 <= units <= keys[key] and warps in (1, 4) for _, units, warps in entries)


# ---- the build ----


class Status(IntEnum):
    """A call's status, as both libraries give it."""

    SUCCESS = 0
    BROKEN = 6


@dataclass
class Compiler:
    """A double of NVRTC: the machine code names the options; messages come as the library gives them."""

    version: int = 13
    status: Status = Status.SUCCESS
    log: bytes = b"step.cu(7): error: expected a ';'\n\0"
    compiled: list[list[str]] = field(default_factory=list)
    destroyed: int = 0

    def nvrtcVersion(self) -> tuple[Status, int, int]:
        return Status.SUCCESS, self.version, 0

    def nvrtcCreateProgram(self, text: bytes, name: bytes, n: int, *headers: object) -> tuple[Status, bytes]:
        assert n == 0
        assert b"replay_step" in text
        return Status.SUCCESS, text

    def nvrtcCompileProgram(self, handle: bytes, n: int, options: list[bytes]) -> tuple[Status]:
        assert n == len(options)
        self.compiled.append([option.decode() for option in options])
        return (self.status,)

    def nvrtcGetProgramLogSize(self, handle: bytes) -> tuple[Status, int]:
        return Status.SUCCESS, len(self.log)

    def nvrtcGetProgramLog(self, handle: bytes, into: bytes) -> tuple[Status]:
        ctypes.memmove(into, self.log, len(self.log))
        return (Status.SUCCESS,)

    @property
    def code(self) -> bytes:
        return f"machine code {self.version} {self.compiled[-1]}".encode()

    def nvrtcGetCUBINSize(self, handle: bytes) -> tuple[Status, int]:
        return Status.SUCCESS, len(self.code)

    def nvrtcGetCUBIN(self, handle: bytes, into: bytes) -> tuple[Status]:
        ctypes.memmove(into, self.code, len(self.code))
        return (Status.SUCCESS,)

    def nvrtcDestroyProgram(self, handle: bytes) -> tuple[Status]:
        self.destroyed += 1
        return (Status.SUCCESS,)


@dataclass
class Driver:
    """A double of the driver: it keeps what it is given, and reads the parameters as the driver does."""

    loaded: list[bytes] = field(default_factory=list)
    attributes: list[tuple[str, int]] = field(default_factory=list)
    launches: list[tuple[object, ...]] = field(default_factory=list)
    launch_status: Status = Status.SUCCESS
    CUfunction_attribute = SimpleNamespace(
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="shared",
        CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT="carveout",
    )
    CUlaunchAttributeID = SimpleNamespace(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION="early")

    def cuModuleLoadData(self, image: bytes) -> tuple[Status, int]:
        self.loaded.append(image)
        return Status.SUCCESS, len(self.loaded)

    def cuModuleGetFunction(self, module: int, name: bytes) -> tuple[Status, str]:
        return Status.SUCCESS, f"{name.decode()} of {module}"

    def cuFuncSetAttribute(self, function: str, attribute: str, value: int) -> tuple[Status]:
        self.attributes.append((attribute, value))
        return (Status.SUCCESS,)

    @staticmethod
    def CUlaunchConfig() -> SimpleNamespace:
        return SimpleNamespace(attrs=[], numAttrs=0)

    @staticmethod
    def CUlaunchAttribute() -> SimpleNamespace:
        return SimpleNamespace(id="", value=SimpleNamespace(programmaticStreamSerializationAllowed=0))

    def cuLaunchKernelEx(
        self, shape: SimpleNamespace, function: str, pointers: int, extra: int
    ) -> tuple[Status]:
        assert extra == 0
        (address,) = (ctypes.c_void_p * 1).from_address(pointers)
        assert address is not None
        given = dict(vars(shape))
        attributes = [(a.id, a.value.programmaticStreamSerializationAllowed) for a in given.pop("attrs")]
        assert given.pop("numAttrs") == len(attributes)
        self.launches.append((function, given, attributes, ctypes.string_at(address, ctypes.sizeof(Params))))
        return (self.launch_status,)


@dataclass
class Machine:
    """One GPU with its libraries and the folder that kernels are kept in."""

    nvrtc: Compiler
    driver: Driver
    cache: Path
    current: list[int] = field(default_factory=lambda: [0])
    entered: list[int] = field(default_factory=list)

    @contextlib.contextmanager
    def on(self, device: int) -> Iterator[None]:
        """`torch.cuda.device`."""
        self.entered.append(device)
        self.current.append(device)
        yield
        self.current.pop()

    @property
    def kept(self) -> list[Path]:
        return sorted((self.cache / "replayssm").iterdir())


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    made = Machine(Compiler(), Driver(), tmp_path / "cache")
    monkeypatch.setattr(build, "nvrtc", made.nvrtc, raising=False)
    monkeypatch.setattr(build, "driver", made.driver, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: made.current[-1])
    monkeypatch.setattr(torch.cuda, "device", made.on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(made.cache))
    return made


def test_a_kernel_is_compiled_once_and_kept(machine: Machine) -> None:
    """The second process reads what the first has compiled, for the same source, options and compiler."""
    Program(PLAIN, 0)
    Program(PLAIN, 0)
    assert len(machine.nvrtc.compiled) == machine.nvrtc.destroyed == 1
    assert machine.driver.loaded == [machine.nvrtc.code] * 2
    assert [path.suffix for path in machine.kept] == [".cubin"], "no temporary file stays"
    assert machine.kept[0].read_bytes() == machine.nvrtc.code
    options = machine.nvrtc.compiled[0]
    assert options[0] == "--gpu-architecture=sm_90"
    assert set(PLAIN.defines()) < set(options)


def test_what_a_kept_kernel_depends_on(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    Program(PLAIN, 0)
    Program(replace(PLAIN, units=1), 0)
    machine.nvrtc.version = 14
    Program(PLAIN, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    Program(PLAIN, 0)
    text = build.source(PLAIN)
    monkeypatch.setattr(build, "source", lambda config: text + "// changed")
    Program(PLAIN, 0)
    assert len(machine.nvrtc.compiled) == len(machine.kept) == 5


def test_kernels_are_kept_in_the_home_folder(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(machine.cache.parent))
    Program(PLAIN, 0)
    assert len(list((machine.cache.parent / ".cache" / "replayssm").glob("*.cubin"))) == 1


def test_a_folder_that_cannot_be_written(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    """The kernel runs all the same; a warning names the folder."""
    machine.cache.write_text("a file stands in the way")
    with caplog.at_level(logging.WARNING, logger="replayssm"):
        Program(PLAIN, 0)
    assert machine.driver.loaded == [machine.nvrtc.code]
    (record,) = caplog.records
    assert record.getMessage().startswith(
        f"replayssm: a compiled kernel can't be kept in {machine.cache / 'replayssm'}: "
    )


def test_the_compiler_says_why(machine: Machine) -> None:
    """Its messages and its options are the error; nothing is kept or loaded."""
    machine.nvrtc.status = Status.BROKEN
    with pytest.raises(RuntimeError) as caught:
        Program(PLAIN, 0)
    message = str(caught.value)
    assert message.startswith("the step kernel did not compile with --gpu-architecture=sm_90")
    assert message.endswith(":\nstep.cu(7): error: expected a ';'")
    assert machine.driver.loaded == []
    assert not machine.cache.exists()


@pytest.mark.parametrize(("capability", "attributes"), [((9, 0), [("early", 1)]), ((8, 6), [])])
def test_a_launch(
    machine: Machine, capability: tuple[int, int], attributes: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One warp a program, shared memory as configured, the parameters' bytes; early where the GPU can."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    program = Program(PLAIN, 0)
    assert ("shared", PLAIN.shared_bytes) in machine.driver.attributes
    params = Params(state=4096, R=18, scale=0.5)
    program.launch((12, 7), params, 33)
    shape = {f"{what}Dim{axis}": 1 for what in ("grid", "block") for axis in "XYZ"}
    shape |= {"gridDimX": 12, "gridDimY": 7, "blockDimX": 32, "sharedMemBytes": PLAIN.shared_bytes}
    assert machine.driver.launches == [
        ("replay_step of 1", shape | {"hStream": 33}, attributes, bytes(params))
    ]
    machine.driver.launch_status = Status.BROKEN
    with pytest.raises(RuntimeError, match=r"CUDA reports BROKEN; .* choose backend='triton'"):
        program.launch((12, 7), params, 33)


def test_a_launch_on_another_device(machine: Machine) -> None:
    """A function belongs to its device's context: that one is current during the launch, then the old one."""
    program = Program(PLAIN, 1)
    program.launch((1, 1), Params(), 0)
    assert len(machine.driver.launches) == 1
    assert machine.entered == [1, 1]
    assert machine.current == [0]


# ---- where the backend can't run ----


@pytest.fixture
def gpu(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """A machine on which the backend can run."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(build, "_not_imported", None)
    build.missing.cache_clear()
    yield machine
    build.missing.cache_clear()


def test_available(gpu: Machine) -> None:
    assert cuda_backend.unavailable("cuda") is None


@pytest.mark.parametrize("device", ["cpu", "xpu"])
def test_other_devices(gpu: Machine, device: str) -> None:
    assert cuda_backend.unavailable(device) == "it needs an NVIDIA GPU"


def test_amd_gpus(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch calls them "cuda" too."""
    monkeypatch.setattr(torch.version, "cuda", None)
    assert cuda_backend.unavailable("cuda") == "it needs an NVIDIA GPU"


def test_without_the_bindings(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_not_imported", "No module named 'cuda'")
    assert cuda_backend.unavailable("cuda") == (
        "cuda.bindings can't be imported (No module named 'cuda'); pip install cuda-bindings"
    )


def test_without_nvrtc(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bindings load it at the first call, and say over several lines what they looked for."""

    def absent() -> tuple[Status]:
        raise RuntimeError("Failure finding libnvrtc.so.13:\n  no such file")

    monkeypatch.setattr(gpu.nvrtc, "nvrtcVersion", absent)
    assert cuda_backend.unavailable("cuda") == (
        "NVRTC, CUDA's run-time compiler, can't be loaded (Failure finding libnvrtc.so.13: no such file); "
        "pip install nvidia-cuda-nvrtc"
    )


def test_older_gpus(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert cuda_backend.unavailable("cuda") == "it needs compute capability 8.0 or higher, this GPU has 7.5"

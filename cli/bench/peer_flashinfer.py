"""FlashInfer's Mamba-2 kernels: conventional decoding, and its checkpoint with a ring."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from functools import cache
from typing import Any

import torch

from replayssm.cli.bench.cases import WINDOW, Case
from replayssm.cli.bench.contestant import Contestant, Setup, nothing, starts
from replayssm.cli.bench.histories import standard, verification
from replayssm.cli.bench.inputs import ACTIVATIONS
from replayssm.cli.bench.packages import installed, load, missing
from replayssm.core.geometry import Rule

MODULE = "flashinfer.mamba"
KNOBS = ("FLASHINFER_SSU_MAIN_CTA_PER_SM", "FLASHINFER_SSU_MAIN_PIPELINE_STAGES")
"""Read by its launcher at each launch, so at a graph's capture."""


@cache
def _package() -> str | None:
    """Import the package; why it can't be used, if so.

    Its modules look the driver's symbols up in the process, so the driver comes first, for all to see.
    """
    with suppress(OSError):
        ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
    return missing(MODULE)


def _module() -> Any:
    _package()
    return load(MODULE)


def _refuses(case: Case) -> str | None:
    if case.rule is not Rule.MAMBA2:
        return "of this package the Mamba-2 kernels are timed"
    if case.layer.value_dim != 64:
        return f"its kernels are made for heads of 64 values, not {case.layer.value_dim}"
    return _package()


class _FlashInfer(Contestant):
    @classmethod
    def versions(cls) -> dict[str, str]:
        return installed("flashinfer-python")

    def parameters(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`A` as `[H, P, N]`, `D` and `dt_bias` as `[H, P]`, with strides of 0 where values repeat."""
        p, g = self.setup.inputs.parameters, self.setup.case.layer
        per_head = (g.value_heads, g.value_dim)
        decays = p["A"][:, None, None].expand(*per_head, g.key_dim)
        skip, bias = (p[name].to(dtype)[:, None].expand(per_head) for name in ("D", "dt_bias"))
        return decays, skip, bias


class Conventional(_FlashInfer):
    """Its `selective_state_update`, one token a step."""

    name = "flashinfer"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._step = _module().selective_state_update
        self._decays, self._skip, self._bias = self.parameters(ACTIVATIONS)
        self._algorithm = "auto"

    @classmethod
    def refuses(cls, case: Case) -> str | None:
        return _refuses(case) or ("timed for one token a step" if case.tokens > 1 else None)

    def shapes(self) -> list[str]:
        return ["auto", "simple", "vertical"]

    def select(self, shape: str) -> None:
        self._algorithm = shape

    def launch(self, layer: int) -> None:
        t = self.setup.inputs.tokens
        x = t["x"][:, 0]
        self._step(
            self.setup.states[layer], x, t["dt"][:, 0, :, None].expand(x.shape), self._decays, t["B"][:, 0],
            t["C"][:, 0], self._skip, dt_bias=self._bias, dt_softplus=True,
            state_batch_indices=self.setup.rows, out=self.out[:, 0], algorithm=self._algorithm,
        )  # fmt: skip


class Checkpointing(_FlashInfer):
    """Its `checkpointing_ssu` at the best of its algorithms and launch settings; cursors move for free."""

    name = "flashinfer-checkpointing"
    replay = True

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        case, g, module = setup.case, setup.case.layer, _module()
        self._step = module.checkpointing_ssu
        self._decays, self._skip, self._bias = self.parameters(torch.float32)
        self._scratch = module.allocate_checkpointing_ssu_scratch(
            case.batch, g.value_heads, case.tokens, WINDOW, ACTIVATIONS, setup.device
        )
        if case.tokens == 1:
            self.histories = standard(case.batch, WINDOW)
        else:
            self.histories, _ = verification(case.batch, case.tokens, WINDOW)
        lengths = nothing(case.batch) if setup.empty else self.histories.lengths
        self._rows = WINDOW + case.tokens
        self._lengths = lengths.to(setup.device)
        self._starts = starts(lengths, self._rows).to(setup.device)
        self._length, self._start = self._lengths[0].clone(), self._starts[0].clone()
        lead = (case.batch, g.value_heads, self._rows)
        groups = (case.batch, g.key_heads, self._rows, g.key_dim)
        self._rings = [
            (
                setup.filled((*lead, g.value_dim), ACTIVATIONS, -0.1, 0.1),
                setup.filled(groups, ACTIVATIONS, -0.1, 0.1),
                setup.filled(lead, torch.float32, 0.0, 0.1),
            )
            for _ in range(setup.layers)
        ]
        self._choice: dict[str, Any] = {}

    @classmethod
    def refuses(cls, case: Case) -> str | None:
        return _refuses(case)

    def shapes(self) -> list[str]:
        two = [f"two-kernel ctas={ctas} stages={stages}" for ctas in (2, 4) for stages in (1, 2)]
        return ["monolith", "monolith d_split=1", "monolith d_split=2", "two-kernel", *two]

    def select(self, shape: str) -> None:
        algorithm, *settings = shape.split()
        values = dict(setting.split("=") for setting in settings)
        for knob, name in zip(KNOBS, ("ctas", "stages"), strict=True):
            os.environ.pop(knob, None)
            if name in values:
                os.environ[knob] = values[name]
        self._choice = {"algorithm": algorithm}
        if "d_split" in values:
            self._choice["d_split"] = int(values["d_split"])
        if algorithm == "two-kernel":
            names = ("cb_scaled", "cumAdt_vec", "cb_old")
            self._choice |= dict(zip(names, self._scratch, strict=True))

    def phase(self, index: int) -> None:
        self._length.copy_(self._lengths[index % len(self._lengths)])
        self._start.copy_(self._starts[index % len(self._starts)])

    def launch(self, layer: int) -> None:
        t = self.setup.inputs.tokens
        self._step(
            self.setup.states[layer], *self._rings[layer], self._start, self._length, t["x"],
            t["dt"][..., None].expand(t["x"].shape), self._decays, t["B"], t["C"], self.out, D=self._skip,
            dt_bias=self._bias, dt_softplus=True, state_batch_indices=self.setup.rows, **self._choice,
        )  # fmt: skip

    def advance(self, accepted: torch.Tensor) -> None:
        flushed = self._length + self.setup.case.tokens > WINDOW
        start = torch.where(flushed, (self._start + self._length) % self._rows, self._start)
        self._length.copy_(torch.where(flushed, 0, self._length) + accepted)
        self._start.copy_(start)

    def steps(self) -> int:
        return WINDOW + 3 if self.setup.case.tokens == 1 else 10

"""How a step's work is cut into programs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from replayssm.core.formats import PACKED
from replayssm.core.geometry import Rule
from replayssm.kernels.cuda_backend.build import (
    BLOCK_ROWS,
    UNIT,
    Config,
    Kinds,
    Params,
    ReadBlocksConfig,
    ReadConfig,
    SmallConfig,
    StepConfig,
)


@dataclass(frozen=True)
class Cut:
    """A program's share.

    Attributes:
        units: units of 16 value rows, of one head.
        warps: 1, which works on unit after unit (`step.cu`), or 4, which share them (`small.cu`).
    """

    units: int
    warps: int = 1


MOST_RING = 32
"""Rows of a ring that `small.cu` takes in one piece."""
ONE_WAVE = 1024
"""Programs that a large GPU runs at a time, about."""
LARGE = 8 * ONE_WAVE
TABLE = Path(__file__).with_name("launch_shapes.json")
"""Shapes measured by `bench/launch_shapes.py`: of each GPU, of each `shape_key`, triples that ascend, of the
most heads of a step that a share serves, its units and its warps. Beyond the last a share is a whole head."""

Shapes = dict[str, list[tuple[int, int, int]]]


@cache
def tables() -> dict[str, Shapes]:
    """The measured shapes of all GPUs, by name."""
    content: dict[str, Shapes] = json.loads(TABLE.read_text(encoding="utf-8"))
    return content


def shape_key(rule: Rule, value_dim: int, tokens: int) -> str:
    """Steps that share a row of the table; `tokens` as kernels are compiled for them."""
    return f"{rule} V{value_dim} T{min(tokens, 8)}"


def cut(rule: Rule, value_dim: int, tokens: int, heads: int, gpu: str) -> Cut:
    """The cut of a step over `heads` heads of all its rows.

    As measured on this GPU where its table has the step; else by a rule of thumb: small steps are cut small,
    for latency, large ones into whole heads, whose units share the most work.
    """
    whole = -(-value_dim // UNIT)
    measured = tables().get(gpu, {}).get(shape_key(rule, value_dim, tokens))
    if measured is not None:
        return next((Cut(units, warps) for most, units, warps in measured if heads <= most), Cut(whole))
    if heads >= LARGE:
        return Cut(whole)
    parts = next((n for n in (2, 4) if heads * min(n, whole) >= ONE_WAVE), whole)
    return Cut(-(-whole // min(parts, whole)))


def serves_small(rule: Rule, tokens: int, ring: int) -> bool:
    """Whether `small.cu` serves steps of at most so many tokens a row, on rings of so many rows."""
    return ring <= MOST_RING and tokens <= (1 if rule is Rule.KDA else 8)


def read_config(
    rule: Rule,
    value_dim: int,
    group: int,
    format: str,
    tokens: int,
    window: int,
    split: bool,
    heads: int,
    params: Params,
) -> ReadConfig | ReadBlocksConfig:
    """What a step over packed states is compiled for, with `heads` heads of all its rows.

    A few tokens go to `read_blocks.cu`, but KDA's, whose keys do not serve several heads; a warp serves as
    many blocks as leave enough warps. In `read.cu` a warp serves as many value rows as it has registers for:
    128 with codes of four bits and one column, 64 else; fewer where the step would leave a large GPU idle.
    """
    records, kinds = 2 if window <= 16 else 4, Kinds.of(params)
    if tokens <= 4 and rule is not Rule.KDA:
        blocks, most = heads * value_dim // BLOCK_ROWS, 4 if PACKED[format].bits == 4 else 2
        each = next((n for n in (4, 2) if n <= most and blocks // n >= 4 * ONE_WAVE), 1)
        return ReadBlocksConfig(rule, value_dim, group, format, tokens, records, each, split, kinds)
    wide = PACKED[format].bits == 8 or tokens > 4 or (rule is Rule.KDA and tokens > 1)
    rows = 64 if wide else 128
    while rows > 32 and (rows // 2 >= value_dim or heads * -(-value_dim // rows) < LARGE // 4):
        rows //= 2
    return ReadConfig(rule, value_dim, group, format, tokens, records, rows, split, kinds)


def config(
    share: Cut,
    rule: Rule,
    value_dim: int,
    group: int,
    state_dtype: torch.dtype,
    tokens: int,
    window: int,
    ring: int,
    stochastic: bool,
    skips: bool,
    params: Params,
) -> Config:
    """What a step is compiled for; of four warps only where `small.cu` serves it.

    Args:
        share: how it is cut.
        rule: the layer's rule.
        value_dim: of a head.
        group: value heads per key head.
        state_dtype: of the checkpoint.
        tokens: 1, 4, 8 or 16, the most a row brings.
        window: `L`.
        ring: rows of the ring, `R`.
        stochastic: whether the checkpoint is rounded stochastically.
        skips: whether checkpoints that norms allow to leave unread are; `small.cu` reads all.
        params: its arguments.
    """
    if share.warps > 1 and not skips and serves_small(rule, tokens, ring):
        rows = UNIT * share.units
        held = -(-ring // 4) * 4 if rule is Rule.KDA else MOST_RING
        return SmallConfig(
            rule, value_dim, group, state_dtype, tokens, held, rows, stochastic, Kinds.of(params)
        )
    records = 2 if window <= 16 else 4
    return StepConfig(rule, value_dim, group, state_dtype, tokens, records, share.units, stochastic, skips)

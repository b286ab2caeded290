"""`replayssm plan`: what replay saves for a model, batch and draft length, before anything is installed.

Arithmetic over the model's config and the traffic model of `replayssm.core.traffic`; no weights, no GPU.
Figures are for the recurrent layers of one device.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from replayssm.cli.model_config import ModelConfig, load_model_config
from replayssm.core import traffic
from replayssm.core.config import ReplayConfig
from replayssm.core.geometry import LayerGeometry
from replayssm.core.layout import RingLayout
from replayssm.core.precision import Precision
from replayssm.core.traffic import Accounting, StepTraffic

H200_COPY_TBPS = 4.28
"""Measured copy bandwidth (read and write together) of one H200; other devices need their own."""

ACTIVATIONS = torch.bfloat16
MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class Workload:
    """How a model is served on one device.

    Attributes:
        batch: sequences decoded together.
        window: L.
        draft: T, tokens of a step for each sequence.
        accepted: mean tokens that a step commits.
        tp: tensor-parallel ranks.
        context: tokens of KV cache per sequence.
        precision: storage of the state.
        slots: slots of the state pool that an engine keeps for each sequence, for its prefix cache too.
        skip_tolerance: of `ReplayConfig`; its norms take memory, and no read is foreseen to be left out.
    """

    batch: int
    window: int
    draft: int
    accepted: float
    tp: int
    context: int
    precision: Precision
    slots: int = 1
    skip_tolerance: float = 0.0


@dataclass(frozen=True)
class Plan:
    """Memory of one sequence and mean traffic of one step of the batch, per device.

    Attributes:
        state: bytes of one sequence's states, all copies, and short-convolution inputs.
        conventional_state: the same without replay, which keeps the recurrence copy alone.
        bytes_per_value: of the states, all copies.
        ring: bytes of its rings.
        snapshots: bytes of the states that conventional verification would keep besides.
        kv: bytes of its KV cache at the workload's context.
        slots: slots of each sequence, all with a ring.
        conventional: traffic of a step without replay.
        replay: traffic of a step with replay.
        flush_share: share of steps that flush.
        best_window: the window with the least traffic.
        best_replay: traffic at that window.
        per_head_ratio: replay over conventional bytes under `traffic.PER_HEAD`.
        per_head_best_window: the best window under that accounting.
    """

    state: int
    conventional_state: int
    bytes_per_value: float
    ring: int
    snapshots: int
    kv: int
    slots: int
    conventional: StepTraffic
    replay: StepTraffic
    flush_share: float
    best_window: int
    best_replay: StepTraffic
    per_head_ratio: float
    per_head_best_window: int

    @property
    def ratio(self) -> float:
        """Replay over conventional bytes."""
        return self.replay.total / self.conventional.total

    def fitting(self, budget: float) -> dict[str, int]:
        """Sequences that fit in `budget` bytes, with replay and with snapshots in place of the rings.

        Snapshots are of running sequences; what a prefix cache keeps needs none.
        """
        replay = self.slots * (self.state + self.ring) + self.kv
        conventional = self.slots * self.conventional_state + self.snapshots + self.kv
        return {
            "replay": traffic.sequences_that_fit(budget, replay),
            "conventional": traffic.sequences_that_fit(budget, conventional),
        }


def make_plan(model: ModelConfig, load: Workload) -> Plan:
    """Plan `load` for `model`.

    Raises:
        ValueError: `T > L`, accepted tokens out of range, heads that do not divide over the ranks, or a
            format that does not fit the state.
    """
    layers = [geometry.shard(load.tp) for geometry in model.recurrent]
    memory = [
        traffic.sequence_memory(_layout(g, load, load.window), load.draft, precision=load.precision)
        for g in layers
    ]
    best = _best_window(layers, load, traffic.EVERY_BYTE)
    per_head = _step(layers, load, load.window, traffic.PER_HEAD)
    conventional, replay = _step(layers, load, load.window, traffic.EVERY_BYTE)
    return Plan(
        state=sum(m.state + m.conv for m in memory),
        conventional_state=sum(m.conventional_state + m.conv for m in memory),
        bytes_per_value=sum(m.state for m in memory) / sum(g.state_elements for g in layers),
        ring=sum(m.ring for m in memory),
        snapshots=sum(m.snapshots for m in memory),
        kv=load.context * model.kv.bytes_per_token(load.tp),
        slots=load.slots,
        conventional=conventional,
        replay=replay,
        flush_share=traffic.flush_cycle(load.window, load.draft, load.accepted).flush_share,
        best_window=best,
        best_replay=_step(layers, load, best, traffic.EVERY_BYTE)[1],
        per_head_ratio=per_head[1].total / per_head[0].total,
        per_head_best_window=_best_window(layers, load, traffic.PER_HEAD),
    )


def plan(
    model: Annotated[str, typer.Option(help="Name of a shipped model config, or the path of a config.json.")],
    batch: Annotated[int, typer.Option(min=1, help="Sequences decoded together.")] = 1,
    window: Annotated[int | None, typer.Option(help="Window L; by default REPLAYSSM_WINDOW or 16.")] = None,
    draft: Annotated[
        int, typer.Option(help="Tokens T of a step for each sequence; 1 is standard decoding.")
    ] = 1,
    accept: Annotated[
        float | None,
        typer.Option(help="Mean tokens that a step commits; by default all T, which flushes most."),
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks; figures are for one.")] = 1,
    context: Annotated[int, typer.Option(min=0, help="Tokens of KV cache that each sequence holds.")] = 8192,
    hbm_tbps: Annotated[
        float,
        typer.Option(
            min=0.001,
            help="Memory bandwidth that kernels reach, TB/s. The default is the copy bandwidth measured "
            "on one H200; give your own device's.",
        ),
    ] = H200_COPY_TBPS,
    hbm_gib: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Memory of one device that the weights leave for states, rings and KV cache, GiB; "
            "given, the sequences that fit are counted.",
        ),
    ] = None,
    slots: Annotated[
        int,
        typer.Option(
            min=1,
            help="Slots of the state pool for each sequence, those of the prefix cache among them; in SGLang "
            "1 without it, 3 with no_buffer, 4 with extra_buffer_lazy, 5 with extra_buffer.",
        ),
    ] = 1,
    precision: Annotated[
        str | None,
        typer.Option(
            help="Format of the state, or of its copies as in nvfp4/fp16+sr; by default REPLAYSSM_PRECISION "
            "or fp32."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Predict memory and traffic of replay decoding for a model, batch and draft length."""
    try:
        config = ReplayConfig.load(window=window, max_draft=draft, precision=precision)
        found = load_model_config(model)
        accepted = float(draft) if accept is None else accept
        load = Workload(
            batch, config.window, draft, accepted, tp, context, config.precision, slots, config.skip_tolerance
        )
        result = make_plan(found, load)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    report = _report(found, load, result, hbm_tbps, hbm_gib)
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        _print(report)


def _layout(geometry: LayerGeometry, load: Workload, window: int) -> RingLayout:
    split, tolerance = load.precision.split, load.skip_tolerance
    return RingLayout(geometry, window, load.draft, ACTIVATIONS, split=split, skip_tolerance=tolerance)


def _step(
    layers: Sequence[LayerGeometry], load: Workload, window: int, accounting: Accounting
) -> tuple[StepTraffic, StepTraffic]:
    """Traffic of one step of the batch over all layers, conventional and with replay."""
    conventional = replay = StepTraffic()
    for geometry, count in Counter(layers).items():
        options: Any = {"precision": load.precision, "accounting": accounting}
        each = count * load.batch
        before = traffic.conventional(geometry, load.draft, activation_dtype=ACTIVATIONS, **options)
        layout = _layout(geometry, load, window)
        after = traffic.replay(layout, load.draft, load.accepted, **options)
        conventional, replay = conventional + before.scaled(each), replay + after.scaled(each)
    return conventional, replay


def _best_window(layers: Sequence[LayerGeometry], load: Workload, accounting: Accounting) -> int:
    """The best window of the first layer: a model's recurrent layers have one geometry."""
    return traffic.best_window(
        layers[0],
        load.draft,
        load.accepted,
        precision=load.precision,
        activation_dtype=ACTIVATIONS,
        accounting=accounting,
    )


def _report(model: ModelConfig, load: Workload, plan: Plan, tbps: float, gib: float | None) -> dict[str, Any]:
    """The plan as plain data, the one source of both outputs; bytes, seconds and ratios."""
    bandwidth = tbps * 1e12
    seconds = {
        "conventional": plan.conventional.seconds(bandwidth),
        "replay": plan.replay.seconds(bandwidth),
    }
    return {
        "model": model.name,
        "model_type": model.model_type,
        "hidden_size": model.hidden_size,
        "recurrent_layers": len(model.recurrent),
        "attention_layers": model.kv.layers,
        "rule": model.recurrent[0].rule.value,
        "state_shape": list(model.recurrent[0].shard(load.tp).state_shape),
        "unconfirmed": list(model.unconfirmed),
        "workload": asdict(load) | {"precision": str(load.precision)},
        "bytes_per_value": plan.bytes_per_value,
        "memory_per_sequence": {
            "state": plan.state,
            "conventional_state": plan.conventional_state,
            "ring": plan.ring,
            "ring_share": plan.ring / (plan.state + plan.ring),
            "snapshots": plan.snapshots,
            "kv_per_token": model.kv.bytes_per_token(load.tp),
            "kv": plan.kv,
        },
        "hbm_gib": gib,
        "sequences_that_fit": None if gib is None else plan.fitting(gib * GIB),
        "traffic_per_step": {
            "conventional": {**asdict(plan.conventional), "total": plan.conventional.total},
            "replay": {**asdict(plan.replay), "total": plan.replay.total},
            "ratio": plan.ratio,
        },
        "flush_share": plan.flush_share,
        "hbm_tbps": tbps,
        "seconds_per_step": seconds,
        "predicted_gain": seconds["conventional"] / seconds["replay"],
        "best_window": plan.best_window,
        "best_window_ratio": plan.best_replay.total / plan.conventional.total,
        "per_head_accounting": {
            "ratio": plan.per_head_ratio,
            "best_window": plan.per_head_best_window,
        },
    }


def _print(report: dict[str, Any]) -> None:
    console = Console()
    load = report["workload"]
    console.print(
        f"{report['model']}: {report['recurrent_layers']} {report['rule']} layers with state "
        f"{report['state_shape']}, {report['attention_layers']} attention layers; batch "
        f"{load['batch']}, L {load['window']}, T {load['draft']}, accepted {load['accepted']:g}, "
        f"tp {load['tp']}",
        highlight=False,
    )
    for table in (_memory_table(report), _traffic_table(report)):
        console.print(table)
    for line in _summary(report):
        console.print(line, highlight=False)


def _memory_table(report: dict[str, Any]) -> Table:
    memory, load = report["memory_per_sequence"], report["workload"]
    table = Table("memory of one sequence", title="Memory, per device", title_justify="left")
    table.add_column("conventional", justify="right")
    table.add_column("replay", justify="right")
    kv = _mib(memory["kv"])
    states = _mib(memory["conventional_state"]), _mib(memory["state"])
    table.add_row("state and convolution inputs", *states)
    table.add_row("ring", "-", f"{_mib(memory['ring'])} ({memory['ring_share']:.1%})")
    table.add_row(f"snapshots for {load['draft']} draft tokens", _mib(memory["snapshots"]), "-")
    table.add_row(f"KV cache of {load['context']} tokens", kv, kv)
    if (fitting := report["sequences_that_fit"]) is not None:
        counts = str(fitting["conventional"]), str(fitting["replay"])
        table.add_row(f"sequences that fit in {report['hbm_gib']:g} GiB", *counts)
    return table


def _traffic_table(report: dict[str, Any]) -> Table:
    before, after = (report["traffic_per_step"][way] for way in ("conventional", "replay"))
    table = Table("bytes of one step", title="Traffic of the batch, per device", title_justify="left")
    table.add_column("conventional", justify="right")
    table.add_column("replay", justify="right")
    for term in before:
        table.add_row(term.replace("_", " "), _mib(before[term]), _mib(after[term]))
    seconds = report["seconds_per_step"]
    table.add_row(
        f"time at {report['hbm_tbps']:g} TB/s",
        f"{seconds['conventional'] * 1e6:,.1f} us",
        f"{seconds['replay'] * 1e6:,.1f} us",
    )
    return table


def _summary(report: dict[str, Any]) -> list[str]:
    load, head = report["workload"], report["per_head_accounting"]
    lines = [
        f"Predicted gain {report['predicted_gain']:.2f}x: {report['traffic_per_step']['ratio']:.2f} of "
        f"the bytes, one step in {1 / report['flush_share']:.1f} flushes.",
        f"Best window L {report['best_window']} ({report['best_window_ratio']:.2f} of the bytes).",
    ]
    if load["draft"] == 1:
        lines.append(
            f"Counted per head, keys not shared, as published figures come out: {head['ratio']:.2f} at "
            f"L {load['window']}, best L {head['best_window']}."
        )
    if load["precision"] != "fp32":
        lines.append(
            f"States in {load['precision']}: {report['bytes_per_value']:.2f} bytes a value, where an fp32 "
            "state has 4."
        )
    if report["unconfirmed"]:
        lines.append(f"Not confirmed in this model's config: {', '.join(report['unconfirmed'])}.")
    return lines


def _mib(count: float) -> str:
    return f"{count / MIB:,.2f} MiB"

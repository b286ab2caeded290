"""`replayssm bench kernels` without a GPU: what is timed, from which histories, and what a run keeps.

Workers are replaced by ones that check on the CPU, with the torch backend, and tell made-up times.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from replayssm.cli.bench import (
    bytes_moved,
    cases,
    copies,
    drift,
    histories,
    kernels,
    precisions,
    table,
    targets,
    timing,
    worker,
)
from replayssm.cli.bench.cases import WINDOW, Case, Rows, schedule
from replayssm.cli.bench.contestant import Contestant
from replayssm.cli.bench.contestants import PEERS, contestants, named
from replayssm.cli.bench.measure import Checked, Room, check, measure, small_setup
from replayssm.cli.bench.ours import Ours, ours_in, ours_skipping
from replayssm.cli.bench.run import Message, command_line, execute, start_worker
from replayssm.cli.bench.timing import Bandwidth, Timing, summary
from replayssm.cli.errors import CommandError
from replayssm.cli.main import app
from replayssm.core import formats, traffic
from replayssm.core.formats import PACKED, allocate_states, state_tensors
from replayssm.core.geometry import LayerGeometry, Rule
from replayssm.core.precision import Precision, Rounding
from replayssm.kernels import load_states, store_states

CPU = torch.device("cpu")
BAND = Bandwidth(copy=4.0, read=5.0)
NVFP4 = Precision.parse("nvfp4/fp16+sr")
TINY = {
    "tiny-gdn": LayerGeometry(Rule.GDN, 4, 2, 8, 16),
    "tiny-kda": LayerGeometry(Rule.KDA, 2, 2, 8, 16),
    "tiny-mamba2": LayerGeometry.mamba2(4, 8, 16, 2),
}


@pytest.fixture
def tiny_geometries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that a CPU steps through at once, and graphs of four of them."""
    monkeypatch.setattr(cases, "GEOMETRIES", {**cases.GEOMETRIES, **TINY})
    monkeypatch.setattr(timing, "COLD", 1)
    monkeypatch.setattr(drift, "TOKENS", 40)


def cpu_clock(contestant: Contestant, replays: int) -> Timing:
    """Runs a whole step in the first two phases; the times are made up."""
    phases = 1 if contestant.histories is None else contestant.histories.phases
    for phase in range(min(phases, 2)):
        contestant.phase(phase)
        before = [cursor.clone() for cursor in cursors(contestant)]
        seed = (
            None if not isinstance(contestant, Ours) or contestant.seed is None else contestant.seed.clone()
        )
        timing.step(contestant)
        assert all(map(torch.equal, before, cursors(contestant)))
        assert seed is None or torch.equal(contestant.seed, seed + 1)
    return summary([[10.0, 12.0, 30.0]] * phases)


def cursors(contestant: Contestant) -> list[torch.Tensor]:
    return [contestant._cursors.now] if isinstance(contestant, Ours) else []


def cpu_worker(orders: Message, silence: float) -> Iterator[Message]:
    """A worker's messages, in this process and for our kernels alone."""
    jobs = [(Case.parse(name), impl) for name, impl in orders["jobs"]]
    if orders["task"] == "check":
        for case, impl in jobs:
            if precisions.is_ours(impl):
                checked = check(named(case, impl), case, CPU, "torch", batches=(2,))
                yield {
                    "checked": [case.name, impl], "reason": checked.reason, "errors": checked.errors,
                    "drift": 0.12345,
                }  # fmt: skip
            else:
                yield {"checked": [case.name, impl], "reason": "not here", "errors": {}}
        yield {"ended": 0, "tail": ""}
        return
    yield {"bandwidth": {"copy": 4.0, "read": 5.0}, "gpu": "a CPU", "versions": {"torch": "2"}}
    kinds = [(case, named(case, impl)) for case, impl in jobs]
    room = Room.allocate([(case, kind.precision) for case, kind in kinds], CPU)
    for (case, kind), errors in zip(kinds, orders["errors"], strict=True):
        yield {"row": measure(kind, case, room, cpu_clock, BAND, errors, "torch")}
    yield {"ended": 0, "tail": ""}


def test_the_schedule_holds_every_case_that_a_target_is_about() -> None:
    names = {case.name for case in schedule()}
    assert {name for target in targets.TARGETS for name in (*target.cases, target.other) if name} <= names
    assert len(names) == len(schedule())


def test_the_schedule_starts_with_batch_256_of_the_flagships() -> None:
    first = schedule()[:9]
    assert {case.geometry for case in first} == set(cases.FLAGSHIPS)
    assert {case.batch for case in first} == {256}


def test_the_schedule_is_filtered() -> None:
    assert schedule(rules=["kda"], batches=[3], tokens=[1]) == [Case("kda-32", 3), Case("kda-96", 3)]
    assert schedule(geometries=["gdn-hv32"], batches=[1], tokens=[4]) == [Case("gdn-hv32", 1, 4)]
    assert schedule(patterns=["*-hv64/b8/*"], tokens=[4]) == [Case("gdn-hv64", 8, 4)]
    assert max(case.batch for case in schedule(geometries=["kda-96"])) == 128
    assert {case.batch for case in schedule(quick=True)} == {1, 32, 256}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rules": ["mamba"]}, "unknown rule 'mamba': expected one of mamba2, gdn, kda"),
        ({"geometries": ["x"]}, "unknown geometry 'x'"),
        ({"batches": [0]}, "batch must be at least 1"),
        ({"tokens": [17]}, "at most the window L=16, got 17"),
        ({"patterns": ["nothing"]}, "no case is left"),
    ],
)
def test_the_schedule_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(CommandError, match=message):
        schedule(**options)


@pytest.mark.parametrize("batch", [1, 2, 3, 8, 16, 24, 256])
def test_standard_histories_flush_one_step_in_l(batch: int) -> None:
    found = histories.standard(batch, 16)
    assert found.lengths.shape == (found.phases, batch)
    counts = found.lengths.flatten().bincount(minlength=17)
    assert counts[0] == 0
    assert len(set(counts[1:].tolist())) == 1
    assert ((found.lengths + 1 > 16).float().mean() - found.flush_share).abs() < 1e-6


@pytest.mark.parametrize("tokens", [2, 4, 8])
def test_verification_histories_follow_the_flush_rule(tokens: int) -> None:
    """The stationary share of flushes, from the rule's own Markov chain."""
    chain = torch.zeros(17, 17, dtype=torch.float64)
    for history in range(17):
        for accepted in range(1, tokens + 1):
            after = (0 if history + tokens > 16 else history) + accepted
            if after <= 16:
                chain[history, after] += 1 / tokens
    share = torch.linalg.matrix_power(chain, 256)[0, 16 - tokens + 1 :].sum().item()
    for batch in (1, 8, 256):
        found, accepted = histories.verification(batch, tokens, 16)
        assert found.flush_share == pytest.approx(share, abs=0.02)
        assert found.lengths.shape == accepted.shape == (found.phases, batch)
        assert sorted(set(accepted.flatten().tolist())) == list(range(1, tokens + 1))


def test_an_early_flush_leaves_room_for_the_next_step() -> None:
    for tokens, share in ((4, None), (8, 1.0)):
        found, _ = histories.verification(256, tokens, 16, early=True)
        assert int(found.lengths.max()) + 2 * tokens <= 16
        assert share is None or found.flush_share == share


@pytest.mark.parametrize("geometry", ["gdn-hv64", "mamba2-128x64", "kda-32"])
def test_bytes_agree_with_the_traffic_model(geometry: str) -> None:
    case = Case(geometry, 256)
    model = traffic.replay(case.layout, 1)
    moved = bytes_moved.replay(case, histories.standard(256, 16))
    assert moved.total / 256 == pytest.approx(model.total, rel=1e-6)
    assert moved.written / 256 == pytest.approx(
        model.state_write + model.ring_write + 2 * case.layer.value_heads * case.layer.value_dim
    )
    plain = bytes_moved.conventional(Case(geometry, 8, 4))
    assert plain.total / 8 == pytest.approx(traffic.conventional(case.layer, 4).total)


def test_the_least_time_takes_writes_at_the_rate_of_a_copy() -> None:
    assert BAND.least_us(5e6, 0) == pytest.approx(1)
    assert BAND.least_us(2e6, 2e6) == pytest.approx(1)
    assert BAND.least_us(7e6, 2e6) == pytest.approx(2)
    assert BAND.least_us(0, 4e6) == pytest.approx(1)


def test_a_timing_is_the_mean_over_phases_of_medians() -> None:
    assert summary([[1.0, 2.0, 9.0], [4.0, 4.0, 5.0]]) == Timing(3.0, 2.5, 6)


@pytest.mark.usefixtures("tiny_geometries")
@pytest.mark.parametrize("geometry", sorted(TINY))
@pytest.mark.parametrize("tokens", [1, 4])
def test_our_kernels_pass_the_check(geometry: str, tokens: int) -> None:
    checked = check(Ours, Case(geometry, 1, tokens), CPU, "torch", batches=(1, 3))
    assert checked.reason is None
    assert checked.sound == ["default"]
    assert checked.errors["default"] < 0.01


@pytest.mark.usefixtures("tiny_geometries")
def test_a_wrong_contestant_is_not_timed() -> None:
    class Wrong(Ours):
        def launch(self, layer: int) -> None:
            super().launch(layer)
            self.out *= 1.1

    class Lost(Ours):
        def launch(self, layer: int) -> None:
            self.out.fill_(float("nan"))

    class Broken(Ours):
        def launch(self, layer: int) -> None:
            raise RuntimeError("no such kernel")

    case = Case("tiny-gdn", 1)
    assert "error 0.1" in str(check(Wrong, case, CPU, "torch", batches=(2,)).reason)
    assert "error inf" in str(check(Lost, case, CPU, "torch", batches=(2,)).reason)
    broken = check(Broken, case, CPU, "torch", batches=(2, 3))
    assert broken == Checked({}, {"default": "RuntimeError: no such kernel"})
    assert "no such kernel" in str(broken.reason)


@pytest.mark.usefixtures("tiny_geometries")
def test_the_fastest_launch_shape_is_kept() -> None:
    class Shaped(Ours):
        def shapes(self) -> list[str]:
            return ["default", "wide", "wrong", "broken"]

        def select(self, shape: str) -> None:
            self.chosen = shape

    def clock(contestant: Contestant, replays: int) -> Timing:
        assert isinstance(contestant, Shaped)
        if contestant.chosen == "broken":
            raise RuntimeError("too large")
        us = {"default": 8.0, "wide": 5.0, "wrong": 1.0}[contestant.chosen]
        return Timing(us, us, replays)

    case = Case("tiny-gdn", 2)
    errors = {"default": 0.001, "wide": 0.002, "broken": 0.001}
    row = measure(Shaped, case, Room.allocate([(case, Precision())], CPU), clock, BAND, errors, "torch")
    assert (row["launch"], row["us"], row["default_us"], row["error"]) == ("wide", 5.0, 8.0, 0.002)


def test_a_records_command_has_no_folders_of_a_machine() -> None:
    arguments = ["--json=/some/where/a.json", "--cases", "gdn-*/b1/*", "--json", "out/b.json"]
    assert command_line(arguments) == (
        "replayssm bench kernels --json=a.json --cases 'gdn-*/b1/*' --json out/b.json"
    )


@pytest.mark.usefixtures("tiny_geometries")
def test_a_run_checks_then_times_and_keeps_every_row(tmp_path: Path) -> None:
    file = tmp_path / "kernels.json"
    printed: list[str] = []
    arguments = ["--geometry", ",".join(TINY), "--batch", "2,20", "--tokens", "1,4", "--json", str(file)]
    kernels.main(arguments, printed.append, cpu_worker)
    record = json.loads(file.read_text(encoding="utf-8"))
    assert list(record)[:7] == ["topic", "date", "machine", "gpu", "versions", "commit", "command"]
    assert record["topic"] == "kernels"
    assert record["command"].startswith("replayssm bench kernels --geometry tiny-gdn")
    assert record["command"].endswith(" --json kernels.json"), "a machine's folders are nobody's business"
    assert record["bandwidth_tbps"] == {"copy": 4.0, "read": 5.0}
    assert len(record["rows"]) == 12
    needed = "case rule geometry batch T window read recurrence impl us bytes bandwidth_fraction flush_share"
    assert set(needed.split()) <= set(record["rows"][0])
    row = next(row for row in record["rows"] if row["case"] == "tiny-gdn/b2/t1")
    assert row["flush_share"] == 0.0625
    assert row["us"] == 12.0
    assert row["least_us"] == 10.0
    assert {entry["impl"] for entry in record["skipped"]} == {
        kind.name for tokens in (1, 4) for kind in contestants(Case("tiny-gdn", 2, tokens))[1:]
    }
    assert any(line.startswith("tiny-kda/b20/t4") for line in printed)
    assert "not measured" in printed[-1]


@pytest.mark.usefixtures("tiny_geometries")
def test_a_worker_checks_and_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "bandwidth", lambda device: BAND)
    monkeypatch.setattr(worker, "graph_clock", cpu_clock)
    jobs = [["tiny-gdn/b2/t1", "ours"], ["tiny-mamba2/b2/t4", "fla"]]
    orders = {"task": "check", "backend": "torch", "jobs": jobs}
    first, second = told(orders)
    assert first["checked"] == jobs[0]
    assert (first["reason"], list(first["errors"])) == (None, ["default"])
    assert 0 < first["drift"] < 1e-5
    assert second["drift"] is None
    assert second["reason"] == "it has no decoding kernel for Mamba-2"
    orders = {
        "task": "time",
        "backend": "torch",
        "quick": True,
        "jobs": jobs[:1],
        "errors": [first["errors"]],
    }
    head, timed = told(orders)
    assert (head["gpu"], head["bandwidth"]) == ("cpu", {"copy": 4.0, "read": 5.0})
    assert timed["row"]["case"] == "tiny-gdn/b2/t1"
    orders["errors"] = [{}]
    _, failed = told(orders)
    assert failed["failed"] == jobs[0]


def told(orders: Message) -> list[Message]:
    out = io.StringIO()
    worker.main(orders, out, CPU)
    return [json.loads(line.removeprefix(worker.MARK)) for line in out.getvalue().splitlines()]


@pytest.mark.usefixtures("tiny_geometries")
def test_a_process_that_dies_costs_its_own_row() -> None:
    starts: list[Message] = []

    def fake(orders: Message, silence: float) -> Iterator[Message]:
        starts.append(orders)
        if orders["task"] == "check":
            for case, impl in orders["jobs"]:
                if impl == "sglang-replay" and len(starts) < 4:
                    yield {"ended": -11, "tail": "segmentation fault"}
                    return
                yield {"checked": [case, impl], "reason": None, "errors": {"default": 0.0}}
            yield {"ended": 0, "tail": ""}
            return
        for case, impl in orders["jobs"]:
            if impl == "sglang":
                yield {"ended": None, "tail": ""}
                return
            name = Case.parse(case)
            yield {"row": made_up(name, impl, 1.0)}
        yield {"ended": 0, "tail": ""}

    run = execute([Case("tiny-gdn", 1), Case("tiny-gdn", 2)], ["sglang"], say=lambda line: None, start=fake)
    assert [(row["case"], row["impl"]) for row in run.rows] == [
        ("tiny-gdn/b1/t1", "ours"),
        ("tiny-gdn/b2/t1", "ours"),
    ]
    reasons = {(entry["case"], entry["impl"]): entry["reason"] for entry in run.skipped}
    assert "ended with status -11: segmentation fault" in reasons["tiny-gdn/*/t1", "sglang-replay"]
    assert "said nothing for too long" in reasons["tiny-gdn/b1/t1", "sglang"]
    assert "said nothing for too long" in reasons["tiny-gdn/b2/t1", "sglang"]


@pytest.mark.usefixtures("tiny_geometries")
def test_our_own_kernels_must_run() -> None:
    def fake(orders: Message, silence: float) -> Iterator[Message]:
        for case, impl in orders["jobs"]:
            yield {"checked": [case, impl], "reason": "no NVRTC here", "errors": {}}

    with pytest.raises(CommandError, match="backend 'cuda': no NVRTC here"):
        execute([Case("tiny-gdn", 1)], [], "cuda", say=lambda line: None, start=fake)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is about machines without a GPU")
def test_a_worker_that_fails_says_how() -> None:
    orders = {"task": "check", "backend": "torch", "jobs": [["gdn-hv64/b1/t1", "ours"]]}
    messages = list(start_worker(orders, 120.0))
    assert len(messages) == 1
    assert messages[0]["ended"] == 1
    assert "CUDA" in messages[0]["tail"]


def test_a_silent_worker_is_ended() -> None:
    assert list(start_worker({"task": "check", "jobs": []}, 0.0)) == [{"ended": None, "tail": ""}]


@pytest.mark.parametrize("case", [Case("gdn-hv64", 1), Case("kda-32", 1, 4), Case("mamba2-128x64", 1)])
def test_peers_that_are_missing_say_why(case: Case) -> None:
    for kind in contestants(case, PEERS)[1:]:
        reason = kind.refuses(case)
        assert reason is None or len(reason) > 10


def made_up(case: Case, impl: str, us: float, fraction: float = 0.5) -> dict[str, Any]:
    return {
        "case": case.name, "rule": case.rule.value, "geometry": case.geometry, "batch": case.batch,
        "T": case.tokens, "impl": impl, "us": us, "bandwidth_fraction": fraction, "flush_share": None,
        "launch": "default",
    }  # fmt: skip


def test_targets_are_judged_by_the_record() -> None:
    case = Case("gdn-hv64", 256)
    verify = Case("gdn-hv64", 256, 8)
    rows = [
        made_up(case, "ours", 100.0, 0.9), made_up(case, "sglang", 190.0),
        made_up(case, "sglang-replay", 112.0),
        made_up(verify, "ours", 150.0), made_up(Case("gdn-hv64", 1), "ours", 5.0),
        made_up(Case("gdn-hv64", 1), "fla", 4.9), made_up(Case("gdn-hv64", 1), "sglang", 6.0),
    ]  # fmt: skip
    found = {
        (outcome.target.text, outcome.target.against, outcome.case): outcome
        for outcome in targets.outcomes(rows)
    }
    plain = found["GDN Hv 64, T = 1", "sglang", case.name]
    assert plain.reached == pytest.approx(1.9)
    assert plain.met
    assert not found["GDN Hv 64, T = 1", "sglang-replay", case.name].met
    assert found["GDN Hv 64, T = 1", "sglang", Case("gdn-hv64", 512).name].reached is None
    beside = found["GDN Hv 64, T = 8, beside one conventional T = 1 step", "sglang", verify.name]
    assert beside.reached == pytest.approx(190 / 150)
    assert beside.met
    slower = found["GDN Hv 64 and Hv 32, T = 1", targets.BEST, Case("gdn-hv64", 1).name]
    assert (slower.by, slower.met) == ("fla", False)
    assert found["all rules, T = 1, 4 and 8", targets.BANDWIDTH, case.name].met


def test_tables_show_the_worst_case() -> None:
    rows = [
        made_up(Case("gdn-hv64", 1), "ours", 5.0), made_up(Case("gdn-hv64", 1), "fla", 4.0),
        made_up(Case("gdn-hv64", 2), "ours", 5.0), made_up(Case("gdn-hv64", 2), "sglang", 10.0),
    ]  # fmt: skip
    assert table.times(rows) == [
        ["case", "ours", "sglang", "fla", "best peer / ours", "of bandwidth"],
        ["gdn-hv64/b1/t1", "5.0", "-", "4.0", "0.80", "50%"],
        ["gdn-hv64/b2/t1", "5.0", "10.0", "-", "2.00", "50%"],
    ]
    line = next(line for line in table.targets(rows) if line[0] == "GDN Hv 64 and Hv 32, T = 1")
    assert line == [line[0], "best peer", "1.00x", "gdn-hv64/b1/t1 (fla)", "0.80x", "1 of 16"]
    assert table.text([["a", "b"], ["ccc", "1.0"]]) == "a    b\nccc  1.0"
    assert table.markdown([["a", "b"], ["c", "1"]]) == "| a | b |\n| --- | ---: |\n| c | 1 |"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is about machines without a GPU")
def test_without_a_gpu_the_command_says_so() -> None:
    result = CliRunner().invoke(app, ["bench", "kernels", "--quick"])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: kernels are timed on a CUDA device")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--peers", "vllm"], "unknown peer 'vllm'"),
        (["--rule", "rwkv"], "unknown rule 'rwkv'"),
        (["--rows", "loud"], "unknown rows 'loud'"),
        (["--precision", "nvfp5"], "--precision: unknown format 'nvfp5'"),
        (
            ["--geometry", "gdn-hv64", "--batch", "1", "--json", "/nowhere/x.json"],
            "there is no folder /nowhere",
        ),
    ],
)
def test_the_command_refuses(options: list[str], message: str) -> None:
    with pytest.raises(CommandError, match=message):
        kernels.main(options, lambda line: None, cpu_worker)


def test_the_command_lists_its_options() -> None:
    result = CliRunner().invoke(app, ["bench", "kernels", "--help"])
    assert result.exit_code == 0
    assert "--peers" in result.stdout


@pytest.mark.parametrize(("reached", "met"), [(1.8999, False), (1.9, True), (None, False)])
def test_a_target_is_not_met_by_rounding(reached: float | None, met: bool) -> None:
    target = next(target for target in targets.TARGETS if target.least == 1.90)
    assert targets.Outcome(target, target.cases[0], reached, "sglang").met is met


def test_a_case_says_which_rows_it_has() -> None:
    found = schedule(geometries=["gdn-hv64"], batches=[8], tokens=[1], rows=["mixed", "quiet", "flush"])
    assert [case.name for case in found] == ["gdn-hv64/b8/t1", "gdn-hv64/b8/t1/quiet", "gdn-hv64/b8/t1/flush"]
    assert [Case.parse(case.name) for case in found] == found
    assert schedule(patterns=["*/b1/t1/flush"], geometries=["kda-32"], rows=list(Rows)) == [
        Case("kda-32", 1, 1, Rows.FLUSH)
    ]
    every = {case.name for case in schedule(rows=list(Rows))}
    assert {name for target in targets.PRECISION_TARGETS for name in target.cases} <= every
    with pytest.raises(CommandError, match="unknown rows 'loud': expected one of mixed, quiet, flush"):
        schedule(rows=["loud"])


@pytest.mark.parametrize("batch", [1, 8, 256])
@pytest.mark.parametrize("tokens", [1, 4, 16])
def test_rows_of_one_kind_have_every_history_of_it(batch: int, tokens: int) -> None:
    quiet, flushing = histories.quiet(batch, tokens, 16), histories.flushing(batch, tokens, 16)
    assert set(quiet.lengths.flatten().tolist()) == set(range(min(1, 16 - tokens), 16 - tokens + 1))
    assert set(flushing.lengths.flatten().tolist()) == set(range(16 - tokens + 1, 17))
    assert (quiet.flush_share, flushing.flush_share) == (0, 1)
    for found in (quiet, flushing):
        assert found.lengths.shape == (found.phases, batch)
        assert len(set(found.lengths.flatten().unique(return_counts=True)[1].tolist())) == 1


@pytest.mark.parametrize("geometry", ["gdn-hv64", "mamba2-128x64"])
def test_bytes_of_a_precision(geometry: str) -> None:
    """The traffic model's, which the plan shows; of rows that all flush, and of rows that do not, by hand."""
    case, mixed = Case(geometry, 256), histories.standard(256, 16)
    for name in ("nvfp4/fp16+sr", "fp8+sr", "fp16+sr", "fp32"):
        precision = Precision.parse(name)
        layout = replace(case.layout, split=precision.split)
        model = traffic.replay(layout, 1, precision=precision)
        assert bytes_moved.replay(case, mixed, precision).total / 256 == pytest.approx(model.total, rel=1e-9)
    shape = case.layer.state_shape
    nvfp4, half = formats.state_bytes("nvfp4", shape), formats.state_bytes("fp16", shape)
    spread = histories.quiet(256, 1, 16)
    plain, packed = (bytes_moved.replay(case, spread, precision) for precision in (Precision(), NVFP4))
    beta = 0 if case.rule is Rule.MAMBA2 else 4 * case.layer.value_heads
    mean = spread.lengths.double().mean().item()
    saved = formats.state_bytes("fp32", shape) - nvfp4
    assert (plain.read - packed.read) / 256 == pytest.approx(saved - mean * beta)
    assert (packed.written - plain.written) / 256 == pytest.approx(beta)
    full = bytes_moved.replay(case, histories.flushing(256, 1, 16), NVFP4)
    fold = half + (0 if case.rule is Rule.MAMBA2 else nvfp4)
    record = replace(case.layout, split=True).record_bytes
    assert (full.read - packed.read) / 256 == pytest.approx(fold + (16 - mean) * record)
    assert (full.written - packed.written) / 256 == pytest.approx(nvfp4 + half)


def test_a_graph_of_packed_states_has_as_many_bytes_to_read() -> None:
    state, ring = 2**22, 2**19
    assert timing.layers(state, ring) == timing.layers(state, ring, state) == 96
    assert timing.layers(state, ring, state // 4) == 4 * 96
    assert timing.layers(2**30, ring, 2**27) == 16
    assert timing.layers(2**20, ring) == 128


@pytest.mark.parametrize("format", [*formats.FORMATS, *PACKED])
@pytest.mark.parametrize("rounding", list(Rounding))
def test_the_largest_rounding_is_reached_and_not_exceeded(format: str, rounding: Rounding) -> None:
    """Heads of one row and 32 values whose largest magnitudes run evenly through a factor of four."""
    largest = torch.linspace(1, 4, 4096).exp2()[:, None, None, None]
    values = (torch.rand(4096, 1, 1, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1) * largest
    values[..., 0] = largest[..., 0]
    state = allocate_states(format, tuple(values.shape), CPU)
    stochastic = rounding is Rounding.STOCHASTIC
    if stochastic and format in ("fp32", "bf16"):
        return
    store_states(state, values, rand_seed=torch.zeros(1, dtype=torch.int64) if stochastic else None)
    scale = values.abs() if format in formats.FORMATS else largest
    worst = ((load_states(state) - values).abs() / scale).max().item()
    allowed = precisions.largest_rounding(format, rounding)
    if format == "fp32":
        assert worst == 0
    else:
        assert 0.75 * allowed < worst <= allowed


@pytest.mark.usefixtures("tiny_geometries")
@pytest.mark.parametrize(
    ("geometry", "tokens", "precision"),
    [
        *((geometry, tokens, "nvfp4/fp16+sr") for geometry in sorted(TINY) for tokens in (1, 4)),
        ("tiny-gdn", 4, "fp8+sr"), ("tiny-kda", 1, "int8/fp32"), ("tiny-mamba2", 1, "fp16+sr"),
    ],
)  # fmt: skip
def test_our_kernels_pass_the_check_in_other_precisions(geometry: str, tokens: int, precision: str) -> None:
    kind = ours_in(Precision.parse(precision))
    checked = check(kind, Case(geometry, 1, tokens), CPU, "torch", batches=(3,))
    assert checked.reason is None
    assert checked.errors["default"] < 0.01


class Output(ours_in(NVFP4)):  # type: ignore[misc]
    """Wrong outputs where rows flush."""

    def launch(self, layer: int) -> None:
        super().launch(layer)
        self.out[self.flushing()] *= 1.1


class Early(ours_in(NVFP4)):  # type: ignore[misc]
    """Wrong outputs before any row has flushed."""

    def launch(self, layer: int) -> None:
        super().launch(layer)
        self.out[~self.flushing()] *= 1.1


class Altered(ours_in(NVFP4)):  # type: ignore[misc]
    """A step that goes on to change its copies: the values of both, or of one."""

    copy, rows = "both", "flushing"

    def launch(self, layer: int) -> None:
        before = [tensor.clone() for tensor in self.pools(layer)]
        super().launch(layer)
        rows = self.flushing() if self.rows == "flushing" else ~self.flushing()
        if self.copy == "both":
            values = self.copies[layer].recurrence()
            values[rows] *= 1.01
            store_states(self.copies[layer].state, values, self.copies[layer].read_state)
        else:
            for tensor, old in zip(self.pools(layer), before, strict=True):
                tensor.copy_(old)

    def pools(self, layer: int) -> list[torch.Tensor]:
        copy = self.copies[layer].read_state if self.copy == "read" else self.copies[layer].state
        assert copy is not None
        return list(state_tensors(copy))


class Disturbed(Altered):
    """A row that does not flush changes."""

    rows = "quiet"


class Stale(Altered):
    """The read copy is not renewed."""

    copy = "read"


class Unfolded(Altered):
    """The recurrence copy is not written, and the read copy is."""

    copy = "recurrence"


@pytest.mark.usefixtures("tiny_geometries")
@pytest.mark.parametrize("geometry", ["tiny-gdn", "tiny-mamba2"])
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Output, r"default: error 0\.[01]\d*, at most 0.02 allowed"),
        (Early, r"default: error 0\.[01]\d*, at most 0.02 allowed"),
        (Altered, "WrongStates: a fold into fp16 is off by 0.0[01]"),
        (Disturbed, "WrongStates: the recurrence copy of a row that does not flush has changed"),
        (Stale, "WrongStates: the read copy is not the recurrence copy rounded to nearest"),
        (Unfolded, r"WrongStates: a fold into fp16 is off by \d"),
    ],
)
def test_wrong_packed_states_are_not_timed(kind: type[Ours], reason: str, geometry: str) -> None:
    checked = check(kind, Case(geometry, 1), CPU, "torch", batches=(2,))
    assert checked.sound == []
    assert re.search(reason, str(checked.reason)), checked.reason


@pytest.fixture
def ones(tiny_geometries: None) -> tuple[copies.Copies, copies.CopiesReference]:
    """States of ones in NVFP4 and fp16, and what a contestant must make of them whose every step flushes."""
    case = Case("tiny-gdn", 1)
    values = torch.ones(1, *case.layer.state_shape)
    stored = copies.Copies.of(values, NVFP4, torch.zeros(1, dtype=torch.int64))
    inputs = small_setup(case, CPU, "torch").inputs
    return stored, copies.CopiesReference(inputs, stored, Rounding.STOCHASTIC, lambda: torch.ones(1).bool())


def test_a_fold_goes_on_from_what_the_last_one_has_stored(
    ones: tuple[copies.Copies, copies.CopiesReference],
) -> None:
    """Without tokens a state may be off by a unit in the last place after each fold, not by two after one."""
    stored, reference = ones
    for units in (1, 2, 3, 5):
        store_states(stored.state, torch.full(stored.state.shape, 1 + units * 2.0**-10), stored.read_state)
        if units < 5:
            reference.step(torch.zeros(1))
    with pytest.raises(copies.WrongStates, match=r"is off by 0.0019 .* is at most 0.0012"):
        reference.step(torch.zeros(1))


def test_a_check_that_sees_nan_fails(ones: tuple[copies.Copies, copies.CopiesReference]) -> None:
    stored, reference = ones
    assert isinstance(stored.state, torch.Tensor)
    stored.state.fill_(float("nan"))
    with pytest.raises(copies.WrongStates, match="is off by nan"):
        reference.step(torch.ones(1))


def test_states_are_stored_a_few_slots_at_a_time() -> None:
    values = torch.rand(copies.SLOTS + 3, 2, 4, 16)
    stored = copies.Copies.of(values, Precision.parse("nvfp4/fp16"), None)
    assert torch.equal(stored.recurrence(), values.half().float())
    whole = allocate_states("nvfp4", tuple(values.shape), CPU)
    store_states(whole, values.half().float())
    assert torch.equal(stored.read(), load_states(whole))
    assert copies.Copies.of(values, Precision(), None).state is values


@pytest.mark.usefixtures("tiny_geometries")
@pytest.mark.parametrize("tokens", [1, 4])
def test_drift_is_that_of_what_is_stored(tokens: int) -> None:
    case = Case("tiny-gdn", 1, tokens)

    def of(name: str) -> float:
        return drift.drift(ours_in(Precision.parse(name)), case, CPU, "torch")

    full, half, split, eight = map(of, ("fp32", "fp16", "nvfp4/fp16", "fp8+sr"))
    assert 0 < full < 1e-6
    assert 1e-4 < half < 4e-4
    assert split == pytest.approx(half, rel=1e-2), "a read copy's error is not in the state"
    assert 0.01 < eight < 0.1

    class Lossy(Ours):
        def launch(self, layer: int) -> None:
            super().launch(layer)
            self.copies[layer].recurrence()[self.flushing()] *= 0.99

    assert drift.drift(Lossy, case, CPU, "torch") > 0.005


def test_a_precision_is_found_by_its_name() -> None:
    quiet = Case("gdn-hv64", 1, 1, Rows.QUIET)
    assert [kind.name for kind in contestants(quiet, PEERS, [NVFP4])] == ["ours", "ours nvfp4/fp16+sr"]
    assert named(quiet, "ours nvfp4/fp16+sr") is ours_in(NVFP4)
    assert named(quiet, "ours") is Ours
    assert named(Case("gdn-hv64", 1), "sglang").name == "sglang"
    assert precisions.parse(["fp32", "fp8+sr", "float32", "fp8+sr"]) == [Precision.parse("fp8+sr")]


@pytest.mark.usefixtures("tiny_geometries")
def test_a_key_dimension_that_blocks_do_not_divide_is_refused() -> None:
    kind = ours_in(Precision.parse("mxfp4/fp16"))
    assert "must divide the key dimension, got K=16" in str(kind.refuses(Case("tiny-gdn", 1)))
    assert kind.refuses(Case("gdn-hv64", 1)) is None


@pytest.mark.usefixtures("tiny_geometries")
@pytest.mark.parametrize("geometry", sorted(TINY))
def test_a_share_of_states_is_left_unread(geometry: str) -> None:
    """Every other head, in rows that do not flush, and again in each phase; a check measures its norms."""
    case = Case(geometry, 2, rows=Rows.QUIET)
    kind = named(case, "ours skip 0.5")
    assert kind is ours_skipping(0.5)
    assert check(kind, case, CPU, "torch", batches=(3,)).reason is None
    for share, unread in ((0.0, False), (0.5, True)):
        contestant = ours_skipping(share)(replace(small_setup(case, CPU, "torch"), empty=False))
        contestant.setup.states[:, :, 1::2] = float("nan")
        contestant.launch(0)
        assert contestant.out[:, :, ::2].isfinite().all()
        assert contestant.out[:, :, 1::2].isfinite().all() == unread
    contestant = kind(replace(small_setup(Case(geometry, 2), CPU, "torch"), empty=False))
    (skipping,) = contestant.skipping
    assert skipping is not None
    said, measured = skipping.norms.clone(), False
    for phase in range(WINDOW):
        contestant.phase(phase)
        assert torch.equal(skipping.norms, said)
        contestant.launch(0)
        measured |= not torch.equal(skipping.norms, said)
        contestant.finish()
    assert measured, "no row has flushed"


@pytest.mark.usefixtures("tiny_geometries")
def test_a_run_times_shares_unread(tmp_path: Path) -> None:
    file, printed = tmp_path / "skipping.json", list[str]()
    kernels.main(
        ["--geometry", "tiny-gdn", "--batch", "2", "--tokens", "1", "--rows", "quiet",
         "--unread", "0,0.5", "--peers", "none", "--backend", "torch", "--json", str(file)],
        printed.append, cpu_worker,
    )  # fmt: skip
    record = json.loads(file.read_text(encoding="utf-8"))
    assert record["topic"] == "skipping"
    assert [row["impl"] for row in record["rows"]] == ["ours", "ours skip 0", "ours skip 0.5"]
    read = [row["bytes"] for row in record["rows"]]
    state = 2 * traffic.state_bytes(Case("tiny-gdn", 2).layer, traffic.FP32)
    assert read[0] - read[2] == state / 2
    assert read[0] == read[1]
    assert re.search(r"tiny-gdn/b2/t1/quiet +skip 0\.5 +12\.0 +1\.00", "\n".join(printed))
    assert not re.search("NVFP4", "\n".join(printed)), "no target of precisions"
    with pytest.raises(SystemExit):
        kernels.main(["--unread", "2"], printed.append, cpu_worker)


@pytest.mark.usefixtures("tiny_geometries")
def test_a_run_times_precisions_and_kinds_of_rows(tmp_path: Path) -> None:
    file = tmp_path / "precision.json"
    printed: list[str] = []
    kernels.main(
        ["--geometry", "tiny-gdn", "--batch", "2", "--tokens", "1", "--rows", "mixed,quiet,flush",
         "--precision", "nvfp4/fp16+sr,fp16", "--peers", "sglang", "--json", str(file)],
        printed.append, cpu_worker,
    )  # fmt: skip
    record = json.loads(file.read_text(encoding="utf-8"))
    assert record["topic"] == "precision"
    names = ["ours", "ours nvfp4/fp16+sr", "ours fp16"]
    kinds = ["", "/quiet", "/flush"]
    assert [(row["case"], row["impl"]) for row in record["rows"]] == [
        (f"tiny-gdn/b2/t1{kind}", name) for kind in kinds for name in names
    ]
    stored = ("read", "recurrence", "rounding", "drift")
    assert {tuple(row[key] for key in stored) for row in record["rows"] if row["impl"] == names[1]} == {
        ("nvfp4", "fp16", "stochastic", 0.123)
    }
    assert [row["flush_share"] for row in record["rows"][::3]] == [0.0625, 0.0, 1.0]
    bytes_of = {(row["case"], row["impl"]): row["bytes"] for row in record["rows"]}
    assert bytes_of["tiny-gdn/b2/t1/quiet", names[1]] < bytes_of["tiny-gdn/b2/t1/flush", names[1]]
    assert {(entry["case"], entry["impl"]) for entry in record["skipped"]} == {
        ("tiny-gdn/*/t1", "sglang"), ("tiny-gdn/*/t1", "sglang-replay"),
    }  # fmt: skip
    assert sum(line.startswith("checked") for line in printed) == 3
    text = "\n".join(printed)
    assert re.search(r"tiny-gdn/b2/t1/quiet +nvfp4/fp16\+sr +12\.0 +1\.00 +\d+% +0\.0 +1\.2e-01", text)
    assert re.search(r"no flush, NVFP4 read +ours +3\.80x +not measured", text)


def test_targets_of_precisions_are_judged_where_there_are_any() -> None:
    quiet, mixed = Case("gdn-hv64", 256, 1, Rows.QUIET), Case("gdn-hv64", 256)
    plain = [made_up(quiet, "ours", 280.0), made_up(mixed, "ours", 300.0), made_up(mixed, "sglang", 540.0)]
    assert {outcome.target for outcome in targets.outcomes(plain)} == set(targets.TARGETS)
    assert len(table.precisions(plain)) == 1
    packed = [
        made_up(quiet, "ours nvfp4/fp16+sr", 70.0), made_up(quiet, "ours fp8/fp16+sr", 110.0),
        made_up(mixed, "ours nvfp4/fp16+sr", 89.0),
        made_up(Case("gdn-hv64", 256, 1, Rows.FLUSH), "ours fp16", 300.0),
        made_up(Case("gdn-hv64", 256, 1, Rows.FLUSH), "ours fp16+sr", 346.0),
    ]  # fmt: skip
    found = {
        (outcome.target.text, outcome.by): outcome
        for outcome in targets.outcomes(plain + packed)
        if outcome.case.startswith("gdn-hv64/b256/t1") and outcome.target in targets.PRECISION_TARGETS
    }
    reached = {key: (outcome.reached, outcome.met) for key, outcome in found.items()}
    assert reached["no flush, NVFP4 read", "ours"] == (4.0, True)
    assert reached["no flush, fp8 read", "ours"] == (pytest.approx(280 / 110), False)
    assert reached["T = 1, NVFP4 read, fp16 with SR", "ours"] == (pytest.approx(300 / 89), True)
    assert reached["T = 1, NVFP4 read, fp16 with SR", "sglang"] == (pytest.approx(540 / 89), True)
    assert reached["all flush, fp16 with SR", "ours fp16"] == (pytest.approx(300 / 346), False)
    assert reached["all flush, NVFP4 read, fp16 with SR", "ours nvfp4/fp16"] == (None, False)
    flush = ["gdn-hv64/b256/t1/flush", "-", "-", "-", "-"]
    assert table.times(plain + packed) == [*table.times(plain), flush], "a precision is no peer and no column"

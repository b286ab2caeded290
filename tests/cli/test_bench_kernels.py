"""`replayssm bench kernels` without a GPU: what is timed, from which histories, and what a run keeps.

Workers are replaced by ones that check on the CPU, with the torch backend, and tell made-up times.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from replayssm.cli.bench import bytes_moved, cases, histories, kernels, table, targets, timing, worker
from replayssm.cli.bench.cases import Case, schedule
from replayssm.cli.bench.contestant import Contestant
from replayssm.cli.bench.contestants import PEERS, contestants
from replayssm.cli.bench.measure import Checked, Room, check, measure
from replayssm.cli.bench.ours import Ours
from replayssm.cli.bench.run import Message, command_line, execute, start_worker
from replayssm.cli.bench.timing import Bandwidth, Timing, summary
from replayssm.cli.errors import CommandError
from replayssm.cli.main import app
from replayssm.core import traffic
from replayssm.core.geometry import LayerGeometry, Rule

CPU = torch.device("cpu")
BAND = Bandwidth(copy=4.0, read=5.0)
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


def cpu_clock(contestant: Contestant, replays: int) -> Timing:
    """Runs a whole step in every phase; the times are made up."""
    phases = 1 if contestant.histories is None else contestant.histories.phases
    for phase in range(phases):
        contestant.phase(phase)
        before = [cursor.clone() for cursor in cursors(contestant)]
        timing.step(contestant)
        assert all(map(torch.equal, before, cursors(contestant)))
    return summary([[10.0, 12.0, 30.0]] * phases)


def cursors(contestant: Contestant) -> list[torch.Tensor]:
    return [contestant._cursors.now] if isinstance(contestant, Ours) else []


def cpu_worker(orders: Message, silence: float) -> Iterator[Message]:
    """A worker's messages, in this process and for our kernels alone."""
    jobs = [(Case.parse(name), impl) for name, impl in orders["jobs"]]
    if orders["task"] == "check":
        for case, impl in jobs:
            if impl == "ours":
                checked = check(Ours, case, CPU, "torch", batches=(2,))
                yield {"checked": [case.name, impl], "reason": checked.reason, "errors": checked.errors}
            else:
                yield {"checked": [case.name, impl], "reason": "not here", "errors": {}}
        yield {"ended": 0, "tail": ""}
        return
    yield {"bandwidth": {"copy": 4.0, "read": 5.0}, "gpu": "a CPU", "versions": {"torch": "2"}}
    room = Room.allocate([case for case, _ in jobs], CPU)
    for (case, _), errors in zip(jobs, orders["errors"], strict=True):
        yield {"row": measure(Ours, case, room, cpu_clock, BAND, errors, "torch")}
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
    row = measure(Shaped, case, Room.allocate([case], CPU), clock, BAND, errors, "torch")
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

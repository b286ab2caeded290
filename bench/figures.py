"""Write the figures of README and docs from recorded results, so that none is typed.

A document marks a place with `<!-- figures:NAME -->` and `<!-- /figures -->`; what lies between is
replaced. NAME is a topic, whose newest file in `bench/results` is read, or a study in one
(`accuracy-STUDY`, `accuracy-examples-STUDY`), or `plan`, `precision-plan` or `requests-in-flight`, which
are predicted. The plots of the kernels and of the precisions are drawn beside their tables.

    python bench/figures.py            # rewrite
    python bench/figures.py --check    # status 1 where a document is not what this would write
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from replayssm.cli.bench import e2e, recall, table
from replayssm.cli.bench.accuracy import tables
from replayssm.cli.bench.cases import Case
from replayssm.cli.bench.compared import PRECISIONS
from replayssm.cli.bench.targets import BANDWIDTH, PRECISION_TARGETS, TARGETS, outcomes
from replayssm.cli.main import app
from replayssm.cli.model_config import load_model_config
from replayssm.cli.plan import Workload, make_plan
from replayssm.core import Precision

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
PLOT = ROOT / "docs" / "kernels.png"
PRECISION_PLOT = ROOT / "docs" / "precision.png"
LARGE_BATCH = 128
SHOWN_COMMANDS = 4
"""Of a study that several processes have measured."""
LONG_RECALL = "recall-long"
"""Topic of a record of `bench recall` that runs far, on any device."""
PLANNED = "Nemotron-3-Super-120B-A12B"
PLAN = ["plan", "--model", PLANNED, "--window", "16", "--precision", "fp32"]
MARKED = re.compile(r"(<!-- figures:(\S+) -->\n).*?(<!-- /figures -->)", re.DOTALL)


def newest(topic: str, results: Path = RESULTS) -> Path:
    """The result file of a topic with the latest date in its name; of that date a GPU's rather than a CPU's.

    Raises:
        FileNotFoundError: there is none yet.
    """
    dated = re.compile(rf"{re.escape(topic)}-([^-]+)-(\d{{4}}-\d\d-\d\d)\.json")
    found = {
        (match[2], match[1] != "cpu"): path
        for path in results.iterdir()
        if (match := dated.fullmatch(path.name))
    }
    if not found:
        raise FileNotFoundError(f"no file {topic}-<machine>-<date>.json in {results}")
    return found[max(found)]


def e2e_transformers() -> str:
    """The demo's table."""
    path = newest("e2e-transformers")
    record = json.loads(path.read_text(encoding="utf-8"))
    models: dict[str, dict[str, Any]] = {}
    for row in record["rows"]:
        models.setdefault(row["model"], {})[row["decoding"]] = row
    lines = [
        "| model | tokens | state bytes: replay | replay + speculation | drafts accepted a round |"
        " tokens/s on a CPU thread: conventional, replay, replay + speculation |",
        "|---|---|---|---|---|---|",
        *(_model_line(model, *ways.values()) for model, ways in models.items()),
    ]
    first = record["rows"][0]
    source = path.relative_to(ROOT).as_posix()
    versions = ", ".join(f"{name} {record['versions'][name]}" for name in ("torch", "transformers"))
    return "\n".join(lines) + (
        f"\n\nState bytes are those read and written per token, as a share of conventional decoding's. "
        f"{len(first['prompts'])} prompts a model, fp32, greedy, L = {record['rows'][1]['window']}. From "
        f"[{Path(source).name}]({source}): `{record['command']}` on {record['date']}; "
        f"{record['machine']}; {versions}; commit {record['commit'][:12]}.\n"
    )


def _model_line(model: str, conventional: Any, replay: Any, speculation: Any) -> str:
    equal = "equal" if replay["tokens_equal"] and speculation["tokens_equal"] else "differ"
    speeds = " / ".join(f"{row['tokens_per_s']:.0f}" for row in (conventional, replay, speculation))
    drafts = f"{speculation['drafts_accepted']:.2f} of {speculation['drafts_proposed']:.2f}"
    shares = " | ".join(f"{row['traffic_ratio']:.0%}" for row in (replay, speculation))
    return (
        f"| {model} ({conventional['rule']}) | {replay['tokens']} {equal} | {shares} | {drafts} | {speeds} |"
    )


def plan() -> str:
    """What `replayssm plan` predicts for the model with a published figure."""
    result = CliRunner().invoke(app, [*PLAN, "--json"])
    report = json.loads(result.stdout)
    ratio, head = report["traffic_per_step"]["ratio"], report["per_head_accounting"]
    return (
        f"`replayssm {' '.join(PLAN)}` predicts {ratio:.2f} of conventional decoding's bytes, least at "
        f"L = {report['best_window']} ({report['best_window_ratio']:.2f}). In the accounting of the "
        f"published figure, each head by itself with its own keys, it is {head['ratio']:.2f}, least at "
        f"L = {head['best_window']}.\n"
    )


def kernels(results: Path = RESULTS) -> str:
    """Times of the kernels beside their peers', and the targets; one line where none is recorded yet."""
    try:
        path = newest("kernels", results)
    except FileNotFoundError:
        return "No run on a GPU is recorded yet.\n"
    record = json.loads(path.read_text(encoding="utf-8"))
    rows = record["rows"]
    rules = {row["rule"] for row in rows}
    titles = {"gdn": "Gated DeltaNet", "mamba2": "Mamba-2", "kda": "Kimi Delta Attention"}
    parts = [f"![How many times faster than the peers, over the batch size]({PLOT.name})"]
    for rule, title in titles.items():
        if rule in rules:
            lines = table.times([row for row in rows if row["rule"] == rule])
            parts += [f"### {title}", table.markdown(lines)]
    parts += ["### Targets", table.markdown(table.targets(rows)), _kernels_source(path, record)]
    return "\n\n".join(parts) + "\n"


def precision(results: Path = RESULTS) -> str:
    """Times and drift of states in other formats than fp32; one line where none is recorded yet."""
    try:
        path = newest("precision", results)
    except FileNotFoundError:
        return "No run on a GPU is recorded yet.\n"
    record = json.loads(path.read_text(encoding="utf-8"))
    tables = table.precisions(record["rows"]), table.targets(record["rows"], PRECISION_TARGETS)
    return "\n\n".join([*map(table.markdown, tables), _kernels_source(path, record)]) + "\n"


def skipping(results: Path = RESULTS) -> str:
    """Times of steps that leave a share of the checkpoints unread."""
    path = newest("skipping", results)
    record = json.loads(path.read_text(encoding="utf-8"))
    whole = {row["case"]: row["us"] for row in record["rows"] if row["impl"] == "ours"}
    lines = [["case", "left unread", "us", "all read / this", "MB"]]
    for row in record["rows"]:
        share = row["impl"].removeprefix("ours").removeprefix(" skip ") or "without norms"
        faster, size = f"{whole[row['case']] / row['us']:.2f}", f"{row['bytes'] / 1e6:.1f}"
        lines.append([row["case"], share, f"{row['us']:.1f}", faster, size])
    return f"{table.markdown(lines)}\n\n{_kernels_source(path, record)}\n"


def requests_in_flight() -> str:
    """How many times as many requests SGLang runs with drafts as with snapshots, by its prefix cache."""
    kept = {"no prefix cache": 1, "`no_buffer`": 3, "`extra_buffer_lazy`": 4, "`extra_buffer`": 5}
    drafts, window, budget = 4, 16, 2.0**50
    lines = [[f"times as many requests, T = {drafts}", *kept]]
    for model in ("Qwen3.5-4B", "Nemotron-3-Nano-4B"):
        line = [model]
        for slots in kept.values():
            load = Workload(1, window, drafts, 1.0, 1, 0, Precision(), slots)
            fitting = make_plan(load_model_config(model), load).fitting(budget)
            line.append(f"{fitting['replay'] / fitting['conventional']:.1f}")
        lines.append(line)
    lines.append(["rings of no bytes", *(f"{(slots + drafts) / slots:.1f}" for slots in kept.values())])
    return f"{table.markdown(lines)}\n\nStates in fp32, window {window}.\n"


def unmet(results: Path = RESULTS) -> str:
    """Of targets that large batches miss: the share of the measured bandwidth that each would take."""
    lines = [["target", "against", "case", "asked", "of bandwidth", "reached", "of bandwidth"]]
    for topic, targets in (("kernels", TARGETS), ("precision", PRECISION_TARGETS)):
        rows = _record(topic, results)["rows"]
        shares = {(row["case"], row["impl"]): row["bandwidth_fraction"] for row in rows}
        for each in outcomes(rows, targets):
            name, reached = each.target.text, each.reached
            if reached is None or each.met or Case.parse(each.case).batch < LARGE_BATCH:
                continue
            share, asked = shares[each.case, each.target.ours], each.target.least
            if each.target.against == BANDWIDTH:
                lines.append([name, BANDWIDTH, each.case, "", f"{asked:.0%}", "", f"{share:.0%}"])
                continue
            more = f"{share * asked / reached:.0%}", f"{reached:.2f}x", f"{share:.0%}"
            lines.append([name, each.by, each.case, f"{asked:.2f}x", *more])
    return table.markdown(lines) + "\n"


def counters(results: Path = RESULTS) -> str:
    """What a GPU's counters say of single launches."""
    path = newest("counters", results)
    record = json.loads(path.read_text(encoding="utf-8"))
    lines = [["case", "states", "kernel", "us", "GB/s", "memory", "issue slots", "warps", "registers"]]
    for row in record["rows"]:
        rate = (row["bytes_read"] + row["bytes_written"]) / row["ns"]
        shares = (f"{row[name]:.0f}%" for name in ("memory_pct", "issue_pct", "warps_pct"))
        states = row["impl"].removeprefix("ours").strip() or "fp32"
        us = f"{row['ns'] / 1000:.1f}"
        lines.append(
            [row["case"], states, f"`{row['kernel']}`", us, f"{rate:.0f}", *shares, f"{row['registers']:.0f}"]
        )
    return (
        f"{table.markdown(lines)}\n\nShares of the GPU's peaks over a launch. From [{path.name}]"
        f"(../bench/results/{path.name}): `{record['command']}` on {record['date']}; {record['gpu']}; "
        f"torch {record['versions']['torch']}; commit {_commit(record)}.\n"
    )


def e2e_sglang(topic: str = "e2e-sglang", results: Path = RESULTS) -> str:
    """Decode steps of SGLang's engine, without replay and with it, and what was profiled of them."""
    path = newest(topic, results)
    record = json.loads(path.read_text(encoding="utf-8"))
    versions = ", ".join(f"{name} {record['versions'][name]}" for name in ("sglang", "torch", "triton"))
    commands = "; ".join(f"`{command}`" for command in record["command"].split("; "))
    timed = [row for row in record["rows"] if "step_ms" in row]
    what = f"Milliseconds of a step, median of {timed[0]['replays']}. " if timed else ""
    parts = [
        *([table.markdown(e2e.lines(timed))] if timed else []),
        *(table.markdown(lines) for lines in profiles(record["rows"])),
        f"{what}From [{path.name}](../bench/results/{path.name}) on {record['date']}; {record['gpu']}; "
        f"{versions}; commit {_commit(record)}: {commands}.",
    ]
    return "\n\n".join(parts) + "\n"


def profiles(rows: Sequence[dict[str, Any]]) -> list[list[list[str]]]:
    """A table of each profiled batch: microseconds of its kernels in a mean CUDA graph, by way of serving."""
    profiled: dict[tuple[str, int, int], dict[str, dict[str, Any]]] = {}
    for row in rows:
        if "profiled_steps" in row:
            profiled.setdefault((row["model"], row["T"], row["batch"]), {})[row["mode"]] = row
    made = []
    for (model, tokens, batch), by_way in profiled.items():
        ways = sorted(by_way, key=[*e2e.WAYS, *by_way].index)
        lines = [[f"{model}, T = {tokens}, batch {batch}", *(f"{way}, us" for way in ways)]]
        for name, key in (
            ("first kernel to last", "span_us"),
            ("until the next graph", "between_us"),
            ("of it at work", "between_busy_us"),
            ("kernels, in number", "launches"),
        ):
            if all(key in by_way[way] for way in ways):
                lines.append([name, *(f"{by_way[way][key]:.1f}" for way in ways)])
        kernels = {way: {each["name"]: each["us"] for each in by_way[way]["kernels"]} for way in ways}
        names = dict.fromkeys(name for way in ways for name in kernels[way])
        for name in names:
            times = (f"{kernels[way][name]:.1f}" if name in kernels[way] else "-" for way in ways)
            lines.append([f"`{name}`", *times])
        made.append(lines)
    return made


def accuracy(study: str, results: Path = RESULTS, topic: str = "accuracy") -> str:
    """One study of the newest record of a topic: a table for each model, or one for all."""
    rows = tables.labelled(_record(topic, results)["rows"])
    rows = [row for row in rows if row["study"] == study]
    if not rows:
        return "Not in this record.\n"
    if study in tables.OVER_MODELS:
        return table.markdown(tables.OVER_MODELS[study](rows)) + "\n"
    parts = []
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        size = f"{own[0]['parameters'] / 1e6:.1f} million parameters"
        parts += [f"**{model}** ({own[0]['rule']}, {size})", table.markdown(tables.BY_MODEL[study](own))]
    return "\n\n".join(parts) + "\n"


def split_gain(results: Path = RESULTS) -> str:
    """What a copy to read beside another gains over one copy, of all models that were given text."""
    records = (_record(topic, results) for topic in ("accuracy", "accuracy-examples"))
    rows = [row for record in records for row in tables.labelled(record["rows"])]
    return table.markdown(tables.split_gain([row for row in rows if row["study"] == "teacher-forced"])) + "\n"


def recalled(results: Path = RESULTS) -> str:
    """What layers recall, by rule and precision, to the greatest length that was measured."""
    rows = _record(LONG_RECALL, results)["rows"]
    parts = []
    for rule in dict.fromkeys(row["rule"] for row in rows):
        own = [row for row in rows if row["rule"] == rule]
        heads, value_dim, key_dim = own[0]["state"]
        parts += [
            f"**{rule}** (V {value_dim}, K {key_dim}, heads {heads})",
            table.markdown(recall.lines(own)),
        ]
    return "\n\n".join([*parts, study_source(LONG_RECALL, results)])


def recalled_by_kernels(results: Path = RESULTS) -> str:
    """How far the errors of a GPU's kernels are from those of the record above, in shorter runs."""
    long, short = (
        {
            (row["rule"], row["precision"], row["last"]): row["error_old"]
            for row in _record(topic, results)["rows"]
        }
        for topic in (LONG_RECALL, "recall")
    )
    ratios = [error / long[key] for key, error in short.items() if error and long.get(key)]
    furthest = max(last for _, _, last in short)
    return (
        f"To {furthest} tokens the errors of pairs written at the start are {min(ratios):.2f} to "
        f"{max(ratios):.2f} times the table's. {study_source('recall', results)}"
    )


def study_source(topic: str, results: Path = RESULTS) -> str:
    """Where the figures of a study are from."""
    record, path = _record(topic, results), newest(topic, results)
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    commands = [f"`{command}`" for command in record["command"].split("; ")]
    if (more := len(commands) - SHOWN_COMMANDS) > 0:
        commands[SHOWN_COMMANDS:] = [f"{more} more in that file, alike"]
    return (
        f"From [{path.name}](../bench/results/{path.name}) on {record['date']}; {record['gpu'] or 'no GPU'}; "
        f"{record['machine']}; {versions}; commit {_commit(record)}: {'; '.join(commands)}.\n"
    )


def _commit(record: dict[str, Any]) -> str:
    """The commit in short, with what the record says of it."""
    head, _, more = record["commit"].partition(" ")
    return " ".join(filter(None, (head[:12], more)))


def _record(topic: str, results: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(newest(topic, results).read_text(encoding="utf-8"))
    return record


def precision_plan() -> str:
    """Bytes of a value, of a sequence's states and rings, and of a step, by precision and model."""
    models = {"Qwen3.5-4B": "GDN", "Nemotron-3-Super-120B-A12B": "Mamba-2", "Kimi-Linear-48B-A3B": "KDA"}
    plans = {
        (model, precision): make_plan(
            load_model_config(model), Workload(1, 16, 1, 1.0, 1, 0, Precision.parse(precision))
        )
        for model in models
        for precision in PRECISIONS
    }
    lines = [["precision", "bytes a value", *(f"{model} ({rule})" for model, rule in models.items())]]
    for precision in PRECISIONS:
        line = [precision, f"{plans[next(iter(models)), precision].bytes_per_value:.2f}"]
        for model in models:
            each, fp32 = plans[model, precision], plans[model, "fp32"]
            memory, step = (each.state + each.ring) / 2**20, each.replay.total / fp32.conventional.total
            line.append(f"{memory:.1f} MiB, {step:.0%}")
        lines.append(line)
    return (
        f"{table.markdown(lines)}\n\nStates and rings of one sequence over all recurrent layers, and the "
        "bytes that a step reads and writes of them, as a share of conventional decoding with fp32 states; "
        "window 16, bf16 activations, as `replayssm plan` predicts.\n"
    )


def _kernels_source(path: Path, record: dict[str, Any]) -> str:
    rates = ", ".join(f"{name} {rate:.2f}" for name, rate in record["bandwidth_tbps"].items())
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    skipped = sorted({(entry["impl"], entry["reason"]) for entry in record["skipped"]})
    reasons = "".join(f"\n- {impl}: {reason}" for impl, reason in skipped)
    return (
        f"Microseconds per layer; T is in a case's name. From "
        f"[{path.name}](../bench/results/{path.name}): `{record['command']}` on {record['date']}; "
        f"{record['gpu']}, bandwidth {rates} TB/s; {versions}; commit {str(record['commit'])[:12]}."
        + (f"\n\nNot timed:\n{reasons}" if reasons else "")
    )


def draw_kernels(path: Path, results: Path = RESULTS) -> None:
    """Draw the plot of the newest record, where there is one; needs matplotlib."""
    from replayssm.cli.bench.plot import draw

    try:
        record = json.loads(newest("kernels", results).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    note = f"Standard decoding, fp32 state, bf16 activations, L = 16: {record['gpu']}, {record['date']}"
    draw(path, record["rows"], note)


def draw_precision(path: Path, results: Path = RESULTS) -> None:
    """Draw the plot of the newest records; needs matplotlib."""
    from replayssm.cli.bench.accuracy.plot import draw

    draw(path, _record("accuracy", results)["rows"], _record(LONG_RECALL, results)["rows"])


FIGURES: dict[str, Callable[[], str]] = {
    **{f"accuracy-{study}": partial(accuracy, study) for study in (*tables.BY_MODEL, *tables.OVER_MODELS)},
    "accuracy-source": partial(study_source, "accuracy"),
    "accuracy-before-generated": partial(accuracy, "generated", topic="accuracy-before"),
    "accuracy-before-source": partial(study_source, "accuracy-before"),
    "accuracy-before-trained": partial(accuracy, "trained", topic="accuracy-before"),
    "accuracy-examples-teacher-forced": partial(accuracy, "teacher-forced", topic="accuracy-examples"),
    "accuracy-split-gain": split_gain,
    "accuracy-examples-source": partial(study_source, "accuracy-examples"),
    "counters": counters,
    "e2e-sglang": e2e_sglang,
    "e2e-sglang-mtp": partial(e2e_sglang, "e2e-sglang-mtp"),
    "e2e-sglang-nemotron": partial(e2e_sglang, "e2e-sglang-nemotron"),
    "e2e-sglang-nemotron-again": partial(e2e_sglang, "e2e-sglang-nemotron-again"),
    "e2e-sglang-qwen": partial(e2e_sglang, "e2e-sglang-qwen"),
    "e2e-transformers": e2e_transformers,
    "kernels": kernels,
    "plan": plan,
    "precision": precision,
    "precision-plan": precision_plan,
    "recall": recalled,
    "recall-kernels": recalled_by_kernels,
    "requests-in-flight": requests_in_flight,
    "skipping": skipping,
    "unmet": unmet,
}


def rewrite(text: str) -> str:
    """A document's text with every marked place filled in."""
    return MARKED.sub(lambda place: f"{place[1]}{FIGURES[place[2]]()}{place[3]}", text)


def documents() -> list[Path]:
    """README and the pages of docs."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]


def main() -> int:
    """Rewrite, or check."""
    stale = [path for path in documents() if path.read_text("utf-8") != rewrite(path.read_text("utf-8"))]
    for path in stale:
        print(path.relative_to(ROOT))
        if "--check" not in sys.argv:
            path.write_text(rewrite(path.read_text("utf-8")), encoding="utf-8")
    if "--check" not in sys.argv:
        draw_kernels(PLOT)
        draw_precision(PRECISION_PLOT)
    return int(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())

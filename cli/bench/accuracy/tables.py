"""The record of `bench accuracy` as tables: precisions down, positions or models across."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Rows = Sequence[Mapping[str, Any]]
Lines = list[list[str]]

SHARED, SPLIT, FLOOR = "nvfp4+sr", "nvfp4/fp16+sr", "bf16"
"""One copy, a copy to read beside another, and what rounding alone comes to where activations are bf16."""


def every(rows: Rows) -> dict[str, Lines]:
    """All tables of a record, by title."""
    made, rows = {}, labelled(rows)
    for model in _values(rows, "model"):
        own = [row for row in rows if row["model"] == model]
        for study, build in BY_MODEL.items():
            if of_study := [row for row in own if row["study"] == study]:
                made[f"{model}, {study}"] = build(of_study)
    for study, build in OVER_MODELS.items():
        if of_study := [row for row in rows if row["study"] == study]:
            made[study] = build(of_study)
    return made


def labelled(rows: Rows) -> list[dict[str, Any]]:
    """The rows; what was run in another dtype than fp32 is of a model that is named after it as well."""
    return [
        {**row, "model": f"{row['model']} in {row['dtype']}"}
        if row.get("dtype", "fp32") != "fp32" and row["study"] != "trained"
        else dict(row)
        for row in rows
    ]


def trained(rows: Rows) -> Lines:
    """What models were trained on, how long, and how well they predict."""
    head = ["model", "parameters", "seconds", "steps", "bytes seen", "of", "seed"]
    lines = [[*head, "bits per byte, held out", "in bf16"]]
    for row in {row["model"]: row for row in rows}.values():
        sizes = [f"{row[name] / 1e6:.0f} M" for name in ("bytes_seen", "training_bytes")]
        scores = [f"{row[name]:.3f}" for name in ("held_out", "held_out_bf16")]
        spent = [f"{row['parameters'] / 1e6:.1f} M", f"{row['seconds']:.0f}", f"{row['steps']:,}"]
        lines.append([row["model"], *spent, *sizes, str(row["seed"]), *scores])
    return lines


def teacher_forced(rows: Rows) -> Lines:
    """One model's mean divergence by position, its largest, and agreement over all positions."""
    spans = _values(rows, "first", "last")
    lines = [["precision", *map(_span, spans), "largest", "same token", "bits per byte"]]
    for precision in _values(rows, "precision"):
        own = [row for row in rows if row["precision"] == precision]
        largest = max(row["kl_max"] for row in own)
        lines.append(
            [
                precision,
                *(_small(_at(own, span)["kl_mean"]) for span in spans),
                _small(largest),
                f"{_over_all(own, 'agreement'):.2%}",
                f"{_over_all(own, 'bits_per_byte'):.4f}",
            ]
        )
    return lines


def generated(rows: Rows) -> Lines:
    """One model's own texts: bits per byte and repetition by output length, of several runs as a range."""
    spans = _values(rows, "first", "last")
    found = (("bits_per_byte", "bits per byte", ".2f"), ("repetition", "repeated", ".0%"))
    titles = [f"{title}, {_span(span)}" for _, title, _ in found for span in spans]
    lines = [["precision", *titles, "tokens as fp32"]]
    for precision in _values(rows, "precision"):
        own = [row for row in rows if row["precision"] == precision]
        line = [precision]
        for name, _, form in found:
            for span in spans:
                at = [row[name] for row in own if (row["first"], row["last"]) == span]
                line.append(_range(at, form))
        lines.append([*line, _range([row["same_tokens"] for row in own], ".0f")])
    return lines


def long_prompt(rows: Rows) -> Lines:
    """Divergence of a short answer behind a long prompt, and how many answers are fp32's."""
    return _by_model(
        rows,
        "precision",
        {
            "KL": lambda row: _small(row["kl_mean"]),
            "same token": lambda row: f"{row['agreement']:.1%}",
        },
    )


def skipped_reads(rows: Rows) -> Lines:
    """Shares of reads that could be left out."""
    cells: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "by norm": lambda row: f"{row['by_norm']:.1%}",
        "at best": lambda row: f"{row['at_best']:.1%}",
    }
    return _by_model(rows, "tolerance", cells)


def read_scales(rows: Rows) -> Lines:
    """Errors of what is read, by format and further scales."""
    named = [{**row, "copy": f"{row['format']}, {row['scales']}"} for row in rows]
    return _by_model(named, "copy", {"read": lambda row: f"{row['read_error']:.2%}"})


def split_gain(rows: Rows) -> Lines:
    """By model, how many times less a split NVFP4 state diverges than one copy, where the text ends.

    With activations in bf16 any rounding at all moves the output about as far as bf16 states do, so the last
    column leaves that much out of both.
    """
    lines = [["model", "positions", SHARED, SPLIT, FLOOR, "times", f"times, above {FLOOR}"]]
    for model in _values(rows, "model"):
        own = [row for row in rows if row["model"] == model]
        span = max(_values(own, "first", "last"))
        kl = {row["precision"]: row["kl_mean"] for row in own if (row["first"], row["last"]) == span}
        if SPLIT not in kl:
            continue
        found = [_small(kl[name]) if name in kl else "-" for name in (SHARED, SPLIT, FLOOR)]
        times = ["-", "-"]
        if {SHARED, FLOOR} <= kl.keys():
            above = (kl[SHARED] - kl[FLOOR]) / (kl[SPLIT] - kl[FLOOR])
            times = [f"{kl[SHARED] / kl[SPLIT]:.1f}", f"{above:.1f}"]
        lines.append([model, _span(span), *found, *times])
    return lines


BY_MODEL: dict[str, Callable[[Rows], Lines]] = {"teacher-forced": teacher_forced, "generated": generated}
OVER_MODELS: dict[str, Callable[[Rows], Lines]] = {
    "trained": trained,
    "long-prompt": long_prompt,
    "skipped-reads": skipped_reads,
    "read-scales": read_scales,
}


def _by_model(rows: Rows, key: str, cells: Mapping[str, Callable[[Mapping[str, Any]], str]]) -> Lines:
    """A line for each value of `key`, columns of cells for each model."""
    models = _values(rows, "model")
    lines = [[key, *(f"{model}: {name}" for model in models for name in cells)]]
    for value in _values(rows, key):
        line = [str(value)]
        for model in models:
            found = [row for row in rows if row["model"] == model and row[key] == value]
            line += [cell(found[0]) if found else "-" for cell in cells.values()]
        lines.append(line)
    return lines


def _over_all(rows: Rows, name: str) -> float:
    """Mean over buckets, weighed by their tokens."""
    return float(sum(row[name] * row["tokens"] for row in rows) / sum(row["tokens"] for row in rows))


def _at(rows: Rows, span: tuple[int, int]) -> Mapping[str, Any]:
    return next(row for row in rows if (row["first"], row["last"]) == span)


def _range(values: Sequence[float], form: str) -> str:
    """The least and the largest, or both in one where they look the same."""
    return " to ".join(dict.fromkeys(f"{value:{form}}" for value in (min(values), max(values))))


def _span(span: tuple[int, int]) -> str:
    return f"{span[0]}-{span[1]}"


def _values(rows: Rows, *names: str) -> list[Any]:
    """Distinct values in order of appearance; tuples of several names' values."""
    values: Iterable[Any] = (tuple(row[name] for name in names) for row in rows)
    found = dict.fromkeys(values)
    return [value if len(names) > 1 else value[0] for value in found]


def _small(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"

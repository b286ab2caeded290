"""What decoding runs come to: one `Row` per way of decoding, for tables and for recorded results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from math import isnan

from rich import box
from rich.table import Table

from replayssm.adapters.transformers import Account
from replayssm.cli.decode import Decoded

CONVENTIONAL, REPLAY, SPECULATION = "conventional", "replay", "replay + speculation"
NONE = "-"
KIB = 1024


@dataclass(frozen=True)
class Row:
    """Totals of one way of decoding over some prompts; the fields of an end-to-end result's row.

    Attributes:
        model: name of the model's folder.
        rule: of its recurrent layers.
        engine: what decodes.
        mode: `on` with replay, `off` without.
        decoding: the way in words.
        batch: sequences decoded together.
        T: the most tokens of a step.
        window: L; `None` without replay.
        prompts: names of the prompts' texts.
        tokens: generated, over all prompts.
        tokens_equal: whether they are conventional decoding's; `None` where nothing was compared.
        steps: decoding steps, or rounds of drafts.
        step_ms: mean time of a step, without those that include a prompt.
        tokens_per_s: likewise.
        accept_length: tokens that a step keeps.
        drafts_proposed: drafts of a round, on average.
        drafts_accepted: of these, kept.
        flushes: folds of the history into the checkpoints.
        state_bytes: bytes of a sequence's recurrent states.
        read_per_token: bytes of states and rings read for a token.
        written_per_token: bytes of states and rings written for a token.
        traffic_ratio: both together, over conventional decoding's.
        max_requests: not measured here.
    """

    model: str
    rule: str
    engine: str
    mode: str
    decoding: str
    batch: int
    T: int
    window: int | None
    prompts: list[str]
    tokens: int
    tokens_equal: bool | None
    steps: int
    step_ms: float | None
    tokens_per_s: float | None
    accept_length: float | None
    drafts_proposed: float | None
    drafts_accepted: float | None
    flushes: int
    state_bytes: int
    read_per_token: float | None
    written_per_token: float | None
    traffic_ratio: float | None
    max_requests: None = None


@dataclass(frozen=True)
class Way:
    """A way of decoding.

    Attributes:
        decoding: in words.
        draft: T, the most tokens of a step.
        window: L; `None` without replay.
    """

    decoding: str
    draft: int = 1
    window: int | None = None


def make_row(
    model: str,
    rule: str,
    way: Way,
    prompts: Sequence[str],
    runs: Sequence[Decoded],
    tokens_equal: bool | None = None,
) -> Row:
    """Sum up one run per prompt."""
    account = total(run.account for run in runs)
    steps, timed, seconds = (sum(column) for column in zip(*(run.timed for run in runs), strict=True))
    return Row(
        model=model,
        rule=rule,
        engine="transformers",
        mode="off" if way.window is None else "on",
        decoding=way.decoding,
        batch=1,
        T=way.draft,
        window=way.window,
        prompts=list(prompts),
        tokens=sum(len(run.tokens) for run in runs),
        tokens_equal=tokens_equal,
        steps=account.steps,
        step_ms=_ratio(1e3 * seconds, steps),
        tokens_per_s=_ratio(timed, seconds),
        accept_length=_ratio(account.kept, account.steps),
        drafts_proposed=_ratio(account.drafted - account.steps, account.steps),
        drafts_accepted=_ratio(account.kept - account.steps, account.steps),
        flushes=account.flushes,
        state_bytes=round(_ratio(account.conventional_read, account.kept) or 0),
        read_per_token=_ratio(account.read, account.kept),
        written_per_token=_ratio(account.written, account.kept),
        traffic_ratio=None if isnan(account.traffic_ratio) else account.traffic_ratio,
    )


def beside(replayed: Decoded) -> Decoded:
    """What conventional decoding would have moved for the same tokens, not timed."""
    a = replayed.account
    moved = (a.conventional_read, a.conventional_written)
    return Decoded(replayed.tokens, replayed.steps[:1], Account(a.kept, a.kept, a.kept, 0, *moved, *moved))


def total(accounts: Iterable[Account]) -> Account:
    """The sum of accounts."""
    return Account(*map(sum, zip(*map(astuple, accounts), strict=True)))


def make_table(rows: Sequence[Row], clock: str, stock_speculation: str = NONE) -> Table:
    """One column per way of decoding; lines that say nothing are left out.

    Args:
        rows: the ways.
        clock: what tokens per second were measured on.
        stock_speculation: what became of speculation without replay.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for row in rows:
        table.add_column(row.decoding, justify="right")
    lines: dict[str, Callable[[Row], str]] = {
        "tokens": _tokens,
        "state read per token": lambda row: _kib(row.read_per_token),
        "state written per token": lambda row: _kib(row.written_per_token),
        "both, of conventional": lambda row: _number(row.traffic_ratio, ".0%"),
        "flushes": lambda row: str(row.flushes) if row.mode == "on" else NONE,
        "speculation": lambda row: _speculation(row, stock_speculation),
        "drafts accepted per round": _drafts,
        f"tokens/s, {clock}": lambda row: _number(row.tokens_per_s, ".0f"),
    }
    for name, cell in lines.items():
        cells = list(map(cell, rows))
        if any(text != NONE for text in cells):
            table.add_row(name, *cells)
    return table


def _tokens(row: Row) -> str:
    verdict = {None: "", True: " equal", False: " [bold red]DIFFER[/]"}[row.tokens_equal]
    return f"{row.tokens}{verdict}"


def _speculation(row: Row, stock: str) -> str:
    if row.mode == "off":
        return stock
    return f"prompt lookup, T {row.T}" if row.T > 1 else NONE


def _drafts(row: Row) -> str:
    if row.T == 1 or row.drafts_accepted is None:
        return NONE
    return f"{row.drafts_accepted:.2f} of {row.drafts_proposed:.2f}"


def _kib(count: float | None) -> str:
    return NONE if count is None else f"{count / KIB:,.1f} KiB"


def _number(value: float | None, form: str) -> str:
    return NONE if value is None else format(value, form)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None

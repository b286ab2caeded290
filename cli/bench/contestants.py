"""Who takes part in a case."""

from __future__ import annotations

from collections.abc import Sequence

from replayssm.cli.bench import peer_fla, peer_flashinfer, peer_sglang
from replayssm.cli.bench.cases import Case, Rows
from replayssm.cli.bench.contestant import Contestant
from replayssm.cli.bench.ours import Ours, ours_in, ours_skipping
from replayssm.cli.bench.precisions import is_ours, precision_of, unread_of
from replayssm.core.precision import Precision

PEERS = ("sglang", "flashinfer", "fla")
"""Packages whose kernels can be timed beside ours."""


def contestants(
    case: Case,
    peers: Sequence[str] = PEERS,
    precisions: Sequence[Precision] = (),
    unread: Sequence[float] = (),
) -> list[type[Contestant]]:
    """Ours, in fp32, in these precisions and with these shares of states unread, then those of `peers`.

    They are named whether or not they can take part.

    Peers have flush rules of their own, so they take part with a server's rows only.
    """
    ours: list[type[Contestant]] = [Ours, *map(ours_in, precisions), *map(ours_skipping, unread)]
    if case.rows is not Rows.MIXED:
        return ours
    ring = peer_sglang.Replay if case.tokens == 1 else peer_sglang.ReplayVerify
    theirs: dict[str, list[type[Contestant]]] = {
        "sglang": [peer_sglang.Conventional, ring],
        "flashinfer": [peer_flashinfer.Conventional, peer_flashinfer.Checkpointing],
        "fla": [peer_fla.FusedRecurrent],
    }
    return [*ours, *(kind for peer in peers for kind in theirs[peer])]


def named(case: Case, impl: str) -> type[Contestant]:
    """The contestant of a name."""
    precisions = [precision_of(impl)] if is_ours(impl) else []
    share = unread_of(impl)
    unread = [] if share is None else [share]
    return next(kind for kind in contestants(case, PEERS, precisions, unread) if kind.name == impl)


def package(kind: type[Contestant]) -> str:
    """Which of `PEERS` a contestant belongs to; ours by name, each precision for itself."""
    return kind.name if is_ours(kind.name) else kind.name.split("-")[0]

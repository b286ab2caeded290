"""Who takes part in a case."""

from __future__ import annotations

from collections.abc import Sequence

from replayssm.cli.bench import peer_fla, peer_flashinfer, peer_sglang
from replayssm.cli.bench.cases import Case
from replayssm.cli.bench.contestant import Contestant
from replayssm.cli.bench.ours import Ours

PEERS = ("sglang", "flashinfer", "fla")
"""Packages whose kernels can be timed beside ours."""


def contestants(case: Case, peers: Sequence[str] = PEERS) -> list[type[Contestant]]:
    """Ours, then those of `peers`, whether or not they can take part."""
    ring = peer_sglang.Replay if case.tokens == 1 else peer_sglang.ReplayVerify
    theirs: dict[str, list[type[Contestant]]] = {
        "sglang": [peer_sglang.Conventional, ring],
        "flashinfer": [peer_flashinfer.Conventional, peer_flashinfer.Checkpointing],
        "fla": [peer_fla.FusedRecurrent],
    }
    return [Ours, *(kind for peer in peers for kind in theirs[peer])]


def package(kind: type[Contestant]) -> str:
    """`ours`, or which of `PEERS` a contestant belongs to."""
    return kind.name.split("-")[0]

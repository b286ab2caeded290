"""How far our states move from the recurrence in fp64, by what is stored and by how it is rounded."""

from __future__ import annotations

from dataclasses import replace

import torch

from replayssm.cli.bench.cases import Case
from replayssm.cli.bench.inputs import Reference
from replayssm.cli.bench.measure import small_setup
from replayssm.cli.bench.ours import Ours

TOKENS = 256
"""Tokens of a row; inputs are drawn such that the slowest heads remember some tens of them."""
BATCH = 3
"""A batch that the checks have compiled kernels for."""


def drift(kind: type[Ours], case: Case, device: torch.device, backend: str = "auto") -> float:
    """Error of the recurrence copies after replay of `TOKENS` tokens, as a share of the states' norm.

    Each row is compared when it has flushed last, with the state of the records that were folded. The fp64
    recurrence starts from states in fp32, so the first rounding, of what a prefill leaves, counts too.
    """
    small = replace(case, batch=BATCH)
    setup = small_setup(small, device, backend)
    exact = Reference(setup.inputs, setup.states[0], torch.float64)
    contestant, folded = kind(setup), exact.state
    tokens, drawn = torch.Generator(device).manual_seed(4), torch.Generator().manual_seed(5)
    for _ in range(2 * TOKENS // (case.tokens + 1)):
        setup.inputs.refresh(tokens)
        accepted = torch.randint(1, case.tokens + 1, (BATCH,), generator=drawn, dtype=torch.int32)
        accepted = accepted.to(device)
        folded = torch.where(contestant.flushing()[:, None, None, None], exact.state, folded)
        contestant.launch(0)
        exact.step(accepted)
        contestant.advance(accepted)
    error = contestant.copies[0].recurrence().double() - folded
    return (error.norm() / folded.norm()).item()

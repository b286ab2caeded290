"""Mode `own` over the interface double: every output of random request schedules against the fp64 oracle."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from replayssm.adapters.trtllm.activation import install
from replayssm.adapters.trtllm.served import rings_of
from replayssm.adapters.trtllm.settings import Settings
from replayssm.kernels.torch_backend.skipping import row_norms
from tests.adapters.trtllm.engine import KINDS, RULES, Server

pytestmark = pytest.mark.usefixtures("double")
WINDOW = 6
SETTINGS = Settings(WINDOW, "torch", None, None)


def serve(kind: str, rule: str, max_draft: int | None = None, **options: Any) -> tuple[Server, Any]:
    install(options.pop("settings", SETTINGS))
    server = Server(kind, rule, max_draft, **options)
    rings = rings_of(server.manager)
    assert rings is not None
    for layer in rings.rings:
        for tensor in layer.values():
            tensor.fill_(float("nan"))
    return server, rings


@pytest.mark.parametrize("max_draft", [None, 3], ids=["standard", "drafts"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_double_alone_agrees_with_the_oracle(kind: str, rule: str, max_draft: int | None) -> None:
    """What the engine would do without the adapter; so that the tests below test the adapter."""
    server = Server(kind, rule, max_draft, options={"use_replay_state_update": False})
    walk(server, seed=1, steps=25)


def walk(server: Server, seed: int, steps: int, fixed: bool = False, after: Any = None) -> bool:
    """Prompts whole and in chunks, mixed batches, drafts of changing length, padding, ends.

    Args:
        server: it.
        seed: of the schedule.
        steps: forward passes at most.
        fixed: every step has as many drafts as the server may have, as the engine's own replay needs.
        after: called behind each step.

    Returns:
        Whether a ring was seen whose history does not begin at its first row, so behind a flush.
    """
    rings, flushed = rings_of(server.manager), False
    choose = random.Random(seed)
    # Without the adapter a step without drafts is lost: the engine's worker does not commit it.
    most = (server.max_draft or 0) + 1
    fewest = 1 if server.max_draft is None or rings is not None else 2
    decoding: list[Any] = []
    begun: list[Any] = []
    for _ in range(steps):
        if len(decoding) + len(begun) < server.batch and choose.random() < 0.3:
            begun.append(server.start())
        prompts = [(begun[0], choose.randint(1, 4))] if begun and choose.random() < 0.5 else []
        # The flat manager's convolution takes padding for a live request; its Gated DeltaNet knows no chunks.
        flat = server.kind == "flat"
        rows = [request for request in decoding if choose.random() < 0.8]
        tokens = most if fixed else choose.randint(fewest, most)
        accepted = [choose.randint(1, tokens) for _ in rows]
        pads = choose.choice([0, server.batch - len(rows)]) if rows and not prompts and not flat else 0
        if rows or prompts:
            server.step(prompts, rows, tokens, accepted, pads)
            flushed |= rings is not None and bool(rings.cursors.start.any())
            if after is not None:
                after()
        if prompts and (flat or choose.random() < 0.6):
            decoding.append(begun.pop(0))
        if decoding and choose.random() < 0.1:
            server.finish(decoding.pop(choose.randrange(len(decoding))))
    return flushed


@pytest.mark.parametrize("max_draft", [None, 1, 3], ids=["standard", "one draft", "drafts"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", KINDS)
def test_random_schedules(kind: str, rule: str, max_draft: int | None) -> None:
    """L1, L2, L3, L8, L10, L11, L15."""
    server, _ = serve(kind, rule, max_draft)
    assert walk(server, seed=3, steps=60)


@pytest.mark.parametrize("rule", RULES)
def test_longer_steps_and_windows_than_the_engines_own_replay(rule: str) -> None:
    """It takes 8 tokens a step and a history of 16 at most, for Gated DeltaNet."""
    server, _ = serve("cpp", rule, 9, settings=replace(SETTINGS, window=20))
    assert walk(server, seed=3, steps=25)


@pytest.mark.parametrize("rule", RULES)
def test_norms_follow_the_states(rule: str) -> None:
    """Behind every step no row of a running request's state is larger than its norm says."""
    server, rings = serve("cpp", rule, 3, settings=replace(SETTINGS, window=4, skip_tolerance=1e-3))
    seen: list[bool] = []

    def look() -> None:
        for layer, states in enumerate(server.states()):
            for request, ring in rings._ring_of.items():
                found = row_norms(states[server.slot(server.requests[request])].float()[None])[0]
                norms = rings.skipping.norms[layer, ring]
                assert (found <= norms * (1 + 1e-6)).all()
                seen.append(bool(norms.isfinite().all()))

    assert walk(server, seed=3, steps=40, after=look)
    assert any(seen)
    assert not all(seen)

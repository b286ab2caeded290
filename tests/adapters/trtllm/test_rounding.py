"""The engine's `mamba_ssm_stochastic_rounding` in mode `own`, over the interface double.

What a flush adds to an fp16 state is kept on average however small it is; which bits are drawn changes with
each step and with nothing but the steps and the rank.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from replayssm.core import rows
from tests.adapters.trtllm.engine import KINDS, H, Request, Server, Truth
from tests.adapters.trtllm.test_life import decoding
from tests.adapters.trtllm.test_own import SETTINGS, WINDOW, serve, walk
from tests.support import NoReadBack

pytestmark = pytest.mark.usefixtures("double")
FLAG = "mamba_ssm_stochastic_rounding"
UNIT = 2.0**-10
"""The last place of fp16 between 1 and 2."""


def rounding(
    kind: str, rule: str, max_draft: int | None = None, on: bool = True, **options: Any
) -> tuple[Server, Any]:
    """A server with fp16 states."""
    given = {"state": torch.float16, "tolerance": 5e-3, **options}
    given["options"] = {FLAG: on, **given.get("options", {})}
    return serve(kind, rule, max_draft, **given)


@pytest.mark.parametrize(
    ("kind", "rule", "max_draft"),
    [("cpp", "mamba2", None), ("python", "mamba2", 3), ("v2", "gdn", None), ("cpp", "gdn", 3)],
)
def test_random_schedules(kind: str, rule: str, max_draft: int | None) -> None:
    """Outputs are as near to the oracle as an fp16 state allows."""
    server, rings = rounding(kind, rule, max_draft)
    assert walk(server, seed=3, steps=30)
    assert rings.seed.item() > 0, "the steps changed it"


@pytest.mark.parametrize("kind", KINDS)
def test_the_double_alone(kind: str) -> None:
    """So that the layers' calls above are the engine's, with its own seeds."""
    replay = {"use_replay_state_update": False, FLAG: True}
    walk(Server(kind, "mamba2", 3, state=torch.float16, tolerance=5e-3, options=replay), seed=1, steps=8)


def steady(server: Server, count: int) -> list[Request]:
    """Requests whose states are 1.5 and whose tokens all add the same, less than half a unit."""
    row = torch.randn(server.width, generator=torch.Generator().manual_seed(1))
    if server.rule == "mamba2":
        row[-H:] = -9.6
    else:
        row[server.conv_dim : server.conv_dim + H] = -9.3
    for layer in server.layers:
        if server.rule == "mamba2":
            layer.A.data.fill_(-1e-9)
            layer.dt_bias.data.zero_()
        else:
            layer.A_log.data.fill_(-25.0)

        def forward(hidden: torch.Tensor, *rest: Any, of: Any = layer.forward) -> Any:
            return of(hidden.copy_(row.expand_as(hidden)), *rest)

        layer.forward = forward
    requests = decoding(server, count, steps=0)
    for number, states in enumerate(server.states()):
        for request in requests:
            states[server.slot(request)] = 1.5
            before = request.truths[number]
            request.truths[number] = Truth(torch.full_like(before.S, 1.5), before.window)
    return requests


def moved(server: Server, rings: Any, requests: list[Request]) -> tuple[torch.Tensor, torch.Tensor]:
    """How far the states have come, and how far they should have, in units of the last place."""
    slots = [server.slot(request) for request in requests]
    rings.hand_over(rings.on_device(slots), rings.rows[: len(requests)])
    got = torch.stack([states[slots].double() for states in server.states()])
    want = torch.stack([torch.stack(each) for each in zip(*(
        [truth.S for truth in request.truths] for request in requests), strict=True)])  # fmt: skip
    return (got - 1.5) / UNIT, (want - 1.5) / UNIT


@pytest.mark.parametrize("by", ["steps", "handing over"])
@pytest.mark.parametrize(("rule", "max_draft"), [("mamba2", None), ("gdn", 1)])
def test_small_additions_are_kept_on_average(rule: str, max_draft: int | None, by: str) -> None:
    """In flushes of steps, and where states are made current: suspended, sent, in mixed batches."""
    tokens, folds, results = (1 if max_draft is None else 2), 12, {}
    # A ring with room for one step is folded at each.
    settings = replace(SETTINGS, window=tokens if by == "steps" else WINDOW)
    for on in (False, True):
        # What rounding to nearest loses shows in outputs as well.
        server, rings = rounding("v2", rule, max_draft, on, tolerance=1.0, settings=settings)
        requests = steady(server, 2)
        for _ in range(folds):
            server.step(decodes=requests, tokens=tokens, accepted=[1, 1])
            if by != "steps":
                moved(server, rings, requests)
        results[on] = moved(server, rings, requests)
    (lost, want), (kept, _) = results[False], results[True]
    assert not lost.any(), "each addition is below half a unit"
    assert want.abs().max() > 4
    # Each fold adds a unit or nothing, independently of the others, by what it should add.
    part = want.abs() / folds
    variance, error = folds * part * (1 - part), kept - want
    deviation = (want.square() * variance).sum().sqrt()
    assert (error * want).sum().abs() < 4 * deviation < 0.6 * want.square().sum()
    assert error.square().mean().item() == pytest.approx(variance.mean().item(), rel=0.4)


def bits(rank: int) -> list[torch.Tensor]:
    """States after some steps of the same requests."""
    from tensorrt_llm.mapping import Mapping

    server, _ = rounding("cpp", "gdn", 2, options={"mapping": Mapping(rank=rank)})
    requests = decoding(server, 2)
    for _ in range(WINDOW):
        server.step(decodes=requests, tokens=3, accepted=[1, 3])
    return [states[[server.slot(request) for request in requests]].clone() for states in server.states()]


def test_the_same_bits_in_each_run_and_others_on_each_rank() -> None:
    def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
        return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))

    first = bits(0)
    assert same(first, bits(0))
    assert not same(first, bits(1))


@pytest.mark.parametrize(("rule", "max_draft"), [("mamba2", None), ("gdn", 2)])
def test_the_seed_changes_on_the_device(
    rule: str, max_draft: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place and by an operation of the step, so that each replay of a captured graph changes it."""
    monkeypatch.setattr(rows, "may_read_back", lambda tensor: False)
    server, rings = rounding("cpp", rule, max_draft, settings=replace(SETTINGS, window=3))
    requests = decoding(server, 2, steps=0)

    def quietly(function: Any) -> Any:
        def call(*args: Any) -> Any:
            with NoReadBack():
                return function(*args)

        return call

    for part in (*server.layers, server.worker):
        part.forward = quietly(part.forward)
    address, seen = rings.seed.data_ptr(), []
    for _ in range(5):
        server.step(decodes=requests, tokens=1 if max_draft is None else 3, accepted=[1, 1], pads=1)
        seen.append(rings.seed.item())
    assert rings.cursors.start.any(), "a flush was seen"
    assert seen == list(range(seen[0], seen[0] + 5))
    assert rings.seed.data_ptr() == address


@pytest.mark.parametrize(("kind", "state"), [("python", torch.bfloat16), ("v2", torch.float32)])
def test_other_formats_are_rounded_to_nearest(kind: str, state: torch.dtype) -> None:
    """The engine disables it for them."""
    server, rings = rounding(kind, "mamba2", state=state, act=torch.bfloat16, tolerance=0.1)
    assert rings.seed is None
    decoding(server, 2, steps=WINDOW + 1)


def test_the_log_says_it(caplog: pytest.LogCaptureFixture) -> None:
    rounding("cpp", "gdn")
    assert "state fp16 rounded stochastically; rings" in caplog.text

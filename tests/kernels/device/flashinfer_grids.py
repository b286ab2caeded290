"""FlashInfer's own test grids of its replay, decode and verification kernels, as data for ours.

Each entry is one of their shapes with their histories, lengths and dtypes. Tolerances are theirs for 16-bit
states and a tenth of theirs for fp32 states; an output's own rounding comes on top, since theirs are far
above it. The reference is the fp64 oracle, never their kernels. From tests/mamba/test_checkpointing_ssu.py,
tests/mamba/test_selective_state_update_*.py, tests/gdn/test_decode_ucache.py and
tests/gdn/test_decode_delta_rule.py of flashinfer-ai/flashinfer at fb28d724.
"""

from __future__ import annotations

from dataclasses import dataclass

from replayssm.core import LayerGeometry, Rule
from tests.kernels.device.walk import Layer


@dataclass(frozen=True)
class Grid:
    """One entry: a layer, the sequences' histories, the tokens of each, and the tolerance.

    Attributes:
        name: where it comes from.
        layer: shape, window, dtypes.
        histories: records of each sequence before the step.
        starts: ring row of the oldest, `None`: spread over the ring.
        lens: tokens of each, `None`: all T.
        form: as in `BatchWalk.step`.
        tolerance: relative and absolute, of outputs and states.
        steps: how often.
    """

    name: str
    layer: Layer
    histories: tuple[int, ...]
    tolerance: tuple[float, float]
    starts: tuple[int, ...] | None = None
    lens: tuple[int, ...] | None = None
    form: str = "full"
    steps: int = 1


def tenth(state: str, relative: float, absolute: float) -> tuple[float, float]:
    """Their tolerance, for fp32 states a tenth of it."""
    return (relative / 10, absolute / 10) if state == "fp32" else (relative, absolute)


NEMOTRON = {"tp8": (16, 64, 128, 1), "tp4": (32, 64, 128, 2)}
STATES = ("fp16", "bf16", "fp32")
SSU = (2e-2, 5e-1)


def replay_ssu() -> list[Grid]:
    """`checkpointing_ssu`: windows above the drafts, mixed checkpoints, philox's shapes, steps in a row."""
    found = []
    for tp, state, pool, (tokens, window) in [
        (tp, state, pool, sizes)
        for tp in NEMOTRON
        for state in STATES
        for pool in ("plain", "dense")
        for sizes in ((4, 8), (10, 16))
        # Every pair; the whole product differs from it in nothing that a kernel knows.
        if (pool == "dense") == ((tp == "tp8") ^ (sizes == (4, 8)) ^ (state == "bf16"))
    ]:
        layer = Layer(
            LayerGeometry.mamba2(*NEMOTRON[tp]), window, tokens, None, state, "bf16", "softplus", pool
        )
        name = f"window-{tp}-{state}-{pool}-T{tokens}-W{window}"
        found.append(Grid(name, layer, tuple(range(tokens + 1)), tenth(state, *SSU), steps=2))
    for tp in NEMOTRON:
        layer = Layer(LayerGeometry.mamba2(*NEMOTRON[tp]), 16, 10, None, "fp16", "bf16", "softplus", "dense")
        found.append(Grid(f"mixed-{tp}", layer, (0, 6, 7, 10), SSU))
    for tokens, window, history in ((10, 16, 7), (10, 16, 10), (14, 16, 14), (14, 16, 3), (4, 8, 3)):
        for state in ("fp16", "fp32"):
            layer = Layer(
                LayerGeometry.mamba2(*NEMOTRON["tp8"]), window, tokens, None, state, "bf16", "softplus"
            )
            name = f"philox-T{tokens}-W{window}-h{history}-{state}"
            found.append(Grid(name, layer, (history, history), tenth(state, *SSU)))
    layer = Layer(LayerGeometry.mamba2(*NEMOTRON["tp8"]), 16, 3, None, "fp32", "bf16", "softplus")
    found.append(Grid("steps-in-a-row", layer, (0, 0), tenth("fp32", *SSU), steps=5))
    return found


def replay_ssu_varlen() -> list[Grid]:
    """`checkpointing_ssu` on packed rows of different lengths."""
    found = []
    for name, tokens, lens, histories in (
        ("no-checkpoint", 4, (3, 1, 4, 2, 4), (0, 5, 10, 12, 8)),
        ("checkpoint", 8, (3, 5, 8, 6, 7), (14, 15, 16, 14, 15)),
    ):
        for state in STATES:
            layer = Layer(LayerGeometry.mamba2(*NEMOTRON["tp8"]), 16, tokens, None, state, "bf16", "softplus")
            for form in ("varlen", "lens"):
                tolerance = tenth(state, *SSU)
                found.append(Grid(f"{name}-{state}-{form}", layer, histories, tolerance, None, lens, form))
    return found


def selective_state_update() -> list[Grid]:
    """`selective_state_update`: a base and one change at a time, one and several tokens."""
    base = {"batch": 64, "heads": 64, "dim": 64, "dstate": 128, "tokens": 4, "state": "bf16"}
    changes: list[dict[str, object]] = [{}, {"heads": 8}, {"dim": 128}, {"dstate": 64}, {"dstate": 96}]
    changes += [
        {"batch": 1},
        {"batch": 4},
        {"tokens": 1},
        {"tokens": 8},
        {"state": "fp32"},
        {"state": "fp16"},
    ]
    changes += [{"gates": "gated"}, {"tokens": 1, "state": "fp32"}, {"tokens": 8, "state": "fp32"}]
    found = []
    for change in changes:
        # Their batch of 64 shows nothing more than 12 of its rows.
        use: dict = {"gates": "softplus", **base, "batch": 12} | change
        geo = LayerGeometry.mamba2(use["heads"], use["dim"], use["dstate"], use["heads"] // 8)
        layer = Layer(geo, 16, use["tokens"], None, use["state"], "bf16", use["gates"], "dense")
        name = "-".join(f"{key}{value}" for key, value in change.items()) or "base"
        histories = tuple((5 * n) % 17 for n in range(use["batch"]))
        found.append(Grid(f"ssu-{name}", layer, histories, tenth(use["state"], 1e-2, 1e-3)))
    return found


def gdn_ring() -> list[Grid]:
    """`gated_delta_rule_mtp_ucache_flush`: its arms, histories and bases; histories of 13 flush."""
    geo = LayerGeometry(Rule.GDN, 64, 16, 128, 128)
    arms = {
        "bf16": ("bf16", "bf16"),
        "fp16_state": ("fp16", "bf16"),
        "fp16_io": ("fp16", "fp16"),
        "fp32": ("fp32", "bf16"),
        "fp32_io": ("fp32", "fp32"),
    }
    histories = {"empty": (0,) * 4, "full": (12,) * 4, "mixed": (13, 12, 13, 12)}
    bases = {"zero": (0,) * 4, "wrap": (19, 5, 18, 17)}  # theirs in a ring of 32, ours has 20 rows
    found = []
    for arm, (state, act) in arms.items():
        for history, lengths in histories.items():
            for base, starts in bases.items():
                # Their output tolerance is absolute, and so much tighter than their states'.
                found.append(
                    Grid(
                        f"ucache-{arm}-{history}-{base}",
                        Layer(geo, 16, 4, None, state, act, "bias", "dense"),
                        lengths,
                        tenth(state, 0.0, 8e-3),
                        starts,
                        steps=3,
                    )
                )
    return found


def delta_rule_decode() -> list[Grid]:
    """Decode and verification of the delta rule over their batches and drafts, fp32 and bf16 states."""
    found = []
    pairs = [(batch, 1) for batch in (1, 4, 8, 16, 32, 64, 128, 256)]
    pairs += [(4, tokens) for tokens in (2, 3, 4, 8)] + [(16, 4), (32, 2)]
    for number, (batch, tokens) in enumerate(pairs):
        geo = LayerGeometry(Rule.GDN, 32 if batch > 64 or number % 2 else 64, 16, 128, 128)
        for state, tolerance in (("fp32", (0.0, 1e-3 if tokens > 1 else 5e-3)), ("bf16", (1.6e-2, 2e-2))):
            if state == "bf16" and batch > 16:
                continue
            layer = Layer(geo, 16, tokens, None, state, "bf16", "bias", "dense")
            # Their verification starts from a state, without a history.
            histories = tuple((5 * n) % 17 if tokens == 1 else 0 for n in range(batch))
            name = f"delta-B{batch}-HV{geo.value_heads}-T{tokens}-{state}"
            found.append(Grid(name, layer, histories, tenth(state, *tolerance)))
    return found


GRIDS = [
    *replay_ssu(),
    *replay_ssu_varlen(),
    *selective_state_update(),
    *gdn_ring(),
    *delta_rule_decode(),
]

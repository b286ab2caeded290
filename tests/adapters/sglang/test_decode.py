"""SGLang's own `forward_decode` of each rule, with replay, against the fp64 oracle."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import oracle
from tests.adapters.sglang.engine import LAYERS, RULES, Engine, write_model

WINDOW = 4


def start(rule: str, folder: Path, **options: object) -> Engine:
    model = write_model(rule, folder)
    return Engine.start(
        rule, model, enable_linear_replayssm=True, linear_replayssm_cache_len=WINDOW, **options
    )


@pytest.mark.parametrize(
    ("rule", "lower_bound"), [*((rule, None) for rule in RULES), ("kda", -5.0)], ids=[*RULES, "kda-bounded"]
)
def test_decode_is_the_recurrence(rule: str, lower_bound: float | None, tmp_path: Path) -> None:
    engine = start(rule, tmp_path)
    engine.lower_bound = lower_bound
    generator = torch.Generator().manual_seed(1)
    slots = [3, 5, 2]
    rows = [1, 2, 3]
    engine.slots.req_index_to_mamba_index_mapping[rows] = torch.tensor(slots, dtype=torch.int32)
    expected = [
        [torch.zeros(engine.states.shape[2:], dtype=torch.double) for _ in rows] for _ in range(LAYERS)
    ]
    for _ in range(3 * WINDOW):
        tokens = engine.draw(4, generator)
        outputs = engine.decode([*rows, 0], tokens)
        for layer, out in enumerate(outputs):
            assert (out[3] == 0).all(), "a padded row"
            for row in range(3):
                token = engine.oracle_token(layer, tokens[layer], row)
                expected[layer][row], want = oracle.TOKEN[rule](expected[layer][row], token)
                torch.testing.assert_close(out[row].double(), want, rtol=1e-5, atol=1e-5)
    assert (engine.states[:, 0] == 0).all(), "SGLang's dummy slot"

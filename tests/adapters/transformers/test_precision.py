"""Models in low precision, and states in low precision.

Decoded token by token, a model in bf16 or fp16 differs from itself in fp32 by the rounding of its
activations. Replay reorders sums and rounds where stock code does, so it must be no further from the
fp32 model than stock decoding is.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from replayssm.adapters.transformers import enable
from replayssm.core.precision import FORMATS
from tests.adapters.transformers import zoo

NAMES = ("OlmoHybridForCausalLM", "Mamba2ForCausalLM", "FalconH1ForCausalLM", "KimiLinearForCausalLM")
PROMPT, NEW = 12, 48


@torch.no_grad()
def decode(model: Any, ids: torch.Tensor, drafts: int = 1) -> torch.Tensor:
    """Logits of given tokens, a prompt at once and the others `drafts` at a time."""
    cache = DynamicCache(config=model.config)
    options = {zoo.cache_keyword(model): cache}
    logits = [model(ids[:, :PROMPT], **options).logits[:, -1:]]
    if drafts > 1:
        cache.activate_past_recording()
    for at in range(PROMPT, PROMPT + NEW, drafts):
        logits.append(model(ids[:, at : at + drafts], **options).logits)
        if drafts > 1:
            cache.crop(0)
    return torch.cat(logits, 1).float()


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found - exact).square().mean().sqrt())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", NAMES)
def test_models_in_low_precision(name: str, dtype: torch.dtype) -> None:
    ids = zoo.tokens(4, PROMPT + NEW)
    exact = decode(zoo.BY_NAME[name].build(), ids)
    model = zoo.BY_NAME[name].build().to(dtype)
    stock = decode(model, ids)
    handle = enable(model, window=8)
    for drafts in (1, 4):
        ours = decode(model, ids, drafts)
        assert error(ours, exact) < 1.1 * error(stock, exact)
        assert (ours.argmax(-1) == stock.argmax(-1)).float().mean() > 0.9
    assert handle.account.steps == NEW + NEW // 4


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", NAMES)
def test_states_in_low_precision(name: str, precision: str) -> None:
    """Rounding the state at each flush costs less than running all of the model in that precision."""
    ids = zoo.tokens(4, PROMPT + NEW)
    model = zoo.BY_NAME[name].build()
    exact = decode(model, ids)
    rounded = decode(zoo.BY_NAME[name].build().to(FORMATS[precision]), ids)
    handle = enable(model, window=8, precision=precision)
    ours = decode(model, ids)
    assert 0 < error(ours, exact) < error(rounded, exact)
    assert handle.account.flushes == 4 * ((NEW - 1) // 8)

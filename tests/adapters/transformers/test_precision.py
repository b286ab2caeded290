"""Models in low precision, and states in low precision.

Decoded token by token, a model in bf16 or fp16 differs from itself in fp32 by the rounding of its
activations. Replay reorders sums and rounds where stock code does, so it must be no further from the
fp32 model than stock decoding is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from replayssm.adapters.transformers import Handle, enable
from replayssm.core.formats import FORMATS
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


@pytest.mark.one_version
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


SPLIT = [
    ("OlmoHybridForCausalLM", "fp8/fp32"),
    ("Mamba2ForCausalLM", "nvfp4/fp32"),
    ("KimiLinearForCausalLM", "int8/fp32"),
]


@contextmanager
def enabled(model: Any, precision: str) -> Iterator[Handle]:
    handle = enable(model, window=8, precision=precision)
    yield handle
    handle.disable()


@torch.no_grad()
def converse(model: Any, ids: torch.Tensor, precision: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits of given tokens under replay, and the states that its recurrent layers are left with.

    Single tokens, drafts of which some are taken back, rounds between which nothing is settled so that a part
    of the history is folded, another prompt in the middle, and rows that change places and back.
    """
    cache = DynamicCache(config=model.config)
    options = {zoo.cache_keyword(model): cache}
    logits = []

    def feed(start: int, stop: int) -> None:
        logits.append(model(ids[:, start:stop], **options).logits)

    with enabled(model, precision) as handle:
        feed(0, PROMPT)
        for at in range(PROMPT, PROMPT + 10):
            feed(at, at + 1)
        cache.activate_past_recording()
        for at in range(PROMPT + 10, PROMPT + 30, 2):
            feed(at, at + 4)
            cache.crop(-2)
        cache.crop(0)
        for at in range(PROMPT + 30, PROMPT + 42, 3):
            feed(at, at + 3)
        cache.crop(-1)
        feed(PROMPT + 41, PROMPT + 42)
        cache.crop(0)
        swap = torch.arange(len(ids)).flip(0)
        cache.reorder_cache(swap)
        logits.append(model(ids[swap, PROMPT + 42 : PROMPT + 43], **options).logits[swap])
        cache.crop(0)
        cache.reorder_cache(swap)
        feed(PROMPT + 43, PROMPT + NEW)
        cache.crop(0)
        layers = [mixer.layer_idx for mixer in handle.mixers]
    states: list[torch.Tensor] = [cache.layers[layer].recurrent_states[0] for layer in layers]
    return torch.cat(logits, 1), states


@pytest.mark.one_version
@pytest.mark.parametrize(("name", "precision"), SPLIT)
def test_a_read_copys_error_never_enters_a_state(name: str, precision: str) -> None:
    """The first recurrent layer, whose inputs are the same, ends with the state that fp32 alone gives it.

    Later layers take in what it gave out, so theirs differ, as the logits do.
    """
    ids = zoo.tokens(2, PROMPT + NEW)
    model = zoo.BY_NAME[name].build()
    exact, plain = converse(model, ids, "fp32")
    found, states = converse(model, ids, precision)
    assert (found - exact).abs().max() > 1e-4
    assert torch.equal(found[:, :PROMPT], exact[:, :PROMPT])
    torch.testing.assert_close(states[0], plain[0], rtol=0, atol=1e-5 * plain[0].abs().max().item())
    assert (states[-1] - plain[-1]).abs().max() > 1e-4 * plain[-1].abs().max()


@pytest.mark.one_version
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("OlmoHybridForCausalLM", "fp8+sr"),
        ("Mamba2ForCausalLM", "nvfp4/fp16+sr"),
    ],
)
def test_stochastic_rounding_is_reproducible(name: str, precision: str) -> None:
    """A second conversation gives the same bits; to nearest it gives others."""
    ids = zoo.tokens(2, PROMPT + NEW)
    model = zoo.BY_NAME[name].build()
    first, second = (converse(model, ids, precision)[0] for _ in range(2))
    assert torch.equal(first, second)
    nearest = precision.replace("+sr", "+force")
    assert not torch.equal(first, converse(model, ids, nearest)[0])


@torch.no_grad()
@pytest.mark.parametrize("precision", ["fp8/fp32", "fp8+sr"])
def test_a_cache_from_before_is_taken_over(precision: str) -> None:
    """What a stock model left in the cache is stored in all copies: the next tokens come from it."""
    ids = zoo.tokens(2, PROMPT + NEW)
    model = zoo.BY_NAME["OlmoHybridForCausalLM"].build()
    logits = []
    for early in (True, False):
        options = {zoo.cache_keyword(model): DynamicCache(config=model.config)}
        if not early:
            model(ids[:, :PROMPT], **options)
        with enabled(model, precision):
            if early:
                model(ids[:, :PROMPT], **options)
            logits.append(model(ids[:, PROMPT : PROMPT + 1], **options).logits)
    assert (logits[0] - logits[1]).abs().max() < 0.1 * logits[0].abs().max()
    if precision == "fp8/fp32":
        torch.testing.assert_close(*logits)


@pytest.mark.one_version
@torch.no_grad()
def test_the_account_of_two_copies() -> None:
    """Steps read the read copy; a fold reads the recurrence copy, and writes both."""
    ids = zoo.tokens(4, PROMPT + NEW)
    model = zoo.BY_NAME["Mamba2ForCausalLM"].build()
    accounts = {}
    for text in ("fp32", "nvfp4/fp16"):
        cache = DynamicCache(config=model.config)
        with enabled(model, text) as handle:
            options = {zoo.cache_keyword(model): cache}
            model(ids[:, :PROMPT], **options)
            for at in range(PROMPT, PROMPT + NEW):
                model(ids[:, at : at + 1], **options)
            replay = cache.session._replay
            accounts[text], stored = handle.account, replay.state_bytes
    geometry, rows = replay.layers[0].layout.geometry, 4 * len(replay.layers)
    two, four = 2 * geometry.state_elements, 4 * geometry.state_elements
    read = two // 4 + two // 32 + 4 * geometry.value_heads
    assert stored == rows * (read + two)
    plain, split = accounts.values()
    flushes, steps = split.flushes // 4, split.steps
    assert (flushes, steps) == ((NEW - 1) // 8, NEW)
    rings = plain.read - rows * four * steps
    assert split.read - rings == rows * (read * steps + two * flushes)
    assert split.written - (plain.written - rows * four * flushes) == rows * (read + two) * flushes
    assert split.conventional_read * 2 == plain.conventional_read


def test_formats_that_do_not_fit_a_model_are_refused() -> None:
    model = zoo.BY_NAME["OlmoHybridForCausalLM"].build()
    with (
        enabled(model, "nvfp4/fp32"),
        pytest.raises(ValueError, match="must divide the key dimension, got K=8: use a format with a scale"),
    ):
        model(zoo.tokens(1, 4), use_cache=True)


@pytest.mark.parametrize("text", ["fp32", "nvfp4/fp16+sr"])
def test_the_log_line_names_the_copies(text: str) -> None:
    with enabled(zoo.BY_NAME["Mamba2ForCausalLM"].build(), text) as handle:
        assert handle.describe().endswith(f"; state {text}")


@pytest.mark.one_version
@pytest.mark.parametrize("name", NAMES[:2])
def test_reads_left_out(name: str) -> None:
    """Under a tolerance that nothing stays under all is as without; a larger one changes something."""
    ids = zoo.tokens(2, PROMPT + NEW)
    found = {}
    for tolerance in (0.0, 1e-30, 0.1):
        model = zoo.BY_NAME[name].build()
        handle = enable(model, window=8, skip_tolerance=tolerance)
        assert ("left out" in handle.describe()) == (tolerance > 0)
        found[tolerance] = decode(model, ids)
    assert torch.equal(found[0.0], found[1e-30])
    assert error(found[0.1], found[0.0]) > 0


@pytest.mark.one_version
def test_a_prompt_is_measured_by_nobody() -> None:
    """Its states are new: norms are infinite until a step flushes, and go with their rows."""
    model = zoo.BY_NAME["Mamba2ForCausalLM"].build()
    enable(model, window=8, skip_tolerance=0.1)
    cache = DynamicCache(config=model.config)
    options = {zoo.cache_keyword(model): cache}
    ids = zoo.tokens(2, 24)
    with torch.no_grad():
        model(ids[:, :4], **options)
        session: Any = cache.session
        norms = [layer.skipping.norms for layer in session._replay.layers]
        assert all((each == float("inf")).all() for each in norms)
        for at in range(4, 16):
            model(ids[:, at : at + 1], **options)
        assert all(each.isfinite().all() for each in norms)
        cache.reorder_cache(torch.tensor([1, 1]))
        for each, layer in zip(norms, session._replay.layers, strict=True):
            assert torch.equal(layer.skipping.norms, each[[1, 1]])
        model(ids[:, 16:20], **options)

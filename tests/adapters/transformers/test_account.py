"""The account of a run whose every step is known, counted by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from replayssm.adapters.transformers import Account, enable
from tests.adapters.transformers import zoo

# A layer of the Mamba-2 model: 8 heads of 8 x 16, two groups, everything fp32.
LAYERS = 3
STATE = 8 * 8 * 16 * 4
RECORD = 8 * 8 * 4 + 2 * 16 * 4 + 8 * 4


@pytest.fixture
def model() -> Any:
    return zoo.BY_NAME["Mamba2ForCausalLM"].build()


@torch.no_grad()
def feed(model: Any, cache: Any, rows: int, count: int) -> None:
    model(zoo.tokens(rows, count), **{zoo.cache_keyword(model): cache})


def test_decoding(model: Any) -> None:
    """Window 4, two rows, a prompt and six tokens: the fifth step finds a full window and flushes."""
    handle = enable(model, window=4, max_draft=2)
    cache = DynamicCache(config=model.config)
    feed(model, cache, rows=2, count=9)
    assert handle.account == Account()
    for _ in range(6):
        feed(model, cache, rows=2, count=1)
    # The state at every step, and the history of 0, 1, 2, 3, 4 and 1 records.
    read = 6 * STATE + (0 + 1 + 2 + 3 + 4 + 1) * RECORD
    # A record at every step, and the state at the flush.
    written = 6 * RECORD + STATE
    rows = 2 * LAYERS
    assert handle.account == Account(
        steps=6, drafted=12, kept=12, flushes=2, read=rows * read, written=rows * written,
        conventional_read=rows * 6 * STATE, conventional_written=rows * 6 * STATE,
    )  # fmt: skip
    assert handle.account.traffic_ratio == (read + written) / (12 * STATE)


def test_drafts_taken_back(model: Any) -> None:
    """One row: 3 drafts of which 1 is kept, 2 of which both are, 3 of which none is."""
    handle = enable(model, window=4, max_draft=3)
    cache = DynamicCache(config=model.config)
    feed(model, cache, rows=1, count=9)
    cache.activate_past_recording()
    for drafts, dropped in ((3, 2), (2, 0), (3, 3)):
        feed(model, cache, rows=1, count=drafts)
        cache.crop(-dropped)
    # Histories of 0, 1 and 3 records; the last step does not fit behind 3 and flushes.
    read = 3 * STATE + (0 + 1 + 3) * RECORD
    written = (3 + 2 + 3) * RECORD + STATE
    assert handle.account == Account(
        steps=3, drafted=8, kept=3, flushes=1, read=LAYERS * read, written=LAYERS * written,
        conventional_read=LAYERS * 3 * STATE, conventional_written=LAYERS * 3 * STATE,
    )  # fmt: skip


def test_a_prompt_folds_the_history_before_it(model: Any) -> None:
    handle = enable(model, window=4)
    cache = DynamicCache(config=model.config)
    for count in (9, 1, 1, 5):
        feed(model, cache, rows=1, count=count)
    read = 2 * STATE + (0 + 1) * RECORD + STATE + 2 * RECORD
    written = 2 * RECORD + STATE
    assert handle.account.flushes == 1
    assert (handle.account.read, handle.account.written) == (LAYERS * read, LAYERS * written)
    handle.disable()
    assert handle.account.flushes == 1


def test_nothing_decoded(model: Any) -> None:
    handle = enable(model)
    assert handle.account.traffic_ratio != handle.account.traffic_ratio


def test_an_account_may_be_replaced(model: Any) -> None:
    """Per call, for example; caches in use count into the new one."""
    handle = enable(model)
    cache = DynamicCache(config=model.config)
    feed(model, cache, rows=1, count=9)
    feed(model, cache, rows=1, count=1)
    handle.account = Account()
    feed(model, cache, rows=1, count=1)
    assert handle.account.steps == 1


def test_delta_rules_read_the_same_records_at_a_flush() -> None:
    """A step reads u, key and decay of each record, whether it flushes or not."""
    model = zoo.BY_NAME["OlmoHybridForCausalLM"].build()
    handle = enable(model, window=2)
    model.generate(zoo.tokens(1, 9), max_new_tokens=4, do_sample=False)
    state = 4 * 8 * 16 * 4
    record = (4 * 16 + 2 * 8 + 4) * 4
    read = 3 * state + (0 + 1 + 2) * record
    written = 3 * record + state
    assert (handle.account.read, handle.account.written) == (3 * read, 3 * written)

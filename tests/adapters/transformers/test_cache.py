"""What may happen to a cache: growing, cropping, copying, reordering, changing hands."""

from __future__ import annotations

import copy
import inspect
import logging
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

from replayssm.adapters.transformers import enable
from tests.adapters.transformers import zoo

# A rule each, and each kind of cache: recurrent and attention layers, recurrent only, both in one layer.
NAMES = ("OlmoHybridForCausalLM", "Mamba2ForCausalLM", "FalconH1ForCausalLM", "KimiLinearForCausalLM")
ASSISTED = tuple(name for name in NAMES if zoo.BY_NAME[name].assisted)


@pytest.fixture(params=NAMES)
def model(request: pytest.FixtureRequest) -> Any:
    return zoo.BY_NAME[request.param].build()


@pytest.fixture(autouse=True)
def _no_gradient() -> Iterator[None]:
    with torch.no_grad():
        yield


class Stream:
    """One batch's sequences, fed to a model piece by piece through a cache, and what they should give."""

    def __init__(self, model: Any, ids: torch.Tensor, cache: Any = None, seen: int = 0) -> None:
        self.model = model
        self.ids = ids
        self.expected = model(ids, use_cache=False).logits
        self.cache = DynamicCache(config=model.config) if cache is None else cache
        self.seen = seen

    def feed(self, count: int) -> None:
        """Feed the next `count` tokens and check their logits."""
        start, end = self.seen, self.seen + count
        logits = forward(self.model, self.ids[:, start:end], self.cache, start)
        torch.testing.assert_close(logits, self.expected[:, start:end], rtol=0, atol=2e-4)
        self.seen = end

    def feed_each(self, count: int) -> None:
        """Feed `count` tokens one by one."""
        for _ in range(count):
            self.feed(1)

    def branch(self, ids: torch.Tensor, cache: Any = None) -> Stream:
        """Other sequences, as far as this one; over the same cache where no other is given."""
        return Stream(self.model, ids, self.cache if cache is None else cache, self.seen)


def forward(model: Any, ids: torch.Tensor, cache: Any, start: int) -> torch.Tensor:
    options = {zoo.cache_keyword(model): cache, "use_cache": True}
    if "position_ids" in inspect.signature(model.forward).parameters:
        options["position_ids"] = torch.arange(start, start + ids.shape[1]).expand(ids.shape)
    return model(ids, **options).logits


def greedy(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    return model.generate(ids, do_sample=False, **{"max_new_tokens": 16, **options})


def diverging(ids: torch.Tensor, at: int, seed: int) -> torch.Tensor:
    """The same sequences up to position `at`, others from there."""
    return torch.cat([ids[:, :at], zoo.tokens(ids.shape[0], ids.shape[1] - at, seed)], 1)


# Windows and drafts.


@pytest.mark.one_version
@pytest.mark.parametrize("window", [1, 2, 3, 7, 16, 64])
def test_every_window(model: Any, window: int) -> None:
    stream = Stream(model, zoo.tokens(2, 32))
    with_replay = enable(model, window=window)
    stream.feed(9)
    stream.feed_each(23)
    assert with_replay.account.flushes == 2 * (22 // window)
    with_replay.disable()


@pytest.mark.one_version
@pytest.mark.parametrize(("window", "max_draft"), [(1, 1), (4, 2), (5, 5), (16, 3), (32, 8)])
@pytest.mark.parametrize("name", ASSISTED)
def test_speculation_with_every_window(name: str, window: int, max_draft: int) -> None:
    """Drafts of 5 tokens and more, whether or not the ring has room for them at first."""
    model = zoo.BY_NAME[name].build()
    ids = zoo.repetitive()
    expected = greedy(model, ids)
    enable(model, window=window, max_draft=max_draft)
    assert torch.equal(greedy(model, ids, prompt_lookup_num_tokens=5), expected)


@pytest.mark.parametrize("name", ASSISTED)
def test_a_long_draft_grows_the_ring(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model = zoo.BY_NAME[name].build()
    ids = zoo.repetitive()
    expected = greedy(model, ids)
    enable(model, window=4, max_draft=2)
    with caplog.at_level(logging.INFO, logger="replayssm"):
        got = greedy(model, ids, prompt_lookup_num_tokens=11)
    assert torch.equal(got, expected)
    lines = [record.getMessage() for record in caplog.records if "larger ring" in record.getMessage()]
    assert lines == ["replayssm: a draft of 12 tokens needs a larger ring: window 16, draft limit 12"]


# Prompts in pieces.


def test_pieces_of_any_length(model: Any) -> None:
    stream = Stream(model, zoo.tokens(2, 40))
    enable(model, window=4)
    for count in (7, 1, 1, 6, 1, 1, 1, 1, 1, 2, 9, 1):
        stream.feed(count)


def test_a_prompt_of_one_token(model: Any) -> None:
    stream = Stream(model, zoo.tokens(2, 12))
    enable(model, window=4)
    stream.feed_each(12)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "Mamba2ForCausalLM"])
def test_chunked_prefill(name: str) -> None:
    """Not for a cache without attention layers: transformers asks it for its length, which it can't say."""
    model = zoo.BY_NAME[name].build()
    ids = zoo.tokens(2, 17)
    expected = greedy(model, ids, prefill_chunk_size=5)
    enable(model, window=4)
    assert torch.equal(greedy(model, ids, prefill_chunk_size=5), expected)


# Several calls of generate.


def converse(model: Any, whole: bool, **options: Any) -> torch.Tensor:
    """Three turns over one cache; each call gets the whole text, or what the cache has not seen of it."""
    text, seen = torch.empty(1, 0, dtype=torch.long), 0
    cache = DynamicCache(config=model.config)
    for turn in range(3):
        text = torch.cat([text, zoo.tokens(1, 5, seed=turn).repeat(1, 2)], 1)
        given = text if whole else text[:, seen:]
        options |= {zoo.cache_keyword(model): cache, "attention_mask": torch.ones_like(text)}
        out = greedy(model, given, **options, max_new_tokens=7)
        text = torch.cat([text, out[:, given.shape[1] :]], 1)
        seen = text.shape[1] - 1
    return text


def test_turns_of_a_conversation(model: Any) -> None:
    expected = converse(model, whole=False)
    enable(model, window=4)
    assert torch.equal(converse(model, whole=False), expected)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "Mamba2ForCausalLM"])
def test_turns_that_repeat_the_whole_text(name: str) -> None:
    """Not for a cache without attention layers: transformers feeds it the whole text again."""
    model = zoo.BY_NAME[name].build()
    expected = converse(model, whole=True)
    enable(model, window=4)
    assert torch.equal(converse(model, whole=True), expected)


@pytest.mark.parametrize("name", ASSISTED)
def test_turns_with_speculation(name: str) -> None:
    """transformers feeds a cache that holds tokens the whole text again; the adapter cuts it."""
    model = zoo.BY_NAME[name].build()
    expected = converse(model, whole=False)
    enable(model, window=8)
    assert torch.equal(converse(model, whole=True, prompt_lookup_num_tokens=3), expected)


@pytest.mark.parametrize("name", ASSISTED)
def test_plain_decoding_of_a_cache_left_by_speculation(name: str) -> None:
    """The cache goes on recording in stock code; here that must not keep records for ever."""
    model = zoo.BY_NAME[name].build()
    handle = enable(model, window=4, max_draft=4)
    ids, keyword = zoo.repetitive(), zoo.cache_keyword(model)
    cache = DynamicCache(config=model.config)
    first = greedy(model, ids, **{keyword: cache}, prompt_lookup_num_tokens=3)
    seen = first.shape[1] - 1
    mask = torch.ones_like(first)
    handle.account.flushes = 0
    second = greedy(model, first[:, seen:], **{keyword: cache}, attention_mask=mask, max_new_tokens=20)
    assert handle.account.flushes >= 4
    handle.disable()
    assert torch.equal(torch.cat([first, second[:, 1:]], 1), greedy(model, ids, max_new_tokens=36))


@pytest.mark.parametrize("name", ASSISTED)
def test_speculation_over_new_tokens_only_is_refused(name: str) -> None:
    model = zoo.BY_NAME[name].build()
    enable(model)
    with pytest.raises(ValueError, match="expected the whole sequence, got input_ids of length 3"):
        converse_short(model)


def converse_short(model: Any) -> None:
    cache = {zoo.cache_keyword(model): DynamicCache(config=model.config)}
    greedy(model, zoo.repetitive(), **cache)
    greedy(model, zoo.tokens(1, 3), **cache, prompt_lookup_num_tokens=3)


# Taking back.


def test_crop_within_the_ring(model: Any) -> None:
    """As much as is still in the ring, again and again, with other tokens in its place."""
    stream = Stream(model, zoo.tokens(2, 100))
    enable(model, window=8)
    stream.feed(10)
    dropped = []
    for step in range(8):
        stream.feed_each(8 + step)
        dropped.append(crop_most(stream, 7))
        ids = diverging(stream.ids, stream.seen - dropped[-1], seed=10 + step)
        stream = Stream(model, ids, stream.cache, stream.seen - dropped[-1])
    assert len(set(dropped)) > 3


def crop_most(stream: Stream, at_most: int) -> int:
    """Take back as many tokens as possible, `at_most` some; refusals on the way must change nothing."""
    for count in range(at_most, -1, -1):
        try:
            stream.cache.crop(-count)
        except ValueError:
            continue
        return count
    raise AssertionError("crop(0) was refused")


def test_crop_of_what_is_folded_changes_nothing(model: Any) -> None:
    stream = Stream(model, zoo.tokens(2, 30))
    enable(model, window=4)
    stream.feed(10)
    stream.feed_each(7)
    with pytest.raises(ValueError, match=r"only the newest 3 are still in the ring \(window 4\)"):
        stream.cache.crop(-4)
    stream.feed_each(5)
    with pytest.raises(ValueError, match="negative number of tokens to remove, got 3"):
        stream.cache.crop(3)
    stream.feed(8)


def test_crop_while_recording(model: Any) -> None:
    """Until a crop, every token can be taken back, however many forwards brought it."""
    ids = zoo.tokens(1, 60)
    stream = Stream(model, ids)
    enable(model, window=4, max_draft=4)
    stream.feed(10)
    stream.cache.activate_past_recording()
    for _ in range(3):
        at = stream.seen
        stream.feed_each(9)
        stream.feed(3)
        stream.cache.crop(-11)
        stream.seen = at + 1
    stream.feed_each(6)


# Rows.


def test_reorder(model: Any) -> None:
    stream = Stream(model, zoo.tokens(3, 24))
    enable(model, window=8)
    stream.feed(9)
    stream.feed_each(5)
    order = torch.tensor([2, 2, 0])
    stream.cache.reorder_cache(order)
    stream = stream.branch(diverging(stream.ids[order], stream.seen, seed=3))
    stream.feed_each(9)


def test_select_and_repeat(model: Any) -> None:
    stream = Stream(model, zoo.tokens(3, 24))
    enable(model, window=8)
    stream.feed(9)
    stream.feed_each(5)
    rows = torch.tensor([2, 0])
    stream.cache.batch_select_indices(rows)
    stream = stream.branch(stream.ids[rows])
    stream.feed_each(3)
    stream.cache.batch_repeat_interleave(3)
    ids = diverging(stream.ids.repeat_interleave(3, 0), stream.seen, seed=4)
    stream = stream.branch(ids)
    stream.feed_each(5)


def test_another_number_of_rows_is_refused(model: Any) -> None:
    stream = Stream(model, zoo.tokens(3, 24))
    enable(model)
    stream.feed(9)
    with pytest.raises(ValueError, match="the cache holds 3 sequences, the model was called with 2"):
        forward(model, zoo.tokens(2, 1), stream.cache, stream.seen)


def test_reset(model: Any) -> None:
    stream = Stream(model, zoo.tokens(2, 24))
    enable(model, window=4)
    stream.feed(9)
    stream.feed_each(6)
    stream.cache.reset()
    stream = Stream(model, zoo.tokens(2, 24, seed=2), stream.cache)
    stream.feed(9)
    stream.feed_each(6)


# Copies and changes of hands.


def test_copies_go_their_own_ways(model: Any) -> None:
    ids = zoo.tokens(2, 30)
    stream = Stream(model, ids)
    enable(model, window=4)
    stream.feed(9)
    stream.feed_each(6)
    twin = stream.branch(diverging(ids, stream.seen, seed=5), copy.deepcopy(stream.cache))
    for _ in range(3):
        stream.feed_each(5)
        twin.feed_each(5)
    again = twin.branch(twin.ids, copy.deepcopy(copy.deepcopy(twin.cache)))
    twin.cache.crop(-1)
    assert again.cache.get_seq_length() == twin.cache.get_seq_length() + 1


def test_a_cache_made_before_enable(model: Any) -> None:
    stream = Stream(model, zoo.tokens(2, 30))
    stream.feed(9)
    stream.feed_each(4)
    enable(model, window=4)
    stream.feed_each(6)
    stream.feed(5)
    stream.feed_each(6)


def test_the_length_of_a_cache(model: Any) -> None:
    """Known from the first token on; not where other tokens were there before and nobody counted them."""
    stream = Stream(model, zoo.tokens(2, 30))
    handle = enable(model, window=4)
    for count in (9, 1, 1, 5):
        stream.feed(count)
        assert stream.cache.get_seq_length() == stream.seen
    stream.cache.crop(0)
    assert stream.cache.get_seq_length() == stream.seen
    handle.disable()
    enable(model)
    stream.feed(1)
    if type(model).__name__ == "Mamba2ForCausalLM":
        with pytest.raises(ValueError, match="filled before replay decoding was enabled"):
            stream.cache.get_seq_length()
    else:
        assert stream.cache.get_seq_length() == stream.seen


def test_a_cache_shorter_than_the_convolution(model: Any) -> None:
    stream = Stream(model, zoo.tokens(2, 12))
    stream.feed(2)
    handle = enable(model, window=4)
    stream.feed_each(1)
    handle.disable()
    stream.feed_each(1)
    enable(model, window=4)
    stream.feed_each(8)


def test_disable_with_a_live_cache(model: Any) -> None:
    """The cache goes on under stock code, and under replay again."""
    stream = Stream(model, zoo.tokens(2, 50))
    before = {**vars(stream.cache)}
    handle = enable(model, window=8)
    stream.feed(9)
    stream.feed_each(6)
    twin = stream.branch(stream.ids, copy.deepcopy(stream.cache))
    handle.disable()
    assert type(stream.cache) is DynamicCache
    assert vars(stream.cache).keys() == before.keys()
    stock = DynamicCache(config=model.config)
    for layer, plain in zip(stream.cache.layers, stock.layers, strict=True):
        assert type(layer) is type(plain)
    for each in (stream, twin):
        each.feed_each(4)
        each.feed(3)
    enable(model, window=4)
    for each in (stream, twin):
        each.feed_each(9)


def test_disable_after_speculation(model: Any) -> None:
    if "Mamba2" in type(model).__name__ and not zoo.BY_NAME["Mamba2ForCausalLM"].assisted:
        pytest.skip("refused for this class")
    ids, keyword = zoo.repetitive(), zoo.cache_keyword(model)
    cache = DynamicCache(config=model.config)
    handle = enable(model)
    first = greedy(model, ids, **{keyword: cache}, prompt_lookup_num_tokens=3)
    handle.disable()
    second = greedy(
        model, first[:, -1:], **{keyword: cache}, attention_mask=torch.ones_like(first), max_new_tokens=9
    )
    assert torch.equal(torch.cat([first, second[:, 1:]], 1), greedy(model, ids, max_new_tokens=25))


def test_a_dropped_cache_is_freed(model: Any) -> None:
    """At once, not when Python next looks for cycles: it may hold gigabytes."""
    enable(model)
    stream = Stream(model, zoo.tokens(2, 12))
    stream.feed(9)
    stream.feed_each(1)
    session = weakref.ref(stream.cache.session)
    del stream
    assert session() is None


def test_offloading_leaves_replayed_layers_where_they_are(model: Any) -> None:
    stream = Stream(model, zoo.tokens(2, 20))
    enable(model, window=4)
    stream.feed(9)
    for _ in range(6):
        for layer in stream.cache.layers:
            layer.offload()
            layer.prefetch()
        stream.feed_each(1)


def test_an_interrupted_forward(model: Any) -> None:
    """Layers that have seen a token and layers that have not can't go on together."""
    stream = Stream(model, zoo.tokens(2, 20))
    handle = enable(model, window=4)
    stream.feed(9)
    stream.feed_each(2)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    last = handle.mixers[-1].module
    hook = last.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        stream.feed(1)
    hook.remove()
    with pytest.raises(RuntimeError, match="interrupted: its layers differ in what they have seen"):
        stream.feed(1)
    with pytest.raises(RuntimeError, match="interrupted"):
        stream.cache.reorder_cache(torch.tensor([1, 0]))
    twin = copy.deepcopy(stream.cache)
    stream.cache.reset()
    again = Stream(model, stream.ids, stream.cache)
    again.feed(9)
    again.feed_each(3)
    handle.disable()
    again.feed_each(3)
    assert not twin.has_previous_state()


# Caches that can't be served.


def test_a_cache_without_config_is_refused(model: Any) -> None:
    enable(model)
    with pytest.raises(ValueError, match=r"make the cache with DynamicCache\(config=model.config\)"):
        forward(model, zoo.tokens(1, 5), DynamicCache(), 0)


def test_static_caches_are_refused(model: Any) -> None:
    enable(model)
    with pytest.raises(ValueError, match="doesn't work with a static cache"):
        greedy(model, zoo.tokens(1, 5), cache_implementation="static")
    with pytest.raises(ValueError, match="doesn't work with a static cache"):
        forward(model, zoo.tokens(1, 5), StaticCache(config=model.config, max_cache_len=16), 0)

"""Every covered class gives the tokens of the unpatched model, in every way of generating."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

from replayssm.adapters.transformers import Handle, UnsupportedModel, enable
from tests.adapters.transformers import zoo

NEW = 24


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", zoo.MODELS, ids=lambda case: case.name)


@pytest.fixture
def model(case: zoo.Model) -> Any:
    if not case.exists:
        pytest.skip(f"transformers {zoo.VERSION} has no {case.architecture}")
    return case.build()


def generate(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    torch.manual_seed(7)
    return model.generate(ids, **{"do_sample": False, "max_new_tokens": NEW, **options})[:, ids.shape[1] :]


@cache
def stock_tokens(case: zoo.Model) -> torch.Tensor:
    """Greedy tokens of the model before anything is patched."""
    return generate(case.build(), zoo.repetitive())


def replayed(model: Any, ids: torch.Tensor, **options: Any) -> tuple[torch.Tensor, Handle]:
    """Tokens under replay; a small window, so that flushes happen."""
    handle = enable(model, window=8, max_draft=4)
    try:
        return generate(model, ids, **options), handle
    finally:
        handle.disable()


def assert_varied(ids: torch.Tensor) -> None:
    """A model that writes the same token again and again would hide errors."""
    assert all(len(set(row.tolist())) >= NEW // 3 for row in ids)


def test_greedy(case: zoo.Model, model: Any) -> None:
    expected = stock_tokens(case)
    assert_varied(expected)
    got, handle = replayed(model, zoo.repetitive())
    assert torch.equal(got, expected)
    assert (handle.account.steps, handle.account.kept) == (NEW - 1, NEW - 1)
    assert handle.account.flushes == (NEW - 2) // 8


def test_batch_with_left_padding(case: zoo.Model, model: Any) -> None:
    if not case.batched:
        pytest.skip(f"transformers before {case.batched_since} itself fails on batches of {case.name}")
    ids, mask = zoo.padded()
    expected = generate(model, ids, attention_mask=mask)
    assert_varied(expected)
    got, _ = replayed(model, ids, attention_mask=mask)
    assert torch.equal(got, expected)


def test_sampling(case: zoo.Model, model: Any) -> None:
    options: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 20}
    expected = generate(model, zoo.repetitive(), **options)
    assert_varied(expected)
    got, _ = replayed(model, zoo.repetitive(), **options)
    assert torch.equal(got, expected)


def test_beam_search(case: zoo.Model, model: Any) -> None:
    if not case.batched:
        pytest.skip(f"transformers before {case.batched_since} itself fails on batches of {case.name}")
    expected = generate(model, zoo.repetitive(), num_beams=3)
    assert_varied(expected)
    got, _ = replayed(model, zoo.repetitive(), num_beams=3)
    assert torch.equal(got, expected)


def test_prompt_lookup(case: zoo.Model, model: Any) -> None:
    expected = stock_tokens(case)
    if not case.assisted:
        with pytest.raises(UnsupportedModel, match=f"needs transformers {case.assisted_since} or later"):
            replayed(model, zoo.repetitive(), prompt_lookup_num_tokens=3)
        return
    got, handle = replayed(model, zoo.repetitive(), prompt_lookup_num_tokens=3)
    assert torch.equal(got, expected)
    assert handle.account.drafted > handle.account.kept


def test_assistant(case: zoo.Model, model: Any) -> None:
    """Some of the assistant's drafts are accepted and some refused; it is replayed as well."""
    expected = stock_tokens(case)
    assistant = case.build(noise=0.01)
    assistant.generation_config.num_assistant_tokens = 3
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    helper = enable(assistant)
    if not case.assisted:
        with pytest.raises(UnsupportedModel, match=f"needs transformers {case.assisted_since} or later"):
            replayed(model, zoo.repetitive(), assistant_model=assistant)
        return
    got, handle = replayed(model, zoo.repetitive(), assistant_model=assistant)
    assert torch.equal(got, expected)
    account = handle.account
    assert account.steps < account.kept < account.drafted
    assert helper.account.steps > 0
    helper.disable()


def snapshot(model: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Everything that patching could leave behind, by owner."""
    for name, module in model.named_modules():
        yield name, {key: value for key, value in vars(module).items() if not key.startswith("_forward")}
        yield f"{name} hooks", {"pre": len(module._forward_pre_hooks), "post": len(module._forward_hooks)}
        yield type(module).__module__, dict(vars(sys.modules[type(module).__module__]))
        yield f"class {name}", dict(vars(type(module)))


def test_disable_restores_the_model(case: zoo.Model, model: Any) -> None:
    expected = generate(model, zoo.repetitive())
    before = dict(snapshot(model))
    _, handle = replayed(model, zoo.repetitive())
    after = dict(snapshot(model))
    assert before.keys() == after.keys()
    for owner in before:
        assert before[owner].keys() == after[owner].keys(), owner
        for key, value in before[owner].items():
            found = after[owner][key]
            assert found is value or found == value, f"{owner}.{key}"
    assert model._is_stateful is type(model)._is_stateful
    handle.disable()
    assert torch.equal(generate(model, zoo.repetitive()), expected)

"""Ways of running an enabled model beside those of the parity tests, and models beside each other."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import wraps
from types import ModuleType
from typing import Any

import pytest
import torch
from packaging.version import Version
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.generation import BaseStreamer
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

from replayssm.adapters.transformers import enable
from tests.adapters.transformers import zoo

NAMES = ("OlmoHybridForCausalLM", "Mamba2ForCausalLM", "FalconH1ForCausalLM", "KimiLinearForCausalLM")
ASSISTED = tuple(name for name in NAMES if zoo.BY_NAME[name].assisted)


@pytest.fixture(params=NAMES)
def model(request: pytest.FixtureRequest) -> Any:
    return zoo.BY_NAME[request.param].build()


def generate(model: Any, ids: torch.Tensor, **options: Any) -> Any:
    torch.manual_seed(3)
    return model.generate(ids, **{"do_sample": False, "max_new_tokens": 16, **options})


def test_scores_and_hidden_states(model: Any) -> None:
    options = {"return_dict_in_generate": True, "output_logits": True, "output_hidden_states": True}
    expected = generate(model, zoo.tokens(2, 9), **options)
    enable(model, window=4)
    got = generate(model, zoo.tokens(2, 9), **options)
    assert torch.equal(got.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(expected.logits), rtol=0, atol=2e-4)
    for step, (found, wanted) in enumerate(zip(got.hidden_states, expected.hidden_states, strict=True)):
        for layer, (mine, stock) in enumerate(zip(found, wanted, strict=True)):
            torch.testing.assert_close(mine, stock, rtol=0, atol=2e-4, msg=f"step {step}, layer {layer}")


@pytest.mark.parametrize("name", ASSISTED)
def test_scores_of_speculation(name: str) -> None:
    model = zoo.BY_NAME[name].build()
    options: dict[str, Any] = {"return_dict_in_generate": True, "output_logits": True}
    expected = generate(model, zoo.repetitive(), **options)
    enable(model, window=4)
    got = generate(model, zoo.repetitive(), prompt_lookup_num_tokens=3, **options)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(expected.logits), rtol=0, atol=2e-4)


def test_time_steps_are_bounded_where_stock_code_does_it() -> None:
    """transformers bounds dt for a prompt, its last token included, and not for decoded tokens."""
    case = zoo.BY_NAME["BambaForCausalLM"]
    bounded = replace(case, settings={**case.settings, "time_step_limit": (0.9, 1.1)})
    options: dict[str, Any] = {"return_dict_in_generate": True, "output_logits": True}
    expected = generate(bounded.build(), zoo.repetitive(), **options)
    assert not torch.allclose(
        expected.logits[0], generate(case.build(), zoo.repetitive(), **options).logits[0]
    )
    model = bounded.build()
    enable(model, window=4)
    for drafts in ({}, {"prompt_lookup_num_tokens": 3}):
        got = generate(model, zoo.repetitive(), **drafts, **options)
        torch.testing.assert_close(torch.stack(got.logits), torch.stack(expected.logits), rtol=0, atol=2e-4)


class Tokens(BaseStreamer):
    """Collects what is streamed."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.seen += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


@pytest.mark.parametrize("drafts", [None, 3])
@pytest.mark.parametrize("name", ASSISTED)
def test_streamer(name: str, drafts: int | None) -> None:
    model = zoo.BY_NAME[name].build()
    expected = generate(model, zoo.repetitive())
    enable(model, window=4)
    streamer = Tokens()
    options = {} if drafts is None else {"prompt_lookup_num_tokens": drafts}
    generate(model, zoo.repetitive(), streamer=streamer, **options)
    assert streamer.seen == expected[0].tolist()
    assert streamer.ended


def test_stopping_early(model: Any) -> None:
    """Rows that end sooner are padded, as without replay."""
    ids, mask = zoo.padded()
    whole = generate(model, ids, attention_mask=mask)
    end = int(whole[1, ids.shape[1] + 5])
    expected = generate(model, ids, attention_mask=mask, eos_token_id=end)
    enable(model, window=4)
    assert torch.equal(generate(model, ids, attention_mask=mask, eos_token_id=end), expected)


@pytest.mark.parametrize("name", ASSISTED)
def test_stopping_within_accepted_drafts(name: str) -> None:
    model = zoo.BY_NAME[name].build()
    ids = zoo.repetitive()
    end = int(generate(model, ids)[0, ids.shape[1] + 6])
    expected = generate(model, ids, eos_token_id=end)
    twin = zoo.BY_NAME[name].build()
    enable(model, window=4)
    enable(twin, window=4)
    assert torch.equal(generate(model, ids, eos_token_id=end, assistant_model=twin), expected)


def test_several_samples_of_a_prompt(model: Any) -> None:
    options = {"do_sample": True, "num_return_sequences": 3}
    expected = generate(model, zoo.tokens(1, 9), **options)
    enable(model, window=4)
    assert torch.equal(generate(model, zoo.tokens(1, 9), **options), expected)


def test_several_samples_of_a_prompt_by_beams(model: Any) -> None:
    options = {"num_beams": 4, "num_return_sequences": 2, "do_sample": True, "length_penalty": 0.7}
    expected = generate(model, zoo.tokens(2, 9), **options)
    enable(model, window=4)
    assert torch.equal(generate(model, zoo.tokens(2, 9), **options), expected)


def test_prompts_as_embeddings(model: Any) -> None:
    if type(model).__name__ == "FalconH1ForCausalLM":
        pytest.skip("transformers itself takes no inputs_embeds in generate for this class")
    embeddings = model.get_input_embeddings()(zoo.tokens(2, 9))
    expected = generate(model, zoo.tokens(2, 0), inputs_embeds=embeddings)
    enable(model, window=4)
    assert torch.equal(generate(model, zoo.tokens(2, 0), inputs_embeds=embeddings), expected)


@pytest.mark.parametrize("name", ASSISTED)
def test_sampling_with_speculation(name: str) -> None:
    """Prompt lookup's samples are drawn one by one from the model's own distribution."""
    model = zoo.BY_NAME[name].build()
    options: dict[str, Any] = {"do_sample": True, "top_k": 1, "prompt_lookup_num_tokens": 3}
    expected = generate(model, zoo.repetitive())
    enable(model, window=4)
    assert torch.equal(generate(model, zoo.repetitive(), **options), expected)


@pytest.mark.parametrize("name", ASSISTED)
def test_an_assistant_of_another_kind(name: str) -> None:
    """An attention-only assistant, which needs no replay."""
    model = zoo.BY_NAME[name].build()
    torch.manual_seed(0)
    assistant = LlamaForCausalLM(
        LlamaConfig(vocab_size=zoo.VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                    num_attention_heads=2, eos_token_id=None, pad_token_id=zoo.PAD)
    ).eval()  # fmt: skip
    assistant.generation_config.assistant_confidence_threshold = 0.0
    expected = generate(model, zoo.repetitive())
    handle = enable(model, window=4)
    assert torch.equal(generate(model, zoo.repetitive(), assistant_model=assistant), expected)
    assert handle.account.drafted > handle.account.steps


@pytest.mark.parametrize("name", ASSISTED)
def test_a_recurrent_assistant_of_an_attention_model(name: str) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=zoo.VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                    num_attention_heads=2, eos_token_id=None, pad_token_id=zoo.PAD)
    ).eval()  # fmt: skip
    expected = generate(model, zoo.repetitive())
    assistant = zoo.BY_NAME[name].build()
    assistant.generation_config.assistant_confidence_threshold = 0.0
    handle = enable(assistant, window=4)
    assert torch.equal(generate(model, zoo.repetitive(), assistant_model=assistant), expected)
    assert handle.account.steps > 0


@pytest.mark.parametrize("name", ASSISTED)
def test_an_assistant_with_chunked_prefill(name: str) -> None:
    """A long draft by an assistant that takes its prompt in pieces."""
    if name == "Mamba2ForCausalLM":
        pytest.skip("transformers itself can't prefill a cache without attention layers in pieces")
    if Version("5.21") > zoo.VERSION:
        pytest.skip("transformers before 5.21 itself feeds such an assistant its whole prompt every time")
    model, assistant = zoo.BY_NAME[name].build(), zoo.BY_NAME[name].build(noise=0.01)
    assistant.generation_config.assistant_confidence_threshold = 0.0
    expected = generate(model, zoo.repetitive())
    enable(model, window=4)
    enable(assistant, window=4)
    options = {"assistant_model": assistant, "prefill_chunk_size": 5}
    assert torch.equal(generate(model, zoo.repetitive(), **options), expected)


def test_without_a_cache_nothing_is_replayed(model: Any) -> None:
    expected = generate(model, zoo.tokens(2, 9), use_cache=False)
    handle = enable(model)
    assert torch.equal(generate(model, zoo.tokens(2, 9), use_cache=False), expected)
    assert handle.account.steps == 0


def test_an_inner_model_without_generate(model: Any) -> None:
    """The decoder alone can be enabled too; it has no `generate`."""
    inner = model.get_decoder()
    expected = generate(model, zoo.tokens(2, 9))
    handle = enable(inner, window=4)
    assert torch.equal(generate(model, zoo.tokens(2, 9)), expected)
    assert handle.account.steps == 15
    handle.disable()


def test_a_cache_passed_by_position() -> None:
    model = zoo.BY_NAME["OlmoHybridForCausalLM"].build()
    mixers = [layer.linear_attn for layer in model.model.layers if hasattr(layer, "linear_attn")]
    inputs = torch.randn(1, 5, 32)
    cache = DynamicCache(config=model.config)
    handle = enable(model)
    with torch.no_grad():
        whole = mixers[0](inputs)
        pieces = []
        for piece in (inputs[:, :3], inputs[:, 3:4], inputs[:, 4:]):
            # All of them, as a forward of the model does.
            first, *_ = (mixer(piece, cache) for mixer in mixers)
            pieces.append(first)
    torch.testing.assert_close(torch.cat(pieces, 1), whole)
    assert handle.account.steps == 2


def test_a_forward_that_was_replaced_before(model: Any) -> None:
    """As accelerate does it: what was on the instance is called, and is there again afterwards."""
    mixer = next(module for module in model.modules() if hasattr(module, "conv1d"))
    stock, calls = mixer.forward, []

    @wraps(stock)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return stock(*args, **kwargs)

    mixer.forward = replaced
    expected = generate(model, zoo.tokens(2, 9))
    handle = enable(model, window=4)
    assert torch.equal(generate(model, zoo.tokens(2, 9)), expected)
    handle.disable()
    assert mixer.forward is replaced
    assert len(calls) == 2 * 16


# Gradients.


def test_training_is_untouched(model: Any) -> None:
    """In training mode the loss and every gradient are those of the stock model, bit by bit."""
    model.train()
    ids = zoo.tokens(2, 12)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    expected = gradients()
    handle = enable(model)
    got = gradients()
    assert len(got) == len(expected) > 10
    assert all(torch.equal(mine, stock) for mine, stock in zip(got, expected, strict=True))
    assert handle.account.steps == 0


def test_gradients_of_a_prompt(model: Any) -> None:
    """A prompt's gradients exist in evaluation mode, with a cache too."""
    ids = zoo.tokens(1, 9)

    def gradients(**options: Any) -> list[torch.Tensor]:
        model.zero_grad()
        model(ids, labels=ids, **options).loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = gradients(use_cache=False)
    enable(model)
    for mine, stock in zip(gradients(use_cache=True), expected, strict=True):
        torch.testing.assert_close(mine, stock, rtol=1e-3, atol=1e-5)


def test_no_wrong_gradient_through_replay(model: Any) -> None:
    """Decoding with gradients switched on works; going backward through replayed tokens is an error."""
    enable(model)
    cache = {zoo.cache_keyword(model): DynamicCache(config=model.config)}
    model(zoo.tokens(1, 9), use_cache=True, **cache)
    out = model(zoo.tokens(1, 1), use_cache=True, **cache)
    with pytest.raises(RuntimeError, match="replayed tokens have no gradient"):
        out.logits.sum().backward()


# Compilation.


@pytest.mark.slow
def test_a_compiled_model() -> None:
    """Mixers stay outside the graph; the rest may have been compiled before `enable` or not."""
    case = zoo.BY_NAME["FalconH1ForCausalLM"]
    model = replace(case, settings={**case.settings, "num_hidden_layers": 1}).build()
    options: dict[str, Any] = {"max_new_tokens": 5}
    expected = generate(model, zoo.repetitive(), **options)
    model.compile(backend="eager")
    handle = enable(model, window=2)
    assert torch.equal(generate(model, zoo.repetitive(), **options), expected)
    assert handle.account.steps == 4
    assert torch.equal(generate(model, zoo.repetitive(), prompt_lookup_num_tokens=3, **options), expected)
    handle.disable()
    assert torch.equal(generate(model, zoo.repetitive(), **options), expected)
    handle = enable(model, window=2)
    assert torch.equal(generate(model, zoo.repetitive(), **options), expected)
    assert handle.account.steps == 4


# Models beside each other.


def test_two_enabled_models_of_a_class() -> None:
    case = zoo.BY_NAME["OlmoHybridForCausalLM"]
    models = [case.build(seed) for seed in (0, 1)]
    expected = [generate(model, zoo.tokens(2, 9)) for model in models]
    handles = [enable(model, window=window) for model, window in zip(models, (4, 8), strict=True)]
    for _ in range(2):
        for model, wanted in zip(models, expected, strict=True):
            assert torch.equal(generate(model, zoo.tokens(2, 9)), wanted)
    handles[0].disable()
    assert torch.equal(generate(models[0], zoo.tokens(2, 9)), expected[0])
    assert torch.equal(generate(models[1], zoo.tokens(2, 9)), expected[1])
    assert [handle.account.steps for handle in handles] == [30, 45]


def test_an_enabled_and_a_stock_model_of_a_class() -> None:
    case = zoo.BY_NAME["FalconH1ForCausalLM"]
    enabled, stock = case.build(0), case.build(1)
    expected = generate(stock, zoo.tokens(2, 9))
    handle = enable(enabled)
    assert torch.equal(generate(stock, zoo.tokens(2, 9)), expected)
    assert handle.account.steps == 0
    with pytest.raises(ValueError, match="not supported with stateful models"):
        generate(stock, zoo.repetitive(), prompt_lookup_num_tokens=3)


# Optimised scans.


def test_a_scan_with_other_parameter_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with flash-linear-attention or mamba-ssm installed: transformers passes on what they know."""
    case = zoo.BY_NAME["OlmoHybridForCausalLM"]
    model = case.build()
    expected = generate(model, zoo.tokens(2, 9))
    module = sys.modules["transformers.models.olmo_hybrid.modeling_olmo_hybrid"]
    stock, calls = module.torch_chunk_gated_delta_rule, []

    def chunk(  # type: ignore[no-untyped-def]
        q, k, v, g=None, beta=None, scale=None, initial_state=None, output_final_state=False,
        use_qk_l2norm_in_kernel=False,
    ):  # fmt: skip
        calls.append(scale)
        return stock(
            q, k, v, g=g, beta=beta, initial_state=initial_state, output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        )  # fmt: skip

    package = ModuleType("fast_scans")
    package.chunk = chunk  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fast_scans", package)

    def torch_scan(
        query, key, value, g, beta, chunk_size=64, initial_state=None, output_final_state=False,
        use_qk_l2norm_in_kernel=False, **kwargs,
    ):  # type: ignore[no-untyped-def]  # fmt: skip
        raise AssertionError("the optimised scan was not taken")

    wrapped = use_kernel_func_from_hub_with_fallback("chunk", "fast_scans")(torch_scan)
    monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", wrapped)
    enable(model, window=4)
    assert torch.equal(generate(model, zoo.tokens(2, 9)), expected)
    assert calls == [None] * 3

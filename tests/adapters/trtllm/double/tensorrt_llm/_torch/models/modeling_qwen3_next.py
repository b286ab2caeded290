"""A model with Gated DeltaNet layers."""

from tensorrt_llm._torch.models.modeling_utils import register_auto_model


@register_auto_model("Qwen3NextForCausalLM")
class Qwen3NextForCausalLM:
    pass

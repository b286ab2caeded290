"""A model with Mamba-2 layers."""

from tensorrt_llm._torch.models.modeling_utils import register_auto_model


@register_auto_model("NemotronHForCausalLM")
class NemotronHForCausalLM:
    pass

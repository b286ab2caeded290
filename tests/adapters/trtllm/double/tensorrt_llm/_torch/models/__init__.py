"""Importing the package registers every model, as the engine's does."""

from tensorrt_llm._torch.models.modeling_nemotron_h import NemotronHForCausalLM
from tensorrt_llm._torch.models.modeling_qwen3_next import Qwen3NextForCausalLM

__all__ = ["NemotronHForCausalLM", "Qwen3NextForCausalLM"]

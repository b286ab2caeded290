"""The adapter for TensorRT-LLM's PyTorch backend; importing it patches nothing."""

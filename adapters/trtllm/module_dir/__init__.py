"""Its folder goes on TensorRT-LLM's path, so it holds one package, with a name that nothing else has."""

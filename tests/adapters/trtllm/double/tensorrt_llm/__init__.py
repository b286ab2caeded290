"""An interface double of TensorRT-LLM 1.3.0rc20 to rc27 (generation g3), written from its contract.

It has the classes, constructor orders, attributes, buffers and calls that the adapter meets, on a CPU, and
plain torch where the engine has kernels. It is not TensorRT-LLM, and nothing of it was copied.
"""

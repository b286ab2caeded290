"""Kernels behind one registry, functional and allocation-free; built on the core."""

"""The vectorised PyTorch backend: any device, the readable one."""

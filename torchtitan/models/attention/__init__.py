"""Attention: its modules, the backend that chooses a kernel, and the kernels."""

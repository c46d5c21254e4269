"""Tensor parallelism: the styles that split layers, and asynchronous products."""

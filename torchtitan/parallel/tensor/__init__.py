"""Tensor parallelism: how each layer is split, asynchronous products, gathering again."""

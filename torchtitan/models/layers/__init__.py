"""Layers that all families share: norms, RoPE, feed-forward, linear."""

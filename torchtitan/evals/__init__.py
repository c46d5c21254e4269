"""Benchmarks of EleutherAI's lm-eval."""

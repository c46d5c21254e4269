"""Token files: written by `torchtitan tokenize` or Megatron, and read."""

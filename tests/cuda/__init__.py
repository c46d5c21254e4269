"""Training steps compiled for NVIDIA's GPUs on a machine without one."""

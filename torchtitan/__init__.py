"""TorchTitan: pretrain Llama models from one TOML, on a laptop CPU or a cluster of GPUs."""

__version__ = "0.1.0"

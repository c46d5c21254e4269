"""TorchTitan: pretrain Llama models from one TOML, on a laptop CPU or a cluster of GPUs."""

import time

__version__ = "0.1.0"
IMPORTED = time.time()
"""When this process began with its work, in seconds since the epoch."""

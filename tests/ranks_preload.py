"""Imported once by the fork server, so that a forked rank starts in milliseconds. Must leave no thread behind."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor

import torchtitan.train
import torchtitan.trainer.trainer  # noqa: F401

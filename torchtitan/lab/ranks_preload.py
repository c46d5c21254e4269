"""Imported once by the fork server, so that a forked rank starts in milliseconds. Must leave no thread behind."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # these ranks talk through gloo

import torchtitan.train.entry
import torchtitan.train.trainer  # noqa: F401

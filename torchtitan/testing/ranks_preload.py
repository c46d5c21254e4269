"""Imported once by the fork server, so that forked ranks start in milliseconds. Must start no
thread.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the ranks use gloo

import torchtitan.train.rank_main
import torchtitan.train.trainer  # noqa: F401

"""Imported once by the fork server, so that forked ranks start in milliseconds. Must start no
thread.
"""

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the ranks use gloo

gc.disable()
import tokenizers  # noqa: E402, F401

import torchtitan.models.families.llama3  # noqa: E402
import torchtitan.train.rank_main  # noqa: E402
import torchtitan.train.trainer  # noqa: E402, F401
from torchtitan.train.built_in import CollectGarbage  # noqa: E402

CollectGarbage.freezes = False
gc.collect()
gc.freeze()  # else each run of each rank scans all of torch's objects
gc.enable()

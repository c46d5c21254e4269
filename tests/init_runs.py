"""Arguments of `torchtitan init`, and what it writes."""

from pathlib import Path

import tomli

CPU = """\
[this-machine]
description = "CPU, made up"
device = "cpu"
memory_gib = 16.0
bf16 = 1e11
fp8 = 0.0
fp32 = 1e11
gemm_bf16 = 1.0
gemm_fp8 = 1.0
attention = 0.3
memory_bandwidth = 1e10
memory_efficiency = 1.0
gpus_per_node = 1
"""
DEBUG = "llama3/debugmodel"
SMALL = ["--data=demo", "--hours=1"]
H100 = ["--hardware=h100-sxm", "--devices=1"]


def written(folder: str) -> tuple[str, dict]:
    text = Path(folder, "train.toml").read_text()
    return text, tomli.loads(text)

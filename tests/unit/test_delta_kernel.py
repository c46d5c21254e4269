"""Gated DeltaNet's Triton kernels, without a GPU: their numbers in Triton's interpreter, and their
code for Hopper and Blackwell.
"""

import json
import os
import subprocess
import sys

import pytest

from tests.delta_kernel import CASES
from tests.import_graph import ROOT

pytestmark = pytest.mark.slow  # in the corner, whose build of torch has triton

triton = pytest.importorskip("triton", reason="triton comes with torch's builds for CUDA only")


def report(*arguments, **environment):
    command = [sys.executable, "-m", "tests.delta_kernel", *arguments]
    env = os.environ | environment
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.corner
@pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9),
    reason="older interpreters fail with NumPy 2.4",
)
def test_kernels_are_the_rule():
    """Outputs, last state and gradients; tensor cores' rounding is emulated. TF32 isn't enough."""
    found = report("interpret", TRITON_INTERPRET="1")
    assert found.pop("tf32")[1] > 1e-4
    assert found.keys() == CASES.keys()
    for name, (from_loop, from_definition) in found.items():
        limit = 2**-7 if name == "bfloat16" else 5e-6
        assert from_loop < limit, name
        assert from_definition < limit, name


@pytest.mark.parametrize("arch", [pytest.param(90, marks=pytest.mark.corner), 100])
def test_kernels_compile(arch, tmp_path):
    """To machine code that uses tensor cores and fits a multiprocessor."""
    found = report("compile", str(arch), TRITON_CACHE_DIR=str(tmp_path))
    assert found.keys() == {"_forward", "_backward"}
    for kernel in found.values():
        assert kernel["target"].startswith(f"sm_{arch}")
        assert kernel["cubin"]
        assert kernel["tensor_cores"]
        assert kernel["shared"] <= 227 * 1024

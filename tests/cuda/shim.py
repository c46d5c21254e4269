"""Builds `gpu.cpp` with the headers of torch's wheel, and loads it."""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from functools import cache
from importlib.metadata import version
from pathlib import Path
from tempfile import gettempdir
from typing import Any

_SOURCE = Path(__file__).with_name("gpu.cpp")
_COMPILER = os.environ.get("CXX", "g++")


def obstacle() -> str | None:
    """Why nothing can be compiled for a GPU here; None if it can."""
    import torch

    if sys.platform != "linux":
        return "needs Linux"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if torch.cuda.is_available():
        return "this machine has a GPU, which the fake one would hide"
    if not shutil.which(_COMPILER):
        return f"no C++ compiler: {_COMPILER} isn't installed"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return "no headers of Python"
    return None


def _packages() -> Path:
    """The folder that torch is installed in. Does not import it."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    return Path(str(spec.origin)).parents[1]


@cache
def build() -> Path:
    """The built module, of this source and version of torch. It is kept between runs.

    Raises:
        RuntimeError: the compiler failed.
    """
    packages = _packages()
    torch_folder = packages / "torch"
    source = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:8]
    folder = Path(gettempdir(), f"torchtitan-fake-gpu-{os.getuid()}", version("torch"), source)
    built = folder / f"fake_gpu{sysconfig.get_config_var('EXT_SUFFIX')}"
    if built.exists():
        return built
    folder.mkdir(parents=True, exist_ok=True)
    includes = [
        torch_folder / "include",
        torch_folder / "include/torch/csrc/api/include",
        packages / "triton/backends/nvidia/include",  # CUDA's, whole
        Path(sysconfig.get_paths()["include"]),
    ]
    unfinished = built.with_suffix(f".{os.getpid()}")
    command = [_COMPILER, "-O0", "-std=c++20", "-fPIC", "-shared", str(_SOURCE)]
    command += [f"-I{path}" for path in includes]
    command += [f"-L{torch_folder}/lib", "-lc10", "-ltorch_cpu", "-o", str(unfinished)]
    command += [f"-Wl,-rpath,{torch_folder}/lib"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{result.stderr[-4000:]}")
    unfinished.rename(built)
    return built


def load() -> Any:
    """Load the module. Before torch is imported: its libraries bind to what is loaded first."""
    assert "torch" not in sys.modules
    flags = sys.getdlopenflags()
    sys.setdlopenflags(os.RTLD_GLOBAL | os.RTLD_NOW)
    try:
        spec = importlib.util.spec_from_file_location("fake_gpu", build())
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
    finally:
        sys.setdlopenflags(flags)
    return module

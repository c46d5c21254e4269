"""Fetch the packages that a machine with torch, but without a network, may lack: `python
benchmarks/gpu/gpu_wheels.py`.

The wheels of `requirements/run.txt` for Python 3.12 on x86-64 go into build/wheels, which git
ignores. `gpu.py` unpacks those that are missing or older where it runs. Packages that torch brings
along can be named: `gpu_wheels.py numpy`.

`--nccl` adds a newer NCCL, which lets several ranks share one GPU, without the kernels for other
GPUs than Hopper. This has not been tried on a GPU.
"""

import argparse
import importlib.metadata
import lzma
import re
import struct
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from _gpu_bench import NCCL, ROOT

WHEELS = ROOT / "build/wheels"
PACKAGES = (
    "annotated-types",
    "markdown-it-py",
    "mdurl",
    "psutil",
    "pydantic",
    "pydantic-core",
    "pygments",
    "rich",
    "safetensors",
    "tokenizers",
    "tomli",
    "torchao",
    "typing-extensions",
    "typing-inspection",
)
"""What training on the demo text needs beyond torch and what torch requires."""
MOST_BYTES = 60 * 2**20
"""Of the folder, so that it fits into an upload of 64 MiB beside the project."""
PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
)
NCCL_WHEEL = "nvidia-nccl-cu13==2.30.7"
HOPPER = 90
FAT_BINARY = struct.pack("<I", 0xBA55ED50)
"""How a container of GPU code begins. Its format is not documented by the vendor."""
MACHINE_CODE = 2
"""Kind of an entry of the container; the others are PTX."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("more", nargs="*", metavar="PACKAGE", help="packages to fetch as well")
    parser.add_argument("--out", type=Path, default=WHEELS, metavar="DIR", help="where they go")
    parser.add_argument(
        "--python", default="3.12", metavar="VERSION", help="of the other machine (%(default)s)"
    )
    parser.add_argument("--nccl", action="store_true", help=f"also {NCCL_WHEEL}, reduced to 44 MB")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    fetch([*PACKAGES, *options.more], options.out, options.python)
    if options.nccl:
        fetch_nccl(options.out / NCCL)
    size = sum(file.stat().st_size for file in options.out.iterdir())
    print(f"{options.out}: {size / 2**20:.1f} MiB")
    if size > MOST_BYTES:
        sys.exit(
            f"that is more than {MOST_BYTES / 2**20:.0f} MiB: delete what the other machine has"
        )


def fetch(names: list[str], folder: Path, python: str) -> None:
    """Download the wheels of `names` as `requirements/run.txt` pins them, with their hashes."""
    pins = re.findall(
        r"^([\w.-]+==\S+(?: \\\n +--hash=\S+)+)", (ROOT / "requirements/run.txt").read_text(), re.M
    )
    by_name = {pin.partition("==")[0]: pin for pin in pins}
    if missing := [name for name in names if name not in by_name]:
        sys.exit(f"requirements/run.txt doesn't name {', '.join(missing)}")
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(by_name[name] for name in names) + "\n")
        file.flush()
        _pip(["--require-hashes", "--requirement", file.name, f"--python-version={python}"], folder)


def _pip(arguments: list[str], folder: Path) -> None:
    platforms = [f"--platform={platform}" for platform in PLATFORMS]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--only-binary=:all:",
        *platforms,
    ]
    subprocess.run([*command, "--dest", str(folder), *arguments], check=True)


# ---- on the other machine


def unpack_missing(wheels: Path, target: Path) -> Path | None:
    """Unpack the wheels of packages that this Python lacks or has in an older version. None: there
    are none.

    Returns:
        `target`, to be put on `sys.path`.
    """
    needed = [wheel for wheel in sorted(wheels.glob("*.whl")) if _is_newer(wheel)]
    for wheel in needed:
        with zipfile.ZipFile(wheel) as file:
            file.extractall(target)
    return target if needed else None


def _is_newer(wheel: Path) -> bool:
    name, version = wheel.name.split("-")[:2]
    try:
        return _numbers(version) > _numbers(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return True


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])]


# ---- NCCL


def fetch_nccl(target: Path) -> None:
    """Download NCCL and compress its library, with zeros for all GPU code but Hopper's."""
    with tempfile.TemporaryDirectory() as folder:
        _pip([NCCL_WHEEL], Path(folder))
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as file:
            (name,) = (name for name in file.namelist() if name.endswith("libnccl.so.2"))
            library = bytearray(file.read(name))
    kept, dropped = keep_one_architecture(library, HOPPER)
    print(f"NCCL: kept {kept / 2**20:.0f} MiB of GPU code, dropped {dropped / 2**20:.0f}")
    with lzma.open(target, "wb") as out:
        out.write(library)


def keep_one_architecture(library: bytearray, architecture: int) -> tuple[int, int]:
    """Zero the GPU code in `library` that is not machine code of one architecture; the bytes kept
    and dropped.

    A container has a header of 16 bytes (magic, version 1, the header's size, and that of the
    rest), then entries. Each entry's header gives its kind, its own size, that of its code, and at
    byte 28 the architecture.
    """
    kept = dropped = position = 0
    while (position := library.find(FAT_BINARY, position)) >= 0:
        version, header, size = struct.unpack_from("<HHQ", library, position + 4)
        end = position + header + size
        if version != 1 or header != 16 or end > len(library):  # the same four bytes by chance
            position += 4
            continue
        entry = position + header
        while entry < end:
            kind, _, header, size = struct.unpack_from("<HHIQ", library, entry)
            (built_for,) = struct.unpack_from("<I", library, entry + 28)
            if kind == MACHINE_CODE and built_for == architecture:
                kept += size
            else:
                dropped += size
                library[entry + header : entry + header + size] = bytes(size)
            entry += header + size
        position = end
    return kept, dropped


if __name__ == "__main__":
    main()

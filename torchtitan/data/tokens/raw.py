"""Token files of llm.c and of nanoGPT.

    llm.c     256 int32: a magic number, a version, the number of ids; then the ids, uint16
              (GPT-2's) or uint32 (Llama 3's)
    nanoGPT   uint16 ids alone, in `train.bin` and `val.bin`

Neither names its tokenizer.
"""

import re
import struct
from pathlib import Path

import numpy as np

from torchtitan.data.read.opening import DataError, FilePool, FileStamp

HEADER_BYTES = 1024
"""Size of llm.c's header."""
_KINDS = {(20240520, 1): "uint16", (20240801, 7): "uint32"}
"""Type of the ids by llm.c's magic number and version."""
_MAGIC = {magic for magic, _ in _KINDS}
_NANOGPT = re.compile(r"(train|val)\.bin")
_LITDATA = re.compile(r"chunk-\d+-\d+(\..+)?\.bin")
_LOOKED_AT = 2**16
"""Number of ids that are read to check a file without a description."""


def read_raw(file: FileStamp) -> tuple[str, int, int] | None:
    """The type of the ids of a file without a description, their number, and the first one's byte;
    None if it is neither of llm.c nor, by its name, of nanoGPT.

    Raises:
        OSError: reading fails.
        DataError: it is damaged, or holds something else.
    """
    path = Path(file.path)
    if _LITDATA.fullmatch(path.name):
        raise DataError(f"{path} is a chunk of litdata, which can't be read")
    head = FilePool().read(file.path, 0, min(file.size, HEADER_BYTES))
    magic, version, count = struct.unpack("<3i", head[:12].ljust(12, b"\0"))
    if magic in _MAGIC:
        dtype = _KINDS.get((magic, version))
        if dtype is None:
            raise DataError(f"{path} is of version {version} of llm.c's format, which is unknown")
        size = HEADER_BYTES + count * np.dtype(dtype).itemsize
        if count < 0 or file.size != size:
            raise DataError(
                f"{path} has {file.size:,} bytes instead of the {size:,} of its {count:,} ids (cut "
                "off?)"
            )
        return dtype, count, HEADER_BYTES
    if not _NANOGPT.fullmatch(path.name):
        return None
    if file.size % 2:
        raise DataError(
            f"{path} has {file.size:,} bytes, an odd number: no uint16 ids of nanoGPT's"
        )
    ids = np.frombuffer(FilePool().read(file.path, 0, min(file.size, 2 * _LOOKED_AT)), "<u2")
    if len(ids) > 3 and not ids[1::2].any():
        raise DataError(
            f"{path}: every second of its uint16 ids is 0, so they are uint32, which nanoGPT's "
            "files never have; write them as uint16, or with llm.c's header"
        )
    return "uint16", file.size // 2, 0

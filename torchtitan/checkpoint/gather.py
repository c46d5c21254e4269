"""Rank 0 reads what every rank has written (`parts.py`), to write what they have in common."""

import concurrent.futures
import os
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from torchtitan.checkpoint.index import TensorPlaces, add_written
from torchtitan.checkpoint.parts import RankFile, name_of, read_rank
from torchtitan.data.positions import DataPosition
from torchtitan.utils.errors import CheckpointError, DamageError, FormatBugError
from torchtitan.utils.storage import is_remote

VISIBLE_WITHIN = 60.0
"""Seconds in which a rank must see what another one has written; by default NFS caches a folder's
names this long.
"""
_REQUESTS = 32
"""Files that rank 0 reads from object storage at once."""


def gathered(
    path: Path, save: str, ranks: int
) -> tuple[dict[str, TensorPlaces], Metadata, list[WriteResult], list[DataPosition]]:
    """What all ranks have written: for the index, for DCP's metadata, and for the manifest.

    Raises:
        FormatBugError: it is not all of every tensor.
    """
    tensors: dict[str, TensorPlaces] = {}
    metadata = Metadata({}, planner_data={})
    results: list[WriteResult] = []
    lanes = []
    for content in _read_all(path, save, ranks):
        lanes += [] if content.data is None else [content.data]
        for key, found in content.tensors.items():
            if key not in tensors:
                tensors[key] = TensorPlaces(dtype=found.dtype, size=found.size, layout=found.layout)
            known = tensors[key]
            if None not in (known.layout, found.layout) and known.layout != found.layout:
                continue  # another place of the pipeline has it, too
            if found.layout is None:
                tensors[key] = known.model_copy(update={"layout": None})
            results += add_written(metadata, key, found)
    for key, about in metadata.state_dict_metadata.items():
        filled = sum(chunk.sizes.numel() for chunk in about.chunks)
        if filled != about.size.numel():
            raise FormatBugError(
                f"{key}: the ranks wrote {filled} elements of {about.size.numel()}: this is a bug "
                "in torchtitan, please report it with this line"
            )
    return tensors, metadata, results, lanes


def _read_all(path: Path, save: str, ranks: int) -> Iterator[RankFile]:
    """What each rank has written. Object storage takes long to answer, so it is asked for many."""
    read = partial(_read, path, save)
    if not is_remote(path):
        yield from map(read, range(ranks))
        return
    with concurrent.futures.ThreadPoolExecutor(_REQUESTS) as pool:
        for start in range(0, ranks, _REQUESTS):
            yield from pool.map(read, range(start, min(start + _REQUESTS, ranks)))


def _read(path: Path, save: str, rank: int) -> RankFile:
    """What `rank` has just written. A network file system may show it late."""
    start = time.monotonic()
    pause = 0.05
    while True:
        try:
            return read_rank(path, save, rank)[0]
        except DamageError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            if time.monotonic() - start > VISIBLE_WITHIN:
                raise CheckpointError(
                    f"{socket.gethostname()} doesn't see {path / name_of(rank)}, which rank {rank} "
                    "has written; checkpoint.folder must be in a folder that all nodes share, or "
                    "at a URL"
                ) from error
        if not is_remote(path):
            with suppress(OSError):
                os.listdir(path)  # makes NFS ask the server for the folder's names
        time.sleep(pause)
        pause = min(2 * pause, 5.0)

"""Time to load a checkpoint: `python benchmarks/cpu/restart.py [--ranks 2] [--gb 1] [--folder DIR]
[--loads 5]`.

A state of the given size (weights and AdamW's two moments, sharded by FSDP) is saved once, then
loaded by turns as this version does, verifying each part as it is read, and as earlier versions
did, reading every file once for its checksum and once for its tensors. The files are in the page
cache, so this measures what the processor does; a storage slower than that adds its time to each
byte that is read.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchtitan.testing.ranks import RankPool

WIDTH = 2048


def measure(folder: Path, gb: float, loads: int) -> dict[str, list[tuple[float, float]]]:
    """Wall and processor seconds of each load on this rank, by who wrote the checkpoint. Called by
    all ranks.
    """
    new = folder / "new"
    old = folder / "old"
    checkpointer = _checkpointer(new, gb)
    checkpointer.save(1, _train_state())
    checkpointer.close()
    if dist.get_rank() == 0:
        shutil.copytree(new, old)
        _remove_sums(old / "step-1")
    dist.barrier()
    seconds: dict[str, list[tuple[float, float]]] = {"old": [], "new": []}
    for _ in range(loads):
        for name, found in seconds.items():
            checkpointer = _checkpointer(folder / name, gb, load_only=True)
            dist.barrier()
            began = time.perf_counter()
            processor = time.process_time()
            assert checkpointer.resume() is not None
            processor = time.process_time() - processor
            dist.barrier()
            found.append((time.perf_counter() - began, processor))
    return seconds


def _checkpointer(folder: Path, gb: float, **settings: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from torchtitan.checkpoint import Checkpointer, Trained
    from torchtitan.config.sections import schema

    layers = round(gb * 1e9 / (12 * WIDTH * WIDTH))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    config = schema.Checkpoint(enable=True, folder=str(folder), keep_latest_k=0, **settings)
    about: dict[str, Any] = {"versions": {}, "model": {"name": "linear"}, "data": {}, "config": ""}
    return Checkpointer(config, "", Trained([model], optimizer), about)


def _train_state() -> dict[str, Any]:
    fingerprint = {"sources": {}, "tokenizer": "", "seq_len": 1, "seed": 0}
    shares: dict[str, Any] = {"weights": {}, "rows": 0, "counts": {}}
    return {
        "progress": {"step": 1, "tokens": 0, "skipped": 0},
        "lr_scheduler": {"steps": 1},
        "data": {"fingerprint": fingerprint, "step": 1, "shares": shares, "sources": {}},
        "guard": {"windows": {}, "streak": 0, "calm": 1, "rows": 1, "skipped": []},
    }


def _remove_sums(step: Path) -> None:
    """Leave out the parts' checksums, as earlier versions did: the files are then verified before
    they are loaded.
    """
    from torchtitan.checkpoint.index import INDEX
    from torchtitan.checkpoint.manifest import MANIFEST, read_manifest, render

    tensors = json.loads((step / INDEX).read_bytes())
    for about in tensors.values():
        about["parts"] = [part[:5] for part in about["parts"]]
    content = json.dumps(tensors).encode()
    (step / INDEX).write_bytes(content)
    manifest = read_manifest(step).model_dump(exclude_unset=True)
    manifest["files"][INDEX] = {"bytes": len(content), "crc32": zlib.crc32(content)}
    (step / MANIFEST).write_bytes(render(manifest))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", default=None, help="where to write (a new temporary folder)")
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--loads", type=int, default=5)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="titan-restart-", dir=options.folder))
    pool = RankPool(options.ranks)
    try:
        seconds = pool.run(measure, folder, options.gb, options.loads, timeout=600)[0]
        size = sum(path.stat().st_size for path in (folder / "new/step-1").iterdir())
    finally:
        pool.close()
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{options.ranks} ranks, {size / 1e9:.2f} GB")
    medians = {}
    for name, what in (("old", "verified before loading"), ("new", "verified while loading")):
        wall, processor = medians[name] = [
            statistics.median(times) for times in zip(*seconds[name], strict=True)
        ]
        low = min(seconds[name])[0]
        high = max(seconds[name])[0]
        print(
            f"{what}: {wall:.2f} s ({low:.2f} to {high:.2f}), {processor:.2f} s of rank "
            "0's processor (medians)"
        )
    print(f"{medians['old'][0] / medians['new'][0]:.2f} times as fast")


if __name__ == "__main__":
    main()

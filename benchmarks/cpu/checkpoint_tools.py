"""Memory of `torchtitan ckpt` on large checkpoints.

    python benchmarks/cpu/checkpoint_tools.py [--gb 100] [--ranks 64]

Writes a checkpoint of Llama 3 8B's shapes with AdamW's moments, as that many ranks would. Its
tensors are zero, so the files are sparse and take little space. Then runs each tool in a process of
its own.
"""

import argparse
import io
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import torch

_HOLE = 1 << 16
LAYER = {
    "attention.wq": (4096, 4096),
    "attention.wk": (1024, 4096),
    "attention.wv": (1024, 4096),
    "attention.wo": (4096, 4096),
    "feed_forward.w1": (14336, 4096),
    "feed_forward.w2": (4096, 14336),
    "feed_forward.w3": (14336, 4096),
    "attention_norm": (4096,),
    "ffn_norm": (4096,),
}


class _Sparse(io.BytesIO):
    """Keeps what `torch.save` writes except for zeros, of which it keeps the number."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[bytes | int] = []
        self.crc32 = self.length = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.crc32 = zlib.crc32(view, self.crc32)
        self.length = self.length + len(view)
        self.pieces.append(len(view) if len(view) > _HOLE else bytes(view))
        return len(view)


def write(folder: Path, gb: float, ranks: int) -> None:
    """A checkpoint of about `gb` GB, as `ranks` ranks would write it."""

    from torchtitan.checkpoint.format.index import (
        IndexedTensor,
        RankFile,
        StoredChunk,
        WrittenTensor,
        rank_file_name,
        render_index,
        render_rank,
    )
    from torchtitan.checkpoint.format.layout import Cut, Layout
    from torchtitan.checkpoint.format.manifest import (
        FORMAT,
        FileEntry,
        Manifest,
        RankTotals,
        render,
        validate,
    )

    step = folder / "step-1"
    step.mkdir(parents=True)
    shapes = {
        "tok_embeddings.weight": (128256, 4096),
        "norm.weight": (4096,),
        "output.weight": (128256, 4096),
    }
    sizes = {name: torch.Size(size).numel() for name, size in LAYER.items()}
    outer = sum(torch.Size(size).numel() for size in shapes.values())
    for layer in range(max(1, round((gb * 1e9 / 12 - outer) / sum(sizes.values())))):
        shapes |= {f"layers.{layer}.{name}.weight": size for name, size in LAYER.items()}
    names = [f"{part}{name}{slot}" for part, slot in PARTS for name in shapes]
    tensors = {
        name: IndexedTensor(
            dtype="float32",
            size=shapes[_weight(name)],
            layout=Layout(0, [[Cut(ranks, 1)], *([] for _ in shapes[_weight(name)][1:])]),
        )
        for name in names
    }
    made: dict[tuple[int, ...], _Sparse] = {}
    save = "0" * 16
    written = 0
    for rank in range(ranks):
        name = f"__{rank}_0.distcp"
        end = 0
        whole = _Sparse()
        with (step / name).open("wb") as file:
            own = {}
            for key, about in tensors.items():
                rows = about.size[0] // ranks
                shape = (rows, *about.size[1:])
                if shape not in made:
                    made[shape] = _Sparse()
                    torch.save(torch.zeros(shape), made[shape])
                part = made[shape]
                for piece in part.pieces:
                    file.seek(piece, 1) if isinstance(piece, int) else file.write(piece)
                    whole.write(bytes(piece) if isinstance(piece, int) else piece)
                    whole.pieces.clear()
                offsets = (rank * rows, *[0] * (len(shape) - 1))
                place = StoredChunk(offsets, shape, name, end, part.length, part.crc32)
                own[key] = WrittenTensor(**about.model_dump(), parts=[place])
                end += part.length
            file.truncate(end)
        files = {name: FileEntry(bytes=end, crc32=whole.crc32)}
        content = render_rank(RankFile(save=save, rank=rank, files=files, tensors=own))
        (step / rank_file_name(rank)).write_bytes(content)
        written += end + len(content)
    index = render_index(tensors)
    (step / "tensors.json").write_bytes(index)
    count = sum(torch.Size(size).numel() for size in shapes.values())
    manifest = {
        "format": FORMAT,
        "saved": "2026-01-01T00:00:00+00:00",
        "step": 1,
        "model_only": True,
        "model": {"name": "llama3"},
        "versions": {},
        "data": {},
        "config": "",
        "train_state": None,
        "parameters": count,
        "tensor_bytes": {},
        "files": {"tensors.json": {"bytes": len(index), "crc32": zlib.crc32(index)}},
        "save": save,
        "written": RankTotals(ranks=ranks, files=2 * ranks, bytes=written),
    }
    (step / "manifest.json").write_bytes(render(validate(Manifest, manifest)))


PARTS = (("model.", ""), ("optimizer.", ".exp_avg"), ("optimizer.", ".exp_avg_sq"))


def _weight(key: str) -> str:
    return key.partition(".")[2].removesuffix(".exp_avg").removesuffix(".exp_avg_sq")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gb", type=float, default=100.0)
    parser.add_argument("--ranks", type=int, default=64, help="a divisor of 1024")
    parser.add_argument("--folder", default=None, help="where to write (a new temporary folder)")
    parser.add_argument("--tools", nargs="+", default=["inspect", "verify"])
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="titan-tools-", dir=options.folder))
    try:
        write(folder / "run", options.gb, options.ranks)
        files = list((folder / "run/step-1").iterdir())
        size = sum(f.stat().st_size for f in files)
        used = sum(f.stat().st_blocks * 512 for f in files)
        print(f"{size / 1e9:.1f} GB in {len(files)} files, {used / 1e9:.2f} GB on disk")
        for tool in options.tools:
            _run(tool, folder / "run")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(tool: str, folder: Path) -> None:
    argv = [sys.executable, "-m", "torchtitan", "ckpt", tool, str(folder)]
    began = time.perf_counter()
    process = subprocess.Popen(
        argv, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    _, status, used = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    code = os.waitstatus_to_exitcode(status)
    print(f"{tool}: {used.ru_maxrss / 1024:,.0f} MiB at most, {seconds:.1f} s, exit status {code}")


if __name__ == "__main__":
    main()

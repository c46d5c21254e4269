"""Small checkpoints for tests, and ways to forge them: whoever hands us one can compute every
checksum in it.
"""

import hashlib
import io
import json
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchtitan.checkpoint import Checkpointer, TrainedModel
from torchtitan.config.sections import schema

ABOUT: dict[str, Any] = {
    "versions": {},
    "model": {"name": "llama3"},
    "git": None,
    "ranks": 2,
    "data": {},
    "config": "",
}


def train_state(step: int) -> dict[str, Any]:
    return {
        "progress": {"step": step, "tokens": 100 * step, "skipped": 0},
        "lr_scheduler": {"steps": step},
        "data": {
            "fingerprint": {"sources": {}, "tokenizer": "", "seq_len": 8, "seed": 0},
            "step": step,
            "shares": {"weights": {"data": 1}, "rows": 8, "counts": {"data": 8}},
            "sources": {
                "data": {
                    "contents": "x",
                    "rows": 8,
                    "tokens": 64,
                    "lane_count": 3,
                    "lanes": {str(i): lane(i) for i in range(3)},
                }
            },
        },
        "guard": {
            "windows": {"loss": [0.1, 1e-05, 0.30000000000000004]},
            "streak": 0,
            "calm": step,
            "rows": 8,
            "skipped": [],
        },
    }


def lane(index: int) -> dict[str, Any]:
    return {"cursor": {"position": index}, "offset": -1}


def small_checkpointer(folder: Path, features: int = 4, **settings: Any) -> Checkpointer:
    """A checkpointer of one linear layer, its folder being `folder` itself. Called by all ranks."""
    model = nn.Linear(features, 3)
    settings = {"keep_latest_k": 0, **settings}
    config = schema.Checkpoint(enable=True, folder=str(folder), **settings)
    trained = TrainedModel([model], torch.optim.AdamW(model.parameters()))
    return Checkpointer(config, str(folder.parent), trained, ABOUT)


def save_steps(folder: Path, *steps: int) -> None:
    """Save checkpoints whose weights are all equal to their step."""
    checkpointer = small_checkpointer(folder)
    for step in steps:
        for param in checkpointer.trained.models[0].parameters():
            nn.init.constant_(param, step)
            param.grad = torch.zeros_like(param)
        checkpointer.trained.optimizer.step()
        for param in checkpointer.trained.models[0].parameters():
            nn.init.constant_(param, step)
        checkpointer.save(step, train_state(step))
    checkpointer.close()


def outcome(folder: Path, **settings: Any) -> Any:
    """The step that is resumed, or what is wrong. Called by all ranks."""
    from torchtitan.utils.errors import CheckpointError

    checkpointer = small_checkpointer(folder, load_only=True, **settings)
    try:
        resumed = checkpointer.resume()
    except CheckpointError as error:
        return str(error)
    if resumed is not None:
        assert all(
            (param == resumed.step).all() for param in checkpointer.trained.models[0].parameters()
        )
    return resumed and resumed.step


def seal(step: Path, content: Any) -> None:
    """Write any manifest with the right checksum."""
    body = (
        (content if isinstance(content, str) else json.dumps(content, indent=1))
        .encode()
        .removesuffix(b"\n}")
    )
    line = f',\n "sha256": "{hashlib.sha256(body).hexdigest()}"\n}}\n'
    (step / "manifest.json").write_bytes(body + line.encode())


def manifest(step: Path) -> dict[str, Any]:
    content = json.loads((step / "manifest.json").read_text())
    del content["sha256"]
    return content


def change(step: Path, /, **changes: Any) -> None:
    """Change entries of the manifest, and its checksum."""
    seal(step, manifest(step) | changes)


def sealed(content: Any) -> bytes:
    """JSON with the right checksum, as in the manifest and the ranks' files."""
    body = json.dumps(content).encode().removesuffix(b"}")
    line = f',\n "sha256": "{hashlib.sha256(body).hexdigest()}"\n}}\n'
    return body + line.encode()


def rank_file(step: Path, rank: int = 0) -> dict[str, Any]:
    """What a rank has written into a checkpoint."""
    content = json.loads((step / f"__{rank}.json").read_text())
    del content["sha256"]
    return content


def seal_rank(step: Path, content: Any, rank: int = 0) -> None:
    """Write any file of a rank with the right checksum, and the manifest's totals."""
    (step / f"__{rank}.json").write_bytes(sealed(content))
    written = manifest(step)["written"]
    files = [path for i in range(written["ranks"]) for path in _of_rank(step, i)]
    size = sum(path.stat().st_size for path in files)
    change(step, written={"ranks": written["ranks"], "files": len(files), "bytes": size})


def _of_rank(step: Path, rank: int) -> list[Path]:
    try:
        names = rank_file(step, rank)["files"]
    except (ValueError, TypeError, KeyError, RecursionError):
        names = []
    return [path for name in (f"__{rank}.json", *names) if (path := step / name).is_file()]


def replace(step: Path, name: str, content: bytes) -> None:
    """Replace a file, and its checksum in the manifest or in the file of its rank."""
    (step / name).write_bytes(content)
    entry = {"bytes": len(content), "crc32": zlib.crc32(content)}
    if name.startswith("__"):
        about = rank_file(step)
        seal_rank(step, about | {"files": about["files"] | {name: entry}})
    else:
        change(step, files=manifest(step)["files"] | {name: entry})


def index(step: Path) -> dict[str, Any]:
    """The tensors that rank 0 has written."""
    return rank_file(step)["tensors"]


def replace_index(step: Path, tensors: Any) -> None:
    """Replace what `index` returns, and its checksum."""
    seal_rank(step, rank_file(step) | {"tensors": tensors})


def replace_tensors(step: Path, pickled: bytes) -> None:
    """Let every tensor be what `pickled` makes when torch loads a file with it."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/data/0", bytes(1 << 18))
    replace(step, "__9_0.distcp", file.getvalue())
    tensors = index(step)
    for tensor in tensors.values():
        tensor["parts"] = [
            [
                [0] * len(tensor["size"]),
                tensor["size"],
                "__9_0.distcp",
                0,
                len(file.getvalue()),
                zlib.crc32(file.getvalue()),
            ]
        ]
    replace_index(step, tensors)


def flip(path: Path, position: int) -> None:
    """Flip a bit of a file."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def on_rank_0(action: Any, *args: Any) -> None:
    if dist.get_rank() == 0:
        action(*args)
    dist.barrier()

#!/usr/bin/env python3
"""The files that something passes through, counted by running it: `scripts/walks.py [--write]`.

Each walk runs on the debug model under the interpreter's profiler, which sees every call, of every
thread. A file of the package belongs to a walk if a function of it ran, in the order of the first
call. Helpers in `utils/` are left out. `--write` puts the lists into the page on the architecture.
"""

import argparse
import importlib
import re
import runpy
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = f"{ROOT / 'torchtitan'}/"
PAGE = ROOT / "docs/internals/architecture.md"
BEGIN, END = "<!-- scripts/walks.py writes this -->\n", "<!-- end -->\n"


@contextmanager
def traced(until: str = "") -> Iterator[list[str]]:
    """The files whose functions run within, below the package.

    Args:
        until: stop at the first call of a function whose qualified name is this.
    """
    files: dict[str, None] = {}
    active = True

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal active
        code = frame.f_code
        if event != "call" or not active:
            return
        active = not until or code.co_qualname != until
        if active and code.co_filename.startswith(PACKAGE) and code.co_name != "<module>":
            file = code.co_filename.removeprefix(PACKAGE)
            if not file.startswith("utils/"):
                files.setdefault(file)

    walk: list[str] = []
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield walk
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        walk += files


def key(argv: list[str]) -> list[str]:
    """From the command line and a file to a checked configuration."""
    from torchtitan.config import resolve

    with traced() as files:
        resolve(argv, 1)
    return files


def family(argv: list[str]) -> list[str]:
    """What the definition of a family of existing parts calls."""
    module = importlib.import_module("torchtitan.models.families.olmo2")
    with traced() as files:
        runpy.run_path(str(module.__file__), run_name="olmo2")
    return files[1:]  # the first is the family's own


def batch(argv: list[str]) -> list[str]:
    """From JSON lines to the loss, without the model's files."""
    from torchtitan.config import resolve
    from torchtitan.train.build import build_data
    from torchtitan.train.step import train_step

    loop = runpy.run_path(str(ROOT / "examples/loop.py"))
    config = resolve(argv, 1).config
    engine = loop["build"](config)
    tokenizer = loop["build_tokenizer"](config.model.hf_assets_path)
    with traced(until="Tensor.backward") as files:
        loader = build_data(config, "training", tokenizer, (0, 1))
        train_step(engine, next(iter(loader)))
    return [file for file in files if not file.startswith("models/")]


def shard(argv: list[str]) -> list[str]:
    """Into a checkpoint and back."""
    from torchtitan.config import resolve
    from torchtitan.train.preflight import preflight
    from torchtitan.train.trainer import Trainer

    flags = ["--checkpoint.enable", "--checkpoint.async_mode=disabled"]  # one thread, one order
    config = resolve([*argv, *flags], 1).config
    trainer = Trainer(config, preflight(config))
    trainer.train()
    step, state = trainer.progress.step, trainer.state.local_state()
    with traced() as files:
        trainer.checkpointer.save(step, state)
        trainer.checkpointer.resume()
    trainer.close()
    return files


WALKS: dict[str, tuple[Callable[[list[str]], list[str]], str]] = {
    "A row of text": (batch, "from a file of JSON lines to its loss, without the model's files"),
    "A key of the configuration": (key, "from a command line and a TOML file to a checked value"),
    "A family of existing parts": (family, "used by a file of `models/families/`"),
    "A shard": (shard, "into a checkpoint and back"),
}


def walk_all() -> dict[str, list[str]]:
    """Each walk's files, in order."""
    import torch.distributed as dist

    from torchtitan.config import resolve
    from torchtitan.parallel.groups import init_distributed
    from torchtitan.utils.device import current_device

    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text.jsonl")
        text.write_text('{"text": "All happy families are alike."}\n' * 400)
        argv = [
            "--job.config_file=train_configs/debug_model.toml",
            f"--job.dump_folder={folder}/run",
            f"--training.dataset_path={text}",
            "--training.dataset=text",
            "--training.steps=1",
            "--validation.enable=false",
            "--checkpoint.enable=false",
        ]
        walks = {name: walk(argv) for name, (walk, _) in list(WALKS.items())[1:3]}
        init_distributed(resolve(argv, 1).config.comm, current_device())
        walks |= {name: WALKS[name][0](argv) for name in WALKS if name not in walks}
        dist.destroy_process_group()
    return {name: walks[name] for name in WALKS}


def markdown(walks: dict[str, list[str]]) -> str:
    """The walks as the page shows them."""
    paragraphs = []
    for name, files in walks.items():
        text = f"**{name}**, {WALKS[name][1]}: {len(files)} files. " + ", ".join(
            f"`{file}`" for file in files
        )
        lines = textwrap.wrap(text + ".", 120, break_long_words=False, break_on_hyphens=False)
        paragraphs.append("\n".join(lines) + "\n")
    return "\n".join(paragraphs)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="The files that something passes through.")
    parser.add_argument("--write", action="store_true", help=f"into {PAGE.relative_to(ROOT)}")
    options = parser.parse_args(argv)
    text = markdown(walk_all())
    if not options.write:
        print(text, end="")
        return 0
    page = PAGE.read_text()
    PAGE.write_text(re.sub(f"(?s)(?<={re.escape(BEGIN)}).*?(?={END})", text, page))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

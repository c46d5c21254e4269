"""Inspect, verify and convert checkpoints, without a GPU.

    torchtitan ckpt inspect outputs/run/checkpoint             # list checkpoints, or show one
    torchtitan ckpt verify  outputs/run/checkpoint             # compare files with their checksums
    torchtitan ckpt to-hf   outputs/run/checkpoint exported/   # export for transformers
    torchtitan ckpt from-hf assets/hf/Llama-3.2-1B started/    # make a checkpoint and a TOML

Where one checkpoint is needed, a folder of them means the newest. Folders may be URLs (s3://,
gs://), except the source of from-hf.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchtitan.utils.argument_types import command_parser, number, path_or_url
from torchtitan.utils.errors import CheckpointError, DamageError, UserError
from torchtitan.utils.storage import path_argument


def inspect(options: argparse.Namespace) -> int:
    from torchtitan.checkpoint.commit import checkpoints_at
    from torchtitan.checkpoint.format.manifest import read_manifest
    from torchtitan.checkpoint.inspect import as_data, overview

    checkpoints = []
    errors = []
    for step in checkpoints_at(options.path, abandoned=True):
        try:
            checkpoints.append((step, read_manifest(step)))
        except DamageError as error:
            errors.append(error)
    if options.json and (checkpoints or not errors):
        print(json.dumps([as_data(*checkpoint) for checkpoint in checkpoints], indent=1))
    elif checkpoints or not errors:
        print(overview(checkpoints))
    if errors:
        raise CheckpointError("\n".join(map(str, errors)))
    return 0


def verify(options: argparse.Namespace) -> int:
    from torchtitan.checkpoint.commit import abandoned_at, checkpoints_at, damage, leftovers
    from torchtitan.checkpoint.format.index import read_index
    from torchtitan.checkpoint.format.manifest import read_manifest

    bad = 0
    for step in checkpoints_at(options.path, abandoned=True):
        try:
            manifest = read_manifest(step)
            problems = list(damage(step, manifest))
            if not problems:
                read_index(step, manifest)
        except DamageError as error:
            problems = [str(error)]
        if problems:
            bad += 1
            print("\n  ".join([f"{step}: damaged", *problems]))
        else:
            size = manifest.file_bytes()
            note = "" if abandoned_at(step) is None else "; abandoned"
            print(f"{step}: OK, {manifest.file_count()} files, {size:,} bytes{note}")
    for path in leftovers(options.path):
        print(
            f"{path}: left by an interrupted save, or a save in progress; the run's next "
            "start deletes it"
        )
    return 1 if bad else 0


def to_hf(options: argparse.Namespace) -> int:
    from torchtitan.checkpoint.hf import convert

    convert.to_hf(
        options.source,
        options.target,
        options.dtype,
        options.assets,
        options.max_file_gb,
        options.check,
        options.custom_import,
        family=options.model,
        averaged=options.ema,
    )
    return 0


def from_hf(options: argparse.Namespace) -> int:
    from torchtitan.checkpoint.hf import convert
    from torchtitan.config import resolve
    from torchtitan.train.preflight import preflight

    def check(argv: list[str]) -> None:
        preflight(resolve(argv, 1, check=False).config, world=1, output=False)

    convert.from_hf(
        options.source,
        options.target,
        options.model,
        options.toml,
        check,
        custom_import=options.custom_import,
    )
    return 0


_CHECKPOINTS: dict[str, Any] = {"type": path_argument, "help": "checkpoint, or folder of them"}
_EMA: dict[str, Any] = {
    "action": "store_true",
    "help": "use the average of the weights, which the run kept with ema.enable",
}
_DTYPES = ["float32", "bfloat16", "float16"]


def parser() -> argparse.ArgumentParser:
    parser = command_parser("ckpt", __doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(
        name: str, run: Callable[[argparse.Namespace], int], help: str
    ) -> Callable[..., Any]:
        """Add a command, and return the function that adds its arguments."""
        command = commands.add_parser(name, help=help)
        command.set_defaults(run=run)
        return command.add_argument

    add = command("inspect", inspect, "list checkpoints, or the contents of one")
    add("path", **_CHECKPOINTS)
    add("--json", action="store_true", help="print JSON")

    add = command(
        "verify", verify, "compare every file with its checksum; exit code 1 if one differs"
    )
    add("path", **_CHECKPOINTS)

    add = command("to-hf", to_hf, "export Hugging Face safetensors")
    add("source", **_CHECKPOINTS)
    add("target", type=path_argument, help="folder to create")
    add("--ema", **_EMA)
    add("--dtype", choices=_DTYPES, help="dtype of the weights (default: as stored)")
    add(
        "--assets",
        type=path_or_url,
        help="folder of the tokenizer (default: model.hf_assets_path of the run)",
    )
    add("--max-file-gb", type=number, default=5.0, help="largest file size (default: %(default)s)")
    add(
        "--check",
        action=argparse.BooleanOptionalAction,
        help="read the export back, and compare logits and token ids with transformers' (default: "
        "as far as it is installed and memory suffices)",
    )
    add(
        "--model", help="export as the class of this family, which has the same code (default: own)"
    )
    add(
        "--custom-import",
        metavar="MODULE",
        help="module that registers the model's family or its tokenizer",
    )

    add = command("from-hf", from_hf, "convert a Hugging Face model, to start a run from")
    add("source", type=Path, help="folder with config.json and safetensors")
    add("target", type=path_argument, help="folder to create, for step-0 and train.toml")
    add("--model", help="model family, as in model.name (default: by config.json)")
    add("--toml", type=path_or_url, help="TOML file to write (default: train.toml in the target)")
    add("--custom-import", metavar="MODULE", help="module that registers the model's family")
    return parser


def main(argv: list[str]) -> int:
    try:
        options = parser().parse_args(argv)
        return options.run(options)
    except OSError as error:  # a folder that can't be read or written, a bucket that doesn't answer
        raise UserError(str(error)) from error

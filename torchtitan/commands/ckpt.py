"""Look at, check, compare, thin out and convert checkpoints: `torchtitan ckpt COMMAND --help`.

    inspect outputs/run/checkpoint             what there is; of one step: what is in it
    verify  outputs/run/checkpoint             checksums of every file
    diff    A/step-100 B/step-100              configuration, counters and tensors
    prune   outputs/run/checkpoint --keep-latest 3 --keep-every 1000
    to-hf   outputs/run/checkpoint exported/   a folder that transformers loads
    from-hf assets/hf/Llama-3.2-1B started/    a checkpoint, and a TOML that trains from it

Where a step is asked for, a folder of steps means its newest. URLs (s3://, gs://) do for folders, too (but for
what from-hf reads). Needs no GPU and
no torchrun; of tensors, only one or two are in memory at a time.
"""

import argparse
import json
from pathlib import Path

from torchtitan.utils.errors import UserError
from torchtitan.utils.storage import storage_path, storage_problem
from torchtitan.utils.text import count


def folder(name: str) -> Path:
    """A path or URL from the command line.

    Raises:
        UserError: a URL of storage that can't be used here.
    """
    if problem := storage_problem(name):
        raise UserError(problem)
    return storage_path(name)


def inspect(options: argparse.Namespace) -> int:
    from torchtitan.checkpoint.report import overview, steps_in, summary

    where = folder(options.path)
    found = [summary(step) for step in steps_in(where)]
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        print(overview(found))
    return 0


def verify(options: argparse.Namespace) -> int:
    from torchtitan.checkpoint.commit import damage, leftovers, read_manifest
    from torchtitan.checkpoint.report import steps_in

    where = folder(options.path)
    bad = 0
    for step in steps_in(where):
        manifest = read_manifest(step)
        problems = list(damage(step, manifest))
        bad += bool(problems)
        size = sum(file["bytes"] for file in manifest["files"].values())
        print(f"{step}: " + ("damaged" if problems else f"OK, {len(manifest['files'])} files, {size:,} bytes"))
        for problem in problems:
            print(f"  {problem}")
    for path in leftovers(where):
        print(f"{path}: left by an interrupted save (or one is running); the run's next start deletes it")
    return 1 if bad else 0


def diff(options: argparse.Namespace) -> int:
    from torchtitan.checkpoint.report import compare, one_step

    a, b = (one_step(folder(name)) for name in (options.a, options.b))
    print(f"a: {a}\nb: {b}")
    found = 0
    for part, text in compare(a, b, options.tolerance):
        if part in options.only:
            found += 1
            print(f"{part}: {text}")
    print(f"{found} difference(s) in {', '.join(options.only)}" if found else f"equal in {', '.join(options.only)}")
    return 1 if found else 0


def prune(options: argparse.Namespace) -> int:
    from torchtitan.checkpoint.commit import committed_steps, disposable, remove, step_folder

    where = folder(options.path)
    gone = disposable(where, options.keep_latest, options.keep_every)
    for step in gone:
        print(f"{'would delete' if options.dry_run else 'deleting'} {step_folder(where, step)}")
        if not options.dry_run:
            remove(step_folder(where, step))
    kept = [step for step in committed_steps(where) if step not in gone]
    print(f"kept: {', '.join(map(str, kept)) or 'none; there are no checkpoints here'}")
    return 0


def to_hf(options: argparse.Namespace) -> int:
    from torchtitan.checkpoint import convert

    source, target = folder(options.source), folder(options.target)
    convert.to_hf(source, target, options.dtype, options.assets, options.max_file_gb, options.check)
    return 0


def from_hf(options: argparse.Namespace) -> int:
    from torchtitan.checkpoint import convert

    convert.from_hf(Path(options.source), folder(options.target), options.model, options.toml)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchtitan ckpt",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("inspect", help="what a checkpoint, or each of a folder, holds")
    command.add_argument("path", help="a step, or a folder of steps")
    command.add_argument("--json", action="store_true", help="for programs")
    command.set_defaults(run=inspect)

    command = commands.add_parser("verify", help="compare every file with its checksum; exit code 1 if one differs")
    command.add_argument("path", help="a step, or a folder of steps")
    command.set_defaults(run=verify)

    command = commands.add_parser("diff", help="compare two checkpoints; exit code 1 if they differ")
    command.add_argument("a")
    command.add_argument("b")
    command.add_argument("--tolerance", type=float, default=0.0, help="largest |a - b| of equal tensors (default: 0)")
    parts = ["config", "train_state", "tensors"]
    command.add_argument("--only", nargs="+", choices=parts, default=parts, help="what to compare (default: all)")
    command.set_defaults(run=diff)

    command = commands.add_parser("prune", help="delete old checkpoints, never the newest that can be resumed")
    command.add_argument("path", help="a folder of steps")
    command.add_argument("--keep-latest", type=count, required=True, metavar="K", help="keep the K newest")
    command.add_argument("--keep-every", type=count, default=0, metavar="N", help="and every multiple of N")
    command.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    command.set_defaults(run=prune)

    command = commands.add_parser("to-hf", help="export as Hugging Face safetensors")
    command.add_argument("source", help="a step, or a folder of steps")
    command.add_argument("target", help="folder to make")
    command.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="default: as stored")
    command.add_argument("--assets", help="folder of the tokenizer (default: model.hf_assets_path of the run)")
    command.add_argument("--max-file-gb", type=float, default=5.0, help="largest size of a file (default: 5)")
    command.add_argument(
        "--check",
        action=argparse.BooleanOptionalAction,
        help="load the export with transformers and compare logits (default: if it is installed and memory suffices)",
    )
    command.set_defaults(run=to_hf)

    command = commands.add_parser("from-hf", help="start a run from a Hugging Face folder")
    command.add_argument("source", help="folder with config.json and safetensors")
    command.add_argument("target", help="folder to make: the checkpoint step-0, and train.toml")
    command.add_argument("--model", default="llama3", help="model family, as model.name (default: llama3)")
    command.add_argument("--toml", help="TOML file to make (default: train.toml in the target)")
    command.set_defaults(run=from_hf)
    return parser


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    try:
        return options.run(options)
    except OSError as error:  # a folder that can't be read or written, a bucket that doesn't answer
        raise UserError(str(error)) from error

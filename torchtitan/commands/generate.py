"""Let a model talk: `torchtitan generate --checkpoint outputs/debug_model --prompt "def main("`.

Where a run's folder, or its folder of checkpoints, is given, the newest complete checkpoint speaks. Under torchrun the
ranks share the model by tensor parallelism: `torchrun --nproc-per-node 2 -m torchtitan generate ...`.
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli

from torchtitan.data.tokenizer import Tokenizer, build_tokenizer
from torchtitan.models import ModelSpec, get_spec
from torchtitan.utils.errors import CheckpointError, ConfigError, UserError
from torchtitan.utils.storage import storage_path, storage_problem

if TYPE_CHECKING:
    from torchtitan.generate.generator import Continuation, TextGenerator


@dataclass(frozen=True)
class Source:
    """Where a model's weights lie, and what it is."""

    folder: Path
    hugging_face: bool
    spec: ModelSpec
    args: Any
    assets: str
    """Folder of the tokenizer."""
    tokenizer: str | None
    """Fingerprint of the tokenizer that it was trained with, if that is known."""
    stop: tuple[int, ...]
    """Tokens that end a text, besides the tokenizer's own."""


def find(name: str) -> Source:
    """The model in a checkpoint, a folder of checkpoints, a run's folder, or a Hugging Face model's folder.

    Raises:
        UserError: there is none, or of no family that is known here.
    """
    from torchtitan.checkpoint.commit import read_manifest
    from torchtitan.checkpoint.convert import model_of
    from torchtitan.checkpoint.report import one_step

    if problem := storage_problem(name):
        raise ConfigError([f"--checkpoint: {problem}"])
    folder = storage_path(name)
    if (folder / "config.json").is_file():
        return _hugging_face(folder)
    if (folder / "config.toml").is_file():  # a run's, which says where its checkpoints are
        settings = tomli.loads((folder / "config.toml").read_text())
        folder = storage_path(settings.get("checkpoint", {}).get("folder", "checkpoint"), folder)
    folder = one_step(folder)
    manifest = read_manifest(folder)
    for file, expected in manifest["files"].items():
        if not (folder / file).is_file() or (folder / file).stat().st_size != expected["bytes"]:
            raise CheckpointError(
                f"{folder} is damaged: {file} is not as long as it was written; take an earlier step "
                "(torchtitan ckpt verify finds a whole one)"
            )
    return Source(folder, False, *model_of(manifest), manifest["data"].get("tokenizer"), ())


def _hugging_face(folder: Path) -> Source:
    try:
        config = json.loads((folder / "config.json").read_text())
    except ValueError as error:
        raise ConfigError([f"--checkpoint: {folder / 'config.json'} is not valid JSON: {error}"]) from None
    if not list(folder.glob("*.safetensors")):
        raise ConfigError([f"--checkpoint: {folder} has a config.json but no .safetensors files"])
    spec = get_spec("llama3")
    stop = config.get("eos_token_id")
    stop = [] if stop is None else stop if isinstance(stop, list) else [stop]
    return Source(folder, True, spec, spec.hf.args(config), str(folder), None, tuple(stop))


def open_tokenizer(source: Source, assets: str | None) -> Tokenizer:
    """The model's tokenizer, from `assets` or from where the run had it.

    Raises:
        ConfigError: it can't be read, or is another than the model was trained with.
    """
    try:
        tokenizer = build_tokenizer(assets or source.assets)
    except UserError as error:
        raise ConfigError([str(error).replace("model.hf_assets_path", "--assets")]) from None
    if tokenizer.vocab_size > source.args.vocab_size:
        raise ConfigError(
            [
                f"--assets: the tokenizer {tokenizer.path} has {tokenizer.vocab_size} entries, the model in "
                f"{source.folder} only {source.args.vocab_size}; give the folder of the tokenizer it was trained with"
            ]
        )
    if not assets and source.tokenizer not in (None, tokenizer.fingerprint):
        raise ConfigError(
            [
                f"--assets: {tokenizer.path} is not the tokenizer that the model in {source.folder} was trained with; "
                "give that one's folder, or this one's if the difference means nothing"
            ]
        )
    return tokenizer


def load(
    source: Source, tokenizer: Tokenizer, max_seq_len: int, rows: int, dtype: str | None, world: int
) -> "TextGenerator":
    """The model, ready to generate, on this process's device or shared by the `world` ranks of torchrun."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    from torchtitan.checkpoint.dcp_storage import alone
    from torchtitan.checkpoint.hf import load_hf
    from torchtitan.checkpoint.state import model_state, read_tensors
    from torchtitan.config.schema import Comm
    from torchtitan.generate.generator import TextGenerator
    from torchtitan.models.layers import attention_backend
    from torchtitan.parallel.groups import init_distributed
    from torchtitan.parallel.tensor import apply_tensor_parallel
    from torchtitan.utils.device import current_device, tune_cpu

    device = current_device()
    tune_cpu()
    mesh = None
    if world > 1:
        if not torch.distributed.is_initialized():
            init_distributed(Comm(), device)
        mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("tp",))
    args = source.args.model_copy(update={"max_seq_len": max_seq_len + world})
    with torch.device("meta"):
        model: Any = source.spec.build(args, attention_backend(device.type))
    model.to(getattr(torch, dtype or ("bfloat16" if device.type == "cuda" else "float32")))
    if mesh is not None:
        apply_tensor_parallel(model, mesh, source.spec.tensor_parallel_styles, sharded_loss=False, float8=False)
    model.to_empty(device=device)
    model.init_buffers()  # on the CPU, as training does
    model.to(device)
    with alone():
        if source.hugging_face:
            load_hf([model], source.folder, source.spec.hf.names(args))
        else:
            read_tensors({"model": model_state([model])}, source.folder)
    stop = {tokenizer.eos_id, *source.stop}
    return TextGenerator(
        model,
        device,
        rows=rows,
        max_seq_len=max_seq_len,
        vocab_size=tokenizer.vocab_size,
        stop=tuple(stop),
        mesh=mesh,
    )


class _Stream:
    """Prints a text as it grows; bytes that don't make a character yet are held back."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer, self.shown = tokenizer, ""

    def __call__(self, row: "Continuation") -> None:
        text = _text(self.tokenizer, row)
        if not row.end:
            text = text.rstrip("\N{REPLACEMENT CHARACTER}")
        print(text[len(self.shown) :], end="", flush=True)
        self.shown = text


def _text(tokenizer: Tokenizer, row: "Continuation") -> str:
    """What the model wrote; decoded with the prompt, since some tokenizers drop the blank of a first word."""
    return tokenizer.decode([*row.prompt, *row.tokens])[len(tokenizer.decode(row.prompt)) :]


def _prompts(options: argparse.Namespace) -> list[str]:
    prompts = list(options.prompt)
    if options.prompts_file:
        try:
            lines = Path(options.prompts_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError([f"--prompts-file: can't read {options.prompts_file}: {error}"]) from None
        prompts += [line for line in lines if line.strip()]
        if not prompts:
            raise ConfigError([f"--prompts-file: {options.prompts_file} has no prompt: one a line"])
    return prompts or [""]


def _check(options: argparse.Namespace) -> Iterator[str]:
    if options.temperature < 0:
        yield f"--temperature: got {options.temperature:g}, must be 0 (the likeliest token) or more"
    if not 0 < options.top_p <= 1:
        yield f"--top-p: got {options.top_p:g}, must be above 0 and at most 1 (all tokens)"
    for name in ("top_k", "max_new_tokens", "batch_size"):
        least = 0 if name == "top_k" else 1
        if (value := getattr(options, name)) < least:
            yield f"--{name.replace('_', '-')}: got {value}, must be at least {least}"


def _check_model(source: Source, prompts: Sequence[list[int]], world: int) -> Iterator[str]:
    sizes = source.spec.tensor_parallel_sizes(source.args)
    if wrong := ", ".join(f"{name} {size}" for name, size in sizes.items() if size % world):
        yield f"--nproc-per-node: {world} does not divide {wrong}; take a divisor of {math.gcd(*sizes.values())}"
    limit = source.args.max_seq_len
    for i, prompt in enumerate(prompts, 1):
        if len(prompt) >= limit:
            yield f"prompt {i} has {len(prompt)} tokens; the model reads {limit}, and one must be left: shorten it"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchtitan generate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--checkpoint", required=True, help="folder of a run, of checkpoints, or of a Hugging Face model")
    add("--prompt", action="append", default=[], help="beginning of a text; may be repeated (default: nothing)")
    add("--prompts-file", help="file with a prompt on each line")
    add("--assets", help="folder of the tokenizer (default: the one the model was trained with)")
    add("--max-new-tokens", type=int, default=128, help="length of each continuation (128)")
    add("--temperature", type=float, default=0.8, help="0: always the likeliest token (0.8)")
    add("--top-k", type=int, default=0, help="draw from so many of the likeliest tokens; 0: all (0)")
    add("--top-p", type=float, default=0.95, help="draw from the likeliest tokens of this total probability (0.95)")
    add("--seed", type=int, default=0, help="the same seed and prompt give the same text (0)")
    add("--dtype", choices=["float32", "bfloat16", "float16"], help="of the weights (bfloat16; on a CPU float32)")
    add("--batch-size", type=int, default=8, help="prompts that are worked on at once (8)")
    add("--json", action="store_true", help="print one JSON object instead of text")
    return parser


def main(argv: list[str]) -> int:
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    try:
        return _generate(_parser().parse_args(argv), rank, world)
    except UserError as error:
        if rank == 0:
            raise
        return error.exit_code  # every rank meets the same mistakes


def _generate(options: argparse.Namespace, rank: int, world: int) -> int:
    if problems := list(_check(options)):
        raise ConfigError(problems)
    texts = _prompts(options)
    source = find(options.checkpoint)
    tokenizer = open_tokenizer(source, options.assets)
    prompts = [tokenizer.encode(text, bos=True) or [tokenizer.eos_id] for text in texts]
    if problems := list(_check_model(source, prompts, world)):
        raise ConfigError(problems)
    length = min(source.args.max_seq_len, max(map(len, prompts)) + options.max_new_tokens)
    generator = load(source, tokenizer, length, min(options.batch_size, len(prompts)), options.dtype, world)

    from torchtitan.generate.generator import Sampling

    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
    speaks, one = rank == 0 and not options.json, len(prompts) == 1
    show = _Stream(tokenizer) if speaks and one else lambda _: None
    rows: list[Continuation] = []
    began = time.perf_counter()
    for i in range(0, len(prompts), generator.max_rows):
        if speaks and one:
            print(texts[0], end="", flush=True)
        done = generator(prompts[i : i + generator.max_rows], sampling, options.max_new_tokens, show)
        for text, row in zip(texts[i:], done, strict=False):
            if speaks:
                print("" if one else f"{text}{_text(tokenizer, row)}\n{'-' * 20}", flush=True)
        rows += done
    count, seconds = sum(len(row.tokens) for row in rows), time.perf_counter() - began
    if speaks:
        print(f"{source.folder}: {count} tokens, {count / seconds:,.1f} tokens/s", file=sys.stderr)
    elif rank == 0:
        made = [
            {"prompt": text, "text": _text(tokenizer, row), "tokens": row.tokens, "end": row.end}
            for text, row in zip(texts, rows, strict=True)
        ]
        about = {"checkpoint": str(source.folder), "tokens_per_second": count / seconds, "continuations": made}
        print(json.dumps(about, indent=1, ensure_ascii=False))
    return 0

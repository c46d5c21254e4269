"""Generate text from a checkpoint.

    torchtitan generate --checkpoint outputs/debug_model --prompt "def main("
    torchrun --nproc-per-node 2 -m torchtitan generate ...   # tensor parallelism over two ranks

A run's folder, or a folder of checkpoints, means the newest complete checkpoint in it.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan.data.encode.prompts import encode_prompts, prompt_problems
from torchtitan.inference.options import add_model_options, report_once
from torchtitan.utils.argument_types import command_parser, count, number
from torchtitan.utils.errors import ConfigError, reason
from torchtitan.utils.files import text_of
from torchtitan.utils.process import rank_and_world
from torchtitan.utils.wording import listed, plural, show_rate

if TYPE_CHECKING:
    from torchtitan.data.encode.tokenizer import Tokenizer
    from torchtitan.inference.generator import Continuation
    from torchtitan.inference.load import ModelSource


def main(argv: list[str]) -> int:
    rank, world = rank_and_world()
    return report_once(lambda: _generate(parser().parse_args(argv), rank, world), rank)


def _generate(options: argparse.Namespace, rank: int, world: int) -> int:
    inputs = _prompts(options)

    from torchtitan.inference.generator import SamplingSettings  # imports torch
    from torchtitan.inference.load import find, load, open_tokenizer

    source = find(options.checkpoint, options.custom_import, averaged=options.ema)
    tokenizer = open_tokenizer(source, options.assets)
    key = "--chat" if options.chat else "--prompts-file"
    encoded = encode_prompts(inputs, tokenizer, key, chat=options.chat)
    texts, prompts = zip(*encoded, strict=True)
    if problems := list(_model_problems(source, prompts, world)):
        raise ConfigError(problems)
    length = min(source.args.max_seq_len, max(map(len, prompts)) + options.max_new_tokens)
    generator = load(
        source, tokenizer, length, min(options.batch_size, len(prompts)), options.dtype, world
    )

    sampling = SamplingSettings(options.temperature, options.top_k, options.top_p, options.seed)
    printer = _Printer(tokenizer, texts) if rank == 0 and not options.json else None
    progress = printer.progress if printer else lambda _: None
    rows: list[Continuation] = []
    began = time.perf_counter()
    for i in range(0, len(prompts), generator.max_rows):
        batch = prompts[i : i + generator.max_rows]
        rows += generator(batch, sampling, options.max_new_tokens, progress)
        if printer:
            printer.finish(rows)
    tokens = sum(len(row.tokens) for row in rows)
    seconds = time.perf_counter() - began
    full = [
        f"prompt {i} after {plural(len(row.tokens), 'token')}"
        for i, row in enumerate(rows, 1)
        if row.end == "context"
    ]
    if full and rank == 0:
        limit = f"{length} tokens, all that the model reads, before --max-new-tokens"
        print(f"Ended at {limit} {options.max_new_tokens}: {listed(full)}", file=sys.stderr)
    if printer:
        print(
            f"{source.folder}: {tokens} tokens, {show_rate(tokens / seconds)} tokens/s",
            file=sys.stderr,
        )
    elif rank == 0:
        continuations = [
            {"prompt": text, "text": row.text(tokenizer), "tokens": row.tokens, "end": row.end}
            for text, row in zip(texts, rows, strict=True)
        ]
        report = {
            "checkpoint": str(source.folder),
            "tokens_per_second": tokens / seconds,
            "continuations": continuations,
        }
        print(json.dumps(report, indent=1, ensure_ascii=False))
    return 0


class _Printer:
    """Prints one text as it is generated, or several texts as their batches finish."""

    def __init__(self, tokenizer: "Tokenizer", texts: Sequence[str]):
        self.tokenizer = tokenizer
        self.texts = texts
        self.row_count = 0
        self.streams = len(texts) == 1
        self.output = ""
        if self.streams:
            print(texts[0], end="", flush=True)

    def progress(self, row: "Continuation") -> None:
        if not self.streams:
            return
        text = row.text(self.tokenizer)
        if not row.end:
            text = text.rstrip("\N{REPLACEMENT CHARACTER}")  # the first bytes of a character
        print(text[len(self.output) :], end="", flush=True)
        self.output = text

    def finish(self, rows: "Sequence[Continuation]") -> None:
        """Print the texts of `rows` that haven't been printed."""
        for text, row in list(zip(self.texts, rows, strict=False))[self.row_count :]:
            print(
                "" if self.streams else f"{text}{row.text(self.tokenizer)}\n{'-' * 20}", flush=True
            )
        self.row_count = len(rows)


def _prompts(options: argparse.Namespace) -> list[Any]:
    """The prompts: texts, and conversations."""
    prompts: list[Any] = list(options.prompt)
    if file := options.prompts_file:
        where = str(file)
        try:
            lines = text_of(file.read_bytes()).removesuffix("\n").split("\n")
            for i, line in enumerate(lines, 1):
                where = f"{file}, line {i}"
                prompts.append(json.loads(line) if file.suffix == ".jsonl" else line.rstrip("\r"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError([f"--prompts-file: can't read {where}: {reason(error)}"]) from None
        if not any(map(str.strip, lines)):
            raise ConfigError([f"--prompts-file: {file} has no prompts (one per line)"])
    return prompts or [""]


def _model_problems(
    source: "ModelSource", prompts: Sequence[list[int]], world: int
) -> Iterator[str]:
    sizes = source.spec.tensor_parallel_sizes(source.args)
    if indivisible := ", ".join(f"{name} {size}" for name, size in sizes.items() if size % world):
        yield (
            f"--nproc-per-node: {world} does not divide {indivisible}; use a divisor of "
            f"{math.gcd(*sizes.values())}"
        )
    yield from prompt_problems(prompts, source.args.vocab_size, source.args.max_seq_len)


def parser() -> argparse.ArgumentParser:
    parser = command_parser("generate", __doc__)
    add_model_options(
        parser,
        average="take",
        batch="prompts per batch",
        dtypes=["float32", "bfloat16", "float16"],
        custom_import="the model's family or its tokenizer",
        chat="answer each prompt as a user's message",
    )
    add = parser.add_argument
    add(
        "--prompt",
        type=str,
        action="append",
        default=[],
        help="beginning of a text; repeatable (default: empty)",
    )
    add(
        "--prompts-file",
        type=Path,
        help="file with a prompt per line; in a .jsonl file, a string or a list of messages",
    )
    add(
        "--max-new-tokens",
        type=count,
        default=128,
        help="length of each continuation (default: %(default)s)",
    )
    add(
        "--temperature",
        type=partial(number, zero=True),
        default=0.8,
        help="0: always the likeliest token (default: %(default)s)",
    )
    add(
        "--top-k",
        type=partial(count, fewest=0),
        default=0,
        help="sample from the k likeliest tokens; 0: all (default: %(default)s)",
    )
    add(
        "--top-p",
        type=partial(number, most=1),
        default=0.95,
        help="sample from the likeliest tokens with this total probability (default: %(default)s)",
    )
    add(
        "--seed",
        type=partial(count, fewest=0),
        default=0,
        help="same seed and prompt, same text (default: %(default)s)",
    )
    add("--json", action="store_true", help="print one JSON object instead of text")
    return parser

"""Score a checkpoint on tasks of EleutherAI's lm-eval.

    torchtitan eval --checkpoint outputs/llama3_8b --tasks hellaswag,arc_easy
    torchtitan eval --checkpoint outputs/debug_model --include-path my_tasks --tasks my_task
    torchrun --nproc-per-node 8 -m torchtitan eval ... --parallelism.tensor_parallel_degree 2

A run's folder, or a folder of checkpoints, means the newest complete checkpoint in it. Under
torchrun, the model is sharded over the ranks (FSDP), or by the keys of [parallelism]. Scores of a
run's checkpoint are added to evals.jsonl in the run's folder.
"""

import argparse
import importlib.util
import json
from functools import partial
from pathlib import Path
from typing import Any

from torchtitan.inference.options import add_model_options, report_once
from torchtitan.telemetry.scores import record_scores, run_of
from torchtitan.utils.argument_types import command_parser, count, path_or_url
from torchtitan.utils.errors import ConfigError
from torchtitan.utils.files import write_output
from torchtitan.utils.logging import logger
from torchtitan.utils.process import rank_and_world
from torchtitan.utils.storage import is_remote

_BOOTSTRAP = 100_000
"""Bootstrap samples for the standard error of a metric that isn't a mean; lm-eval's default."""


def main(argv: list[str]) -> int:
    rank, _ = rank_and_world()
    return report_once(lambda: _eval(argv, rank), rank)


def _eval(argv: list[str], rank: int) -> int:
    options, layout = parser().parse_known_args(argv)
    problems = [
        f"{word}: unknown option; `torchtitan eval --help` lists them"
        for word in layout
        if word.startswith("-") and not word.startswith("--parallelism.")
    ]
    if problems:
        raise ConfigError(problems)
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(
            ["torchtitan eval needs the package lm-eval: pip install 'titan-pretrain[eval]'"]
        )
    if options.include_path and not Path(options.include_path).is_dir():
        raise ConfigError([f"--include-path: {options.include_path} is no folder"])

    from torchtitan.inference.load import find, open_tokenizer
    from torchtitan.inference.tasks import Tasks, scores  # imports torch
    from torchtitan.train.trained_model import load_probe, process_group

    source = find(options.checkpoint, options.custom_import, averaged=options.ema)
    tokenizer = open_tokenizer(source, options.assets)
    tokenizer.end_for("torchtitan eval")
    with process_group():
        tasks = Tasks(
            options.tasks.split(","),
            include_path=options.include_path,
            num_fewshot=options.num_fewshot,
            limit=options.limit,
            chat=options.chat,
        )
        sizes = {
            "rows": options.batch_size,
            "max_seq_len": options.max_length,
            "dtype": options.dtype,
        }
        probe = load_probe(source, tokenizer, layout, **sizes)
        bootstrap = _BOOTSTRAP if rank == 0 else 0
        results = tasks.run(probe, tokenizer, bootstrap=bootstrap, by_file=source.hugging_face)
    if rank == 0:
        task_scores = scores(results)
        if not source.hugging_face:
            _record(source.folder, task_scores, options)
        _report(str(source.folder), results, task_scores, options.output)
    return 0


def _record(checkpoint: Path, scores: dict[str, float], options: argparse.Namespace) -> None:
    """Add the scores to the folder of the checkpoint's run, for `torchtitan report`."""
    # these import torch
    from torchtitan.checkpoint.commit import abandoned_at
    from torchtitan.checkpoint.format.manifest import read_manifest

    run = None if is_remote(checkpoint) else run_of(checkpoint)
    if run is None:
        return
    names = ("num_fewshot", "limit", "max_length", "ema", "chat")
    values = {name: getattr(options, name) for name in names}
    settings = {name: value for name, value in values.items() if value not in (None, False)}
    try:
        manifest = read_manifest(checkpoint)
        abandoned = abandoned_at(checkpoint) is not None
        file = record_scores(
            run, manifest.step, scores, settings, branch=manifest.branch(), abandoned=abandoned
        )
    except OSError as error:
        logger.warning(f"{run}: the scores can't be recorded there: {error.strerror or error}")
        return
    note = "the run has abandoned this step" if abandoned else f"shown by `torchtitan report {run}`"
    print(f"Recorded in {file}: {note}")


def _report(
    checkpoint: str, results: dict[str, Any], scores: dict[str, float], output: Path | None
) -> None:
    from lm_eval.utils import make_table

    print(make_table(results))
    if results.get("groups"):
        print(make_table(results, "groups"))
    if output:
        keys = ("results", "groups", "n-shot", "n-samples", "versions", "higher_is_better")
        report = {"checkpoint": checkpoint, "scores": scores}
        report |= {key: results[key] for key in keys if key in results}
        content = json.dumps(report, indent=1, default=str) + "\n"
        write_output({output: content.encode()})


def parser() -> argparse.ArgumentParser:
    parser = command_parser("eval", __doc__)
    add_model_options(
        parser,
        average="score",
        batch="texts per batch on each rank",
        dtypes=["float32", "bfloat16"],
        custom_import="the model's family",
        chat="ask each question as a user's message",
    )
    add = parser.add_argument
    add("--tasks", required=True, help="names of tasks, groups or tags, with commas between them")
    add(
        "--include-path",
        type=path_or_url,
        help="folder with your task files, whose Python functions are run",
    )
    add(
        "--num-fewshot",
        type=partial(count, fewest=0),
        help="solved examples before each question (default: each task's)",
    )
    add("--limit", type=count, help="only this many documents of each task (default: all)")
    add(
        "--max-length",
        type=count,
        help="tokens of the longest text (default: the longest row in training)",
    )
    add("--output", type=Path, help="write the results to this JSON file")
    return parser

"""Report how a tokenizer encodes data: bytes per token, lengths of documents, use of the
vocabulary, and how much a mixture reads of each source.

    torchtitan data corpus/ code.jsonl.gz --tokenizer assets/hf/Llama-3.1-8B
    torchtitan data my.toml --sample 10000 --html data.html

Takes the same paths as `training.dataset_path`, or a configuration and its sources, and writes
only the report. With --sample, about N documents of each source are drawn at random, so the time
doesn't grow with the data; estimates then have 95 % confidence intervals.
"""

import argparse
import json
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path

from torchtitan.config import resolve
from torchtitan.config.load.command_line import split_args
from torchtitan.config.registry import tokenizers
from torchtitan.config.sections.data import DataLoader, Source
from torchtitan.config.sections.schema import Model
from torchtitan.data.encode.tokenizer import build_tokenizer
from torchtitan.data.spec import DataSpec, data_spec
from torchtitan.tools.corpus.survey import survey, survey_page
from torchtitan.tools.corpus.tally import ReadOptions
from torchtitan.tools.corpus.text import as_text
from torchtitan.utils.argument_types import command_parser, count
from torchtitan.utils.assets import shipped_configs
from torchtitan.utils.errors import ConfigError, UserError, show_warnings
from torchtitan.utils.files import write_output

_SEQ_LEN = 2048


def parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "data", __doc__, epilog="Of a configuration, --section.key value overrides a key."
    )
    add = parser.add_argument
    add(
        "paths",
        nargs="+",
        metavar="PATH",
        help="a file, folder or glob of documents or token files, a source each; or demo; or a "
        "configuration",
    )
    add(
        "--tokenizer",
        metavar="DIR",
        help=f"as model.hf_assets_path (default: {Model().hf_assets_path})",
    )
    add("--end-of-document", metavar="TOKEN", help="as model.end_of_document")
    add("--chat-template", metavar="FILE", help="as model.chat_template")
    column = parser.add_mutually_exclusive_group()
    column.add_argument(
        "--text-column", metavar="NAME", help="column or JSON key of the text (text)"
    )
    column.add_argument(
        "--messages-column",
        metavar="NAME",
        help="read conversations from this column or JSON key, as training.messages_column",
    )
    add(
        "--seq-len",
        type=count,
        metavar="N",
        help=f"report how many documents are longer than this ({_SEQ_LEN})",
    )
    add(
        "--sample",
        type=count,
        metavar="N",
        help="draw about N documents of each source at random (default: read everything)",
    )
    add(
        "--seed",
        type=lambda text: count(text, fewest=0),
        default=0,
        metavar="N",
        help="of --sample (0)",
    )
    add(
        "--workers",
        type=count,
        default=os.cpu_count() or 1,
        metavar="N",
        help="processes (all cores)",
    )
    add(
        "--world",
        type=count,
        default=os.environ.get("WORLD_SIZE", "1"),
        metavar="N",
        help="number of ranks of the configuration (WORLD_SIZE, else 1)",
    )
    add("--html", type=Path, metavar="FILE", help="write a page, which opens without a network")
    add("--json", action="store_true", help="print everything as JSON")
    return parser


def main(argv: list[str]) -> int:
    words, flags = split_args(argv)
    options = parser().parse_args(words)
    steps = None
    if any(_is_config(path) for path in options.paths):
        spec, steps = _sources_from_config(options, flags)
    elif flags:
        raise ConfigError([f"{flags[0]}: a key of the configuration, and none is named"])
    else:
        spec = _sources_from_paths(options)
    if options.html and not options.html.parent.is_dir():
        raise UserError(f"--html {options.html}: there is no folder {options.html.parent}")
    for note in (*spec.tokenizer.notes, spec.tokenizer.describe()):
        print(note, file=sys.stderr)
    read_options = ReadOptions(options.sample, options.seed, options.workers)
    with redirect_stdout(sys.stderr):  # progress
        content = survey(spec, read_options, steps)
    if options.html:
        write_output({options.html: survey_page(content).encode()})
        print(f"Wrote {options.html}", file=sys.stderr)
    if options.json:
        print(json.dumps(content, allow_nan=False))
    elif not options.html:
        print(as_text(content))
    return 0


def _is_config(path: str) -> bool:
    return path.endswith(".toml") or (path in shipped_configs() and not os.path.exists(path))


def _sources_from_config(options: argparse.Namespace, flags: list[str]) -> tuple[DataSpec, int]:
    """The sources of a configuration, and its number of steps."""
    if len(options.paths) > 1:
        raise UserError(
            f"{' '.join(options.paths)}: a configuration names its sources; give it alone"
        )
    keys = {
        "tokenizer": "model.hf_assets_path",
        "end_of_document": "model.end_of_document",
        "chat_template": "model.chat_template",
        "text_column": "training.text_column",
        "messages_column": "training.messages_column",
        "seq_len": "training.seq_len",
    }
    for name, key in keys.items():
        if getattr(options, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"{flag}: {options.paths[0]} has a key for that; give --{key} instead")
    resolved = resolve([f"--job.config_file={options.paths[0]}", *flags], options.world)
    show_warnings(resolved.warnings)
    config = resolved.config
    if tokenizers.chosen(config.model.tokenizer, config.custom) is not None:
        raise UserError(
            f"model.tokenizer: {config.model.tokenizer} is registered by your own module; "
            "torchtitan data reads tokenizer.json and tiktoken files"
        )
    model = config.model
    tokenizer = build_tokenizer(
        model.hf_assets_path, None, model.end_of_document, model.chat_template
    )
    return data_spec(config, "training", tokenizer), config.training.steps


def _sources_from_paths(options: argparse.Namespace) -> DataSpec:
    tokenizer = build_tokenizer(
        options.tokenizer or Model().hf_assets_path,
        None,
        options.end_of_document,
        options.chat_template,
    )
    columns = {
        "text_column": options.text_column or "text",
        "messages_column": options.messages_column,
    }
    sources = []
    for path in dict.fromkeys(options.paths):
        where = "dataset" if path in ("demo", "demo_validation") else "dataset_path"
        sources.append(Source.model_validate({"name": path, where: path, **columns}))
    return DataSpec(
        sources=sources,
        tokenizer=tokenizer,
        seq_len=options.seq_len or _SEQ_LEN,
        rows_per_step=1,
        seed=options.seed,
        infinite=False,
        options=DataLoader(),
        on_bad_document="skip",
        section="",
    )

"""Check a configuration, without torch or a GPU. Prints all problems, or one line if there are
none.
"""

import argparse
import os
from operator import attrgetter

from torchtitan.config import Resolved, gradient_accumulation_steps, resolve
from torchtitan.config.load.command_line import parse_args
from torchtitan.config.load.keys import FIELDS
from torchtitan.config.load.render import json_schema, markdown, to_toml, to_toml_value
from torchtitan.train.preflight import preflight
from torchtitan.utils.argument_types import count
from torchtitan.utils.errors import show_warnings
from torchtitan.utils.wording import aligned, plural


def explain(resolved: Resolved) -> str:
    """One line per key: its value, and `default`, `file:line`, flag or formula."""
    rows = []
    custom = [
        f"custom.{name}.{key}"
        for name, keys in resolved.config.custom.tables.items()
        for key, _ in keys
    ]
    for key in (*FIELDS, *custom):
        value = attrgetter(key)(resolved.config)
        entries = [where for k, where in resolved.sources.items() if k.startswith(key + ".")]
        origin = ", ".join(entries) or resolved.sources.get(key, "default")
        if key in resolved.formulas:
            origin = f"derived: {resolved.formulas[key]}"
        rows.append((key, "unset" if value is None else to_toml_value(value), origin))
    return aligned(rows)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="torchtitan config", description=__doc__)
    parser.add_argument(
        "--world",
        type=count,
        default=os.environ.get("WORLD_SIZE", "1"),
        metavar="N",
        help="number of ranks (WORLD_SIZE, else 1)",
    )
    views = parser.add_mutually_exclusive_group()
    for flag, text in {
        "--explain": "print every effective value and where it was set",
        "--toml": "print the effective configuration as a TOML file",
        "--json-schema": "print a JSON Schema of the TOML files, for editors",
        "--markdown": "print the reference, docs/reference/config.md",
    }.items():
        views.add_argument(flag, dest="view", action="store_const", const=flag, help=text)
    return parser


def main(argv: list[str]) -> int:
    options, config_argv = parse_args(parser(), argv)
    if options.view == "--markdown":
        print(markdown(), end="")
        return 0
    if options.view == "--json-schema":
        print(json_schema(), end="")
        return 0
    resolved = resolve(config_argv, options.world, check=False)
    show_warnings(resolved.warnings)
    setup = preflight(resolved.config, world=options.world, sources=resolved.sources, output=False)
    show_warnings(setup.warnings)
    if options.view == "--explain":
        print(explain(resolved))
    elif options.view == "--toml":
        print(to_toml(resolved.config), end="")
    else:
        config = resolved.config
        print(
            f"OK: {config.model.label} on {plural(options.world, 'rank')}, "
            f"global batch {config.training.global_batch_size} x {config.training.seq_len} "
            f"tokens, {plural(gradient_accumulation_steps(config), 'accumulation step')}, "
            f"{plural(config.training.steps, 'step')}"
        )
    return 0

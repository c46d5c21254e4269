"""Check and explain a configuration: `torchtitan config X.toml [--section.key value ...] [--world N]`.

Prints what is wrong, or a line that says OK. Needs no torch, no GPU, no process group. Instead of that line:
  --explain      every effective value and where it came from
  --toml         the effective configuration as a TOML file
  --json-schema  a JSON Schema of the TOML files, for editors
  --markdown     the reference that is docs/config.md
"""

import os
import sys

from torchtitan.config import Resolved, gradient_accumulation_steps, resolve
from torchtitan.config.load import FIELDS
from torchtitan.config.render import json_schema, markdown, to_toml, to_toml_value
from torchtitan.train.preflight import preflight
from torchtitan.utils.errors import ConfigError


def explain(resolved: Resolved) -> str:
    """One line per key: value, and default, `file:line`, flag or formula."""
    rows = []
    for key in FIELDS:
        value: object = resolved.config
        for part in key.split("."):
            value = getattr(value, part)
        origin = resolved.sources.get(key, "default")
        inner = [k for k in resolved.sources if k.startswith(key + ".")]
        origin = ", ".join(resolved.sources[k] for k in inner) or origin
        if key in resolved.formulas:
            origin = f"derived: {resolved.formulas[key]}"
        rows.append((key, "unset" if value is None else to_toml_value(value), origin))
    widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
    return "\n".join(f"{key:{widths[0]}}  {value:{min(widths[1], 40)}}  {origin}" for key, value, origin in rows)


def main(argv: list[str]) -> int:
    if argv in (["--help"], ["-h"]):
        print(__doc__)
    if "--markdown" in argv:
        print(markdown(), end="")
        return 0
    if "--json-schema" in argv:
        print(json_schema(), end="")
        return 0
    argv, modes, world = _options(argv)
    resolved = resolve(argv, world)
    for warning in resolved.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    setup = preflight(resolved.config, output=False)
    if "explain" in modes:
        print(explain(resolved))
    elif "toml" in modes:
        print(to_toml(resolved.config), end="")
    else:
        config = resolved.config
        print(
            f"OK: {setup.spec.name} {config.model.flavor} on {world} rank(s), global batch "
            f"{config.training.global_batch_size} x {config.training.seq_len} tokens, "
            f"{gradient_accumulation_steps(config)} accumulation step(s), {config.training.steps} steps"
        )
    return 0


def _options(argv: list[str]) -> tuple[list[str], set[str], int]:
    """Take this tool's own options out of the arguments."""
    rest: list[str] = []
    modes: set[str] = set()
    world = os.environ.get("WORLD_SIZE", "1")
    words = iter(argv)
    for word in words:
        if word in ("--explain", "--toml"):
            modes.add(word[2:])
        elif word.split("=")[0] == "--world":
            world = word.partition("=")[2] or next(words, "")
        elif not rest and not word.startswith("-"):
            rest += ["--job.config_file", word]
        else:
            rest.append(word)
    if not world.isdigit() or int(world) < 1:
        raise ConfigError([f"--world: {world!r} is not a number of ranks"])
    return rest, modes, int(world)

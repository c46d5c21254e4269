"""Questions of `torchtitan init`, and what this machine answers by default."""

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from torchtitan.tools.launch.ask import Question, discard_typed, wrapped
from torchtitan.tools.launch.data_choice import DataChoice, find_data
from torchtitan.tools.launch.model_choice import DEBUG, ModelChoice, find_model, offered
from torchtitan.tools.launch.preparation import PreparationStep
from torchtitan.tools.launch.recipe import TOKENS_PER_PARAMETER, default_seq_len, suggested_tokens
from torchtitan.tools.planner.cpu import CPU, measure_cpu
from torchtitan.tools.planner.hardware import Hardware, find_hardware, hardware_with, load_hardware
from torchtitan.utils.accelerators import NoDriver, visible_gpus
from torchtitan.utils.argument_types import count
from torchtitan.utils.errors import ConfigError
from torchtitan.utils.wording import brief, show_size, show_tokens

_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_HOURS = {"m": 1 / 60, "min": 1 / 60, "h": 1.0, "d": 24.0}
_CPU_TIME = "10min"
"""Default training time on a CPU, long enough to see the loss fall."""


def model_question() -> Question[ModelChoice]:
    names = [*(model.name for model in offered()), "or a Hugging Face folder"]
    return Question(
        "--model FAMILY/SIZE", "Which model?", wrapped(names), find_model, f"llama3/{DEBUG}"
    )


def data_question() -> Question[DataChoice]:
    choices = (
        "demo (Python's standard library), c4, a file or folder, or org/name:config@split of "
        "the hub"
    )
    return Question("--data NAME|PATH", "On which data?", choices, find_data, "demo")


def hardware_question(gpus: str | None) -> Question[tuple[Hardware, str | None]]:
    """Question whose answer is the hardware, and for this machine's CPU also its hardware file.

    Args:
        gpus: hardware name of this machine's GPUs, which is the default.
    """

    def parse(text: str) -> tuple[Hardware, str | None]:
        if text != CPU:
            return find_hardware(text), None
        measured = measure_cpu()
        discard_typed()
        return measured

    names = [
        f"{CPU} (this machine's)",
        *load_hardware(),
        "or a TOML file (`torchtitan plan --from-run DIR --output FILE` writes one)",
    ]
    return Question("--hardware NAME", "On which hardware?", wrapped(names), parse, gpus or CPU)


def devices_question(default: int | None) -> Question[int]:
    choices = "GPUs on all nodes together; or --nodes N"
    text = None if default is None else str(default)
    return Question("--devices N", "On how many GPUs?", choices, _count("--devices"), text)


def length_question(
    model: ModelChoice | None, *, on_cpu: bool
) -> Question[tuple[float | None, float | None]]:
    """Question whose answer is (tokens, hours), one of them None."""
    choices = "tokens, as 160B, or a time, as 10min, 12h, 3d"
    default = _CPU_TIME
    if model:
        tokens = suggested_tokens(model)
        kind = "active parameter" if len(set(model.parameters())) > 1 else "parameter"
        choices += (
            f"; {TOKENS_PER_PARAMETER} tokens per {kind} (arXiv:2203.15556) are "
            f"{show_tokens(tokens)}"
        )
        default = _CPU_TIME if on_cpu else show_tokens(tokens)
    return Question("--tokens N or --hours N", "For how long?", choices, parse_length, default)


def parse_length(text: str) -> tuple[float | None, float | None]:
    """Parse (tokens, hours), one of them None: `10M` is tokens, `10m` is a time.

    Raises:
        ConfigError: the text is neither.
    """
    if match := re.fullmatch(r"(\d[\d,]*(?:\.\d+)?(?:[eE]\+?\d\d?)?) ?([A-Za-z]*)", text.strip()):
        number = float(match[1].replace(",", ""))
        unit = match[2]
        hours = number * _HOURS.get(unit, 0.0)
        tokens = 0.0 if unit in _HOURS else number * _UNITS.get(unit.upper(), 0.0)
        if 0 < hours < 1e6:
            return None, hours
        if 0 < tokens < 1e18:
            return tokens, None
    raise ConfigError(
        [
            f"--tokens, --hours: {brief(text)} is neither a number of tokens, as 160B, "
            "nor a time, as 12h"
        ]
    )


def seq_len_question(model: ModelChoice | None) -> Question[int]:
    default = str(default_seq_len(model)) if model else None
    parse = _count("--seq-len", most=2**27)
    return Question(
        "--seq-len N", "How long are rows?", "tokens of a row", parse, default, required=False
    )


def folder_question(model: ModelChoice | None) -> Question[Path]:
    default = re.sub(r"[^\w.-]+", "-", model.name.lower()) if model else None
    return Question(
        "FOLDER",
        "In which folder?",
        "it gets the files of the project",
        Path,
        default,
        required=False,
    )


def prepare_question(
    steps: Sequence[PreparationStep], data: DataChoice, default: str
) -> Question[bool]:
    """
    Args:
        steps: commands that prepare the project.
    """

    def parse(text: str) -> bool:
        answers = {"yes": True, "y": True, "no": False, "n": False}
        if text.lower() not in answers:
            raise ConfigError([f"--prepare: {brief(text)} is neither yes nor no"])
        return answers[text.lower()]

    reads = f", which read {show_size(data.size)} of data" if data.size else ""
    lines = [f"yes runs these commands{reads}; you can interrupt them and continue later:"]
    lines += [f"  {step}" for step in steps]
    text = "Prepare the data now?"
    return Question("--prepare", text, "\n  ".join(lines), parse, default, required=False)


def _count(flag: str, most: int = 10**6) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            return count(text, most=most)
        except argparse.ArgumentTypeError as error:
            raise ConfigError([f"{flag}: {error}"]) from None

    return parse


# ---- this machine


def local_gpus() -> tuple[str | None, int]:
    """Hardware name of this machine's GPUs (None if unknown), and their number."""
    try:
        gpus = visible_gpus()
    except NoDriver:
        return None, 0
    hardware = hardware_with(gpus[0]["name"]) if gpus else None
    return hardware.name if hardware else None, len(gpus)

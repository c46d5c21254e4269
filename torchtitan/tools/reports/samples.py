"""Texts that a model wrote during training, from `samples.jsonl`, by prompt."""

import json
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchtitan.tools.reports.folder import SAMPLES
from torchtitan.tools.reports.records import step_of
from torchtitan.tools.reports.scores import Curve
from torchtitan.utils.files import open_regular
from torchtitan.utils.limits import SAMPLES_READ_BYTES
from torchtitan.utils.wording import cut

_PARTS = 64
"""Evenly spaced parts that are read of a file that is too large."""
_PROMPTS = 100
"""Prompts shown, at most."""
_TEXT = 4000
"""Characters of a text or prompt, at most."""
_CHARACTERS = 1_000_000
"""All texts of a run, about; beyond, steps are left out evenly."""


def read_samples(run: Path) -> list[dict[str, Any]]:
    """The texts of a run, see `by_prompt`; empty if it has none."""
    with suppress(OSError):
        return by_prompt(_lines(run / SAMPLES))
    return []


def by_prompt(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """For each prompt `step`, `text` and `end`, columns in the order of the steps.

    Args:
        lines: of the file, whole. Those that are no samples are passed over.
    """
    found: dict[str, dict[int, tuple[str, str]]] = {}
    for line in lines:
        with suppress(ValueError, RecursionError):
            content = json.loads(line)
            step = step_of(content)
            if step is None or not isinstance(content.get("prompt"), str):
                continue
            prompt = cut(content["prompt"], _TEXT)
            if prompt in found or len(found) < _PROMPTS:
                text = cut(str(content.get("text", "")), _TEXT)
                end = cut(str(content.get("end", "")), 20)
                found.setdefault(prompt, {})[step] = (text, end)
    total = sum(len(text) for texts in found.values() for text, _ in texts.values())
    every = max(1, math.ceil(total / _CHARACTERS))
    return [{"prompt": prompt, **_columns(texts, every)} for prompt, texts in found.items()]


def _columns(texts: dict[int, tuple[str, str]], every: int) -> Curve:
    """Every so many of the steps, counted from the last."""
    steps = sorted(texts)[::-1][::every][::-1]
    return {
        "step": steps,
        "text": [texts[step][0] for step in steps],
        "end": [texts[step][1] for step in steps],
    }


def _lines(path: Path) -> Iterator[bytes]:
    """The whole lines of a file, or of parts of a large one."""
    with open_regular(path, links=True) as file:
        size = os.fstat(file.fileno()).st_size
        length = SAMPLES_READ_BYTES
        begins = [0]
        if size > length:
            length //= _PARTS
            begins = [i * (size - length) // (_PARTS - 1) for i in range(_PARTS)]
        for begin in begins:
            lines = os.pread(file.fileno(), length, begin).split(b"\n")
            yield from lines[1 if begin else 0 : -1]

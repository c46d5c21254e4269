"""Texts that a model generated during training, from `samples.jsonl`, by prompt."""

import math
from pathlib import Path
from typing import Any

from torchtitan.tools.reports.folder import SAMPLES
from torchtitan.tools.reports.records import tail_objects, whole
from torchtitan.tools.reports.scores import Curve, add_point
from torchtitan.utils.limits import SAMPLES_READ_BYTES
from torchtitan.utils.wording import cut

_PROMPTS = 100
"""Maximum number of prompts shown."""
_TEXT = 4000
"""Maximum number of characters of a text or prompt."""
_CHARACTERS = 1_000_000
"""Approximate maximum characters of a run's texts; beyond it, steps are thinned evenly."""


def read_samples(run: Path) -> list[dict[str, Any]]:
    """Columns `step`, `text` and `end` of each prompt of a run, in the order of the steps."""
    texts_by_prompt: dict[str, dict[int, dict[str, str]]] = {}
    for content in tail_objects(run / SAMPLES, SAMPLES_READ_BYTES):
        step = whole(content.get("step"))
        if step is None or not isinstance(content.get("prompt"), str):
            continue
        prompt = cut(content["prompt"], _TEXT)
        if prompt in texts_by_prompt or len(texts_by_prompt) < _PROMPTS:
            texts_by_prompt.setdefault(prompt, {})[step] = {
                "text": cut(str(content.get("text", "")), _TEXT),
                "end": cut(str(content.get("end", "")), 20),
            }
    every_text = (sample["text"] for texts in texts_by_prompt.values() for sample in texts.values())
    total = sum(map(len, every_text))
    every = max(1, math.ceil(total / _CHARACTERS))
    return [
        {"prompt": prompt, **_columns(texts, every)} for prompt, texts in texts_by_prompt.items()
    ]


def _columns(texts: dict[int, dict[str, str]], every: int) -> Curve:
    """Columns of every `every`-th step, counted from the last."""
    curve: Curve = {}
    for step in sorted(texts)[::-every][::-1]:
        add_point(curve, step=step, **texts[step])
    return curve

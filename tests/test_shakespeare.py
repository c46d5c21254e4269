"""The example for users of nanoGPT: as its page says, and shortened with another text in place of
Shakespeare's.
"""

import os
import re
import shutil
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from tests.processes import run_module
from tests.runs import read_metrics
from torchtitan.config import resolve

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "examples/shakespeare/train.toml"
PAGE = (CONFIG.parent / "README.md").read_text()
TEXT = os.environ.get("TORCHTITAN_SHAKESPEARE")


def test_its_schedule_is_that_of_nanogpt():
    config = resolve([f"--job.config_file={CONFIG}"], 1).config
    assert (config.optimizer.beta1, config.optimizer.beta2, config.optimizer.weight_decay) == (
        0.9, 0.99, 0.1,
    )  # fmt: skip
    assert config.training.global_batch_size * config.training.seq_len == 12 * 64
    assert config.optimizer.lr * config.lr_scheduler.min_lr_factor == pytest.approx(1e-4)
    assert config.training.max_norm == 1.0


def validation_losses(folder, *flags):
    """The losses by step of the page's commands, which find `input.txt` in the folder.

    Args:
        flags: more flags of `train`.
    """
    (folder / "examples").symlink_to(ROOT / "examples")
    for line in re.search(r"```sh\n(.*?)```", PAGE, re.DOTALL)[1].replace("\\\n", "").splitlines():
        if line.startswith("torchtitan"):
            _, command, *words = line.replace('"', "").split()
            more = flags if command == "train" else ()
            done = run_module("torchtitan", command, *words, *more, cwd=folder)
            assert done.returncode == 0, done.stdout + done.stderr
    records = read_metrics(folder / "outputs/shakespeare/run")
    return {r["step"]: r["validation_loss"] for r in records if "validation_loss" in r}


@pytest.mark.slow
def test_it_learns_characters(tmp_path):
    text = re.sub(r"[^\n -~]", "", "".join(topics.values()))[:200_000]
    (tmp_path / "input.txt").write_text(text)
    losses = validation_losses(
        tmp_path, "--training.steps=60", "--lr_scheduler.warmup_steps=20",
        f"--model.overrides.vocab_size={len(set(text))}",
    )  # fmt: skip
    assert losses[60] < 3.0, "characters alone would be about 3.1"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not TEXT, reason="TORCHTITAN_SHAKESPEARE names no input.txt of nanoGPT")
def test_its_losses_are_those_of_the_page(tmp_path):
    shutil.copy(TEXT, tmp_path / "input.txt")
    losses = validation_losses(tmp_path)
    for steps, loss in re.findall(r"after ([\d,]+) steps \| [\d.]+ \| ([\d.]+)", PAGE):
        assert losses[int(steps.replace(",", ""))] == pytest.approx(float(loss), rel=0.01)

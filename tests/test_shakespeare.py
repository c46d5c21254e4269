"""The example for users of nanoGPT, shortened, with another text in place of Shakespeare's."""

import re
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from tests.processes import run_module
from tests.runs import read_metrics
from torchtitan.config import resolve

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "examples/shakespeare/train.toml"


def test_its_schedule_is_that_of_nanogpt():
    config = resolve([f"--job.config_file={CONFIG}"], 1).config
    assert (config.optimizer.beta1, config.optimizer.beta2, config.optimizer.weight_decay) == (
        0.9, 0.99, 0.1,
    )  # fmt: skip
    assert config.training.global_batch_size * config.training.seq_len == 12 * 64
    assert config.optimizer.lr * config.lr_scheduler.min_lr_factor == pytest.approx(1e-4)
    assert config.training.max_norm == 1.0


@pytest.mark.slow
def test_it_learns_characters(tmp_path):
    text = re.sub(r"[^\n -~]", "", "".join(topics.values()))[:200_000]
    (tmp_path / "input.txt").write_text(text)
    readme = (CONFIG.parent / "README.md").read_text()
    commands = re.search(r"```sh\n(.*?)```", readme, re.DOTALL)[1].splitlines()
    characters = len(set(text))
    more = {
        "train": [
            "--training.steps=60", "--lr_scheduler.warmup_steps=20", "--metrics.log_freq=20",
            f"--model.overrides.vocab_size={characters}",
        ],
    }  # fmt: skip
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for line in commands:
        _, command, *words = line.replace('"', "").split()
        done = run_module("torchtitan", command, *words, *more.get(command, []), cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    records = read_metrics(tmp_path / "outputs/shakespeare/run")
    losses = [record["validation_loss"] for record in records if "validation_loss" in record]
    assert losses[-1] < 3.0, "characters alone would be about 3.1"

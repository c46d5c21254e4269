"""What the tests of TorchTitan 0.2.2 state of configuration, schedules, checkpoints, data positions
and the tokenizer, by behaviour: its TOML files keep their meaning.
"""

from types import SimpleNamespace

import pytest
import torch

from tests.config_loading import load, problems
from tests.data_kinds import loader, take
from torchtitan.checkpoint import Checkpointer
from torchtitan.config import load_config, resolve
from torchtitan.data.encode.tokenizer import build_tokenizer
from torchtitan.optim.lr_schedule import lr_factor

# ---- configuration


def test_an_empty_file_has_the_defaults_and_flags_override_a_file(toml):
    file = toml("")
    assert load("--job.config_file", file).training.steps == load().training.steps == 10_000
    file = toml('[job]\ndump_folder = "/tmp/from_file"\n[training]\nsteps = 7\n')
    config = load("--job.config_file", file, "--job.dump_folder", "/tmp/from_flag")
    assert (config.job.dump_folder, config.training.steps) == ("/tmp/from_flag", 7)
    assert "No such file" in problems("--job.config_file", "/no/such.toml")[0]
    assert "unknown key" in problems("--training.not_a_key", "1")[0]


def test_lists_are_read_from_files_and_flags(toml):
    parts = [["tok_embeddings", "layers.0"], ["layers.1", "norm", "output"]]
    key = "parallelism.module_fqns_per_model_part"
    assert load().parallelism.module_fqns_per_model_part is None
    config = load("--config", toml(f"{key} = {parts}\n"))
    assert config.parallelism.module_fqns_per_model_part == parts
    assert load().checkpoint.exclude_from_loading == []
    file = toml('[checkpoint]\nexclude_from_loading = ["optimizer", "dataloader"]\n')
    both = ["optimizer", "dataloader"]
    assert load("--config", file).checkpoint.exclude_from_loading == both
    flag = ["--checkpoint.exclude_from_loading", "optimizer,dataloader"]
    assert load(*flag).checkpoint.exclude_from_loading == both
    assert load("--model.converters", "float8").model.converters == ["float8"]


@pytest.mark.parametrize(
    ("family", "flavor", "here"),
    [
        ("qwen3", "debugmodel_moe", ("qwen3_moe", "debugmodel")),
        ("qwen3", "30B-A3B", ("qwen3_moe", "30B-A3B")),
        ("deepseek_v3", "16B", ("deepseek_v2", "Lite")),
        ("deepseek_v3", "debugmodel_flex_attn", ("deepseek_v3", "debugmodel")),
    ],
)
def test_models_are_accepted_by_their_names(toml, family, flavor, here):
    file = toml(f'[model]\nname = "{family}"\nflavor = "{flavor}"\n')
    loaded = load_config(["--config", file])
    assert (loaded.config.model.name, loaded.config.model.flavor) == here
    (warning,) = loaded.warnings
    assert warning.startswith(f"{file}:3: model.flavor '{flavor}' is '{here[1]}'")


def test_another_version_of_a_model_is_no_misspelling():
    assert "did you mean" not in problems("--model.name=llama4")[0]
    assert problems("--model.name=lama3")[0].endswith("did you mean 'llama3'?")


# ---- schedules: the rates of 10 steps, as fractions of the peak


@pytest.mark.parametrize(
    ("keys", "rates"),
    [
        ({"warmup_steps": 2}, [1 / 2, 1, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]),
        (
            {"warmup_steps": 2, "decay_ratio": 0.5},
            [1 / 2, 1, 1, 1, 1, 1, 4 / 5, 3 / 5, 2 / 5, 1 / 5],
        ),
        (
            {"warmup_steps": 2, "decay_ratio": 0.5, "min_lr_factor": 0.2},
            [1 / 2, 1, 1, 1, 1, 1, 0.84, 0.68, 0.52, 0.36],
        ),
        (
            {"warmup_steps": 5, "decay_ratio": 0.8},
            [1 / 5, 2 / 5, 3 / 5, 4 / 5, 1, 1, 4 / 5, 3 / 5, 2 / 5, 1 / 5],
        ),
        ({"warmup_steps": 20}, [(step + 1) / 10 for step in range(10)]),
        ({"warmup_steps": 0, "decay_ratio": 0.0}, [1] * 10),
    ],
)
def test_schedules(keys, rates):
    flags = [f"--lr_scheduler.{key}={value}" for key, value in keys.items()]
    schedule = resolve(["--training.steps=10", *flags], 1).config.lr_scheduler
    assert [lr_factor(step, schedule) for step in range(10)] == pytest.approx(rates)


# ---- checkpoints


def test_when_a_checkpoint_is_saved():
    def saved(**keys):
        checkpoint = load().checkpoint.model_copy(update={"enable": True, **keys})
        run = SimpleNamespace(config=checkpoint, saving=True)
        return [step for step in range(1, 11) if Checkpointer.due(run, step, 10)]

    assert saved(interval=4) == [4, 8, 10]
    assert saved(interval=4, enable_first_step_checkpoint=True) == [1, 4, 8, 10]
    assert saved(interval=100) == [10]


def test_one_checkpoint_is_not_kept_alone():
    with pytest.raises(Exception, match=r"checkpoint\.keep_latest_k"):
        resolve(["--checkpoint.enable", "--checkpoint.keep_latest_k=1"], 1)


# ---- data positions


def test_a_resume_reads_the_next_rows_also_of_a_later_epoch(corpora):
    reading = loader(corpora["jsonl"])
    batches = iter(reading)
    before = [next(batches) for _ in range(30)]
    assert before[-1].epochs[0] > 1
    again = loader(corpora["jsonl"])
    again.seek(reading.local_state(before[-1].position))
    for (tokens, labels, *_), batch in zip(take(again, 5), batches, strict=False):
        assert torch.equal(tokens, batch.tokens)
        assert torch.equal(labels, batch.labels)


# ---- tokenizer


def test_the_test_tokenizer():
    tokenizer = build_tokenizer("./tests/assets/tokenizer")
    ids = tokenizer.encode("Hello, world! This is a test.")
    assert tokenizer.decode(ids) == "Hello, world! This is a test."
    assert tokenizer.encode("Hello, world! This is a test.", bos=True, eos=True) == [
        tokenizer.bos_id,
        *ids,
        tokenizer.eos_id,
    ]
    assert max(ids) < tokenizer.vocab_size
    assert tokenizer.encode("") == []

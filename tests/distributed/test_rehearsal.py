"""`torchtitan rehearse`: what it checks against real ranks, and every shipped configuration."""

import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.doc_blocks import BLOCKS, workspace
from tests.runs import EXPERTS, arguments
from torchtitan.commands.rehearse import main
from torchtitan.config import resolve
from torchtitan.config.sections.data import DataStage, ValidationSet
from torchtitan.health.collectives import Group
from torchtitan.tools.rehearsal import rehearsal
from torchtitan.tools.rehearsal.coverage import (
    NEVER,
    OMISSIONS,
    last_step,
    omissions,
    rehearsal_config,
)
from torchtitan.tools.rehearsal.events import Message, Post, RankRecord, Wait
from torchtitan.tools.rehearsal.mismatches import Counts, check_messages
from torchtitan.tools.rehearsal.rank_sample import VALUES, RankSample, coordinates, corners, rank_at
from torchtitan.tools.rehearsal.rehearsal import Rehearsal, rehearse, torchrun_variables
from torchtitan.tools.rehearsal.render import as_text
from torchtitan.tools.rehearsal.waits import check_circles
from torchtitan.train.build import build
from torchtitan.train.preflight import preflight
from torchtitan.train.step import train_step
from torchtitan.utils.errors import ConfigError, UserError
from torchtitan.utils.wording import flat

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "train_configs").glob("*.toml"))
P = "--parallelism."


# ---- runs without a fault

NO_FILES = f"--model.hf_assets_path={ROOT / 'tests/assets/tokenizer'}"
CUT = {
    "deepseek_v3_256xh200": 256,
    "glm4_5_air_64xh200": 64,
    "qwen3_next_80b_32xh200": 32,
    "llama3_405b": 512,
    "llama3_70b": 64,
    "qwen3_moe_235b_a22b": 256,
    "qwen3_32b": 64,
    "qwen3_moe_30b_a3b": 64,
}
"""Ranks of the larger configurations; the others have 8."""


def test_the_command_rehearses_a_small_run(capsys):
    argv = [
        str(ROOT / "train_configs/debug_model.toml"),
        "--training.local_batch_size=2",
        "--training.on_bad_document=skip",
        "--layers=1",
        "--experimental.custom_import=tests.examples.all_at_once",
        "--optimizer.name=lion",
        "--lr_scheduler.name=inverse_sqrt",
        "--training.loss=z_loss",
        "--model.tokenizer=characters",
        "--metrics.sinks=csv_file",
    ]
    assert main([*argv, "--world", "2"]) == 0
    text = capsys.readouterr().out
    assert "llama3 debugmodel on 2 ranks: dp_shard 2" in text
    assert "start, first step, report, validation, save, resume, end" in text
    assert text.rstrip().endswith("groups, collectives, messages and their order agree")
    assert int(re.search(r"([\d,]+) collectives", text)[1]) > 50
    in_foreground = "saves in the background (they run in the foreground): checkpoint.async_mode"
    assert f"Not rehearsed: {'; '.join([in_foreground, *NEVER])}\n" in text
    # All that a rank reads of tensors that others may not share; a new place must be shown not to
    # matter.
    (reads,) = re.findall("of its own data, which changed nothing: (.*)", text)
    places = set(re.sub(r":\d+", "", reads).split("; "))
    step = "torchtitan/train/step.py in forward_backward"  # counts this rank's labels
    assert places == {step, "torchtitan/utils/device.py in LateValues.numbers"}


def test_refuses_what_the_trainer_refuses(tmp_path):
    with pytest.raises(ConfigError, match="but the number of ranks is 3"):
        main(
            [
                str(ROOT / "train_configs/debug_model.toml"),
                "--world",
                "3",
                f"{P}tensor_parallel_degree=2",
            ]
        )


def test_doubts_about_the_model_are_shown(monkeypatch, capsys):
    def stop(*args, **kwargs):
        raise UserError("enough")

    monkeypatch.setattr("torchtitan.commands.rehearse.rehearse", stop)
    with pytest.raises(UserError, match="enough"):
        main(
            [
                "qwen3_moe_debug",
                "--model.overrides.experts_per_token=1",
                "--moe.global_balance_loss=0",
            ]
        )
    assert "warning: model.overrides.normalize_expert_weights: " in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_configuration_cannot_hang(path):
    world = CUT.get(path.stem, 8)
    config = resolve([f"--job.config_file={path}", NO_FILES], world).config
    result = rehearse(config, world)
    assert result.faults == []
    assert result.counts.collectives > 20


PARTS = {
    path.stem.replace("__init__", path.parent.name): path.read_text()
    for path in [*(ROOT / "tests/examples").rglob("*.py"), ROOT / "examples/notify.py"]
    if "register(" in path.read_text()
}
"""Files that register a part: those that the guides show, and a shipped example."""


def command_of(name):
    """The command that the docstring of a part shows, as arguments of `rehearse`."""
    (flags,) = re.findall(r'train CONFIG.toml (--.*?)"""', PARTS[name].replace("\\\n", ""), re.S)
    folder = "" if "import examples." in flags else "tests.examples."
    model = "qwen3_moe_debug" if "qwen3_moe" in flags else "debug_model"
    return [model, *shlex.split(flags.replace("_import ", f"_import {folder}"))]


EXAMPLES = {
    "smollm3": ["debug_model", "--model.name=smollm3"],
    **{name: command_of(name) for name in PARTS},
    **{path.parent.name: [str(path)] for path in (ROOT / "examples").glob("*/train.toml")},
}
EXAMPLES["shakespeare"].append("--model.overrides.vocab_size=2048")  # of another tokenizer


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_cannot_hang(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(workspace(tmp_path))
    for block in BLOCKS if name == "mixture" else ():
        if "make_conversations.py" in block.text and block.language == "bash":
            for line in block.lines[:2]:  # conversations, and a tokenizer for them
                command = line.replace("torchtitan ", "python -m torchtitan ", 1)
                subprocess.run(command.replace("python", sys.executable), shell=True, check=True)
    monkeypatch.syspath_prepend(ROOT / "examples/own_model")
    assert main([*EXAMPLES[name], "--world=2", "--layers=1"]) == 0, capsys.readouterr().out


def test_every_part_that_a_page_shows_is_rehearsed():
    shown = {b.file for b in BLOCKS if b.language == "python" and "register(" in b.text}
    assert shown == {f"{name}.py" for name in PARTS.keys() - {"notify"}}


LAYOUTS = {
    "1F1B": (4, [f"{P}pipeline_parallel_degree=2", f"{P}tensor_parallel_degree=2"]),
    "zero bubble, V": (
        2,
        [f"{P}pipeline_parallel_degree=2", f"{P}pipeline_parallel_schedule=ZBVZeroBubble"]
        + ["--model.overrides.n_layers=4", "--training.local_batch_size=4"],
    ),
    "context": (4, [f"{P}context_parallel_degree=2"]),
    "replicas": (4, [f"{P}data_parallel_replicate_degree=2"]),
    "experts": (4, [*EXPERTS, f"{P}expert_parallel_degree=2"]),
    "experts, tensor": (
        4,
        [*EXPERTS, f"{P}expert_parallel_degree=2", f"{P}tensor_parallel_degree=2"],
    ),
    "average, Muon": (2, ["--ema.enable", "--optimizer.name=Muon"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_cannot_hang(tmp_path, name):
    world, extra = LAYOUTS[name]
    argv = arguments(tmp_path, "--checkpoint.enable", *extra)
    result = rehearse(resolve(argv, world).config, world, ranks=range(world))
    assert result.faults == []
    assert (result.counts.exchanges > 0) == ("experts" in name)
    assert (result.counts.messages > 0) == (f"{P}pipeline_parallel_degree=2" in extra)


# ---- what stands for what


def test_ranks_that_stand_for_others():
    degrees = {"pp": 2, "dp_replicate": 1, "dp_shard": 4, "cp": 1, "tp": 8}
    ranks = corners(degrees)
    assert ranks == [0, 4, 7, 16, 24, 31, 32, 63]
    assert all(rank_at(coordinates(rank, degrees), degrees) == rank for rank in range(64))
    sample = RankSample(ranks, degrees)
    assert [sample.stand_in(rank) for rank in (0, 3, 8, 9, 33, 32, 63)] == [
        0,
        4,
        16,
        31,
        32,
        32,
        63,
    ]
    assert all(sample.stand_in(rank) // 32 == rank // 32 for rank in range(64))


def test_a_rank_has_the_variables_of_torchrun():
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    expected = {
        (9, 16): "9 16 1 8 1",
        (5, 6): "5 6 5 6 0",
        (11, 12): "11 12 3 4 2",  # hosts have as many ranks each
        (0, 1): "0 1 0 1 0",
    }
    for (rank, world), values in expected.items():
        variables = torchrun_variables(world, rank)
        assert [variables[name] for name in names] == values.split()


def test_the_last_step_is_one_that_callbacks_wait_for():
    argv = ["--training.dataset=demo", "--experimental.custom_import=tests.examples.gradient_norm"]
    assert last_step(resolve(argv, 1).config) == 1
    argv += ["--training.callbacks=gradient_norm", "--custom.gradient_norm.every=1300"]
    step = last_step(resolve(argv, 1).config)
    assert step < 2**53
    assert [n for n in (*range(1, 14), 50, 64, 100, 250, 1000, 1024, 1300) if step % n] == []


def test_the_verdict_claims_no_more_than_was_rehearsed():
    config = resolve([f"{P}data_parallel_shard_degree=8", "--training.dataset=demo"], 8).config

    def verdict(ranks):
        records = {
            rank: RankRecord(rank, groups=[Group(tuple(range(8)), "all ranks", "")])
            for rank in ranks
        }
        text = as_text(Rehearsal(config, 8, 2, records, Counts(), []))
        return text.splitlines()[-1], "every rank" in text

    assert verdict(range(8)) == (
        "No rank can wait for another forever: groups, collectives, messages and their order agree",
        True,
    )
    text, whole = verdict(corners({"pp": 1, "dp_shard": 8}))
    assert not whole
    assert "nor can the 5 other ranks if each does what the rank that stands for it does" in text
    assert "singles out one of the others is not seen" in text


def everything(config):
    """The configuration with all that a rehearsal overrides set otherwise."""
    dataset = ValidationSet(name="other", steps=9)
    return config.model_copy(
        update={
            section: getattr(config, section).model_copy(update=values)
            for section, values in {
                "model": {"converters": ["float8"], "delta_rule": "fla"},
                "compile": {"enable": True},
                "parallelism": {
                    "enable_async_tensor_parallel": True,
                    "fsdp_buffers": "symmetric_memory",
                    "tensor_parallel_degree": 2,
                    "pipeline_parallel_degree": 2,
                },
                "training": {
                    "document_mask": True,
                    "enable_cpu_offload": True,
                    "stages": [DataStage(from_step=3)],
                    "callbacks": ["x"],
                },
                "metrics": {"sinks": ["x"], "enable_tensorboard": True, "enable_wandb": True},
                "validation": {"freq": 7, "steps": 9, "sets": [dataset]},
                "checkpoint": {
                    "enable": True,
                    "folder": "s3://bucket/run",
                    "async_mode": "async",
                    "last_save_model_only": True,
                    "last_save_in_hf": True,
                    "initial_load_path": "weights",
                    "initial_load_in_hf": True,
                },
                "guard": {"policy": "rewind", "weight_hash_freq": 50},
                "profiling": {"enable_profiling": True, "enable_memory_snapshot": True},
                "eval": {"enable": True},
                "sampling": {"prompts": ["x"]},
            }.items()
        }
    )


WITHOUT_COLLECTIVES = re.compile(
    r"(job|metrics|profiling|comm|validation)\..*|training.(steps|global_batch_size)|"
    r"checkpoint.interval|guard.weight_hash_freq"
)
"""What a rehearsal overrides without leaving anything out that ranks communicate for."""


def test_what_is_left_out_is_said():
    plain = resolve(["--training.dataset=demo"], 1).config
    assert omissions(plain) == list(NEVER)
    config = everything(plain)
    before, after = (
        flat(c.model_dump(mode="json")) for c in (config, rehearsal_config(config, 4, "folder"))
    )
    changed = {key for key in before | after if before.get(key) != after.get(key)}
    assert len(changed) > 25
    said = {part.key for part in OMISSIONS}
    assert {key for key in changed if not WITHOUT_COLLECTIVES.fullmatch(key)} <= said
    assert len(omissions(config)) == len(OMISSIONS) + len(NEVER)
    text = as_text(
        Rehearsal(config, 4, 2, {0: RankRecord(0, groups=[Group((0,), "", "")])}, Counts(), [])
    )
    assert "\nNot rehearsed: compiled code (blocks run eagerly): compile.enable; 8-bit" in text


@pytest.mark.parametrize(
    "degrees",
    [
        {"pp": 1, "dp_shard": 2},
        {"pp": 2, "dp_shard": 2},
        {"pp": 3, "dp_shard": 4, "tp": 2},
        {"pp": 8, "dp_replicate": 2, "dp_shard": 8, "cp": 2, "tp": 8},
    ],
)
def test_compared_ranks_read_different_values(degrees):
    """At each place of the pipeline, the first rank's value differs from those of its groups modulo
    2 to 100 and by more than 9,000; where three ranks are in a line, all values occur.
    """
    sample = RankSample(corners(degrees), degrees)
    for stage in range(degrees["pp"]):
        first = rank_at({"pp": stage}, degrees)
        last = rank_at(
            {axis: degree - 1 for axis, degree in degrees.items()} | {"pp": stage}, degrees
        )
        lines = [
            rank_at({"pp": stage, axis: 1}, degrees)
            for axis, degree in degrees.items()
            if axis != "pp" and degree > 1
        ]
        value = VALUES[sample.values(first)]
        for other in (last, *lines):
            difference = abs(value - VALUES[sample.values(other)])
            assert difference > 9000
            assert all(difference % modulus for modulus in range(2, 101))
        if stage:
            before = rank_at({"pp": stage - 1}, degrees)
            assert abs(value - VALUES[sample.values(before)]) > 9000
    if degrees["dp_shard"] > 2:
        line = [rank_at({"dp_shard": at}, degrees) for at in range(3)]
        assert {sample.values(rank) for rank in line} == {0, 1, 2}


# ---- circles


def messages(rank, *steps):
    """A rank that posts batches to the other one, `+` for a send and `-` for a receive, then waits
    for all.
    """
    record = RankRecord(rank, groups=[Group((0, 1), "pp", "")])
    for number, step in enumerate(steps):
        batch = tuple(Message(sign == "+", 1 - rank, "float32 [4]", 16) for sign in step)
        record.events.append(
            Post(0, number, batch, len(batch) == 1, f"line {number}", "first step")
        )
    record.events += [Wait(number, "the end") for number in range(len(steps))]
    return record


@pytest.mark.parametrize(
    ("first", "second", "hangs"),
    [
        (["+"], ["-"], False),
        (["+", "-"], ["-", "+"], False),
        (["+", "-"], ["+", "-"], True),  # both send first, over one communicator
        (["+-"], ["+-"], False),  # batched
        (["+-", "+-"], ["+-", "-+"], False),
        (["++", "--"], ["--", "++"], False),
        (["++", "--"], ["++", "--"], True),
    ],
)
def test_order_of_messages(first, second, hangs):
    faults = check_circles({0: messages(0, *first), 1: messages(1, *second)})
    assert [fault.kind for fault in faults] == ["circle"] * hangs


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (["+", "+"], ["-", "-"], None),
        (["++"], ["--"], None),
        (["+-"], ["-+"], None),
        (
            ["+", "+"],
            ["--"],
            "over the two ranks' communicator, but it is received over the group's "
            "communicator, at line 0",
        ),
        (
            ["++"],
            ["-", "-"],
            "over the group's communicator, but it is received over the two ranks' "
            "communicator, at line 0",
        ),
    ],
)
def test_a_message_is_sent_and_received_over_the_same_communicator(first, second, text):
    records = {0: messages(0, *first), 1: messages(1, *second)}
    faults = check_messages(records, RankSample([0, 1], {"pp": 2}), Counts())
    assert [(fault.kind, fault.rank) for fault in faults] == [("messages", 0)] * (text is not None)
    assert text is None or text in faults[0].text


# ---- the start


@pytest.mark.slow
def test_a_start_a_save_and_a_resume_cost_a_rank_the_same_in_any_world(monkeypatch):
    toml = str(ROOT / "train_configs/debug_model.toml")
    argv = ["--job.config_file", toml, NO_FILES, "--training.local_batch_size=1"]
    monkeypatch.setattr(rehearsal, "corners", lambda degrees: {0, degrees["dp_shard"] // 2})
    small, large = (
        rehearse(resolve([*argv, "--checkpoint.enable"], world).config, world, layers=1)
        for world in (512, 16384)
    )
    assert small.faults == large.faults == []
    for during in ("start", "save", "resume"):
        few, many = (
            [e for e in result.records[0].collectives if e.during == during]
            for result in (small, large)
        )
        assert [e.op for e in few] == [e.op for e in many] != []
        # in one: names of host and device of 16,384 ranks; index and manifest of their files
        assert all(e.bytes < 2**21 for e in many)


# ---- against real ranks


KINDS = {
    "reduce_scatter": "reduce_scatter",
    "gather": "all_gather",
    "reduce": "all_reduce",
    "to_all": "all_to_all",
    "toall": "all_to_all",
}


class Counted(TorchDispatchMode):
    """Counts the operators that communicate."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        kind = next((kind for text, kind in KINDS.items() if text in func.name()), None)
        if kind and func.namespace in ("c10d", "_c10d_functional"):
            self.count[kind] += 1
        return func(*args, **(kwargs or {}))


def entered(argv):
    """Collectives of a real step, by kind."""
    config = resolve(argv, dist.get_world_size()).config
    engine = build(config, preflight(config), torch.device("cpu"))
    batch = next(iter(engine.loader))
    with Counted() as counted:
        train_step(engine, batch)
    engine.loader.close()
    return counted.count


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "extra"),
    [
        (4, []),
        (6, [f"{P}tensor_parallel_degree=2"]),
        (12, ["--activation_checkpoint.mode=full"]),
        (4, [*EXPERTS, f"{P}expert_parallel_degree=2"]),
    ],
    ids=["fsdp", "tensor", "accumulated", "experts"],
)
def test_a_real_step_enters_the_same_collectives(ranks, tmp_path, batch, extra):
    argv = arguments(tmp_path, *extra, global_batch=batch)
    (expected, *_) = ranks(2, entered, argv, timeout=200)
    record = rehearse(resolve(argv, 2).config, 2).records[0]
    step = [e for e in record.collectives if e.during == "first step" and "trainer.py" not in e.at]
    found = Counter(event.op for event in step if event.op in KINDS.values())
    assert found == expected

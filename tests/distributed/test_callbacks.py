"""Callbacks: when each method is called, and what a user's callback records and remembers."""

import json
import logging
import math
from collections import Counter

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.examples import gradient_norm, mean_loss
from tests.runs import SAVE, SCHEDULE, arguments, losses, read_metrics, train
from torchtitan.config import resolve
from torchtitan.config.registry import callbacks
from torchtitan.testing.ranks import RankFailure
from torchtitan.train.callbacks import Callback, CallbackStates, build_callbacks
from torchtitan.train.preflight import preflight
from torchtitan.train.trainer import Trainer
from torchtitan.utils.errors import ConfigError, UserError
from torchtitan.utils.logging import logger

NAME = "layers.1.feed_forward.w1.weight"
KEY = f"grad_norm/{NAME}"
EXAMPLE = [
    f"--experimental.custom_import={gradient_norm.__name__}",
    "--training.callbacks=gradient_norm",
    "--custom.gradient_norm.every=2",
]


class Diary(Callback):
    def __init__(self):
        self.lines = []

    def on_start(self, run):
        self.lines.append(f"start {run.progress.step}")

    def before_update(self, run):
        self.lines.append(f"update {run.progress.step}")

    def after_step(self, run, result):
        self.lines.append(f"step {run.progress.step}")

    def on_validation(self, run, results):
        self.lines.append(f"validated {len(results)}")

    def on_save(self, run, step):
        self.lines.append(f"saved {step}")

    def on_end(self, run, reason):
        self.lines.append(reason)


def trained(argv, *callbacks):
    """Train with callbacks; what the trainer calls, in order."""
    config = resolve(argv, dist.get_world_size()).config
    trainer = Trainer(config, preflight(config), callbacks=callbacks)
    try:
        trainer.train()
    except Exception as error:
        trainer.close(error)
        return f"{type(error).__name__}: {error}"
    trainer.close()
    return [type(callback).__name__ for callback in trainer.engine.callbacks]


def kept_diary(argv):
    diary = Diary()
    return trained(argv, diary), diary.lines


def test_methods_are_called_in_order(ranks, tmp_path):
    held_out = {
        "enable": "true",
        "freq": 3,
        "steps": 1,
        "seq_len": 32,
        "dataset_path": tmp_path / "corpus.jsonl",
    }
    flags = [f"--validation.{key}={value}" for key, value in held_out.items()]
    argv = arguments(tmp_path, *SAVE, *flags, steps=3)
    for names, lines in ranks(2, kept_diary, argv):
        assert names == [
            *("WaitForCopy", "AverageWeights", "LimitCollectives", "AnnounceStages"),
            *("ConfirmFolders", "Report", "Advise"),
            *("Profile", "CheckReplicas"),
            *("Validate", "WriteSamples", "RunTasks"),
            *("Diary", "Save", "CollectGarbage"),
        ]
        steps = [line for step in range(3) for line in (f"update {step}", f"step {step + 1}")]
        ended = ["validated 1", "step 3", "saved 3", "completed"]
        assert lines == ["start 0", *steps[:-1], *ended]


def logged(argv):
    """Log by each reduction, on rank 1 more than on rank 0."""
    rank = dist.get_rank()

    class Logs(Callback):
        def before_update(self, run):
            for reduce in ("mean", "sum", "max"):
                run.log(f"by_{reduce}", torch.tensor(float(run.progress.step + rank)), reduce)
            if rank == 1:
                run.log("only_one", 5)

    return trained(argv, Logs())


def test_values_of_ranks_and_steps_become_one(ranks, tmp_path):
    ranks(2, logged, arguments(tmp_path, "--metrics.log_freq=3"))
    first, third, last = read_metrics(tmp_path / "out")
    keys = ("by_mean", "by_sum", "by_max", "only_one")
    assert [first[key] for key in keys] == [0.5, 1, 1, 5]
    assert [third[key] for key in keys] == [2, 8, 3, 5]  # steps 2 and 3, from 0: 1, 2 and 2, 3
    assert [last[key] for key in keys] == [3.5, 7, 4, 5]


def wrong(argv, mistake):
    class Logs(Callback):
        def before_update(self, run):
            rank = dist.get_rank()
            if mistake == "built in":
                run.log("loss", 1.0)
            elif mistake == "two reductions":
                run.log("own", 1.0)
                run.log("own", 1.0, "max")
            elif mistake == "ranks":
                run.log("own", 1.0, ("mean", "max")[rank])
            else:
                run.log("own", 1.0, "median")

    return trained(argv, Logs())


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("built in", "run.log('loss'): a built-in metric has this name"),
        ("two reductions", "run.log('own'): reduced by mean before, by max now"),
        ("ranks", "run.log('own'): rank 1 reduces by max, others by mean"),
        ("unknown", "run.log('own'): reduce is 'median', not mean, sum, max"),
    ],
)
def test_mistakes_in_logging_are_errors(ranks, tmp_path, mistake, message):
    assert ranks(2, wrong, arguments(tmp_path), mistake) == [f"UserError: {message}"] * 2


@pytest.mark.parametrize("layout", [[], ["--parallelism.pipeline_parallel_degree=2"]])
def test_the_example_logs_the_norm_of_the_whole_gradient(ranks, tmp_path, layout):
    """Under every layout that of one rank, and not clipped."""
    most = 1e-3
    flags = [*EXAMPLE, f"--custom.gradient_norm.parameter={NAME}", f"--training.max_norm={most}"]
    ranks(1, train, arguments(tmp_path, *flags, f"--job.dump_folder={tmp_path / 'alone'}"))
    ranks(2, train, arguments(tmp_path, *flags, *layout))
    alone, split = (
        {r["step"]: r[KEY] for r in read_metrics(folder) if KEY in r}
        for folder in (tmp_path / "alone", tmp_path / "out")
    )
    assert list(alone) == [2, 4]
    assert alone[2] > most
    assert split == pytest.approx(alone, rel=1e-3)


# ---- state

MEAN = [
    f"--experimental.custom_import={mean_loss.__name__}",
    "--training.callbacks=mean_loss",
    SCHEDULE,
]


def saved_state(folder, step):
    manifest = json.loads((folder / f"checkpoint/step-{step}/manifest.json").read_text())
    return manifest["train_state"].get("callbacks")


@pytest.mark.parametrize("layout", [[], ["--parallelism.pipeline_parallel_degree=2"]])
def test_a_callback_continues_where_the_checkpoint_is(ranks, tmp_path, layout):
    """Under another layout, too."""
    whole = arguments(tmp_path, *SAVE, *MEAN, f"--job.dump_folder={tmp_path / 'whole'}", steps=6)
    ranks(1, train, whole)
    ranks(1, train, arguments(tmp_path, *SAVE, *MEAN, "--checkpoint.interval=2", steps=2))
    run = ranks(2, train, arguments(tmp_path, *SAVE, *MEAN, *layout, steps=6))[0]
    every = losses({"metrics": read_metrics(tmp_path / "whole")})
    expected = {"mean_loss": {"steps": 2, "sum": pytest.approx(sum(every[:2]), rel=1e-6)}}
    assert saved_state(tmp_path / "out", 2) == expected
    expected = {"mean_loss": {"steps": 6, "sum": pytest.approx(sum(every), rel=1e-5)}}
    assert saved_state(tmp_path / "whole", 6) == expected
    assert saved_state(tmp_path / "out", 6) == expected
    last = run["metrics"][-1]["mean_loss"]  # what step 5 has logged
    assert last == pytest.approx(sum(every[:5]) / 5, rel=1e-5)


def log_of(argv):
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger.addHandler(handler)
    try:
        train(argv)
    finally:
        logger.removeHandler(handler)
    return "\n".join(messages)


def test_callbacks_that_are_new_or_gone_are_named(ranks, tmp_path):
    save = [*SAVE, SCHEDULE, "--checkpoint.interval=1"]
    fresh = "callback mean_loss starts fresh: the checkpoint has no state of it"
    gone = "the state of callbacks that this run doesn't use: mean_loss"
    for step, callback, state in ((1, [], None), (2, MEAN, 1), (3, MEAN, 2), (4, [], None)):
        (log,) = ranks(1, log_of, arguments(tmp_path, *save, *callback, steps=step))
        assert (fresh in log) is (step == 2)
        assert (gone in log) is (step == 4)
        saved = saved_state(tmp_path / "out", step)
        assert saved is None if state is None else saved["mean_loss"]["steps"] == state


class Remembers(Callback):
    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        raise KeyError("count")


def remembering(argv, states):
    return trained(argv, *map(Remembers, states))


def test_a_class_that_is_no_callback_is_refused(monkeypatch):
    config = resolve(EXAMPLE, 1).config
    monkeypatch.setattr(callbacks, "maker", lambda name, custom: object)
    with pytest.raises(UserError, match="callback gradient_norm: object is no Callback"):
        build_callbacks(config)


LOOP = {}
LOOP["loop"] = LOOP


NESTED = {}
for _ in range(99):
    NESTED = {"inner": NESTED}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"average": torch.zeros(2)}, "a value of type torch.Tensor at .average, which"),
        ({"best": math.inf}, "the number inf at .best, which"),
        (LOOP, "more than 100 levels of lists and dicts at .loop"),
        ({"inner": NESTED}, "more than 100 levels"),
        ({"text": "\ud800"}, "a string with a lone surrogate at .text"),
        ({"counts": {1: 2}}, "a key of type int at .counts"),
        ({"pair": (1, 2)}, "a value of type tuple at .pair"),
        ({"seen": {1}}, "a value of type set at .seen"),
        ({"count": np.float64(1)}, "a value of type numpy.float64 at .count"),
        ({"text": "x" * 2**20}, "1,048,588 bytes as JSON, more than 1,048,576"),
    ],
)
def test_a_state_that_a_checkpoint_cannot_hold(state, message):
    with pytest.raises(UserError) as error:
        CallbackStates([Remembers(state)]).state_dict()
    start = "training.callbacks: the state_dict() of 'Remembers' has "
    assert str(error.value).startswith(start + message)


def test_a_state_that_a_checkpoint_can_hold_is_copied():
    state = {"counts": Counter("aab"), "best": 0.1, "none": None, "deep": NESTED["inner"]}
    copy = CallbackStates([Remembers(state)]).state_dict()["Remembers"]
    assert copy == state
    assert copy["counts"] is not state["counts"]
    with pytest.raises(UserError, match="value of type NoneType, not a dict"):
        CallbackStates([Remembers(None)]).state_dict()


class Spoils(Remembers):
    def after_step(self, run, result):
        if run.progress.step == 2:
            self.state["best"] = math.nan


def spoiling(argv, state):
    return trained(argv, Spoils(state))


def test_it_is_found_before_the_first_step_and_later_names_the_last_checkpoint(ranks, tmp_path):
    argv = arguments(tmp_path, *SAVE, "--checkpoint.interval=1", steps=3)
    (error,) = ranks(1, spoiling, argv, {"best": math.inf})
    assert "has the number inf at .best" in error
    assert not (tmp_path / "out/metrics.jsonl").exists()
    (error,) = ranks(1, spoiling, argv, {})
    assert "has the number nan at .best" in error
    assert error.endswith(f"the last good checkpoint is {tmp_path}/out/checkpoint/step-1")


def test_a_state_that_cannot_be_loaded_is_an_error_that_names_the_callback(ranks, tmp_path):
    argv = arguments(tmp_path, *SAVE, "--checkpoint.interval=1", SCHEDULE, steps=1)
    ranks(1, remembering, argv, [{"count": 1}])
    with pytest.raises(RankFailure, match=r"callback Remembers: load_state_dict failed .*count"):
        ranks(1, remembering, [*argv, "--training.steps=2"], [{"count": 1}])


def test_two_states_of_one_name_are_refused(ranks, tmp_path):
    with pytest.raises(RankFailure, match="two callbacks with a state are called Remembers"):
        ranks(1, remembering, arguments(tmp_path), [{}, {}])


def test_names_are_checked_before_anything_starts(tmp_path):
    with pytest.raises(ConfigError, match=r"no callback 'gradient_nrm'; known: .*did you mean"):
        resolve(arguments(tmp_path, EXAMPLE[0], "--training.callbacks=gradient_nrm"), 1)

"""All ranks save after the same step, whichever of them is asked to stop, and when."""

import json

import pytest
import torch.distributed as dist

from tests.runs import arguments, losses, read_metrics, train, weights
from torchtitan.checkpoint.commit import committed_steps
from torchtitan.config import resolve
from torchtitan.train.callbacks import Callback
from torchtitan.train.evaluations import StopVote
from torchtitan.train.preflight import preflight
from torchtitan.train.trainer import Trainer
from torchtitan.utils.signals import StopRequest


class AskedAt(StopRequest):
    """A rank that is asked to stop while it computes a certain step; -1: before it is ready to
    train.
    """

    def __init__(self, step: int):
        super().__init__()
        self.looks = 0
        self.step = step

    @property
    def requested(self) -> bool:
        self.looks += 1  # once before training, then as each step begins
        return self.looks > self.step + 1

    @requested.setter
    def requested(self, _: bool) -> None: ...


class Reasons(Callback):
    def __init__(self):
        self.reasons = []

    def on_end(self, run, reason):
        self.reasons.append(reason)


def train_until_asked(argv, rank, step):
    """Whether the run stopped, its last step, its weights, and the reason that callbacks get."""
    reasons = Reasons()
    config = resolve(argv, dist.get_world_size()).config
    stop = AskedAt(step if dist.get_rank() == rank else 10**6)
    trainer = Trainer(config, preflight(config), stop, callbacks=[reasons])
    try:
        progress = trainer.train()
    finally:
        trainer.close()
    return (
        trainer.engine.stops_early,
        progress.step,
        weights(trainer.engine.models),
        *reasons.reasons,
    )


LAYOUTS = {
    "tensor": (4, ["--parallelism.tensor_parallel_degree=2"]),
    "pipeline": (4, ["--parallelism.pipeline_parallel_degree=2"]),
    "async save in flight": (
        2,
        ["--checkpoint.interval=3", "--checkpoint.async_mode=async_with_pinned_mem"],
    ),
    "validation is due": (
        2,
        ["--validation.enable", "--validation.freq=4", "--validation.dataset=demo_validation"],
    ),
}


@pytest.mark.parametrize(
    "layout",
    [
        x if x == "async save in flight" else pytest.param(x, marks=pytest.mark.slow)
        for x in LAYOUTS
    ],
)
def test_the_last_rank_is_asked_and_all_save_the_same_step(ranks, tmp_path, layout):
    """In step 3, so that the others learn of it in step 4. Then the run goes on as if nothing had
    been.
    """
    world, extra = LAYOUTS[layout]
    argv = arguments(tmp_path, *extra, "--checkpoint.enable", steps=6)
    whole = ranks(world, train, [*argv, f"--job.dump_folder={tmp_path / 'whole'}"])[0]
    outcomes = ranks(world, train_until_asked, argv, world - 1, 3)
    assert [outcome[:2] for outcome in outcomes] == [(True, 4)] * world
    assert [outcome[3] for outcome in outcomes] == ["preempted"] * world
    assert committed_steps(tmp_path / "out/checkpoint")[-1] == 4
    assert not list((tmp_path / "out/checkpoint").glob(".*"))
    rest = ranks(world, train, argv)[0]
    assert losses(rest) == pytest.approx(losses(whole), rel=1e-5)


def test_asked_during_the_last_step_the_run_just_ends(ranks, tmp_path):
    argv = arguments(tmp_path, "--checkpoint.enable")
    assert [o[:2] for o in ranks(2, train_until_asked, argv, 1, 3)] == [(False, 4)] * 2


def test_asked_while_building_no_step_is_made(ranks, tmp_path):
    argv = arguments(tmp_path, "--checkpoint.enable")
    assert [o[:2] for o in ranks(2, train_until_asked, argv, 1, -1)] == [(True, 0)] * 2
    assert committed_steps(tmp_path / "out/checkpoint") == []


class Stops(Callback):
    def __init__(self):
        self.steps = []

    def after_step(self, run, result):
        if run.stops_early:
            self.steps.append(run.progress.step)


def asked_in_a_validation(argv, step):
    """One rank is asked within the validation after a step."""
    stop = StopRequest()
    config = resolve(argv, dist.get_world_size()).config
    stops = Stops()
    trainer = Trainer(config, preflight(config), stop, callbacks=[stops])
    validator = trainer.engine.validation
    vote = validator.before_batch
    batches = []

    def before_batch():
        batches.append(trainer.progress.step)
        if dist.get_rank() == 1 and batches.count(step) == 3:
            stop.requested = True
        vote()

    validator.before_batch = before_batch
    progress = trainer.train()
    trainer.close()
    return stops.steps, progress.step, [batches.count(step) for step in (2, 4)]


def test_asked_during_a_validation_it_ends_between_two_batches(ranks, tmp_path):
    """And the step before it is saved. The last step's is finished: no later start would run it."""
    held_out = {"enable": "true", "freq": 2, "seq_len": 32, "dataset": "demo_validation"}
    flags = [f"--validation.{key}={value}" for key, value in held_out.items()]
    flags.append("--validation.steps=8")
    for steps, stopped in ((6, ([4], 4, [8, StopVote.freq])), (4, ([], 4, [8, 8]))):
        folder = tmp_path / f"{steps}"
        folder.mkdir()
        argv = arguments(folder, *flags, "--checkpoint.enable", steps=steps)
        assert ranks(2, asked_in_a_validation, argv, 4) == [stopped] * 2
        assert committed_steps(folder / "out/checkpoint") == [4]
        records = [r for r in read_metrics(folder / "out") if "validation_loss" in r]
        assert [r["step"] for r in records] == [2, 4][: 2 - len(stopped[0])]
        events = map(json.loads, (folder / "out/events.jsonl").read_text().splitlines())
        skipped = [(e["step"], e["message"]) for e in events if e["kind"] == "unevaluated"]
        assert skipped == [
            (step, f"Asked to stop: step {step} ends without validating") for step in stopped[0]
        ]


def asked_without_checkpoints(argv):
    import logging

    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("torchtitan").addHandler(handler)
    outcome = train_until_asked(argv, 1, 1)[:2]
    logging.getLogger("torchtitan").removeHandler(handler)
    return outcome, lines


def test_without_checkpoints_the_loss_is_said(ranks, tmp_path):
    outcome, lines = ranks(2, asked_without_checkpoints, arguments(tmp_path))[0]
    assert outcome == (True, 2)
    assert any("step 2 is lost, as checkpoint.enable = false" in line for line in lines)

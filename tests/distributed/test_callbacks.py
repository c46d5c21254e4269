"""Callbacks: when each method is called, and what a user's callback records."""

import pytest
import torch
import torch.distributed as dist

from tests.examples import gradient_norm
from tests.runs import SAVE, arguments, read_metrics, train
from torchtitan.config import resolve
from torchtitan.train.callbacks import Callback
from torchtitan.train.preflight import preflight
from torchtitan.train.trainer import Trainer
from torchtitan.utils.errors import ConfigError

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
    return [type(callback).__name__ for callback in trainer.callbacks]


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
            *("ConfirmFolders", "Report", "FindStragglers", "Profile", "CheckReplicas"),
            *("Validate", "WriteSamples", "RunTasks", "Save", "CollectGarbage", "Diary"),
        ]
        steps = [line for step in range(3) for line in (f"update {step}", f"step {step + 1}")]
        ended = ["validated 1", "saved 3", "step 3", "completed"]
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


def test_names_are_checked_before_anything_starts(tmp_path):
    with pytest.raises(ConfigError, match=r"no callback 'gradient_nrm'; known: .*did you mean"):
        resolve(arguments(tmp_path, EXAMPLE[0], "--training.callbacks=gradient_nrm"), 1)

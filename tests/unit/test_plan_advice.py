"""What lowers a peak of memory: every saving is the difference of two plans, and the launcher names
the best.
"""

import os
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from tests.plans import H100, NONE, ONE_ROW, SPEC, workload
from torchtitan.commands import train as command
from torchtitan.config import load_config
from torchtitan.tools.launch.torchrun import what_lowers_memory
from torchtitan.tools.planner.advice import advice, smaller, wasteful
from torchtitan.tools.planner.memory import GIB, predict_memory
from torchtitan.tools.planner.planner import find_layouts, make_plan
from torchtitan.tools.planner.predict import predict
from torchtitan.utils.errors import ConfigError, OutOfMemoryError

BASE = ["--model.flavor=8B", NONE, "--training.seq_len=8192", "--training.local_batch_size=2",
        "--training.global_batch_size=32", "--parallelism.fsdp_reduce_once_per_step"]  # fmt: skip


def test_savings_are_those_of_the_formulas():
    config = workload(*BASE, world=8).config
    found = smaller(config, SPEC, 8)
    keys = [key for saving in found for key in saving.settings]
    for key in ("activation_checkpoint.mode", "training.loss_chunks", "training.local_batch_size",
                "parallelism.fsdp_reduce_once_per_step", "parallelism.data_parallel_shard_degree",
                "training.enable_cpu_offload"):  # fmt: skip
        assert key in keys
    assert keys[-1] in (
        "training.seq_len",
        "optimizer.state_dtype",
    )  # last, though a shorter row saves most
    assert "optimizer.early_step_in_backward" not in keys  # the trainer would refuse it
    for saving in found:
        flags = [
            f"--{key}={str(value).lower() if value is False else value}"
            for key, value in saving.settings.items()
        ]
        after = predict_memory(workload(*BASE, *flags, world=saving.ranks)).reserved / GIB
        assert saving.before > saving.after == pytest.approx(after)
        assert str(saving).endswith(f"{after:.1f} GiB ({after - saving.before:+.1f})")
    kept = [
        s.after
        for s in found
        if s.settings.keys().isdisjoint(("training.seq_len", "optimizer.state_dtype"))
    ]
    assert kept == sorted(kept)


def test_accumulation_is_advised_only_where_it_saves():
    """A smaller batch on a rank lowers the peak now; whole gradients would have raised it."""
    config = workload(
        "--model.flavor=8B", NONE, *ONE_ROW, "--training.local_batch_size=2", world=8
    ).config
    (saving,) = [
        s
        for s in smaller(config, SPEC, 8)
        if "training.local_batch_size" in s.settings and s.ranks == 8
    ]
    assert saving.after < saving.before - 10


def test_a_broken_planner_leaves_the_cause_first():
    """The launcher reports the planner's error beside the run's, and keeps the run's exit code."""
    config = load_config(["--model.flavor=none"]).config
    with pytest.raises(ConfigError, match="no flavor"):
        advice(config, SPEC, 8)
    assert what_lowers_memory(config, 8).startswith("The planner failed, so it advises nothing: ")


def test_the_launcher_adds_the_advice(monkeypatch, tmp_path, capsys):
    """To the message of the only process, and after the cause of a failed rank."""

    def run_out(argv):
        raise OutOfMemoryError("step 1: out of memory")

    def fail(argv):
        raise ChildFailedError(
            "train", {1: ProcessFailure(1, 1, OutOfMemoryError.exit_code, str(tmp_path / "none"))}
        )

    monkeypatch.setattr(command, "StopHandler", lambda grace: SimpleNamespace())
    monkeypatch.setattr(command, "train", run_out)
    monkeypatch.setattr("torch.distributed.run.main", fail)
    monkeypatch.setattr("torchtitan.tools.launch.rendezvous.register", lambda secret: None)
    monkeypatch.setattr(os, "environ", {**os.environ})
    os.environ.pop("RANK", None)
    argv = ["--", f"--job.dump_folder={tmp_path}", "--training.seq_len=8192"]
    advised = (
        r"(?s)out of memory\nWhat lowers the planned peak of .*\n  training.local_batch_size = 4: "
    )
    with pytest.raises(OutOfMemoryError, match=advised):
        command.main(["--nproc-per-node=1", *argv])
    assert command.main(["--nproc-per-node=2", *argv]) == OutOfMemoryError.exit_code
    error = capsys.readouterr().err
    assert "rank 1 ended with exit code 12\nWhat lowers the planned peak of" in error


def test_settings_that_save_nothing_are_said():
    """Two chunks of 1,024 x 128,256 logits save at most 16 bytes of each half, 1 GB; the gradient
    of the output projection that they add up takes 6 bytes of 4,096 x 128,256 parameters, 3 GB.
    """
    argv = ["--model.flavor=8B", "--training.seq_len=1024", "--training.local_batch_size=1"]
    argv += [NONE, "--training.loss_chunks"]
    plans = {n: predict(workload(*argv, str(n), world=8), SPEC, H100) for n in (1, 2)}
    assert plans[2].peak_gib > plans[1].peak_gib + 1.8
    (said,) = wasteful(plans[2])
    assert said.startswith("by this plan, training.loss_chunks = 1 takes less memory")
    assert not list(wasteful(plans[1]))
    made = make_plan([*argv, "2"], 8, H100)
    assert said in made.notes


def test_a_search_proposes_no_setting_that_saves_nothing():
    argv = ["--model.flavor=8B", "--training.seq_len=1024", "--training.global_batch_size=8"]
    found = find_layouts(argv, 8, H100)
    shown = [proposal.plan for proposal in found.best if not proposal.baseline]
    assert [list(wasteful(plan)) for plan in shown] == [[] for _ in shown]

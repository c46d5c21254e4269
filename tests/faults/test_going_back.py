"""A run that goes back to an earlier step continues from what it saved last, never from what it
left.
"""

from contextlib import suppress
from unittest import mock

import pytest
import torch.distributed as dist

from tests.checkpoints import ABOUT, small_checkpointer, train_state
from torchtitan.checkpoint import commit
from torchtitan.checkpoint.commit import ABANDONED, abandoned_at, committed_steps
from torchtitan.commands import ckpt
from torchtitan.config import resolve
from torchtitan.config.load.render import to_toml
from torchtitan.train.preflight import preflight
from torchtitan.utils import storage
from torchtitan.utils.errors import CheckpointError, ConfigError
from torchtitan.utils.logging import logger
from torchtitan.utils.storage import storage_path

pytest.importorskip("upath")


class Killed(BaseException):
    """Stands for a kill."""


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(params=["folder", "URL"])
def folder(request, tmp_path):
    if request.param == "folder":
        yield tmp_path / "checkpoint"
    else:
        url = storage_path(f"memory://{tmp_path.name}")
        yield url
        storage.delete_tree(url)


def start(folder, *saves, last=20, config="", **settings):
    """One start of a run: resume, train, save at some steps. Returns the step resumed from."""
    config = config or f"checkpoint.load_step = {settings.get('load_step', -1)}"
    checkpointer = small_checkpointer(folder, **settings)
    checkpointer.run_info = {**ABOUT, "config": config}
    try:
        resumed = checkpointer.resume()
        step = resumed.step if resumed else 0
        if step < last:
            checkpointer.continue_after(step)
        for param in checkpointer.trained.models[0].parameters():
            param.grad = param.detach() * 0
        checkpointer.trained.optimizer.step()
        for save in saves:
            checkpointer.save(save, train_state(save))
    finally:
        checkpointer.close()
    return step


def test_what_was_saved_last_is_newest(folder, caplog):
    logger.addHandler(caplog.handler)
    start(folder, 2, 4, 6, 8, 10)
    assert start(folder, 7, 8, load_step=6) == 6
    logger.removeHandler(caplog.handler)
    assert "step-8, step-10 in" in caplog.text
    assert "are abandoned" in caplog.text
    events = [record.event for record in caplog.records if hasattr(record, "event")]
    event = next(event for event in events if event["kind"] == "abandoned")
    assert (event["step"], event["steps"]) == (6, [8, 10])
    assert committed_steps(folder) == [2, 4, 6, 7, 8], "step 8 is the new one"
    assert committed_steps(folder, abandoned=True) == [10]
    assert start(folder, 9) == 8
    assert start(folder) == 9


def test_a_run_stopped_before_its_first_save_stays_where_it_went_back_to(folder):
    start(folder, 2, 4, 6)
    assert start(folder, load_step=4) == 4
    assert start(folder) == 4


def test_with_nothing_left_to_train_nothing_is_abandoned(folder):
    start(folder, 2, 4, 6)
    assert start(folder, load_step=4, last=4) == 4
    assert committed_steps(folder) == [2, 4, 6]


def test_the_same_command_goes_back_once_and_another_again(folder):
    start(folder, 2, 4, 6)
    same = "optimizer.lr = 1.0\ntraining.steps = {0}\nparallelism.x = {1}\nmetrics.log_freq = {1}\n"
    same += "validation.freq = {1}\ncheckpoint = {{ load_step = 2, interval = {1} }}"
    assert start(folder, load_step=2, config=same.format(8, 1)) == 2
    assert start(folder, 3, load_step=2, config=same.format(8, 1)) == 2, "nothing was saved"
    assert start(folder, load_step=2, config=same.format(8, 1)) == 3
    assert start(folder, 5, load_step=2, config=same.format(9, 4)) == 3, "more steps, other ranks"
    other = same.format(9, 4).replace("lr = 1.0", "lr = 2.0")
    assert start(folder, load_step=2, config=other) == 2
    assert committed_steps(folder) == [2]
    assert committed_steps(folder, abandoned=True) == [3, 4, 5, 6]


def test_an_abandoned_step_can_be_returned_to(folder):
    start(folder, 2, 4, 6, 8)
    start(folder, 5, load_step=4)
    assert start(folder, load_step=8) == 8
    assert committed_steps(folder) == [2, 4, 8], "step 5 is of the other branch"
    assert committed_steps(folder, abandoned=True) == [5, 6]
    start(folder, 3, load_step=2)
    assert committed_steps(folder) == [2, 3]
    assert start(folder, load_step=8) == 8
    assert committed_steps(folder) == [2, 8], "step 3 isn't an ancestor of step 8"


def test_killed_while_it_marks_them_the_next_start_does_the_rest(folder):
    start(folder, 2, 4, 6, 8)
    real = commit.write_file

    def once(path, content):
        if path.parent.name == "step-6":
            raise Killed
        real(path, content)

    with mock.patch.object(commit, "write_file", once), pytest.raises(Killed):
        start(folder, load_step=2)
    assert committed_steps(folder, abandoned=True) == [4]
    assert start(folder) == 2, "not 8, of the branch that was left"
    assert committed_steps(folder) == [2]
    assert not (folder / "going-back").exists()
    (folder / "step-8" / ABANDONED).write_bytes(b"")  # cut off
    assert abandoned_at(folder / "step-8") == 0
    assert start(folder) == 2


@pytest.mark.parametrize("cut", [False, True])
def test_killed_at_any_moment_of_a_return_nothing_saved_later_is_abandoned(folder, cut, caplog):
    """Back from 8 to 4, on to 10, and back to 8. `cut`: each kill leaves a written file empty."""
    logger.addHandler(caplog.handler)
    name = "write_file" if cut else "patiently"  # every access to files
    real = getattr(commit, name)

    def state():
        steps = committed_steps(folder, abandoned=True)
        return committed_steps(folder), {s: abandoned_at(folder / f"step-{s}") for s in steps}

    def save(*steps):
        for step in steps:
            (folder / f"step-{step}").mkdir(parents=True, exist_ok=True)
            (folder / f"step-{step}" / commit.MANIFEST).write_bytes(b"{}")

    def kill(after):
        def counted(path, action):
            after[0] -= 1
            if after[0] < 0:
                if cut:
                    path.write_bytes(b"")
                raise Killed
            return real(path, action)

        return mock.patch.object(commit, name, counted)

    for moment in range(100):
        storage.delete_tree(folder)
        save(2, 4, 6, 8)
        commit.go_back(folder, 4)
        save(10)
        before = state()
        after = [moment]
        with kill(after), suppress(Killed):
            commit.go_back(folder, 8)
        caplog.clear()
        killed = state()
        assert commit.prepare(folder) is None
        logged = "goes back to step 8: step-10 in" in caplog.text
        assert logged == (10 in killed[0] and 10 not in state()[0])
        if state() == before:
            commit.go_back(folder, 8)
        assert state() == ([2, 4, 8], {6: 4, 10: 4})
        assert not (folder / "going-back").exists()
        save(12, 14)
        assert commit.prepare(folder) is None
        commit.go_back(folder, 14)
        assert state() == ([2, 4, 8, 12, 14], {6: 4, 10: 4})
        if after[0] >= 0:
            break
    logger.removeHandler(caplog.handler)
    assert 1 < moment < 99


def test_retention_deletes_abandoned_steps_first_but_only_those_behind(folder):
    start(folder, 2, 4, 6, 8, 12)
    start(folder, 7, load_step=6, keep_latest_k=2)
    assert committed_steps(folder) == [6, 7]
    assert committed_steps(folder, abandoned=True) == [8, 12], "ahead of the run: kept aside"
    start(folder, 9, keep_latest_k=2, keep_every_n=4)
    assert committed_steps(folder) == [7, 9]
    assert committed_steps(folder, abandoned=True) == [12]
    start(folder, 12, keep_latest_k=2)
    assert committed_steps(folder) == [9, 12]
    assert committed_steps(folder, abandoned=True) == []


def test_a_deletion_that_a_kill_prevented_is_made_up_for_at_the_next_start(folder):
    start(folder, 2, 4, 6)
    assert start(folder, keep_latest_k=2) == 6
    assert committed_steps(folder) == [4, 6]


def test_a_damaged_newest_step_is_abandoned_by_the_run_that_fell_back(folder):
    start(folder, 2, 4, 6)
    shard = folder / "step-6/__0_0.distcp"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    assert start(folder, 5) == 4
    shard.write_bytes(content)  # a file system that has come back
    assert start(folder) == 5


def test_a_rewind_abandons_what_it_passes(folder):
    start(folder, 2, 4, 6)
    checkpointer = small_checkpointer(folder)
    shard = folder / "step-6/__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert checkpointer.rewind(8).step == 4
    checkpointer.close()
    assert committed_steps(folder) == [2, 4]
    assert committed_steps(folder, abandoned=True) == [6]


def test_a_missing_step_is_refused_before_the_start(tmp_path):
    for name in ("step-4/manifest.json", "step-10/manifest.json", "step-9/tensors.json"):
        (tmp_path / "checkpoint" / name).parent.mkdir(parents=True)
        (tmp_path / "checkpoint" / name).touch()
    flags = ["--checkpoint.enable", f"--job.dump_folder={tmp_path}", "--checkpoint.load_step"]
    with pytest.raises(ConfigError, match=r"load_step: .* has no step 9 \(it has: 4, 10\)"):
        preflight(resolve([*flags, "9"], 1).config)
    preflight(resolve([*flags, "4"], 1).config)


def test_a_command_repeated_after_retention_deleted_its_step_continues(tmp_path):
    folder = tmp_path / "checkpoint"
    flags = ["--checkpoint.enable", f"--job.dump_folder={tmp_path}", "--checkpoint.load_step=2"]

    def repeated(*more):
        return resolve([*flags, *more], 1).config

    same = to_toml(repeated("--training.steps=6"))
    start(folder, 2, 4)
    assert start(folder, 5, 6, load_step=2, keep_latest_k=2, config=same) == 2
    assert committed_steps(folder) == [5, 6]
    longer = repeated("--training.steps=8")
    preflight(longer)
    assert start(folder, load_step=2, config=to_toml(longer)) == 6
    other = repeated("--training.steps=8", "--optimizer.lr=1")
    message = rf"checkpoint.load_step: {folder} has no step 2 \(it has: 5, 6\)"
    with pytest.raises(ConfigError, match=message):
        preflight(other)
    with pytest.raises(CheckpointError, match=message):
        start(folder, load_step=2, config=to_toml(other))


def test_the_commands_tell_them_apart(tmp_path, capsys):
    folder = tmp_path / "checkpoint"
    start(folder, 2, 4, 6)
    start(folder, 3, load_step=2)
    ckpt.main(["inspect", str(folder)])
    out = capsys.readouterr().out
    assert out.count("abandoned: the run went back to step 2") == 2
    ckpt.main(["verify", str(folder)])
    out = capsys.readouterr().out
    assert out.count("; abandoned") == 2
    assert out.count("OK") == 4
    assert commit.checkpoints_at(folder)[-1].name == "step-3"

"""Ranks that stand still in a collective of their own: the sentence that says why."""

import json
import os
import signal
import threading
from contextlib import redirect_stderr, suppress
from datetime import timedelta
from io import StringIO
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.hangs import say_that_it_hangs, until_diagnosed, watched
from torchtitan.health import hang_watch
from torchtitan.utils.activity import begin

HERE = "tests/faults/test_hang_collectives.py"


def small_group():
    """A group whose collectives give up after some seconds, as tensor parallelism's would."""
    group = dist.new_group(timeout=timedelta(seconds=7), group_desc="mesh_tp")
    begin("step", "running forward and backward", 7)
    dist.all_reduce(torch.ones(8), group=group)
    return group


def skip_one(folder):
    with watched(folder):
        group = small_group()
        say_that_it_hangs(folder)
        if dist.get_rank() != 1:
            with pytest.raises(
                RuntimeError
            ):  # a timeout: its own, or one of a peer that then closes the connection
                dist.all_reduce(torch.ones(8), group=group)
        else:
            parts = [torch.empty(4) for _ in range(3)]
            with pytest.raises(RuntimeError):
                dist.all_gather(parts, torch.ones(4), group=group)
        return until_diagnosed(folder)


def test_a_rank_that_skips_a_collective(ranks, tmp_path):
    """It is one ahead, and its next one meets the others' last."""
    sentence = ranks(3, skip_one, tmp_path)[0]
    assert sentence.startswith(
        f"rank 1 entered all_gather #2 of tp (Float [4]; ranks 0-2), at {HERE}:"
    )
    assert f", where ranks 0, 2 entered all_reduce (Float [8]), at {HERE}:" in sentence


def raise_one(folder):
    with watched(folder) as watch:
        group = small_group()
        if dist.get_rank() == 1:
            try:
                raise ValueError("boom\nand more")
            except ValueError as error:
                watch.failed(error)
        dist.all_reduce(torch.ones(8), group=group)
        try:
            raise RuntimeError("Connection closed by peer")
        except RuntimeError as error:
            watch.failed(error)  # what follows from it is not written over it
        return until_diagnosed(folder), [str(p.name) for p in Path(folder, "comm_traces").iterdir()]


def test_a_rank_that_raises(ranks, tmp_path):
    """The others, who wait for it, write too, before it ends."""
    sentence, files = ranks(3, raise_one, tmp_path)[0]
    assert sentence.startswith(f"rank 1 raised ValueError: boom, in step 7, at {HERE}:")
    assert sentence.endswith("in raise_one")
    assert {"rank_0", "rank_1", "rank_2", "state-0.json", "state-1.json", "state-2.json"} <= set(
        files
    )


def wait_like_a_kernel(folder):
    """Rank 1 fails while rank 0 waits where nothing tells it; what rank 0 prints before it ends."""
    ended = threading.Event()
    exits = mock.patch.object(hang_watch.os, "_exit", side_effect=lambda _: ended.set())
    soon = mock.patch.object(hang_watch, "LAST_SECONDS", 0.5)
    printed = StringIO()
    Path(folder, "comm_traces").mkdir(exist_ok=True)
    with exits, soon, redirect_stderr(printed), watched(folder) as watch:
        begin("step", "running forward and backward", 7)
        if dist.get_rank() == 1:
            watch.failed(ValueError("boom"))
            watch.give_up()
            assert not ended.wait(1), "it ends by itself"
        else:
            ended.wait(30)
        dist.barrier()
    return printed.getvalue().splitlines()[:1]


def test_a_rank_that_does_not_notice_the_failure_of_another_ends(ranks, tmp_path):
    printed = ranks(2, wait_like_a_kernel, tmp_path)
    assert printed == [["rank 0: ended, because another rank failed"], []]


def stop_one(folder):
    with watched(folder) as watch:
        group = small_group()
        say_that_it_hangs(folder)
        pid = json.loads(watch._store.get("process/1"))[0]

        def release():
            until_diagnosed(folder)
            os.kill(pid, signal.SIGCONT)

        if dist.get_rank() == 0:
            threading.Thread(target=release).start()
        if dist.get_rank() == 1:
            os.kill(pid, signal.SIGSTOP)
        with suppress(RuntimeError):  # it may give up before the stopped rank continues
            dist.all_reduce(torch.ones(8), group=group)
        return until_diagnosed(folder), pid


def test_a_rank_that_is_stopped(ranks, tmp_path):
    sentence, pid = ranks(2, stop_one, tmp_path)[0]
    assert sentence.startswith(f"rank 1 is stopped by a signal (process {pid} on ")
    assert (
        "and did not enter all_reduce #2 of tp (Float [8]; ranks 0-1), where rank 0 waits"
        in sentence
    )

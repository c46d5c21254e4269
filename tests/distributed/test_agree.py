"""What all ranks agree on, and what that costs."""

import os
import threading
from datetime import timedelta
from unittest import mock
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from torchtitan.config.sections.schema import Comm
from torchtitan.parallel import agree, groups
from torchtitan.utils.distributed_compat import store_of_this_attempt
from torchtitan.utils.errors import CheckpointError, ConfigError, DamageError


def agreed():
    rank = dist.get_rank()
    with patch.object(dist, "all_gather_object", side_effect=AssertionError):
        assert agree.problems_from_all(None) == []
        assert agree.together(lambda: rank) == rank
    everyone = agree.from_all(rank)
    some = agree.problems_from_all("here" if rank == 1 else None)
    errors = [DamageError("damaged"), CheckpointError("wrong"), None]

    def fail():
        if error := errors[min(rank, 2)]:
            raise error

    with pytest.raises(CheckpointError, match="wrong"):
        agree.together(fail)
    return everyone, some


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_agree(ranks, world):
    """Objects of all ranks travel only if one has something to tell."""
    results = ranks(world, agreed)
    assert [everyone for everyone, _ in results] == [list(range(world))] * world
    for _, some in results:
        assert some == [None, "here", None][:world]


class Counting(dist.Store):
    """Counts requests to a store in memory."""

    def __init__(self, store):
        super().__init__()
        self.store = store
        self.count = 0


for name in ("get", "add", "append", "multi_set"):

    def counted(self, *args, name=name):
        self.count += 1
        return getattr(self.store, name)(*args)

    setattr(Counting, name, counted)


def test_rank_0_answers_many_ranks_by_few_requests(monkeypatch):
    """An earlier attempt's rank, and ranks that ask at once."""
    monkeypatch.setitem(os.environ, "MASTER_ADDR", "localhost")
    monkeypatch.setitem(os.environ, "MASTER_PORT", "0")
    shared = dist.HashStore()
    shared.append("attempt/asks", "0" * 32)  # it died before it counted itself
    stores = []

    def connect(*_, **__):
        stores.append(Counting(shared))
        return stores[-1]

    monkeypatch.setattr(dist, "TCPStore", connect)
    world = 40
    answered = []

    def ask(rank):
        with store_of_this_attempt(rank, world, timedelta(seconds=30)):
            answered.append(rank)

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in range(1, world)]
    for thread in threads:
        thread.start()
    with store_of_this_attempt(0, world, timedelta(seconds=30)):
        for thread in threads:
            thread.join()
    assert sorted(answered) == list(range(1, world))
    # rank 0's own connection, those of the others, and that of the thread which answers
    none, *asked, _ = sorted(store.count for store in stores)
    assert none == 0
    assert asked == [3] * (world - 1)


def test_what_a_process_lacks_to_connect(monkeypatch):
    """torch's own errors would be tracebacks."""
    monkeypatch.setattr(groups.psutil, "net_if_addrs", lambda: {"lo": [], "eth0": []})
    rank = {"WORLD_SIZE": "4", "MASTER_ADDR": "node0"}
    for environment, message in (
        ({}, "its loopback interface, which is down: `ip link set lo up` as root, or name another"),
        (rank, "WORLD_SIZE=4 needs RANK, MASTER_ADDR, MASTER_PORT; or unset it"),
    ):
        monkeypatch.setattr(os, "environ", environment)
        with pytest.raises(ConfigError, match=message):
            groups.init_distributed(Comm(), torch.device("cpu"))


def test_rank_0_answers_until_all_ranks_are_there(monkeypatch):
    """Without it, rank 0 could go on: pairs that connect later don't wait for late ranks."""
    calls = mock.Mock()
    environment = {
        "RANK": "0",
        "WORLD_SIZE": "128",
        "MASTER_ADDR": "node0",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCH_GLOO_LAZY_INIT": "1",
    }
    monkeypatch.setattr(os, "environ", {**os.environ, **environment})
    monkeypatch.setattr(groups, "store_of_this_attempt", calls.store)
    calls.store.return_value = mock.MagicMock()
    monkeypatch.setattr(dist, "init_process_group", calls.init)
    monkeypatch.setattr(dist, "barrier", calls.barrier)
    monkeypatch.setattr(groups, "cpu_group", mock.Mock())
    groups.init_distributed(Comm(), torch.device("cpu"))
    names = [name for name, *_ in calls.mock_calls if "__" not in name or "exit" in name]
    assert names == ["store", "init", "barrier", "store().__exit__"]

"""Launchers find one another at the next endpoint when the one that holds their store is gone, with
real stores.
"""

import threading

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousParameters,
    RendezvousStateError,
)

from tests.runs import free_ports
from torchtitan.tools.launch import takeover
from torchtitan.tools.launch.takeover import Endpoint, Takeover, _LiveStore


class Meeting:
    """Stands for torch's rendezvous in a store."""

    def __init__(self, store):
        self.store = store

    def next_rendezvous(self):
        return self.store.add("joined", 1)

    def num_nodes_waiting(self):
        try:
            return self.store.add("waiting", 0)
        except RuntimeError as error:
            raise dist.DistNetworkError(str(error)) from error

    def _stop_heartbeats(self):
        pass


@pytest.fixture
def launcher(monkeypatch):
    """Makes the launcher of one of three endpoints; None is that of a node without one."""
    monkeypatch.setattr(takeover, "_SETTLE_SECONDS", 0.1)
    monkeypatch.setattr(takeover, "_POLL_SECONDS", 0.02)
    endpoints = [Endpoint("127.0.0.1", port) for port in free_ports(3)]

    def make(index, secret=b"secret", patience=15):
        parameters = RendezvousParameters("torchtitan", "", "run", 1, 3, "127.0.0.9")
        made = Takeover(endpoints, parameters, secret, Meeting)
        made._here = [index == i for i in range(3)]
        made._patience = patience
        made._start_seconds = 0
        return made

    return make


def together(*launchers):
    """All come to the next rendezvous at once; the generation and endpoint that each has joined."""
    threads = [threading.Thread(target=one.next_rendezvous) for one in launchers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return {(one._joined.generation, one._joined.index) for one in launchers}


def switch_off(one):
    one._hosted = one._joined = one._inner = None


def test_the_next_living_endpoint_takes_over(launcher):
    first, second, third, other = (launcher(index) for index in (0, 1, 2, None))
    assert together(first, second, third, other) == {(1, 0)}
    switch_off(first)
    assert third.num_nodes_waiting() == 1, "so that torchrun comes to the next rendezvous"
    assert together(second, third, other) == {(2, 1)}
    assert together(launcher(0)) == {(2, 1)}, "one that starts again joins the others"
    switch_off(second)
    assert together(third, other) == {(3, 2)}


def test_an_endpoint_without_a_launcher_is_passed_over(launcher):
    assert together(launcher(2, patience=0.3), launcher(None)) == {(1, 2)}
    with pytest.raises(RendezvousError, match="no launcher at these endpoints"):
        launcher(None, patience=0.3)._join()


def test_a_launcher_waits_at_the_start_for_one_that_is_late(launcher):
    """Pulling its image may take a node minutes longer than the others."""
    early = launcher(None, patience=0.3)
    early._start_seconds = 15
    late = threading.Timer(1, launcher(0).next_rendezvous)
    late.start()
    assert together(early) == {(1, 0)}
    late.join()


def test_a_holder_that_was_suspended_gives_way(launcher):
    """Meanwhile the others have gone on without it."""
    first = launcher(0)
    second = launcher(1)
    together(first, second)
    suspended = first._hosted
    first._hosted = None
    second._leave()
    second._find = lambda find=second._find: (
        None if second._hosted is None else find()
    )  # can't reach it
    assert together(second) == {(2, 1)}
    first._hosted = suspended
    assert together(first) == {(2, 1)}
    assert first._hosted is None


def test_of_two_new_stores_the_first_endpoint_s_is_joined(launcher):
    """Launchers that couldn't reach each other for a while have begun to hold one each."""
    first = launcher(0)
    second = launcher(1)
    other = launcher(None)
    held = [_LiveStore(1, index, dist.HashStore()) for index in (0, 1)]
    first._hosted, second._hosted = held
    for one in (first, second, other):
        one._probe = [*held, None].__getitem__
    assert together(first, second, other) == {(1, 0)}
    assert first._hosted is held[0]
    assert second._hosted is None


def test_a_store_without_the_secret_is_refused(launcher):
    together(strange := launcher(0, secret=b"another"))
    with pytest.raises(RendezvousStateError):
        launcher(1).next_rendezvous()
    assert strange._hosted is not None


def test_launchers_of_one_address_take_turns(launcher):
    """Each of them takes every endpoint for its own."""
    first, second, third = (launcher(0) for _ in range(3))
    port = first._endpoints[0].port
    for one in (first, second, third):
        one._endpoints = [Endpoint(host, port) for host in ("127.0.0.1", "localhost", "127.0.0.2")]
        one._here = [endpoint.is_here(None) for endpoint in one._endpoints]
        assert one._here == [True] * 3
    assert together(first, second, third) == {(1, 0)}
    (holder,) = [one for one in (first, second, third) if one._hosted]
    left = [one for one in (first, second, third) if one is not holder]
    switch_off(holder)
    assert together(*left) == {(2, 1)}
    (holder,) = [one for one in left if one._hosted]
    assert together(*left, holder) == {(2, 1)}, "its own store, found at another endpoint"
    assert holder._hosted is not None
    (last,) = [one for one in left if one is not holder]
    switch_off(holder)
    assert together(last) == {(3, 2)}


def test_endpoints_of_this_machine_are_known():
    assert Endpoint("localhost", 1).is_here(None)
    assert not Endpoint("192.0.2.7", 1).is_here(None)
    assert not Endpoint("localhost", 1).is_here("127.0.0.3")
    assert Endpoint("127.0.0.3", 1).is_here("127.0.0.3")

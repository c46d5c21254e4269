"""A rendezvous that survives the loss of its node: the next one of a list takes over.

Every launcher gets the same list of endpoints. The launcher of the first endpoint hosts the store
in which all of them meet. When it is lost, each launcher looks for a live store at all endpoints;
if there is none, the launcher of the next endpoint hosts one while the others wait for it, then for
the one after it, and so on. A launcher that starts late, or again, joins the live store.

Every new store has a higher generation than those its launcher has seen, signed with the job's
secret. A launcher that finds several stores joins the one of the highest generation, even if it
hosts another itself, such as after a suspension. Launchers that can't reach each other may still
host two stores. Then the lock on the dump folder decides: ranks whose folder another run holds
exit.

Several launchers may have one address, as the nodes of `slurmd -N` do. One of them gets the port.
"""

import ipaddress
import socket
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta

import psutil
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from torchtitan.tools.launch.signature import signed, verified

_GENERATION = "torchtitan.generation"
_CONNECT_SECONDS = 2.0
"""Seconds to wait for a node's answer; one that is switched off never answers."""
_PATIENCE_SECONDS = 60
"""Seconds to wait for an endpoint's launcher to host a store; it may stop ranks for 30 s first."""
_JOIN_SECONDS = 600
"""Default of torch for `join_timeout`, in seconds."""
_SETTLE_SECONDS = 1.0
"""Seconds until a new store is compared with stores that others hosted at the same time."""
_POLL_SECONDS = 0.5
_CONNECTION_ERRORS = (RendezvousConnectionError, dist.DistError)


def join_seconds(parameters: RendezvousParameters) -> int:
    """Seconds to wait for launchers, as in torch's rendezvous."""
    return parameters.get_as_int("join_timeout", _JOIN_SECONDS) or _JOIN_SECONDS


@dataclass(frozen=True)
class Endpoint:
    """Address at which a launcher may host a store."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def is_here(self, local_address: str | None) -> bool:
        """Whether this endpoint is the launcher's at `local_address` (default: this machine)."""
        if local_address is not None:
            return self.host == local_address
        try:
            addresses = {str(info[4][0]) for info in socket.getaddrinfo(self.host, None)}
        except OSError:
            return False
        if any(ipaddress.ip_address(address).is_loopback for address in addresses):
            return True
        interfaces = psutil.net_if_addrs().values()
        local = {address.address for interface in interfaces for address in interface}
        return not local.isdisjoint(addresses)


@dataclass(frozen=True)
class _LiveStore:
    """A store that answers."""

    generation: int
    index: int
    """Index of its endpoint in the list."""
    store: dist.Store

    @property
    def precedence(self) -> tuple[int, int]:
        """Launchers join the store with the largest."""
        return self.generation, -self.index


class Takeover(RendezvousHandler):
    """A rendezvous at one of several endpoints."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        parameters: RendezvousParameters,
        secret: bytes,
        meet_in: Callable[[dist.Store], DynamicRendezvousHandler],
    ):
        """
        Args:
            meet_in: creates a rendezvous in a store.
        """
        self._endpoints = endpoints
        self._secret = secret
        self._meet_in = meet_in
        self._run_id = parameters.run_id
        self._here = [endpoint.is_here(parameters.local_addr) for endpoint in endpoints]
        self._timeout = timedelta(seconds=parameters.get_as_int("read_timeout") or 60)
        self._patience = parameters.get_as_int("takeover_timeout") or _PATIENCE_SECONDS
        self._start_seconds = join_seconds(parameters)
        self._hosted: _LiveStore | None = None
        self._joined: _LiveStore | None = None
        """The store joined last, even if it is lost."""
        self._inner: DynamicRendezvousHandler | None = None

    # ---- what torchrun calls

    def get_backend(self) -> str:
        return "torchtitan"

    def get_run_id(self) -> str:
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        while True:
            try:
                return self._join().next_rendezvous()
            except _CONNECTION_ERRORS:
                self._leave()

    def num_nodes_waiting(self) -> int:
        try:
            return self._inner.num_nodes_waiting() if self._inner else 1
        except _CONNECTION_ERRORS:
            self._leave()
            # as if somebody waited: torchrun stops its ranks and comes to the next rendezvous
            return 1

    def is_closed(self) -> bool:
        return self._inner is not None and self._inner.is_closed()

    def set_closed(self) -> None:
        if self._inner is not None:
            self._inner.set_closed()

    def shutdown(self) -> bool:
        return self._inner is None or self._inner.shutdown()

    # ---- stores

    def _join(self) -> DynamicRendezvousHandler:
        """Join the live store of the highest generation, or host one at this launcher's turn."""
        best = self._find() or self._take_turns()
        if (
            self._inner is None
            or self._joined is None
            or best.precedence != self._joined.precedence
        ):
            self._leave()
            self._inner = self._meet_in(best.store)
            self._joined = best
        if self._hosted is not None and best.precedence != self._hosted.precedence:
            self._hosted = None  # closes its port
        return self._inner

    def _take_turns(self) -> _LiveStore:
        """Host a store or wait for one, at each endpoint in turn, starting after the lost one."""
        order = list(range(len(self._endpoints)))
        if self._joined is not None:
            last = self._joined.index
            order = order[last + 1 :] + order[: last + 1]
            print(
                f"The rendezvous at {self._endpoints[last]} is gone. The nodes that are left meet "
                "at another",
                file=sys.stderr,
            )
        # At the start, the launchers of the list may be as late as others may join.
        deadline = time.monotonic() + (self._start_seconds if self._joined is None else 0)
        while True:
            for index in order:
                store = self._host(index) if self._here[index] else None
                if store := store or self._wait():
                    return store
            if time.monotonic() >= deadline:
                raise RendezvousError(
                    "no launcher at these endpoints can be reached, and none of them is here"
                )

    def _wait(self) -> _LiveStore | None:
        """Wait for any launcher to host a store; None after a timeout."""
        deadline = time.monotonic() + self._patience
        while time.monotonic() < deadline:
            if store := self._find():
                return store
            time.sleep(_POLL_SECONDS)
        return None

    def _host(self, index: int) -> _LiveStore | None:
        """Host a store at an endpoint of this launcher and find the best one; None: port taken."""
        endpoint = self._endpoints[index]
        generation = 1 + (self._joined.generation if self._joined else 0)
        try:
            store = dist.TCPStore(
                endpoint.host, endpoint.port, is_master=True, timeout=self._timeout
            )
        except (RuntimeError, ValueError):
            return None
        store.set(_GENERATION, signed(b"generation %d.%d" % (generation, index), self._secret))
        self._hosted = _LiveStore(generation, index, store)
        time.sleep(_SETTLE_SECONDS)
        return self._find()

    def _find(self) -> _LiveStore | None:
        """The live store of the highest generation; among equals, of the first endpoint."""
        hosted_index = self._hosted.index if self._hosted else None
        others = [index for index in range(len(self._endpoints)) if index != hosted_index]
        with ThreadPoolExecutor(max(1, len(others))) as pool:
            stores = [self._hosted, *pool.map(self._probe, others)]
        alive = [store for store in stores if store is not None]
        return max(alive, key=lambda store: store.precedence, default=None)

    def _probe(self, index: int) -> _LiveStore | None:
        """The store at an endpoint, if it answers and belongs to this job."""
        endpoint = self._endpoints[index]
        try:
            # The store's own client would try for as long as it may wait for an answer.
            socket.create_connection((endpoint.host, endpoint.port), _CONNECT_SECONDS).close()
            seconds = timedelta(seconds=2 * _CONNECT_SECONDS)
            store = dist.TCPStore(endpoint.host, endpoint.port, is_master=False, timeout=seconds)
            if not store.check([_GENERATION]):
                return None
            message = store.get(_GENERATION)
            store.set_timeout(self._timeout)
        except (OSError, RuntimeError, ValueError):
            return None
        state = verified(message, self._secret).removeprefix(b"generation ")
        # Endpoints of one address all lead to one store, which records the endpoint that holds it.
        generation, holder = map(int, state.split(b"."))
        return _LiveStore(generation, holder, store)

    def _leave(self) -> None:
        """Leave the joined store: it is gone, or another one takes precedence."""
        if self._inner is not None:
            self._inner._stop_heartbeats()  # shutdown() would close the rendezvous to everybody
            self._inner = None

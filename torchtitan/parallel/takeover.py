"""A rendezvous that survives the loss of the node that holds it: the next one of a list takes over.

Every launcher gets the same list of endpoints. The first one's launcher holds the store in which
all of them meet. When it is lost, each launcher looks for a living store at all endpoints; if there
is none, the next endpoint of the list is to hold one, and the others wait for it, then for the one
after it, and so on. A launcher that starts late, or again, joins the living store wherever it is.

Every new store has a higher generation than those its launcher has seen, signed with the job's
secret. A launcher that finds several joins the highest, also if it holds a lower one itself: one
that was suspended and comes back gives way. Launchers that can't reach each other may still hold
two stores. Then the lock on the dump folder decides: ranks whose folder another run holds exit.
"""

import hmac
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
    RendezvousStateError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

_GENERATION = "torchtitan.generation"
_CONNECT_SECONDS = 2.0
"""For a node to answer; one that is switched off never does."""
_PATIENCE_SECONDS = 60
"""For an endpoint's launcher to hold a store. Until then it may be stopping its ranks, which may
take 30 seconds.
"""
_SETTLE_SECONDS = 1.0
"""After which a new store is compared with those that other launchers may have begun to hold at the
same time.
"""
_POLL_SECONDS = 0.5
_LOST = (RendezvousConnectionError, dist.DistError)


@dataclass(frozen=True)
class Endpoint:
    """Where a launcher holds a store if it comes to that."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def is_here(self, local_address: str | None) -> bool:
        """Whether this is an endpoint of the launcher with `local_address`, or else of this
        machine.
        """
        if local_address is not None:
            return self.host == local_address
        own = {address.address for of_one in psutil.net_if_addrs().values() for address in of_one}
        try:
            addresses = {str(info[4][0]) for info in socket.getaddrinfo(self.host, None)}
        except OSError:
            return False
        return any(
            address in own or ipaddress.ip_address(address).is_loopback for address in addresses
        )


@dataclass(frozen=True)
class _Found:
    """A living store."""

    generation: int
    index: int
    """Of its endpoint in the list."""
    store: dist.Store

    @property
    def rank(self) -> tuple[int, int]:
        """The largest one is joined."""
        return self.generation, -self.index


class Takeover(RendezvousHandler):
    """A rendezvous at one of several endpoints."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        parameters: RendezvousParameters,
        secret: bytes,
        meet: Callable[[dist.Store], DynamicRendezvousHandler],
    ):
        """
        Args:
            meet: makes a rendezvous in a store.
        """
        self._endpoints = endpoints
        self._secret = secret
        self._meet_in = meet
        self._run_id = parameters.run_id
        self._here = [endpoint.is_here(parameters.local_addr) for endpoint in endpoints]
        self._timeout = timedelta(seconds=parameters.get_as_int("read_timeout") or 60)
        self._patience = parameters.get_as_int("takeover_timeout") or _PATIENCE_SECONDS
        self._held: _Found | None = None
        self._joined: _Found | None = None
        """The last one, also when it is lost."""
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
            except _LOST:
                self._leave()

    def num_nodes_waiting(self) -> int:
        try:
            return self._inner.num_nodes_waiting() if self._inner else 1
        except _LOST:
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
        """Join the living store of the highest generation; without one, hold one when it is this
        launcher's turn.
        """
        best = self._find() or self._take_turns()
        if self._inner is None or self._joined is None or best.rank != self._joined.rank:
            self._leave()
            self._inner = self._meet_in(best.store)
            self._joined = best
        if self._held is not None and best.rank != self._held.rank:
            self._held = None  # gives way, and closes its port
        return self._inner

    def _take_turns(self) -> _Found:
        """Hold a store, or wait for an endpoint to hold one: each in turn, beginning after the one
        that was lost.
        """
        first = 0
        if self._joined is not None:
            first = self._joined.index + 1
            gone = self._endpoints[self._joined.index]
            print(
                f"The rendezvous at {gone} is gone. The nodes that are left meet at another",
                file=sys.stderr,
            )
        for offset in range(len(self._endpoints)):
            index = (first + offset) % len(self._endpoints)
            deadline = time.monotonic() + self._patience
            while not self._here[index] and time.monotonic() < deadline:
                if found := self._find():
                    return found
                time.sleep(_POLL_SECONDS)
            if self._here[index] and self._hold(index):
                time.sleep(_SETTLE_SECONDS)
                if found := self._find():
                    return found
        raise RendezvousError(
            "no launcher at these endpoints can be reached, and none of them is here"
        )

    def _hold(self, index: int) -> bool:
        """Hold a store at an endpoint of this launcher; False if its port is taken."""
        endpoint = self._endpoints[index]
        seen = self._joined.generation if self._joined else 0
        try:
            store = dist.TCPStore(
                endpoint.host, endpoint.port, is_master=True, timeout=self._timeout
            )
        except (RuntimeError, ValueError):
            return False
        store.set(_GENERATION, self._signed(b"%d" % (seen + 1)))
        self._held = _Found(seen + 1, index, store)
        return True

    def _find(self) -> _Found | None:
        """The living store of the highest generation; of equal ones, that of the first endpoint."""
        elsewhere = [index for index, here in enumerate(self._here) if not here]
        with ThreadPoolExecutor(max(1, len(elsewhere))) as pool:
            found = [
                one for one in (self._held, *pool.map(self._probe, elsewhere)) if one is not None
            ]
        return max(found, key=lambda one: one.rank, default=None)

    def _probe(self, index: int) -> _Found | None:
        """The store at an endpoint, if it is alive and of this job."""
        endpoint = self._endpoints[index]
        try:
            with socket.create_connection((endpoint.host, endpoint.port), _CONNECT_SECONDS):
                pass  # the store's own client would try for as long as it may wait for an answer
            seconds = timedelta(seconds=2 * _CONNECT_SECONDS)
            store = dist.TCPStore(endpoint.host, endpoint.port, is_master=False, timeout=seconds)
            if not store.check([_GENERATION]):
                return None
            found = store.get(_GENERATION)
            store.set_timeout(self._timeout)
        except (OSError, RuntimeError, ValueError):
            return None
        generation, _, _ = found.partition(b" ")
        if not hmac.compare_digest(self._signed(generation), found):
            raise RendezvousStateError(
                f"{endpoint}: the state was not signed with this node's secret"
            )
        return _Found(int(generation), index, store)

    def _signed(self, generation: bytes) -> bytes:
        signature = hmac.digest(self._secret, b"generation " + generation, "sha256")
        return generation + b" " + signature.hex().encode()

    def _leave(self) -> None:
        """Have nothing more to do with the store that was joined: it is gone, or another one
        counts.
        """
        if self._inner is not None:
            self._inner._stop_heartbeats()  # shutdown() would close the rendezvous to everybody
            self._inner = None

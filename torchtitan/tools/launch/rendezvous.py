"""Rendezvous of a job's launchers: in memory on one node, else in a store whose state is signed.

torch unpickles the state of a rendezvous, so anyone who can write it can run code on every node.
With several nodes, anyone who reaches the first node's port can write; but a state is read only if
its signature proves that the writer has the job's secret. On one node there is no port.
"""

import sys
import time

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import (
    C10dRendezvousBackend,
    create_backend,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    Token,
    create_handler,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from torchtitan.tools.launch.signature import signed, verified
from torchtitan.tools.launch.takeover import Endpoint, Takeover, join_seconds

BACKEND = "torchtitan"
"""Name of this rendezvous for `torchrun --rdzv-backend`."""


class SignedBackend(RendezvousBackend):
    """Signs the state it writes to another backend, and reads only what the same secret signed."""

    def __init__(self, backend: RendezvousBackend, secret: bytes):
        self._backend = backend
        self._secret = secret

    @property
    def name(self) -> str:
        return BACKEND

    def get_state(self) -> tuple[bytes, Token] | None:
        """The state and its token; None before the first is written.

        Raises:
            RendezvousStateError: the state was written without the secret.
        """
        stored = self._backend.get_state()
        if stored is None:
            return None
        state, token = stored
        return verified(state, self._secret), token

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        """Write `state` if `token` is the current one's.

        Returns:
            The stored state and token, as in `get_state`, and whether the write succeeded.
        """
        stored = self._backend.set_state(signed(state, self._secret), token)
        if stored is None:
            return None
        current, new_token, succeeded = stored
        return verified(current, self._secret), new_token, succeeded


def register(secret: str) -> None:
    """Make `BACKEND` known to the torchrun of this process.

    Args:
        secret: shared by the launchers of the job; unused on one node.
    """

    def create(parameters: RendezvousParameters) -> RendezvousHandler:
        def rendezvous_in(store: dist.Store) -> DynamicRendezvousHandler:
            backend = C10dRendezvousBackend(store, parameters.run_id)
            return create_handler(store, SignedBackend(backend, secret.encode()), parameters)

        if parameters.max_nodes == 1:
            return rendezvous_in(dist.HashStore())
        if "," in parameters.endpoint:
            texts = parameters.endpoint.split(",")
            endpoints = [Endpoint(*parse_rendezvous_endpoint(text, -1)) for text in texts]
            return Takeover(endpoints, parameters, secret.encode(), rendezvous_in)
        return rendezvous_in(_first_nodes_store(parameters))

    rendezvous_handler_registry.register(BACKEND, create)


def _first_nodes_store(parameters: RendezvousParameters) -> dist.Store:
    """The store at the only endpoint, whose node may start as late as others may join.

    Raises:
        RendezvousConnectionError: the first node didn't start in time.
    """
    host, _ = parse_rendezvous_endpoint(parameters.endpoint, -1)
    if host == parameters.local_addr and "is_host" not in parameters.config:
        parameters.config["is_host"] = True  # torch asks DNS, which may not know the name yet
        try:
            return create_backend(parameters)[1]
        except RendezvousConnectionError:  # another launcher at this address holds it
            del parameters.config["is_host"]
    deadline = time.monotonic() + join_seconds(parameters)
    while True:
        try:
            return create_backend(parameters)[1]
        except RendezvousConnectionError:
            if time.monotonic() >= deadline:
                raise
            print(
                f"Waiting for the first node at {parameters.endpoint}", file=sys.stderr, flush=True
            )


_CAUSES: dict[type[RendezvousError], str] = {
    RendezvousConnectionError: "can't reach the first node, or it has gone",
    RendezvousTimeoutError: "not enough nodes came in time",
    RendezvousClosedError: "the job has ended there",
    RendezvousStateError: (
        "its state is not signed with the RDZV_SECRET of this node; give all nodes the same"
    ),
}


def explain(error: RendezvousError) -> str:
    """Message for users: why this node could not meet the others."""
    texts = (text for kind, text in _CAUSES.items() if isinstance(error, kind))
    return next(texts, str(error))

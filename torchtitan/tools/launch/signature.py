"""Signatures of what a job's launchers write for each other, by the secret that they share."""

import hmac

from torch.distributed.elastic.rendezvous import RendezvousStateError

_BYTES = 32  # SHA-256


def signed(state: bytes, secret: bytes) -> bytes:
    """A state behind its signature."""
    return hmac.digest(secret, state, "sha256") + state


def verified(message: bytes, secret: bytes) -> bytes:
    """The state of a message of `signed`.

    Raises:
        RendezvousStateError: it was written without the secret.
    """
    state = message[_BYTES:]
    if not hmac.compare_digest(message, signed(state, secret)):
        raise RendezvousStateError("the state was not signed with this node's secret")
    return state

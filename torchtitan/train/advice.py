"""One-time hints about settings that slow a run without saving memory."""

from torchtitan.config.derive import selects_operations
from torchtitan.config.sections.parallelism import ActivationCheckpoint


def unneeded_recomputation(
    ac: ActivationCheckpoint, resident: float, available: float, ranks: int
) -> str | None:
    """A sentence on recomputed blocks whose activations this machine could keep, or None.

    With every k-th block recomputed, the other blocks' activations are in memory. Keeping all
    blocks' activations needs at most 1/(k - 1) of this process's memory more.

    Args:
        resident: memory of this process in a training step, in GiB.
        available: free memory of this machine, in GiB.
        ranks: number of such processes on this machine.
    """
    if ac.mode != "selective" or selects_operations(ac) or int(ac.selective_ac_option) < 2:
        return None
    every = int(ac.selective_ac_option)
    more = ranks * resident / (every - 1)
    if more > available / 2:
        return None
    # A block costs three forwards, as its backward costs two; one block in k costs a fourth.
    percent = 100 / (3 * every + 1)
    return (
        f"Recomputing one block in {every} takes up to {percent:.0f} % of a step, and saves at "
        f"most about {more:.1f} GiB of memory, of which {available:.1f} are free: "
        'activation_checkpoint.mode = "none" gives the same numbers faster'
    )

"""What costs a run time for nothing, said once."""

from torchtitan.config.derive import selects_operations
from torchtitan.config.sections.parallelism import ActivationCheckpoint


def unneeded_recomputation(
    ac: ActivationCheckpoint, resident: float, available: float, ranks: int
) -> str | None:
    """A sentence on recomputed blocks whose activations this machine could keep; None if it could
    not, or that isn't known.

    With every k-th block recomputed, the others' activations are in memory, so those of all blocks
    need at most 1/(k - 1) of this process's memory more.

    Args:
        resident: memory of this process in a training step, in GiB.
        available: memory that is free on this machine, in GiB.
        ranks: processes on this machine that need as much.
    """
    if ac.mode != "selective" or selects_operations(ac) or int(ac.selective_ac_option) < 2:
        return None
    every = int(ac.selective_ac_option)
    more = ranks * resident / (every - 1)
    if more > available / 2:
        return None
    # A block costs three forwards, its backward being two; one in k costs a fourth.
    saved = 100 / (3 * every + 1)
    return (
        f"Recomputing one block in {every} takes up to {saved:.0f} % of a step, and saves at most "
        f"about {more:.1f} GiB of memory, of which {available:.1f} are free: "
        'activation_checkpoint.mode = "none" gives the same numbers faster'
    )

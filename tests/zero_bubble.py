"""ZB-H1, a pipeline schedule that splits the backward and that torch lacks, as a user's file."""


def zb_h1(degree: int, microbatches: int) -> str:
    """The rows of the file: 1F1B, each rank postponing the weights' backward (`W`) until all ranks
    keep as many microbatches as the first (Qi et al., arXiv:2401.10241).
    """
    return "".join(f"{','.join(_rank(r, degree, microbatches))}\n" for r in range(degree))


def _rank(rank: int, degree: int, microbatches: int) -> list[str]:
    ahead = min(microbatches, degree - rank)
    order = [f"{rank}F{m}" for m in range(ahead)]
    for m in range(microbatches):
        if rank == 0:  # no stage waits for the gradients of its inputs
            order.append(f"0B{m}")
        else:
            order += [f"{rank}I{m}", *[f"{rank}W{m - rank}"] * (m >= rank)]
        order += [f"{rank}F{ahead + m}"] * (ahead + m < microbatches)
    first_left = microbatches if rank == 0 else max(0, microbatches - rank)
    return order + [f"{rank}W{m}" for m in range(first_left, microbatches)]

"""Faults for rehearsals, each by the name of its function. The last rank is at fault, unless the
name says otherwise; messages are between ranks 0 and 1.

The callback `fault` plants the one that job.description names after a step of a run.
"""

import os
import sys

import torch
import torch.distributed as dist

from tests.examples import z_loss  # noqa: F401, it registers a loss
from torchtitan.config.registry import callbacks, losses
from torchtitan.config.sections.schema import Config
from torchtitan.data.order.rows import IGNORE_INDEX
from torchtitan.optim.loss import build_loss
from torchtitan.train.callbacks import Callback
from torchtitan.utils.activity import note_exchange


def last():
    return dist.get_rank() == dist.get_world_size() - 1


def sums(count):
    """As many collectives, each of another size."""
    for size in range(1, count + 1):
        dist.all_reduce(torch.zeros(size))


def own_value():
    """A value that the host reads of this rank's own data."""
    return torch.empty(4).sum().item()


# ---- left out


def skip():
    if not last():
        dist.all_reduce(torch.zeros(4))


def two_left_out():
    sums(3 if last() else 5)


def three_left_out():
    sums(3 if last() else 6)


def four_left_out():
    sums(3 if last() else 7)


def rank_0_saves_alone():
    dist.barrier()
    if dist.get_rank() == 0:
        sums(3)


def rank_0_after_objects():
    """A fault after objects whose sizes depend on the data, which no rank waits for."""
    dist.all_gather_object([None] * dist.get_world_size(), "x" * int(own_value()))
    if dist.get_rank() == 0:
        dist.barrier()


def returns_early():
    """Before a validation of three sums, which a save of all ranks follows."""
    sums(2)
    if not last():
        for _ in range(3):
            dist.all_reduce(torch.zeros(8))
    dist.broadcast(torch.zeros(16), src=0)


def raises():
    if last():
        raise ValueError("boom")


def exits():
    if last():
        sys.exit("enough")


def objects(*lines):
    """Broadcasts of rank 0, each at another line, whose objects are used."""
    for line in lines:
        box = [line if dist.get_rank() == 0 else None]
        if line == "a":
            dist.broadcast_object_list(box, src=0)
        else:
            dist.broadcast_object_list(box, src=0)
        assert box[0].startswith(line)


def object_of_rank_0():
    """A save that broadcasts an object on rank 0 only, before another part broadcasts its own."""
    if dist.get_rank() == 0:
        dist.broadcast_object_list([["step", 1]], src=0)
    objects("a", "b")


def object_of_others():
    """A rank gets the wrong object, and fails for it."""
    if last():
        dist.broadcast_object_list([None], src=0)
    objects("a", "b")


def alike():
    """Left out among equal calls: only the line tells which one."""
    if not last():
        dist.all_reduce(torch.zeros(1))
    for _ in range(3):
        dist.all_reduce(torch.zeros(1))


# ---- other collectives


def order():
    group = dist.new_group([0, 1], group_desc="extra")
    for size in (8, 4) if last() else (4, 8):
        dist.all_reduce(torch.zeros(size), group=group)


def kind():
    dist.all_reduce(torch.zeros(4, dtype=torch.float64 if last() else torch.float32))


def shape():
    dist.all_reduce(torch.zeros(2 if last() else 4))


def reduction():
    dist.all_reduce(torch.zeros(4), op=dist.ReduceOp.MAX if last() else dist.ReduceOp.SUM)


def root():
    dist.broadcast(torch.zeros(4), src=1 if last() else 0)


def group():
    dist.new_group([0] if last() else [0, 1], group_desc="extra")


def group_order():
    for name in ("second", "first") if last() else ("first", "second"):
        dist.new_group([0, 1], group_desc=name)


def no_group():
    if not last():
        dist.new_group([0, 1], group_desc="extra")


# ---- by a rank's own data


def above_100():
    if own_value() > 100:
        dist.barrier()


def modulo_3():
    sums(int(own_value()) % 3)


def modulo_5():
    sums(int(own_value()) % 5)


def modulo_15():
    sums(int(own_value()) % 15)


def every_seventh():
    if int(own_value()) % 7 == 0:
        dist.barrier()


def third_value():
    """Of three ranks, only one reads a value for which this holds."""
    if int(own_value()) % 3 == 2:
        dist.barrier()


def loop():
    total = torch.empty(4).sum()
    while total.item() > 0.5:
        total = total / 2


# ---- checks of values at the start


def registered_loss():
    build_loss("counts_labels", Config().custom)
    skip()


def wrong_loss():
    build_loss("counts_all", Config().custom)


@losses.register("counts_all")
def counts_all():
    return lambda logits, labels: logits.float().logsumexp(-1).sum(1)


@losses.register("counts_labels")
def counts_labels():
    return lambda logits, labels: (labels != IGNORE_INDEX).float().sum(1)


# ---- messages


def unreceived():
    if dist.get_rank() == 0:
        dist.isend(torch.zeros(4), 1)


def unsent():
    if dist.get_rank() == 1:
        dist.irecv(torch.zeros(4), 0)


def size():
    if dist.get_rank() == 0:
        dist.isend(torch.zeros(4), 1)
    elif dist.get_rank() == 1:
        dist.irecv(torch.zeros(2), 0)


def way():
    """Two messages, each sent alone, which the other rank receives as one batch."""
    if dist.get_rank() == 0:
        for _ in range(2):
            dist.isend(torch.zeros(4), 1)
    elif dist.get_rank() == 1:
        dist.batch_isend_irecv([dist.P2POp(dist.irecv, torch.zeros(4), 0) for _ in range(2)])


def circle():
    """Each rank sends to the next one, and blocks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.send(torch.zeros(4), (rank + 1) % world)
    dist.recv(torch.zeros(4), (rank - 1) % world)


def crossed():
    """Each rank waits for a message before it enters a collective that the other has to enter
    first.
    """
    if dist.get_rank() == 0:
        dist.barrier()
        dist.send(torch.zeros(4), 1)
    else:
        dist.recv(torch.zeros(4), 0)
        dist.barrier()


def experts():
    note_exchange([0, 1], *((([3, 5], [3, 4])) if dist.get_rank() == 0 else ([4, 4], [6, 4])))


@callbacks.register("fault")
class Fault(Callback):
    def __init__(self):
        self.local_rank = int(os.environ["LOCAL_RANK"])

    def after_step(self, run, result):
        assert self.local_rank == dist.get_rank()
        if run.progress.step % 700 == 0:
            globals()[run.config.job.description]()

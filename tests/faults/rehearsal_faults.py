"""Faults for rehearsals: the callback `fault`; job.description names one.

Each happens after a step. The last rank is at fault; messages are between ranks 0 and 1.
"""

import torch
import torch.distributed as dist

from torchtitan.config.registry import callbacks
from torchtitan.train.callbacks import Callback
from torchtitan.utils.activity import note_exchange


def last():
    return dist.get_rank() == dist.get_world_size() - 1


def skip(run):
    if not last():
        dist.all_reduce(torch.zeros(4))


def order(run):
    group = dist.new_group([0, 1], group_desc="extra")
    for size in (8, 4) if last() else (4, 8):
        dist.all_reduce(torch.zeros(size), group=group)


def kind(run):
    dist.all_reduce(torch.zeros(4, dtype=torch.float64 if last() else torch.float32))


def reduction(run):
    dist.all_reduce(torch.zeros(4), op=dist.ReduceOp.MAX if last() else dist.ReduceOp.SUM)


def root(run):
    dist.broadcast(torch.zeros(4), src=1 if last() else 0)


def group(run):
    dist.new_group([0] if last() else [0, 1], group_desc="extra")


def data(run):
    weight = next(run.models[0].parameters()).to_local()
    if weight.sum().item() > 100:
        dist.barrier()


def loop(run):
    total = next(run.models[0].parameters()).to_local().sum()
    while total.item() > 100:
        total = total / 2


def raises(run):
    if last():
        raise ValueError("boom")


def unreceived(run):
    if dist.get_rank() == 0:
        dist.isend(torch.zeros(4), 1)


def unsent(run):
    if dist.get_rank() == 1:
        dist.irecv(torch.zeros(4), 0)


def size(run):
    if dist.get_rank() == 0:
        dist.isend(torch.zeros(4), 1)
    elif dist.get_rank() == 1:
        dist.irecv(torch.zeros(2), 0)


def way(run):
    """Two messages, each sent alone, which the other rank receives as one batch."""
    if dist.get_rank() == 0:
        for _ in range(2):
            dist.isend(torch.zeros(4), 1)
    elif dist.get_rank() == 1:
        dist.batch_isend_irecv([dist.P2POp(dist.irecv, torch.zeros(4), 0) for _ in range(2)])


def circle(run):
    other = 1 - dist.get_rank()
    dist.send(torch.zeros(4), other)
    dist.recv(torch.zeros(4), other)


def crossed(run):
    """Each rank waits for a message before it enters a collective that the other has to enter
    first.
    """
    if dist.get_rank() == 0:
        dist.barrier()
        dist.send(torch.zeros(4), 1)
    else:
        dist.recv(torch.zeros(4), 0)
        dist.barrier()


def experts(run):
    note_exchange([0, 1], *((([3, 5], [3, 4])) if dist.get_rank() == 0 else ([4, 4], [6, 4])))


@callbacks.register("fault")
class Fault(Callback):
    def after_step(self, run, result):
        globals()[run.config.job.description](run)

"""Windows, sinks and narrow values under context parallelism, against an explicit softmax over
whole rows; and what travels.
"""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.attention import documents, inputs, reference
from torchtitan.models.attention import dense as attention_dense
from torchtitan.models.attention.backend import attention_backend, document_mask
from torchtitan.models.attention.interface import Scores
from torchtitan.parallel.context import attention as context
from torchtitan.parallel.context.attention import build_row_layout, ring_attention_backend
from torchtitan.parallel.context.layout import RowLayout
from torchtitan.parallel.context.ulysses import copies_of_keys, ulysses_attention_backend
from torchtitan.parallel.context.window import tails

ROW = 32
KINDS = [
    {},
    {"window": 1},
    {"window": 3, "sinks": True},
    {"window": 13, "mask": True, "scale": 0.3},
    {"window": 30, "sinks": True, "e": 8, "kv_heads": 4},
    {"window": 32, "e": 16},
    {"sinks": True, "scale": 0.5, "e": 8},
    {"sinks": True, "mask": True},
    {"e": 8, "mask": True, "kv_heads": 1},
    {"window": 5, "sinks": True, "e": 8, "mask": True},
]


def build(method, balanced):
    group = dist.group.WORLD
    if method == "ulysses":
        attend = attention_backend("cpu")
        return ulysses_attention_backend(attend, build_row_layout(group, balanced))
    return ring_attention_backend(group, method, balanced)


def arguments(kind, dtype=torch.float32):
    """Queries, keys and values; sinks; and the window and scale of `Scores`."""
    *qkv, sinks = inputs(dtype, s=ROW, e=kind.get("e", 12), kv_heads=kind.get("kv_heads", 2))
    own = {name: kind[name] for name in ("window", "scale") if name in kind}
    return qkv, (sinks if "sinks" in kind else None), own


def differentiated(attend, qkv, mask, sinks, kind, weights):
    """Output and all gradients."""
    leaves = [x.clone().requires_grad_() for x in qkv]
    if sinks is not None:
        sinks = sinks.clone().requires_grad_()
        leaves.append(sinks)
    out = attend(*leaves[:3], Scores(mask, **kind), sinks)
    return [out, *torch.autograd.grad((out * weights).sum(), leaves)]


def exact(q, k, v, scores, sinks):
    return reference(q, k, v, *scores, sinks)


def differences(method, balanced, backend=None, kinds=KINDS):
    """The largest difference of this rank's part for each kind, relative to the largest element or
    1.

    The gradient of sinks is summed over the ranks, as that of any parameter.
    """
    attend = build(method, balanced)
    mine = build_row_layout(dist.group.WORLD, balanced).positions(ROW)
    if backend is not None:
        attend = torch.compile(attend, backend=backend, fullgraph=True, dynamic=False)
    results = []
    for kind in kinds:
        qkv, sinks, own = arguments(kind)
        weights = torch.linspace(-1, 1, ROW)[:, None]
        rows = torch.arange(ROW) if method == "ulysses" else mine
        masks = [
            document_mask(documents(ROW), positions, torch.float32) if "mask" in kind else None
            for positions in (torch.arange(ROW), rows)
        ]
        expected = differentiated(exact, qkv, masks[0], sinks, own, weights)
        local = [x[:, :, mine] for x in qkv]
        actual = differentiated(attend, local, masks[1], sinks, own, weights[mine])
        parts = [x[:, :, mine] for x in expected[:4]]
        if sinks is not None:
            dist.all_reduce(actual[4])
            parts.append(expected[4])
        results.append(
            max(
                ((a - b).abs().max() / b.abs().max().clamp(min=1)).item()
                for a, b in zip(actual, parts, strict=True)
            )
        )
    return results


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("method", ["allgather", "alltoall", "ulysses"])
def test_every_kind_is_that_of_one_process(ranks, world, method, balanced):
    for results in ranks(world, differences, method, balanced):
        assert max(results) < 1e-5, dict(zip(map(str, KINDS), results, strict=True))


@pytest.mark.parametrize("method", ["alltoall", "ulysses"])
def test_kinds_compile_in_one_graph(ranks, method):
    """Unbalanced: one rank sends keys, the other receives them."""
    for results in ranks(2, differences, method, False, "aot_eager", KINDS[-1:]):
        assert max(results) < 1e-5


class Sent(TorchDispatchMode):
    """Elements that this rank receives from others.

    Modes don't see what operators do inside: `inside` replaces the ring's collectives.
    """

    def __init__(self):
        super().__init__()
        self.elements = 0

    def count(self, name, args, out):
        others = dist.get_world_size() - 1
        if name == "all_to_all_single":
            self.elements += sum(args[1]) - args[1][dist.get_rank()]
        elif name == "all_gather_into_tensor":
            self.elements += args[0].numel() * others
        elif name == "reduce_scatter_tensor":
            self.elements += out.numel() * others

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        self.count(operation.overloadpacket.__name__, args, out)
        return out

    def inside(self):
        def counting(name):
            def call(*args):
                out = getattr(torch.ops._c10d_functional, name)(*args)
                self.count(name, args, out)
                return out

            return call

        names = ("all_gather_into_tensor", "all_to_all_single", "reduce_scatter_tensor")
        functions = {name: counting(name) for name in names}
        wait = torch.ops._c10d_functional.wait_tensor
        return patch.object(context, "c10d", SimpleNamespace(wait_tensor=wait, **functions))


def traffic(method, balanced, kind):
    """Elements received in the forward and in the backward, and pairs of query and key computed."""
    qkv, sinks, own = arguments(kind)
    mine = build_row_layout(dist.group.WORLD, balanced).positions(ROW)
    attend = build(method, balanced)
    q, k, v = (x[:, :, mine].clone().requires_grad_() for x in qkv)
    pairs = []
    band_forward = attention_dense.band_forward

    def noting(q, k, *rest):
        pairs.append(q.shape[2] * k.shape[2])
        return band_forward(q, k, *rest)

    with patch.object(attention_dense, "band_forward", noting), Sent() as forward, forward.inside():
        out = attend(q, k, v, Scores(**own), sinks)
    with Sent() as backward, backward.inside():
        out.sum().backward()
    return forward.elements, backward.elements, sum(pairs)


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("method", ["allgather", "alltoall"])
def test_a_window_moves_and_computes_what_it_sees(ranks, method, balanced):
    """Of 4 ranks with 8 positions: 2 keys before each chunk, unless they are on the same rank."""
    world = 4
    kind = {"window": 3}
    b, kv_heads, d = 2, 2, 12
    results = ranks(world, traffic, method, balanced, kind)
    boundaries = 2 * world - 2 if balanced else world - 1  # the last rank's two chunks are adjacent
    size = b * kv_heads * (d + d)
    for direction in (0, 1):
        assert sum(result[direction] for result in results) == boundaries * 2 * size
    chunks = 2 * world if balanced else world
    length = ROW // chunks
    assert sum(result[2] for result in results) == ROW * length + (chunks - 1) * length * 2


@pytest.mark.parametrize(
    ("window", "skipped"), [(1, 12), (2, 9), (9, 9), (10, 7), (17, 7), (18, 6)]
)
def test_a_rank_is_visited_only_if_seen(window, skipped):
    """Of the 12 pairs of 4 ranks with 8 keys each, unbalanced, 6 are causal."""
    layout = RowLayout("", 4, 0, balanced=False)
    pairs = [(a, b) for a in range(4) for b in range(4) if a != b]
    assert sum(not tails(layout, a, b, 8, window) for a, b in pairs) == skipped


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("window", [2, 4, 7, 20, 31])
def test_what_is_needed_is_what_is_seen(balanced, window):
    layout = RowLayout("", 4, 0, balanced)
    length = ROW // (8 if balanced else 4)
    for to in range(4):
        mine = layout._replace(rank=to).positions(ROW)
        distance = mine[:, None] - torch.arange(ROW)
        seen = ((distance >= 0) & (distance < window)).any(0)
        seen[mine] = False
        sent = torch.zeros(ROW, dtype=torch.bool)
        for source in range(4):
            for chunk, count in tails(layout, source, to, length, window).items():
                sent[(chunk + 1) * length - count : (chunk + 1) * length] = True
        assert torch.equal(sent, seen)


@pytest.mark.parametrize("world", [2, 4])
def test_ulysses_moves_heads_once_each_way(ranks, world):
    """Queries, keys, values and output: a rank keeps 1/n of each. The backward sends as much back.

    With fewer key heads than ranks, each is sent to the ranks of its query heads.
    """
    b, s, d, e, heads, kv_heads = 2, ROW // world, 12, 8, 4, 2
    copies = max(1, world // kv_heads)
    size = b * s * (heads * (d + e) + copies * kv_heads * (d + e))
    expected = size * (world - 1) // world
    for forward, backward, _ in ranks(world, traffic, "ulysses", True, {"e": 8}):
        assert forward == backward == expected


def test_ulysses_refuses_heads_that_do_not_divide():
    assert [copies_of_keys(8, 2, 4), copies_of_keys(8, 8, 4), copies_of_keys(8, 1, 8)] == [2, 1, 8]
    for sizes in ((6, 2, 4), (12, 3, 2), (12, 3, 4)):
        with pytest.raises(ValueError, match="can't be split"):
            copies_of_keys(*sizes)

"""What ranks send each other to save and to load: the same few numbers in any world, since each
rank derives what it writes; and that all of every tensor is written.
"""

import contextlib
import functools
import itertools
import json
import math
import threading
import time
from collections import Counter
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.checkpoints import (
    ABOUT,
    manifest,
    outcome,
    rank_file,
    save_steps,
    sealed,
    small_checkpointer,
)
from tests.checkpoints import train_state as state_of
from torchtitan.checkpoint import Checkpointer, TrainedModel, manager
from torchtitan.checkpoint import save as saving
from torchtitan.checkpoint import writer as writing
from torchtitan.checkpoint.format import layout as layouts
from torchtitan.checkpoint.format.index import Index
from torchtitan.checkpoint.format.layout import Cut, Layout
from torchtitan.checkpoint.format.manifest import CheckpointInfo, read_manifest
from torchtitan.checkpoint.writer import CommittingWriter
from torchtitan.commands import ckpt
from torchtitan.config.sections import schema
from torchtitan.utils.errors import CheckpointError

MESSAGES = ("send", "recv", "broadcast", "all_reduce", "all_gather", "barrier")
OBJECTS_OF_RANK_0 = "broadcast_object_list"
OBJECTS = (
    "all_gather_object",
    "gather_object",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
)


@contextlib.contextmanager
def counted():
    """Counts this rank's messages and their bytes. Of objects, rank 0 alone may broadcast any."""
    found = Counter()

    def counting(name, call):
        def wrapper(*args, **kwargs):
            found[name] += 1
            found["bytes"] += sum(x.nbytes for x in args if isinstance(x, torch.Tensor))
            return call(*args, **kwargs)

        return wrapper

    with contextlib.ExitStack() as stack:
        for name in (*MESSAGES, OBJECTS_OF_RANK_0):
            call = counting(name, getattr(dist, name))
            stack.enter_context(mock.patch.object(dist, name, call))
        for name in OBJECTS:
            refuse = mock.Mock(side_effect=AssertionError(name))
            stack.enter_context(mock.patch.object(dist, name, refuse))
        yield found


# ---- counts


@contextlib.contextmanager
def fake_world(size):
    dist.init_process_group("fake", rank=size - 1, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def sharded(folder, rows, world, **settings):
    """A model whose weights are sharded over all ranks, with its optimizer's state."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, rows) for _ in range(3)))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    config = schema.Checkpoint(enable=True, folder=str(folder), keep_latest_k=0, **settings)
    return Checkpointer(config, "", TrainedModel([model], optimizer), ABOUT)


def saved_alone(folder, world):
    """Messages of the last rank of a fake world in a save, and in the search for its own parts."""
    agreeing = lambda sums, **_: sums.zero_()  # noqa: E731 - nobody fails, or differs
    with (
        fake_world(world),
        mock.patch.object(dist, "new_group", return_value=None),
        mock.patch.object(manager, "from_rank_0", lambda value: value),
    ):
        checkpointer = sharded(folder, world, world)
        with mock.patch.object(dist, "all_reduce", agreeing), counted() as first:
            checkpointer.save(1, state_of(1))
        tensors = checkpointer.trained.tensors()
        written = rank_file(folder / ".step-1.tmp", world - 1)
        own = {key: json.dumps(about["layout"]) for key, about in written["tensors"].items()}
        places = {
            len(list(Layout(*json.loads(own[f"{part}.{name}"])).ranks(tuple(x.shape), box)))
            for part, values in tensors.items()
            for name, x in values.items()
            if f"{part}.{name}" in own
            for box in x.__create_chunk_list__()
        }
    return first, written, own, places


def test_a_rank_of_any_world_derives_its_own_plan(tmp_path):
    found = {}
    for world in (8, 512, 16384):
        messages, written, own, places = saved_alone(tmp_path / str(world), world)
        assert messages == {"all_reduce": 3, "bytes": 3 * 8 * saving.NUMBERS}
        assert places == {1}, "the rank finds its boxes in one file"
        assert len(own) == 6 * 3, "weights and two moments; the counters are the first rank's"
        found[world] = {
            key: (about["dtype"], [part[1] for part in about["parts"]])
            for key, about in written["tensors"].items()
        }
        assert max(map(len, own.values())) < 30, "bytes of a layout"
    assert found[8] == found[512] == found[16384], "one row each"


def save_and_load(folder):
    world = dist.get_world_size()
    checkpointer = sharded(folder, world, world)
    with counted() as saved:
        checkpointer.save(1, state_of(1))
    again = sharded(folder, world, world, load_only=True)
    with counted() as loaded:
        assert again.resume().step == 1
    checkpointer.close()
    return saved, loaded


def test_messages_are_as_many_on_two_ranks_as_on_four(ranks, tmp_path):
    found = {}
    for world in (2, 4):
        each = ranks(world, save_and_load, tmp_path / str(world))
        loads = [loaded for _, loaded in each]
        assert all(loaded == loads[0] for loaded in loads)
        found[world] = {name: count for name, count in loads[0].items() if name != "bytes"}
        for saved, _ in each:
            assert saved == {"all_reduce": 3, "bytes": 3 * 8 * saving.NUMBERS}
    assert found[2] == found[4]
    sizes = [len((tmp_path / f"{world}/step-1/tensors.json").read_bytes()) for world in (2, 4)]
    assert sizes[0] == sizes[1]


# ---- layouts


@st.composite
def cut_tensors(draw):
    """A mesh whose axes cut a tensor, as ranks and cuts of each dimension."""
    size = tuple(draw(st.lists(st.integers(1, 13), min_size=1, max_size=3)))
    counts = draw(st.lists(st.integers(1, 5), max_size=3))
    cuts = [[] for _ in size]
    stride = 1
    for count in counts:
        cuts[draw(st.integers(0, len(size) - 1))].insert(0, Cut(count, stride))
        stride *= count
    return size, Layout(draw(st.integers(0, 3)), cuts), stride


@settings(max_examples=60, derandomize=True, database=None, deadline=None)
@given(cut_tensors(), st.data())
def test_layouts_find_exactly_the_ranks_whose_boxes_overlap(cut, data):
    size, layout, world = cut
    boxes = {rank: layout.box(size, rank) for rank in range(layout.first, layout.first + world)}
    cells = [
        cell
        for offsets, sizes in boxes.values()
        for cell in itertools.product(
            *(range(a, a + b) for a, b in zip(offsets, sizes, strict=True))
        )
    ]
    assert Counter(cells) == Counter(itertools.product(*map(range, size))), "each element once"
    starts = [data.draw(st.integers(0, length)) for length in size]
    counts = [data.draw(st.integers(0, length - a)) for a, length in zip(starts, size, strict=True)]
    box = ChunkStorageMetadata(torch.Size(starts), torch.Size(counts))
    overlap = {
        rank
        for rank, (offsets, sizes) in boxes.items()
        if all(
            max(a, c) < min(a + b, c + d)
            for a, b, c, d in zip(offsets, sizes, starts, counts, strict=True)
        )
    }
    assert set(layout.ranks(size, box)) == overlap


def writing_to(folder):
    """Opens a writer of a checkpoint that has only weights."""
    info = CheckpointInfo(step=1, model_only=True, train_state=None, **ABOUT)
    return functools.partial(CommittingWriter, folder, info)


def save_layouts(folder):
    """Save tensors in all layouts of a mesh, uneven ones included; what others read of them."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("a", "b"))
    kinds = {
        "sharded twice": (Shard(0), Shard(0)),
        "in both": (Shard(0), Shard(1)),
        "in replicas": (Replicate(), Shard(0)),
        "of all": (Replicate(), Replicate()),
        "replicas inside": (Shard(1), Replicate()),
    }
    state = {}
    for name, placements in kinds.items():
        for size in ((8, 6), (5, 3), (1, 7), (200, 300)):
            values = torch.arange(math.prod(size), dtype=torch.float32).view(size)
            key = f"{name} {size}".replace(".", "")
            state[key] = distribute_tensor(values, mesh, placements, src_data_rank=None)
    with mock.patch.object(layouts, "_SPREAD", 64):
        flat = mesh["b"]
        sub = fully_shard(nn.Linear(5, 7), mesh=flat)
        state |= {f"fsdp {name}": x.detach() for name, x in sub.named_parameters()}
        weights = {key: value for key, value in state.items() if "fsdp" not in key}
        saving.save({"model": weights}, writing_to(folder))
    target = {key: torch.zeros(value.shape) for key, value in state.items() if "fsdp" not in key}
    dcp.load({"model": target}, checkpoint_id=folder, no_dist=True)
    expected = {key: torch.arange(x.numel()).view(x.shape).float() for key, x in target.items()}
    return [key for key, x in target.items() if not torch.equal(x, expected[key])]


def test_every_layout_is_written_once_and_found(ranks, tmp_path):
    assert ranks(4, save_layouts, tmp_path / "step-1") == [[]] * 4, "by torch's own reader"
    assert ckpt.main(["verify", str(tmp_path / "step-1")]) == 0
    files = [rank_file(tmp_path / "step-1", rank)["tensors"] for rank in range(4)]
    assert all(files), "copies share the work"
    index = Index(tmp_path / "step-1", read_manifest(tmp_path / "step-1"))
    for key, layout in index._layouts.items():
        assert layout is not None, key
        parts = [rank for rank in range(4) if key in files[rank]]
        size = tuple(index.metadata.state_dict_metadata[key].size)
        whole = ChunkStorageMetadata(torch.Size([0] * len(size)), torch.Size(size))
        assert sorted(set(layout.ranks(size, whole))) == parts, key


# ---- faults


def hold_others(folder):
    """Rank 1 has a tensor that rank 0 lacks: nobody may think that another one writes it."""
    state = {"a": torch.ones(2)}
    if dist.get_rank() == 1:
        state["b"] = torch.ones(3)
    try:
        saving.save({"model": state}, writing_to(folder))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def test_a_tensor_of_one_rank_is_not_lost(ranks, tmp_path):
    for text in ranks(2, hold_others, tmp_path / "step-1"):
        assert text.startswith("FormatBugError: ranks hold different tensors")
    assert not (tmp_path / "step-1").exists()


def after_a_failure(folder):
    """Saves that fail on one rank, in each of their parts; then others succeed."""
    checkpointer = small_checkpointer(folder)
    checkpointer.save(1, state_of(1))
    texts = []
    for step, name in enumerate(("begin", "write_data", "finish"), 2):
        failing = mock.patch.object(CommittingWriter, name, side_effect=OSError(28, "full " * 300))
        other = name == "write_data" and dist.get_rank() == 0
        with (
            contextlib.nullcontext() if other else failing,
            pytest.raises(CheckpointError) as error,
        ):
            checkpointer.save(step, state_of(step))
        texts.append(str(error.value))
    texts.append(write_elsewhere(checkpointer))
    leave_the_commit(checkpointer, 5, folder.with_name("left"))
    with losing_connections(at=2), pytest.raises(RuntimeError):
        checkpointer.save(7, state_of(7))
    if dist.get_rank() == 0:
        assert (folder / ".step-7.tmp").exists(), "others may still write"
    checkpointer.close()
    save_steps(folder, 6)
    return texts, outcome(folder)


def write_elsewhere(checkpointer):
    """Rank 1 writes into a folder of its own, and then into one that rank 0 sees late."""
    write = writing.write_file

    def late(path, content):
        hidden = path.with_name(".hidden")
        write(hidden, content)
        threading.Timer(0.3, hidden.rename, (path,)).start()

    for write_late in (lambda *_: None, late):
        with (
            mock.patch.object(writing, "write_file", write_late if dist.get_rank() else write),
            mock.patch.object(writing, "VISIBLE_WITHIN", 30 if write_late is late else 0.1),
        ):
            try:
                checkpointer.save(5, state_of(5))
            except CheckpointError as error:
                text = str(error)
    return text


@contextlib.contextmanager
def losing_connections(at):
    """This rank's all-reduce number `at`, from 1, fails as after another rank's death."""
    count = itertools.count(1)
    real = dist.all_reduce

    def lose(*args, **kwargs):
        if next(count) == at:
            raise RuntimeError("Connection closed by peer")
        return real(*args, **kwargs)

    with mock.patch.object(dist, "all_reduce", lose):
        yield


def leave_the_commit(checkpointer, step, left):
    """Rank 1 loses its connections, as after another rank's death, while rank 0 commits."""
    if dist.get_rank() == 1:
        with (
            losing_connections(at=3),
            pytest.raises(RuntimeError, match=r"^Connection closed"),  # as it is
        ):
            checkpointer.save(step, state_of(step))
        left.touch()
        saving.Phases(checkpointer.group).run(lambda: ())
        return
    commit = writing.commit

    def late(final):
        while not left.exists():
            time.sleep(0.01)
        commit(final)

    with mock.patch.object(writing, "commit", late):
        checkpointer.save(step, state_of(step))


def test_a_failure_of_one_rank_reaches_all(ranks, tmp_path):
    folder = tmp_path / "checkpoint"
    (texts, step), other = ranks(2, after_a_failure, folder)
    assert (texts, step) == other
    assert step == 6
    unseen = texts.pop()
    assert "doesn't see" in unseen
    assert "step-5.tmp/__1.json, which rank 1 has written; checkpoint.folder must be" in unseen
    for rank, text in zip((0, 1, 0), texts, strict=True):
        assert f": rank {rank}: OSError: [Errno 28] full full" in text
        assert "Free some space" in text
    assert sorted(p.name for p in folder.iterdir()) == ["step-1", "step-5", "step-6"]
    assert manifest(folder / "step-6")["written"]["ranks"] == 2
    assert ckpt.main(["verify", str(folder / "step-5")]) == 0, "what rank 0 committed alone"


BOX = st.tuples(st.integers(0, 4), st.integers(0, 4)).map(
    lambda ends: (min(ends), abs(ends[0] - ends[1]))
)


@given(st.lists(st.tuples(BOX, BOX), max_size=6), st.tuples(BOX, BOX), st.randoms())
@settings(max_examples=300, deadline=None)
def test_boxes_fill_a_tensor_as_counting_each_element_says(boxes, whole, random):
    """Random boxes, which mostly don't, and tilings, which do until one is replaced."""

    def chunk(box):
        return ChunkStorageMetadata(*(torch.Size(values) for values in zip(*box, strict=True)))

    def counted(boxes):
        hits = torch.zeros(8, 8)
        for (i, m), (j, n) in boxes:
            hits[i : i + m, j : j + n] += 1
        (i, m), (j, n) = whole
        return bool((hits[i : i + m, j : j + n] == 1).all())

    tiles = [((i, 2), (j, 2)) for i in (0, 2) for j in (0, 2)]
    other = [*tiles[1:], random.choice([*tiles, *boxes, tiles[0]])]
    for case in (boxes, tiles, other):
        assert layouts.fill(map(chunk, case), chunk(whole)) == counted(case)


def test_a_save_that_writes_a_half_twice_is_called_a_bug(ranks, tmp_path):
    message = ranks(1, save_a_half_twice, tmp_path / "run")[0]
    assert "the ranks wrote elements twice, and others not at all: this is a bug" in message
    assert not list((tmp_path / "run").glob("step-*"))


def save_a_half_twice(folder):
    """As with a mistake in the layouts of ranks."""
    real = CommittingWriter._describe

    def describe(self, save, rank, plan, results):
        out = real(self, save, rank, plan, results)
        record = rank_file(self.path, rank)
        for tensor in record["tensors"].values():
            if len(tensor["size"]) == 2:
                ((offsets, (rows, columns), *where),) = tensor["parts"]
                tensor["parts"] = [[offsets, [rows, columns // 2], *where]] * 2
        (self.path / f"__{rank}.json").write_bytes(sealed(record))
        return out

    with mock.patch.object(CommittingWriter, "_describe", describe):
        try:
            save_steps(folder, 1)
        except CheckpointError as error:
            return str(error)
    return ""

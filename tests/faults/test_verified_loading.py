"""Checkpoints are verified while they are loaded: every byte is read once, and none that is damaged
is used.
"""

import io
import random
import zlib
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.checkpoints import ABOUT, flip, on_rank_0, rank_file, train_state
from torchtitan.checkpoint import Checkpointer, TrainedModel
from torchtitan.checkpoint import load as loading
from torchtitan.checkpoint.format import sums
from torchtitan.checkpoint.format.sums import SummedFile, SummedRange, crc32_of_end
from torchtitan.config.sections import schema
from torchtitan.utils.files import open_regular
from torchtitan.utils.storage import storage_path

SIZE = 300
"""Rows and columns: the parts are larger than what `SummedRange` keeps of them."""


def test_sums_of_the_end_are_those_of_zlib():
    content = random.Random(0).randbytes(1 << 16)
    for cut in (0, 1, 2, 7, 4096, 65535, 65536):
        whole = zlib.crc32(content)
        before = zlib.crc32(content[:cut])
        assert crc32_of_end(before, whole, len(content) - cut) == zlib.crc32(content[cut:])
    file = SummedFile(io.BytesIO())
    for piece in (content[:5], content[5:70], content[70:]):
        file.tell()
        file.write(piece[:2])
        file.write(piece[2:])
    file.tell()
    assert file.crc32 == zlib.crc32(content)
    assert [file.crc32_of(0, 5), file.crc32_of(5, 65), file.crc32_of(0, 70)] == [
        zlib.crc32(content[a:b]) for a, b in ((0, 5), (5, 70), (0, 70))
    ]


class Counted(io.BytesIO):
    count = 0

    def readinto(self, buffer):
        count = super().readinto(
            memoryview(buffer)[:50_000]
        )  # a disk may return less than was asked for
        self.count += count
        return count


@pytest.mark.parametrize("length", [0, 1, 1000, 1 << 16, (1 << 16) + 1, 1 << 17, 1 << 19])
def test_a_part_reads_as_a_file_and_knows_its_sum(length):
    content = random.Random(length).randbytes(length + 20)
    part = SummedRange(Counted(content), 10, length)
    expected = io.BytesIO(content[10:-10])
    draw = random.Random(1)
    for _ in range(20):
        position = draw.randrange(length + 5)
        count = draw.randrange(length + 5)
        part.seek(position)
        expected.seek(position)
        assert part.read(count) == expected.read(count)
    assert part.seek(0, io.SEEK_END) == length
    assert part.crc32() == zlib.crc32(content[10:-10])


def test_a_tensor_is_read_once(monkeypatch):
    file = Counted()
    tensor = torch.rand(SIZE, SIZE)
    torch.save(tensor, file)
    part = SummedRange(file, 0, len(file.getvalue()))
    assert torch.equal(torch.load(part, weights_only=True), tensor)
    assert part.crc32() == zlib.crc32(file.getvalue())
    assert file.count == len(file.getvalue())


# ---- runs


def sharded(folder, **settings):
    """A checkpointer of a layer that is sharded over all ranks. Called by all."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.LayerNorm(SIZE))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    config = schema.Checkpoint(enable=True, folder=str(folder), keep_latest_k=0, **settings)
    return Checkpointer(
        config, "", TrainedModel([model], torch.optim.AdamW(model.parameters())), ABOUT
    )


def fill(checkpointer, value):
    """Let all weights be `value`; their moments, which aren't, follow from the steps so far."""
    for param in checkpointer.trained.models[0].parameters():
        param.grad = torch.full_like(param, value)
    checkpointer.trained.optimizer.step()
    with torch.no_grad():
        for param in checkpointer.trained.models[0].parameters():
            param.fill_(value)


def contents(checkpointer):
    """All tensors, whole."""
    tensors = checkpointer.trained.tensors()
    return {
        f"{part}.{name}": value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
        for part in tensors
        for name, value in tensors[part].items()
    }


def save(folder, *steps):
    checkpointer = sharded(folder)
    saved = {}
    for step in steps:
        fill(checkpointer, step)
        checkpointer.save(step, train_state(step))
        saved[step] = contents(checkpointer)
    checkpointer.close()
    return saved


def resume(folder, **settings):
    """The step that is resumed, what was loaded, and the bytes that this rank read of each file."""
    read = {}

    class Counting:
        def __init__(self, path, file):
            self.path = path
            self.file = file

        def readinto(self, view):
            return self.count(self.file.readinto(view))

        def read(self, size):
            content = self.file.read(size)
            self.count(len(content))
            return content

        def count(self, size):
            read[self.path.name] = read.get(self.path.name, 0) + size
            return size

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def __getattr__(self, name):
            return getattr(self.file, name)

    def opened(path, **options):
        return Counting(path, open_regular(path, **options))

    checkpointer = sharded(folder, load_only=True, **settings)
    with (
        mock.patch.object(loading, "open_regular", opened),
        mock.patch.object(sums, "open_regular", opened),
    ):
        resumed = checkpointer.resume()
    return resumed.step, contents(checkpointer), read


def save_and_resume(folder):
    """By all ranks: what they saved, and what they load."""
    return save(folder, 1)[1], resume(folder)


def shards(read):
    return {name: size for name, size in read.items() if name.endswith(".distcp")}


def total(results):
    found = {}
    for _, (*_, read) in results:
        for name, size in shards(read).items():
            found[name] = found.get(name, 0) + size
    return found


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_every_byte_is_read_once(ranks, tmp_path):
    results = ranks(2, save_and_resume, tmp_path / "checkpoint")
    step = tmp_path / "checkpoint/step-1"
    sizes = {path.name: path.stat().st_size for path in step.glob("*.distcp")}
    assert len(sizes) == 2
    parts = {
        name: [part for rank in range(2) for part in written_parts(step, rank, name)]
        for rank in range(2)
        for name in rank_file(step, rank)["tensors"]
    }
    lengths = {name: sum(length for *_, length, _ in found) for name, found in parts.items()}
    assert sum(lengths.values()) == sum(sizes.values()), "the sums of the parts cover the files"
    counters = sum(length for name, length in lengths.items() if "step" in name)
    for saved, (resumed, loaded, _) in results:
        assert resumed == 1
        assert equal(loaded, saved)
    # The step counters of AdamW, which all ranks have, are stored once and read by both.
    assert sum(total(results).values()) == sum(sizes.values()) + counters


def written_parts(step, rank, name):
    """The parts of a tensor that a rank has written."""
    tensors = rank_file(step, rank)["tensors"]
    return tensors[name]["parts"] if name in tensors else []


def resume_damaged(folder, damages, seed):
    """What all ranks resume from of two checkpoints, the newer with a bit flipped somewhere, each
    of several times.
    """
    saved = save(folder, 1, 2)
    step = folder / "step-2"
    draw = random.Random(seed)
    found = []
    sizes = {path.name: path.stat().st_size for path in sorted(step.glob("*.distcp"))}
    dist.barrier()
    for _ in range(damages):
        name = draw.choice(list(sizes))
        position = draw.randrange(sizes[name])
        on_rank_0(flip, step / name, position)
        found.append((name, position, resume(folder)[:2]))
        on_rank_0(flip, step / name, position)
    assert resume(folder)[0] == 2
    return saved[1], found


@pytest.mark.parametrize("damages", [8, pytest.param(100, marks=pytest.mark.slow)])
def test_whichever_bit_is_flipped_everything_comes_from_the_checkpoint_before(
    ranks, tmp_path, damages
):
    folder = tmp_path / "checkpoint"
    for saved, found in ranks(2, resume_damaged, folder, damages, damages):
        for name, position, (step, loaded) in found:
            assert step == 1, (name, position)
            assert equal(loaded, saved), (name, position)


def refusals(folder):
    """The error if the only checkpoint is damaged where one rank reads, on all ranks."""
    save(folder, 1)
    on_rank_0(flip, folder / "step-1/__1_0.distcp", 5000)
    try:
        resume(folder)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def test_the_error_names_the_place(ranks, tmp_path):
    for text in ranks(2, refusals, tmp_path / "checkpoint"):
        assert text.startswith("CheckpointError: no checkpoint can be resumed")
        assert (
            f"{tmp_path}/checkpoint/step-1 is damaged: __1_0.distcp has a wrong checksum in bytes "
            in text
        )


def on_one_rank(folder):
    return resume(folder)


def test_other_numbers_of_ranks(ranks, tmp_path):
    folder = tmp_path / "checkpoint"
    saved = ranks(2, save, folder, 1)[0][1]
    files = {path.name: path.stat().st_size for path in (folder / "step-1").iterdir()}
    step, loaded, read = ranks(1, on_one_rank, folder)[0]
    assert step == 1
    assert equal(loaded, saved)
    assert shards(read) == shards(files), "on fewer ranks, too, each part is read once"


def damaged_url(url):
    """From remote storage, on one rank: the bytes read, and a fallback."""
    save(url, 1, 2)
    folder = storage_path(url)
    read = []
    fetch = folder.fs.cat_file

    def counted(path, **options):
        content = fetch(path, **options)
        read.append((Path(path).name, len(content)))
        return content

    with mock.patch.object(type(folder.fs), "cat_file", staticmethod(counted)):
        step = resume(url)[0]
    size = (folder / "step-2/__0_0.distcp").stat().st_size
    flip(folder / "step-2/__0_0.distcp", size // 2)
    return step, read, size, resume(url)[0]


def test_remote_storage(ranks):
    step, read, size, fallback = ranks(1, damaged_url, "memory://verified")[0]
    assert step == 2
    assert read == [("__0_0.distcp", size)], "in one request"
    assert fallback == 1

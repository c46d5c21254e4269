"""The same documents in many forms, and loaders of them."""

import itertools
import json
import struct

import numpy as np
import torch

from torchtitan.config.sections.data import DataLoader, Source
from torchtitan.data.encode.tokenizer import build_tokenizer
from torchtitan.data.loader import build_loader
from torchtitan.data.read.positions import complete_state
from torchtitan.data.spec import DataSpec

TOKENIZER = build_tokenizer("./tests/assets/tokenizer")
TEXTS = ["", "a, b\tc", "two\nlines\r\nand a third", 'say "so"', "ä日本🚀", "\ufeff x"] + [
    f"{i} of {i * i} words, as {'many ' * (i % 5)}others" for i in range(25)
]


def loader(path, *, stream=False):
    """Reads the files in a folder in any order, or in sequence through `datasets`."""
    source = Source(name="data", **{"dataset" if stream else "dataset_path": str(path)})
    spec = DataSpec(
        sources=[source],
        tokenizer=TOKENIZER,
        seq_len=16,
        rows_per_step=4,
        seed=1,
        infinite=True,
        options=DataLoader(),
    )
    return build_loader(spec, dp_rank=0, dp_degree=1)


def take(loader, count):
    try:
        return list(itertools.islice(iter(loader), count))
    finally:
        loader.close()


def write_json_lines(path, texts=TEXTS):
    path.write_text("".join(json.dumps({"text": text, "n": 1}) + "\n" for text in texts))
    return path


def assert_same_rows(path, other):
    """The first steps from `path`, interrupted and resumed, are those from `other`."""
    expected = take(loader(other), 9)
    whole = take(loader(path), 5)
    resumed = loader(path)
    position = whole[-1].position
    resumed.seek(complete_state(resumed.local_state(position), [position]))
    for step, theirs in zip([*whole, *take(resumed, 4)], expected, strict=True):
        assert torch.equal(step.tokens, theirs.tokens)
        assert torch.equal(step.labels, theirs.labels)


def write_megatron(folder, name="corpus", dtype=np.uint16, code=8, sentences=1):
    """As Megatron's builder does, each text a document of sequences, with end-of-text at its
    end.
    """
    documents = [[TOKENIZER.bos_id, *TOKENIZER.encode(text), TOKENIZER.eos_id] for text in TEXTS]
    parts = [part for ids in documents for part in np.array_split(ids, sentences)]
    lengths = np.array([len(part) for part in parts], np.int32)
    starts = (np.cumsum(lengths, dtype=np.int64) - lengths) * np.dtype(dtype).itemsize
    bounds = np.arange(len(documents) + 1, dtype=np.int64) * sentences
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, code, len(lengths), len(bounds))
    (folder / f"{name}.idx").write_bytes(
        header + lengths.tobytes() + starts.tobytes() + bounds.tobytes()
    )
    (folder / f"{name}.bin").write_bytes(np.concatenate(parts).astype(dtype).tobytes())
    return folder / f"{name}.bin"

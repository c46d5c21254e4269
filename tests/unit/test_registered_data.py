"""Sources, documents and tokenizers that a module of the user registers."""

import itertools
import json

import pytest
import torch

from tests.positions import saved
from torchtitan.config.sections.data import DataLoader, Source
from torchtitan.data.encode.tokenizer import Tokenizer, build_tokenizer
from torchtitan.data.loader import build_loader
from torchtitan.data.read.opening import Retry
from torchtitan.data.read.streams import StreamCursor
from torchtitan.data.registered import open_custom
from torchtitan.data.spec import DataSpec
from torchtitan.utils.errors import UserError

pytestmark = pytest.mark.usefixtures("registered")


class Texts(list):
    fingerprint = "texts"


def test_a_data_source_without_its_methods_or_text_is_refused():
    for made, text in {
        object(): r"made a object without __len__, __getitem__, fingerprint",
        ("a",): "made a tuple without fingerprint",
    }.items():
        with pytest.raises(UserError, match=text):
            open_custom(lambda path, made=made: made, "mine", None, "training")
    for made, text in {
        (): r'training\.dataset: "mine" is empty',
        ("", ""): "no text in its first 2 documents",
        (3,): "has a int as document 0; it must be a string",
    }.items():
        with pytest.raises(UserError, match=text):
            open_custom(lambda path, made=made: Texts(made), "mine", None, "training")
    assert open_custom(lambda path: Texts([path]), "mine", "a", "training")[0] == "a"


def texts(shards):
    for shard in shards:
        for i in range(9):
            yield {"text": f"{shard}: " + " ".join(str(i * k) for k in range(20))}


def stream(dataset_path):
    return datasets().IterableDataset.from_generator(
        texts, gen_kwargs={"shards": ["a", "b", "c", "d"]}
    )


def shuffled(dataset_path):
    return stream(dataset_path).shuffle(seed=3, buffer_size=9)


def documents(dataset_path):
    return Texts(row["text"] for row in texts("abcd"))


def datasets():
    return pytest.importorskip("datasets")


def rows(*names, path=None, rank=0, degree=1, after=(), steps=4):
    """Tokens of the steps that follow the positions `after`, and the position after them."""
    sources = [
        Source(name=name, dataset=name, dataset_path=path if name == "file" else None)
        for name in names
    ]
    spec = DataSpec(
        sources=sources,
        tokenizer=build_tokenizer("./tests/assets/tokenizer"),
        seq_len=16,
        rows_per_step=4,
        seed=1,
        infinite=True,
        options=DataLoader(),
        custom={"stream": stream, "documents": documents, "shuffled": shuffled},
    )
    loader = build_loader(spec, dp_rank=rank, dp_degree=degree)
    if after:
        loader.seek(saved(loader, *after))
    batches = list(itertools.islice(iter(loader), steps))
    loader.close()
    return torch.cat([batch.tokens for batch in batches]).view(steps, -1, 16), batches[-1].position


def test_every_epoch_of_a_stream_has_an_order():
    """The documents of an epoch, differently shuffled; after a resume, too."""
    cursor, other = (
        StreamCursor(shuffled(None), 0, 1, True, Retry("training", "shuffled", DataLoader()))
        for _ in range(2)
    )
    epochs = [[cursor.next() for _ in range(36)] for _ in range(2)]
    between = cursor.position()
    epochs.append([cursor.next() for _ in range(36)])
    assert [sorted(epoch) for epoch in epochs] == 3 * [sorted(row["text"] for row in texts("abcd"))]
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    other.seek(between)
    assert [other.next() for _ in range(36)] == epochs[2]


@pytest.mark.parametrize("names", [["stream"], ["documents"], ["documents", "stream"]])
def test_registered_sources_keep_the_global_order_and_resume(names):
    whole, _ = rows(*names)
    parts, positions = zip(
        *(rows(*names, rank=rank, degree=2, steps=2) for rank in (0, 1)), strict=True
    )
    assert torch.equal(torch.cat(parts, dim=1), whole[:2])
    assert torch.equal(rows(*names, after=positions, steps=2)[0], whole[2:])


def test_registered_documents_are_read_as_those_of_a_file(tmp_path):
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in texts("abcd")))
    assert torch.equal(rows("documents")[0], rows("file", path=str(file))[0])


class Letters(Tokenizer):
    fingerprint = "letters"
    vocab_size = 3
    bos_id = None
    eos_id = 3

    def __init__(self, path): ...

    def _ids(self, text):
        return [0]

    def decode(self, ids):
        return ""


def test_a_tokenizer_that_lacks_something_is_refused(monkeypatch):
    with pytest.raises(UserError, match=r"model\.tokenizer: PosixPath must be a subclass"):
        build_tokenizer("x", lambda path: path)
    with pytest.raises(
        UserError, match=r"Letters has the special ids \[3\], which must be below its vocab_size 3"
    ):
        build_tokenizer("x", Letters)
    monkeypatch.setattr(Letters, "eos_id", 2)
    assert build_tokenizer("x", Letters).encode("abc", eos=True) == [0, 2]
    monkeypatch.delattr(Letters, "fingerprint")
    with pytest.raises(UserError, match="Letters must set fingerprint, str; got 'nothing'"):
        build_tokenizer("x", Letters)

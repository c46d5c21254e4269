"""`torchtitan data` against an independent count with the `tokenizers` library, and its draws
against closed forms.
"""

import bz2
import gzip
import json
import random
import re
from collections import Counter

import numpy as np
import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from tests.browser import CHROMIUM, browser
from tests.chats import CHATML, write_tokenizer
from torchtitan.commands import data as command
from torchtitan.commands import tokenize as tokenize_command
from torchtitan.config.sections.data import DataLoader, DataStage, Source
from torchtitan.data.encode.tokenizer import build_tokenizer
from torchtitan.data.read.opening import FileStamp
from torchtitan.data.spec import DataSpec
from torchtitan.data.tokens.token_files import TokenFiles, write_token_file
from torchtitan.tools.corpus import sampling, tally
from torchtitan.tools.corpus.columns import DocumentColumns, Drawn
from torchtitan.tools.corpus.mixture import mixture
from torchtitan.tools.corpus.sampling import draw_items
from torchtitan.tools.corpus.survey import survey
from torchtitan.tools.corpus.tally import ReadOptions
from torchtitan.tools.corpus.token_reading import _Documents
from torchtitan.utils.errors import UserError

ASSETS = "./tests/assets/tokenizer"
TOKENIZER = build_tokenizer(ASSETS)
WORDS = ["the", "tokenizer", " makes", "\n", "<b>", "naïve", "日本語", "🚀", "x = 1", "self."]


def texts(count=400, seed=0):
    """Texts of very different lengths; the last two are the same."""
    rng = random.Random(seed)
    made = [
        " ".join(rng.choices(WORDS, k=1 + int(rng.lognormvariate(3, 1.2))))
        for _ in range(count - 1)
    ]
    return [*made, made[-1]]


def write_lines(file, some, **more):
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in some), **more)
    return file


def run(capsys, *argv):
    assert command.main([*map(str, argv), "--json", "--workers", "1"]) == 0
    return json.loads(capsys.readouterr().out)


def counted(some):
    """Ids of each text by the library itself, with begin-of-text and end-of-text."""
    backend = Backend.from_file(str(TOKENIZER.path))
    backend.encode_special_tokens = True
    bos = [TOKENIZER.bos_id] if TOKENIZER.bos_id is not None else []
    return [
        [*bos, *backend.encode(text, add_special_tokens=False).ids, TOKENIZER.eos_id]
        for text in some
    ]


def check(source, some, seq_len):
    """The figures of a source against numpy's of the library's ids."""
    ids = counted(some)
    lengths = np.array([len(one) for one in ids])
    sizes = np.array([len(text.encode()) for text in some])
    exact = {"documents": len(some), "tokens": lengths.sum(), "bytes": sizes.sum()}
    for name, value in exact.items():
        assert source[name] == {"value": value, "noise": 0}, name
    assert source["bytes_per_token"]["value"] == pytest.approx(sizes.sum() / lengths.sum())
    for key, values in (("lengths", lengths), ("of_documents", sizes / lengths)):
        found = source[key]
        for percent in ("1", "5", "25", "50", "75", "95", "99"):
            expected = np.percentile(values, int(percent), method="inverted_cdf")
            assert found[percent] == pytest.approx(expected), (key, percent)
        assert found["mean"] == pytest.approx(values.mean())
        assert (found["min"], found["max"]) == (values.min(), values.max())
    long = lengths > seq_len
    assert source["longer"] == {
        "documents": pytest.approx(long.mean()),
        "tokens": pytest.approx(lengths[long].sum() / lengths.sum()),
    }
    for one in source["histogram"]:
        inside = (lengths >= one["from"]) & (lengths <= one["to"])
        assert one["documents"] == pytest.approx(inside.mean())
        assert one["tokens"] == pytest.approx(lengths[inside].sum() / lengths.sum())
    counts = Counter(id for one in ids for id in one)
    plain = {id: n for id, n in counts.items() if id not in (TOKENIZER.bos_id, TOKENIZER.eos_id)}
    use = source["vocabulary"]
    assert use["seen"] == len(plain)
    assert use["entries"] == TOKENIZER.vocab_size - 2
    assert {one["id"]: one["share"] for one in use["frequent"]} == {
        id: pytest.approx(n / lengths.sum()) for id, n in Counter(plain).most_common(20)
    }
    ordered = np.cumsum(sorted(plain.values())[::-1]) / sum(plain.values())
    assert use["covering"] == {
        name: int((ordered < share).sum()) + 1
        for name, share in (("50%", 0.5), ("90%", 0.9), ("99%", 0.99))
    }
    # A byte-level tokenizer: each character of an entry's name is a byte.
    byte_of = {name: byte for byte, name in bytes_to_unicode().items()}
    parts = 0
    for id, n in plain.items():
        spelled = bytes(byte_of[c] for c in TOKENIZER.backend.id_to_token(id))
        try:
            spelled.decode()
        except UnicodeDecodeError:
            parts += n
    assert parts
    assert use["parts"]["tokens"] == pytest.approx(parts / lengths.sum())


def bytes_to_unicode():
    """GPT-2's names of bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + i) for i, byte in enumerate(others)
    }


# ---- everything


def test_figures_are_those_of_the_library(tmp_path, capsys):
    some = texts()
    lines = write_lines(tmp_path / "a.jsonl", some)
    with lines.open("a") as file:
        file.write('\n{"text": null}\n{"text": 3}\n{"text": null}\n')
    table = pyarrow.table({"text": some, "n": range(len(some))})
    pyarrow.parquet.write_table(table, tmp_path / "b.parquet", row_group_size=100)
    found = run(capsys, lines, tmp_path / "b.parquet", "--tokenizer", ASSETS, "--seq-len", 64)
    assert found["steps"] is found["mixture"] is None
    of_lines, of_table = found["sources"]
    for source in (of_lines, of_table):
        check(source, some, 64)
        assert not source["drawn"]
        again = len(some) - len(set(some))
        assert source["duplicates"]["documents"] == again >= 1
    assert of_lines["bad"] == {"null text": 2, "not a string": 1}
    assert of_lines["first_bad"] == f"{lines}: line {len(some) + 2}: column 'text' is null"
    assert of_table["bad"] == {}
    assert command.main([str(lines), "--workers", "2", "--seq-len", "64"]) == 0
    text = capsys.readouterr().out
    assert f"bad documents: 2 null text, 1 not a string; the first is {lines}: line" in text
    assert f"{of_lines['vocabulary']['seen']:,} of 2,046 entries occur" in text


def test_token_files_have_the_figures_of_their_text(tmp_path, capsys, monkeypatch):
    some = texts()
    lines = write_lines(tmp_path / "a.jsonl", some)
    argv = ["--input", str(lines), "--output", str(tmp_path / "tokens"), "--workers", "1"]
    assert tokenize_command.main([*argv, "--part", "150"]) == 0
    capsys.readouterr()
    monkeypatch.setattr("torchtitan.tools.corpus.token_reading._WINDOW", 1000)
    (source,) = run(capsys, tmp_path / "tokens", "--seq-len", 64)["sources"]
    check(source, some, 64)
    assert source["kind"] == "3 token files"
    report = json.loads((tmp_path / "tokens" / "tokens-report.json").read_text())
    assert source["duplicates"] == report["duplicates"]
    assert source["duplicates"]["documents"] >= 1


def test_packed_token_files_are_refused(tmp_path, capsys):
    lines = write_lines(tmp_path / "a.jsonl", texts(20))
    argv = ["--input", str(lines), "--output", str(tmp_path / "tokens"), "--workers", "1"]
    assert tokenize_command.main([*argv, "--best-fit", "64"]) == 0
    with pytest.raises(UserError, match="are packed: they hold padding"):
        command.main([str(tmp_path / "tokens")])


def test_an_error_names_the_source(tmp_path, monkeypatch):
    """A file changes between the time it is found and read."""
    file = tmp_path / "a.txt"
    file.write_text("text")

    def change(items):
        file.write_text("another text")
        yield list(items)

    monkeypatch.setattr("torchtitan.tools.corpus.reading.batch_documents", change)
    with pytest.raises(UserError, match=f"^{re.escape(str(file))}: .* changed"):
        command.main([str(file), "--workers", "1"])


def test_more_documents_than_are_kept(tmp_path, capsys, monkeypatch):
    some = texts(2000)
    monkeypatch.setattr(tally, "_MAX_LENGTHS", 300)
    (source,) = run(capsys, write_lines(tmp_path / "a.jsonl", some))["sources"]
    lengths = np.array([len(one) for one in counted(some)])
    assert source["documents"] == {"value": 2000, "noise": 0}
    assert source["tokens"] == {"value": lengths.sum(), "noise": 0}
    rank = (lengths <= source["lengths"]["50"]).mean()
    assert rank == pytest.approx(0.5, abs=4 * 0.5 / 150**0.5)  # at least 150 are kept


# ---- drawn at random


def draw_always(monkeypatch):
    """Although so little could be read whole."""
    for module in ("reading", "token_reading"):
        monkeypatch.setattr(f"torchtitan.tools.corpus.{module}.WHOLE_BELOW", 1)


def test_places_are_drawn_in_proportion_to_sizes(tmp_path):
    some = ["", "a" * 10, "b" * 100, "c" * 1000]
    lines = write_lines(tmp_path / "a.jsonl", some)
    with lines.open("a") as file:
        file.write("\n" * 40)  # blank lines: no documents, but bytes
    (tmp_path / "b.txt").write_text("d" * 500)
    stamps = [FileStamp.of(lines), FileStamp.of(tmp_path / "b.txt")]
    size = sum(stamp.size for stamp in stamps)
    drawn = Counter()
    total = 0.0
    for item, times in draw_items(stamps, "text", 20_000, seed=0):
        total += sum(one.weight * one.raw for one in times)
        if item is None:
            drawn["blank"] += len(times)
        elif item.content == "d" * 500:
            drawn["file"] += len(times)
        else:
            drawn[json.loads(item.content)["text"]] += len(times)
            assert {one.raw for one in times} == {len(item.content)}
    assert total == pytest.approx(size)
    expected = {text: len(json.dumps({"text": text})) + 1 for text in some}
    for what, of in {**expected, "blank": 40, "file": 500}.items():
        share = of / size
        error = (share * (1 - share) / 20_000) ** 0.5
        assert drawn[what] / 20_000 == pytest.approx(share, abs=4 * error), what


def test_lines_across_blocks_and_at_the_ends_of_files(tmp_path, monkeypatch):
    monkeypatch.setattr(sampling, "_BLOCK", 7)
    some = ["x" * 30, "", "y" * 6, "z" * 100]
    file = write_lines(tmp_path / "a.jsonl", some)
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes().rstrip(b"\n"))  # a BOM, and no last end
    seen = set()
    for item, _ in draw_items([FileStamp.of(file)], "text", 500, seed=1):
        seen.add(json.loads(item.content)["text"])
    assert seen == set(some)


def test_intervals_hold_the_truth_95_times_of_100():
    """Of sizes that differ a hundredfold, and tokens that follow them roughly."""
    rng = np.random.default_rng(0)
    sizes = np.ceil(rng.lognormal(6, 1, 5000))
    tokens = np.maximum(1, np.round(sizes / rng.normal(4, 0.5, 5000).clip(2)))
    truth = {"documents": 5000, "tokens": tokens.sum(), "ratio": sizes.sum() / tokens.sum()}
    hits = Counter()
    for _ in range(400):
        chosen = rng.choice(5000, 200, p=sizes / sizes.sum())
        drawn = [
            Drawn(sizes.sum() / 200 / sizes[i], sizes[i], unit, "places")
            for unit, i in enumerate(chosen)
        ]
        columns = DocumentColumns.from_draws(tokens[chosen], sizes[chosen], drawn)
        estimates = {
            "documents": columns.total(columns.documents),
            "tokens": columns.total(columns.tokens),
            "ratio": columns.ratio(columns.bytes, columns.tokens),
        }
        for name, (value, noise) in estimates.items():
            hits[name] += abs(value - truth[name]) <= noise
        assert columns.total(columns.bytes).value == pytest.approx(sizes.sum())
        assert columns.total(columns.bytes).noise == pytest.approx(0, abs=1e-3 * sizes.sum())
    for name in truth:
        assert 0.9 <= hits[name] / 400 <= 0.985, name


@pytest.mark.parametrize("kind", ["lines", "compressed", "parquet", "arrow", "tokens"])
def test_a_sample_estimates_the_whole(tmp_path, capsys, monkeypatch, kind):
    draw_always(monkeypatch)
    some = texts(3000)
    folder = tmp_path / "data"
    folder.mkdir()
    if kind == "compressed":
        for i in range(60):
            lines = "".join(json.dumps({"text": text}) + "\n" for text in some[i::60])
            (folder / f"{i:02}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    elif kind in ("parquet", "arrow"):
        for i in range(40):
            table = pyarrow.table({"text": some[i::40], "n": range(75)})
            file = folder / f"{i:02}.{kind}"
            if kind == "parquet":
                pyarrow.parquet.write_table(table, file, row_group_size=25)
            else:
                pyarrow.feather.write_feather(table, file, "uncompressed", chunksize=25)
    else:
        write_lines(folder / "a.jsonl", some)
    path = folder
    if kind == "tokens":
        argv = ["--input", str(folder), "--output", str(tmp_path / "tokens"), "--workers", "1"]
        assert tokenize_command.main([*argv, "--part", "1000"]) == 0
        capsys.readouterr()
        path = tmp_path / "tokens"
    ids = counted(some)
    lengths = np.array([len(one) for one in ids])
    size = sum(len(text.encode()) for text in some)
    (source,) = run(capsys, path, "--sample", 600, "--seq-len", 64, "--seed", 3)["sources"]
    assert source["drawn"]
    assert 400 <= source["read"]["documents"] <= 640  # some were drawn twice
    for name, truth in (("documents", 3000), ("tokens", lengths.sum()), ("bytes", size)):
        found = source[name]
        assert found["value"] == pytest.approx(truth, abs=1.5 * found["noise"] + 1), name
        assert found["noise"] < 0.25 * truth
    ratio = source["bytes_per_token"]
    assert ratio["value"] == pytest.approx(size / lengths.sum(), abs=1.5 * ratio["noise"])
    assert 0 < ratio["noise"] < 0.05
    rank = (lengths <= source["lengths"]["50"]).mean()
    assert rank == pytest.approx(0.5, abs=0.12)
    assert source["longer"]["documents"] == pytest.approx((lengths > 64).mean(), abs=0.1)
    counts = Counter(id for one in ids for id in one)
    first = source["vocabulary"]["frequent"][0]
    assert first["share"] == pytest.approx(counts[first["id"]] / lengths.sum(), rel=0.1)
    again = run(capsys, path, "--sample", 600, "--seq-len", 64, "--seed", 3)["sources"][0]
    assert again == source  # a seed is a sample


def test_beginnings_that_are_whole_files_are_exact(tmp_path, capsys, monkeypatch):
    draw_always(monkeypatch)
    some = texts(50)
    pyarrow.parquet.write_table(pyarrow.table({"text": some}), tmp_path / "a.parquet")
    (source,) = run(capsys, tmp_path, "--sample", 200)["sources"]
    assert source["documents"] == {"value": 50, "noise": 0}
    assert source["tokens"] == {"value": sum(map(len, counted(some))), "noise": 0}


def test_files_count_by_their_size(tmp_path, capsys, monkeypatch):
    draw_always(monkeypatch)
    for name, text, count in (("a", "one", 4000), ("b", "two " * 500, 10)):
        lines = (json.dumps({"text": text}) + "\n") * count
        (tmp_path / f"{name}.jsonl.bz2").write_bytes(bz2.compress(lines.encode()))
        (tmp_path / f"{name}.csv").write_text("text\n" + f"{text}\n" * count)
    for kind in ("jsonl.bz2", "csv"):
        (source,) = run(capsys, f"{tmp_path}/*.{kind}", "--sample", 20)["sources"]
        assert source["drawn"]
        assert source["documents"]["value"] == pytest.approx(4010, rel=0.02), kind
        assert source["bytes"]["value"] == pytest.approx(4000 * 3 + 10 * 2000, rel=0.02), kind


def test_of_a_long_text_parts_are_read(tmp_path, capsys, monkeypatch):
    draw_always(monkeypatch)
    monkeypatch.setattr(sampling, "_LONG_TEXT", 10_000)
    monkeypatch.setattr(sampling, "_CHUNK_BYTES", 2000)
    text = " ".join(texts(1500))
    (tmp_path / "a.txt").write_text(text)
    size = len(text.encode())
    assert size > 200_000
    (source,) = run(capsys, tmp_path / "a.txt", "--sample", 40)["sources"]
    tokens = len(counted([text])[0])
    assert source["documents"]["value"] == pytest.approx(1)
    assert source["bytes"]["value"] == pytest.approx(size)
    assert source["tokens"]["value"] == pytest.approx(tokens, rel=0.05)
    assert source["read"]["bytes"] <= 40 * 2000


def test_documents_around_places_of_token_files(tmp_path):
    rng = np.random.default_rng(0)
    eos = TOKENIZER.eos_id
    documents = [[*rng.integers(10, 2000, n), eos] for n in (1, 5, 40, 3, 100, 7)]
    write_token_file(tmp_path / "a.bin", documents, TOKENIZER, {"bytes": 1})
    tail = [[1500, 1501, 1502]]  # ends without end-of-text
    write_token_file(tmp_path / "b.bin", [*documents[:2], *tail], TOKENIZER, {"bytes": 1})
    files = TokenFiles([tmp_path / "a.bin", tmp_path / "b.bin"], 16, TOKENIZER, "here")
    counts = [tokens for *_, tokens in files.files]
    parts = _Documents(files, counts, eos)
    for which, whole in enumerate((documents, [*documents[:2], *tail])):
        offset = 0
        for document in whole:
            for inside in range(len(document)):
                found = parts.document_at(which, offset + inside)
                assert found.tolist() == [int(id) for id in document]
            offset += len(document)


# ---- sources that are no files


class Numbered:
    """Documents that a module of the user registers."""

    fingerprint = "1"

    def __init__(self, some):
        self.some = some

    def __len__(self):
        return len(self.some)

    def __getitem__(self, index):
        return self.some[index]


def of_registered(made, sample, name="mine"):
    spec = DataSpec(
        sources=[Source(name=name, dataset=name)],
        tokenizer=TOKENIZER,
        seq_len=64,
        rows_per_step=1,
        seed=0,
        infinite=False,
        options=DataLoader(),
        custom={name: lambda path: made},
    )
    (source,) = survey(spec, ReadOptions(sample, 0, 1))["sources"]
    return source


def test_registered_documents():
    some = texts(300)
    check(of_registered(Numbered(some), None), some, 64)
    source = of_registered(Numbered(some), 100)
    assert source["read"]["documents"] == 100
    assert source["documents"]["value"] == pytest.approx(300)
    truth = sum(map(len, counted(some)))
    assert source["tokens"]["value"] == pytest.approx(truth, abs=1.5 * source["tokens"]["noise"])
    source = of_registered(Numbered([*some, "half a pair: \ud800"]), None)
    assert source["bad"] == {"lone surrogate": 1}
    assert source["first_bad"].startswith("mine: document 301: half a surrogate pair")


def test_a_stream_is_read_from_its_beginning():
    from datasets import IterableDataset

    some = texts(50)
    stream = IterableDataset.from_generator(
        lambda: ({"text": text} for text in [*some[:5], None, *some])
    )
    source = of_registered(stream, 30)
    check(source, [*some[:5], *some[:25]], 64)
    assert source["bad"] == {"null text": 1}
    assert source["of_stream"]
    with pytest.raises(UserError, match="mine is a stream, whose length is unknown; give --sample"):
        of_registered(stream, None)


def test_a_source_without_documents(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"text": 1}\n{"text": null}\n')
    argv = [str(tmp_path / "a.jsonl"), "--html", str(tmp_path / "a.html")]
    (source,) = run(capsys, *argv)["sources"]
    assert source["documents"]["value"] == 0
    assert source["bytes_per_token"] is None
    assert source["bad"] == {"not a string": 1, "null text": 1}
    assert command.main(argv[:1]) == 0
    text = capsys.readouterr().out
    assert "  bad documents: 1 not a string, 1 null text; the first is" in text
    assert "  no documents" in text


# ---- other vocabularies


def other_tokenizer(folder, model, **parts):
    """A tokenizer of the library with end-of-text."""
    backend = Backend(model)
    for name, part in parts.items():
        setattr(backend, name, part)
    backend.add_special_tokens(["</s>"])
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    return folder


def test_what_a_byte_fallback_costs(tmp_path, capsys):
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "a", "b"]
    model = models.BPE(
        {piece: id for id, piece in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>"
    )
    decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    folder = other_tokenizer(tmp_path / "tokenizer", model, decoder=decoder)
    write_lines(tmp_path / "a.jsonl", ["ab", "ä\n", "a語"])
    (source,) = run(capsys, tmp_path / "a.jsonl", "--tokenizer", folder)["sources"]
    # 2 + 3 + 4 tokens, and 3 ends; "ä" is 2 bytes, "語" is 3, and a line break is a whole character
    assert source["tokens"]["value"] == 12
    assert source["bytes"]["value"] == 9
    use = source["vocabulary"]
    assert use["parts"] == {"tokens": pytest.approx(5 / 12), "bytes": pytest.approx(5 / 9)}
    assert use["unknown"] == 0


def test_text_that_a_vocabulary_can_not_encode(tmp_path, capsys):
    model = models.WordLevel({"<unk>": 0, "one": 1, "two": 2}, unk_token="<unk>")
    split = pre_tokenizers.Whitespace()
    folder = other_tokenizer(tmp_path / "tokenizer", model, pre_tokenizer=split)
    write_lines(tmp_path / "a.jsonl", ["one two three", "four"])
    (source,) = run(capsys, tmp_path / "a.jsonl", "--tokenizer", folder)["sources"]
    assert source["vocabulary"]["unknown"] == pytest.approx(2 / 6)
    assert command.main([str(tmp_path / "a.jsonl"), "--tokenizer", str(folder)]) == 0
    assert "unknown text, which the vocabulary can't encode: 33.3%" in capsys.readouterr().out


# ---- conversations


def test_conversations_are_counted_as_the_template_renders_them(tmp_path, capsys):
    folder = write_tokenizer(tmp_path / "tokenizer", CHATML)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    turns = [[("user", "2+2?"), ("assistant", "4")], [("user", "<|im_end|>"), ("assistant", "ok")]]
    with (tmp_path / "a.jsonl").open("w") as file:
        for turn in turns:
            messages = [{"role": role, "content": content} for role, content in turn]
            file.write(json.dumps({"messages": messages}) + "\n")
        file.write('{"messages": [{"role": "user", "content": "alone"}]}\n')
    argv = [tmp_path / "a.jsonl", "--tokenizer", folder, "--messages-column", "messages"]
    (source,) = run(capsys, *argv)["sources"]
    assert source["documents"]["value"] == 2
    assert sum(source["bad"].values()) == 1
    first = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns[0])
    ids = backend.encode(first, add_special_tokens=False).ids
    assert source["lengths"]["min"] in (len(ids), len(ids) + 1, len(ids) + 2)  # with its ends


# ---- a configuration


def mixed(tokens, steps=1000):
    """What two sources give in two stages, the second of `tokens` that are read at most twice."""
    spec = DataSpec(
        sources=[Source(name="a", weight=3), Source(name="b", dataset_path="b/", max_epochs=2)],
        stages=[DataStage(from_step=501, weights={"b": 9.0}, seq_len=128)],
        tokenizer=TOKENIZER,
        seq_len=64,
        rows_per_step=16,
        seed=0,
        infinite=True,
        options=DataLoader(),
    )
    return mixture(spec, steps, {"a": None, "b": tokens})


def test_what_a_mixture_reads():
    a, b = mixed(10**6)
    assert (a["name"], b["name"]) == ("a", "b")
    # 500 steps of 16 rows of 64 at 3 : 1, then 500 of 16 rows of 128 at 3 : 9
    assert (a["rows"], b["rows"]) == (6000 + 2000, 2000 + 6000)
    assert b["tokens"] == 2000 * 64 + 6000 * 128
    assert b["epochs"] == b["tokens"] / 10**6
    assert a["epochs"] is None
    assert a["share"] == a["tokens"] / (a["tokens"] + b["tokens"])
    assert [one["rows"] for one in mixed(10**6, steps=100)] == [1200, 400]


def test_a_source_that_ends_gives_its_share_to_the_others():
    a, b = mixed(10**5)  # within the second stage
    assert b["tokens"] == 2000 * 64 + (2 * 10**5 - 2000 * 64) // 128 * 128
    assert a["rows"] + b["rows"] == 16_000
    a, b = mixed(1000)  # within the first
    assert b["rows"] == 2000 // 64
    assert a["rows"] + b["rows"] == 16_000


def test_a_configuration_names_sources_and_steps(tmp_path, capsys):
    some = texts(100)
    write_lines(tmp_path / "a.jsonl", some)
    (tmp_path / "my.toml").write_text(
        f"""
[training]
steps = 50
seq_len = 64
local_batch_size = 2
global_batch_size = 2
[[training.sources]]
name = "web"
dataset_path = "{tmp_path}/a.jsonl"
[[training.sources]]
name = "more"
dataset_path = "{tmp_path}/a.jsonl"
"""
    )
    found = run(capsys, tmp_path / "my.toml", "--training.steps=100")
    assert [source["name"] for source in found["sources"]] == ["web", "more"]
    assert (found["steps"], found["seq_len"]) == (100, 64)
    tokens = sum(map(len, counted(some)))
    for one in found["mixture"]:
        assert (one["rows"], one["epochs"]) == (100, pytest.approx(6400 / tokens))
    assert command.main([str(tmp_path / "my.toml"), "--workers", "1"]) == 0
    text = capsys.readouterr().out
    assert "In 50 steps training reads" in text
    assert re.search(r"^web +50 +3.20K +50.0% ", text, re.M)


# ---- mistakes, and the page


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["nowhere"], "nowhere: no file matches 'nowhere'"),
        (
            ["demo", "--training.steps=3"],
            "--training.steps=3: a key of the configuration, and none",
        ),
        (["debug_model", "--tokenizer", ASSETS], "has a key for that; give --model.hf_assets_path"),
        (["debug_model", "demo"], "debug_model demo: a configuration names its sources; give it"),
        (["debug_model", "--training.dataset=c4"], "training.dataset: c4 is a stream"),
        (["demo", "--tokenizer", "tests"], "model.hf_assets_path: tests holds no tokenizer"),
        (["demo", "--messages-column", "messages"], "--messages-column: "),
        (["demo", "--html", "/nowhere/a.html"], "--html /nowhere/a.html: there is no folder"),
    ],
)
def test_mistakes_are_explained(argv, error, monkeypatch):
    monkeypatch.setattr(
        "torchtitan.tools.corpus.reading.open_stream", lambda *_: None
    )  # no network
    with pytest.raises(UserError) as raised:
        command.main([*argv, "--workers", "1"])
    assert error in str(raised.value)


def test_a_registered_tokenizer_is_refused(monkeypatch):
    monkeypatch.setattr(command.tokenizers, "chosen", lambda *_: build_tokenizer)
    with pytest.raises(UserError, match="is registered by your own module"):
        command.main(["debug_model"])


@pytest.mark.e2e
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_the_page(tmp_path, capsys):
    hostile = "<img src=x onerror=alert(1)></script><script>alert(2)</script>"
    folder = tmp_path / f"{hostile.replace('/', '')}.jsonl"
    write_lines(folder, [*texts(100), hostile])
    with folder.open("a") as file:
        file.write('{"text": null}\n')
    write_lines(tmp_path / "b.jsonl", texts(50))
    page = tmp_path / "page.html"
    assert (
        command.main([str(folder), str(tmp_path / "b.jsonl"), "--html", str(page), "--workers=1"])
        == 0
    )
    first, _ = run(capsys, folder, tmp_path / "b.jsonl")["sources"]
    with browser(tmp_path / "profile") as tab:
        for width, dark in ((500, True), (1280, False)):
            tab.open(page.as_uri(), width, dark=dark)
            assert tab.problems == []
            assert tab.evaluate("document.documentElement.scrollWidth") == width
            assert tab.evaluate("document.images.length + document.scripts.length") == 2
        shown = tab.evaluate(
            "Object.fromEntries([...document.querySelector('[data-source]')"
            ".querySelectorAll('[data-figure]')].map(e => [e.dataset.figure, e.textContent]))"
        )
        assert shown["documents"] == f"{first['documents']['value']:,.0f}"
        assert shown["tokens"] == f"{first['tokens']['value']:,.0f}"
        assert shown["bytes_per_token"] == f"{first['bytes_per_token']['value']:.3f}"
        assert tab.evaluate("document.querySelector('.bad').textContent").endswith("1 null text")

"""`torchtitan tokenize`: documents held out, and duplicates dropped, whatever the order, the files,
the workers and interruptions.
"""

import hashlib
import json
import random
import re
import subprocess
import sys

import numpy as np
import pytest

from torchtitan.commands import data, tokenize
from torchtitan.commands import tokenizer as tokenizer_command
from torchtitan.data.encode.tokenizer import build_tokenizer
from torchtitan.data.encode.tokenizer_training import train_tokenizer
from torchtitan.data.read.corpus import Corpus
from torchtitan.data.read.files import find_token_files
from torchtitan.data.tokens.duplicates import Seen
from torchtitan.data.tokens.near_duplicates import NearDuplicates
from torchtitan.utils.errors import UserError

TOKENIZER = build_tokenizer("./tests/assets/tokenizer")
TEXTS = [f"text {i} " + "word " * (i * 37 % 11) for i in range(200)]
"""Some of them occur again in `write`."""
AGAIN = TEXTS[3:60:7]


def write(folder, texts, files=1):
    folder.mkdir(parents=True)
    for i in range(files):
        lines = [json.dumps({"text": text}) + "\n" for text in texts[i::files]]
        (folder / f"{i}.jsonl").write_text("".join(lines))
    return folder


def shuffled(seed):
    texts = TEXTS + AGAIN
    random.Random(seed).shuffle(texts)
    return texts


def run(folder, output, *options, part=40, workers=1):
    argv = ["--input", str(folder), "--output", str(output), "--part", str(part)]
    return tokenize.main([*argv, "--workers", str(workers), *options])


def documents(folder):
    """The texts in a folder of token files, in order."""
    found = []
    for file in find_token_files(str(folder), "key"):
        ids = np.fromfile(file, np.uint16)
        ends = np.flatnonzero(ids == TOKENIZER.eos_id)
        for document in np.split(ids, ends + 1)[:-1]:
            assert document[0] == TOKENIZER.bos_id
            found.append(TOKENIZER.decode(document[1:-1].tolist()))
        assert json.loads(file.with_suffix(".json").read_text())["tokens"] == len(ids)
    return found


def contents(*folders):
    return {str(path): path.read_bytes() for folder in folders for path in sorted(folder.iterdir())}


def held_out(text, share):
    """As documented: by a hash of the text."""
    hash = hashlib.blake2b(text.encode(), digest_size=8).digest()
    drawn = hashlib.blake2b(hash, digest_size=6, person=b"held-out").digest()
    return int.from_bytes(drawn, "little") < share * 2**48


@pytest.mark.parametrize(("seed", "files", "part"), [(0, 1, 40), (1, 5, 1000), (2, 3, 7)])
def test_the_same_documents_are_held_out(tmp_path, seed, files, part, capsys, monkeypatch):
    monkeypatch.setattr("torchtitan.data.tokens.tokenizing._SPOOLED", 64)
    monkeypatch.setattr("torchtitan.data.tokens.tokenizing._BATCH", 300)
    texts = shuffled(seed)
    folder = write(tmp_path / "text", texts, files)
    order = [text for i in range(files) for text in texts[i::files]]
    out = tmp_path / "tokens"
    run(folder, out, "--held-out", "12.5%", part=part)
    apart = tmp_path / "tokens-held-out"
    assert documents(out) == [text for text in order if not held_out(text, 0.125)]
    assert documents(apart) == [text for text in order if held_out(text, 0.125)]
    assert 10 < len(documents(apart)) < 45
    report = json.loads((apart / "tokens-report.json").read_text())
    assert report["documents"] == len(documents(apart))
    assert report["bytes"] == sum(map(len, documents(apart)))
    flags = f"--training.dataset_path {out} --validation.enable --validation.dataset_path {apart}"
    assert flags in capsys.readouterr().out


@pytest.mark.parametrize("name", ["input.txt", "a.jsonl"])
def test_the_end_of_a_single_document_is_held_out(tmp_path, name):
    """With its characters for tokens, as nanoGPT's `prepare.py` writes train.bin and val.bin."""
    text = "".join(f"Line {i} of a play.\n" for i in range(400))
    file = tmp_path / name
    file.write_text(text if name == "input.txt" else json.dumps({"text": text}))
    made, out = str(tmp_path / "made"), tmp_path / "tokens"
    tokenizer_command.main([str(file), "--characters", "--output", made])
    argv = ["--input", str(file), "--output", str(out), "--tokenizer", made, "--workers", "1"]
    for _ in range(2):  # the second finds all of it done
        assert tokenize.main([*argv, "--held-out", "10%"]) == 0
    stoi = {c: i for i, c in enumerate(sorted(set(text)))}
    ids = [stoi[c] for c in text]
    cut = int(len(text) * 0.9)
    for folder, expected in ((out, ids[:cut]), (tmp_path / "tokens-held-out", ids[cut:])):
        found = np.fromfile(folder / "tokens-00000.bin", np.uint16).tolist()
        assert found == expected


def test_a_larger_share_holds_out_the_same_and_more(tmp_path):
    folder = write(tmp_path / "text", TEXTS)
    run(folder, tmp_path / "few", "--held-out", "5%")
    run(folder, tmp_path / "many", "--held-out", "40%")
    few, many = (set(documents(tmp_path / f"{name}-held-out")) for name in ("few", "many"))
    assert few < many


def test_held_out_parts_are_completed(tmp_path, capsys):
    folder = write(tmp_path / "text", TEXTS)
    out, apart = tmp_path / "tokens", tmp_path / "tokens-held-out"
    run(folder, out, "--held-out", "20%")
    before = contents(out, apart)
    (apart / "tokens-00001.json").unlink()
    (out / "tokens-00003.hashes").unlink()
    capsys.readouterr()
    run(folder, out, "--held-out", "20%")
    assert "3 parts already done" in capsys.readouterr().out
    assert contents(out, apart) == before
    for options in ([], ["--held-out", "10%"]):
        with pytest.raises(UserError, match="or with other options than now"):
            run(folder, out, *options)
    assert contents(out, apart) == before


def test_token_files_in_the_folder_of_the_text(tmp_path, capsys):
    """Their descriptions are JSON, but no documents."""
    folder = write(tmp_path / "text", TEXTS)
    out = folder / "tokens"
    run(folder, out, "--held-out", "20%")
    (out / "tokens-00001.json").write_text("[1]")  # damaged, so it is written again
    run(folder, out, "--held-out", "20%")
    assert "4 parts already done" in capsys.readouterr().out
    assert len(documents(out)) + len(documents(folder / "tokens-held-out")) == len(TEXTS)


def test_a_share_that_holds_out_nothing_is_an_error(tmp_path):
    folder = write(tmp_path / "text", TEXTS)
    with pytest.raises(UserError, match=r"none of 200 documents is held out; .* empty folder"):
        run(folder, tmp_path / "tokens", "--held-out", "0.000001%")


def test_documents_are_text_or_conversations(capsys):
    columns = ["--text-column=a", "--messages-column=b"]
    for parser, argv in ((tokenize.parser(), ["--input=x", "--output=y"]), (data.parser(), ["x"])):
        with pytest.raises(SystemExit):
            parser.parse_args([*argv, *columns])
        assert "not allowed with" in capsys.readouterr().err


@pytest.mark.parametrize("share", ["0%", "100%", "0.5", "-1%", "x%"])
def test_a_share_that_is_none(share, capsys):
    with pytest.raises(SystemExit):
        tokenize.parser().parse_args(["--input=x", "--output=y", f"--held-out={share}"])
    assert "must be" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["../b", "a/b", "", ".hidden", "[ab]", "a b"])
def test_a_name_that_is_no_beginning_of_a_file(name, capsys):
    """Held-out documents of `../b` would replace the others."""
    with pytest.raises(SystemExit):
        tokenize.parser().parse_args(["--input=x", "--output=y", f"--name={name}"])
    assert "--name" in capsys.readouterr().err


def first_of_each(texts):
    return list(dict.fromkeys(texts))


@pytest.mark.parametrize(("files", "part", "workers"), [(1, 40, 1), (4, 1000, 1), (3, 70, 2)])
def test_later_copies_are_dropped(tmp_path, files, part, workers, capsys, monkeypatch):
    monkeypatch.setattr("torchtitan.data.tokens.tokenizing._BATCH", 300)
    texts = shuffled(files)
    folder = write(tmp_path / "text", texts, files)
    order = [text for i in range(files) for text in texts[i::files]]
    run(folder, tmp_path / "tokens", "--drop-duplicates", part=part, workers=workers)
    assert documents(tmp_path / "tokens") == first_of_each(order)
    report = json.loads((tmp_path / "tokens/tokens-report.json").read_text())
    size = sum(map(len, AGAIN))
    assert report["documents"] == len(TEXTS)
    assert report["dropped"] == {"exact": {"documents": len(AGAIN), "bytes": size}}
    assert report["duplicates"] == {"documents": 0, "bytes": 0}
    assert f"Dropped {len(AGAIN)} exact duplicates of other documents, {size:,} bytes" in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize("missing", [[0], [1, 3], [2, 5], [0, 1, 2, 3, 4, 5]])
def test_dropping_resumes_as_if_never_interrupted(tmp_path, missing, monkeypatch):
    """A part that is written again sees only the parts before it, though later ones exist."""
    monkeypatch.setattr("torchtitan.data.tokens.tokenizing._BATCH", 100)
    texts = shuffled(4)
    folder = write(tmp_path / "text", texts, 2)
    out, apart = tmp_path / "tokens", tmp_path / "tokens-held-out"
    options = ("--drop-duplicates", "--held-out", "20%")
    run(folder, out, *options)
    before = contents(out, apart)
    kept = documents(out) + documents(apart)
    assert sorted(kept) == sorted(TEXTS)
    for i in missing:
        (out if i % 2 else apart).joinpath(f"tokens-{i:05}.json").unlink(missing_ok=True)
    run(folder, out, *options)
    assert contents(out, apart) == before
    with pytest.raises(UserError, match="or with other options than now"):
        run(folder, out, "--held-out", "20%")


def test_seen_is_a_set():
    seen, reference = Seen(), set()
    generator = np.random.default_rng(0)
    for size in (1, 5, 0, 300, 2, 2, 40, 1000, 7):
        keys = generator.integers(0, 2000, (size, 1), np.uint64)
        expected = []
        for key in keys[:, 0].tolist():
            expected.append(key not in reference)
            reference.add(key)
        assert seen.take(keys).tolist() == expected
    every = np.arange(2000, dtype=np.uint64)
    assert np.flatnonzero(seen.has(every)).tolist() == sorted(reference)


def test_keys_of_dropped_documents_do_not_count():
    """Otherwise a chain of documents, each like the one before, would shrink to its first."""
    chain = np.array([[1, 2], [2, 3], [3, 4], [4, 1]], np.uint64)
    seen = Seen()
    assert seen.take(chain).tolist() == [True, False, True, False]
    assert seen.take(np.array([[5, 3], [6, 7]], np.uint64)).tolist() == [False, True]


NEAR = NearDuplicates.for_similarity(0.8)
WORDS = [f"w{i}" for i in range(400)]


def essay(seed, words=300):
    generator = random.Random(seed)
    return generator.choices(WORDS, k=words)


def jaccard(one, other):
    """Of the sets of sequences of five words."""
    first, second = (
        {tuple(words[i : i + 5]) for i in range(len(words) - 4)} for words in (one, other)
    )
    return len(first & second) / len(first | second)


def edited(words, changes, seed):
    words = list(words)
    generator = random.Random(seed)
    for place in generator.sample(range(len(words)), changes):
        words[place] = "changed"
    return words


def related(one, other):
    return not set(NEAR.keys(" ".join(one))).isdisjoint(NEAR.keys(" ".join(other)))


def test_pairs_are_found_as_often_as_the_formula_says():
    assert (NEAR.bands, NEAR.rows) == (16, 8)
    expected, found = [], []
    for seed in range(300):
        words = essay(seed)
        other = edited(words, seed % 24 + 3, seed)
        expected.append(1 - (1 - jaccard(words, other) ** 8) ** 16)
        found.append(related(words, other))
    assert 90 < sum(expected) < 210
    deviation = np.sqrt(sum(p * (1 - p) for p in expected))
    assert abs(sum(found) - sum(expected)) < 4 * deviation
    assert not any(related(essay(seed), essay(seed + 1000)) for seed in range(300))


@pytest.mark.parametrize("similarity", [0.5, 0.7, 0.75, 0.8, 0.9, 0.95, 0.99])
def test_the_most_rows_that_find_nine_of_ten(similarity):
    near = NearDuplicates.for_similarity(similarity)
    assert near.bands * near.rows <= 128
    assert near.probability(similarity) >= 0.9
    more = NearDuplicates(128 // (near.rows + 1), near.rows + 1)
    assert more.probability(similarity) < 0.9


def test_case_punctuation_and_pieces_change_no_keys(monkeypatch):
    words = essay(0)
    keys = NEAR.keys(" ".join(words))
    assert NEAR.keys("\n".join(words).upper() + "!") == keys
    assert NEAR.keys("日本語の文章です") == NEAR.keys("日 本、語 の文章です。")
    assert NEAR.keys("") != NEAR.keys("!") != NEAR.keys("?")
    assert NEAR.keys("one two") == NEAR.keys("One, two.") != NEAR.keys("one three")
    monkeypatch.setattr("torchtitan.data.encode.base.PIECE", 50)
    assert NEAR.keys(" ".join(words)) == keys


@pytest.mark.parametrize("missing", [[], [1, 2]])
def test_near_duplicates_are_dropped_and_resumed(tmp_path, missing, capsys, monkeypatch):
    """The reference compares each document with all earlier ones that are kept."""
    monkeypatch.setattr("torchtitan.data.tokens.tokenizing._BATCH", 5000)
    texts = []
    for i in range(40):
        base = essay(i)
        texts += [base, edited(base, i % 8, i), edited(base, 40, i)]
    random.Random(0).shuffle(texts)
    keys = {" ".join(words): set(NEAR.keys(" ".join(words))) for words in texts}
    kept, near = [], 0
    for text in map(" ".join, texts):
        if text not in kept and not all(keys[text].isdisjoint(keys[earlier]) for earlier in kept):
            near += 1
        elif text not in kept:
            kept.append(text)
    folder = write(tmp_path / "text", [" ".join(words) for words in texts], 1)
    out, apart = tmp_path / "tokens", tmp_path / "tokens-held-out"
    options = ("--drop-near-duplicates", "80%", "--held-out", "20%")
    run(folder, out, *options)
    assert near > 15
    assert sorted(documents(out) + documents(apart)) == sorted(kept)
    report = json.loads((out / "tokens-report.json").read_text())["dropped"]
    assert report["near"]["documents"] == near
    assert report["exact"]["documents"] == len(texts) - len(kept) - near == 5
    assert f"Dropped {near} near duplicates of other documents" in capsys.readouterr().out
    before = contents(out, apart)
    for i in missing:
        (out / f"tokens-{i:05}.keys").unlink()
    run(folder, out, *options)
    assert contents(out, apart) == before
    with pytest.raises(UserError, match="or with other options than now"):
        run(folder, out, "--drop-near-duplicates", "90%", "--held-out", "20%")


@pytest.mark.e2e
def test_workers_do_not_receive_ctrl_c():
    """Else each prints a traceback. This process ends them, so it receives it."""
    script = """
import signal
from functools import partial
from torchtitan.data.tokens.tokenizing import encode_batches

blocked = partial(signal.pthread_sigmask, signal.SIG_BLOCK)
print([signal.SIGINT in found for _, found in encode_batches(iter([(0, [])]), blocked, 2)])
print(signal.SIGINT in blocked([]))
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "[True]\nFalse\n", done.stderr


def test_the_package_for_near_duplicates_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=re.escape("pip install 'titan-pretrain[near-duplicates]'")):
        run(write(tmp_path / "text", TEXTS), tmp_path / "tokens", "--drop-near-duplicates")
    assert not (tmp_path / "tokens").exists()


def test_a_similarity_that_drops_too_much_is_refused(capsys):
    with pytest.raises(SystemExit):
        tokenize.parser().parse_args(["--input=x", "--output=y", "--drop-near-duplicates=20%"])
    assert "must be 50% or more" in capsys.readouterr().err


def test_a_tokenizer_that_was_trained_again_is_read_again(tmp_path):
    folder = write(tmp_path / "texts", TEXTS)
    made = tmp_path / "tokenizer"
    for words in ("text word", "drow txet"):
        other = write(tmp_path / words, [words])
        train_tokenizer(Corpus(str(other), "PATH"), made, 300)
        output = tmp_path / f"tokens of {words}"
        run(folder, output, "--tokenizer", str(made), part=1000)
        ids = np.fromfile(output / "tokens-00000.bin", np.uint16)
        text = build_tokenizer(str(made)).decode(ids.tolist())
        assert text.replace("<|begin_of_text|>", "").split("<|end_of_text|>")[:-1] == TEXTS

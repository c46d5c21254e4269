"""A tokenizer without end-of-text: documents follow each other, and what needs an end refuses."""

import json

import numpy as np
import pytest

from torchtitan.checkpoint.hf.tokenizer import file_problem, write_tokenizer
from torchtitan.commands import tokenize
from torchtitan.commands import tokenizer as tokenizer_command
from torchtitan.config import resolve
from torchtitan.data.encode import base
from torchtitan.data.encode.chat import Chat
from torchtitan.data.encode.tokenizer import build_tokenizer
from torchtitan.data.order.lanes import DocumentCursor, StreamLane
from torchtitan.data.tokens.token_files import TokenFiles
from torchtitan.train.preflight import preflight
from torchtitan.utils.errors import ConfigError, UserError

TEXTS = ["To be, or\n", "", "not to be", "that is the question"]
STOI = {c: i for i, c in enumerate(sorted(set("".join(TEXTS))))}
IDS = [STOI[c] for c in "".join(TEXTS)]


@pytest.fixture
def made(tmp_path):
    """The folder of a tokenizer of characters, beside the documents `text.jsonl`."""
    lines = [json.dumps({"text": text}) + "\n" for text in TEXTS]
    (tmp_path / "text.jsonl").write_text("".join(lines))
    folder = str(tmp_path / "made")
    argv = [str(tmp_path / "text.jsonl"), "--characters", "--output", folder]
    assert tokenizer_command.main(argv) == 0
    return folder


def config_of(folder):
    return json.loads((folder / "tokenizer_config.json").read_text())


def test_the_folder_says_that_there_is_none(made, tmp_path, capsys):
    assert config_of(tmp_path / "made")["eos_token"] is None
    tokenizer = build_tokenizer(made)
    assert (tokenizer.vocab_size, tokenizer.text_size, tokenizer.ends) == (len(STOI),) * 2 + ([],)
    assert "end with their text" in tokenizer.describe()
    (tmp_path / "made/tokenizer_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"name it as eos_token in tokenizer_config\.json \(null"):
        build_tokenizer(made)


def test_a_sentencepiece_model_may_have_none(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    (tmp_path / "text").write_text("\n".join(TEXTS * 20))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=len(STOI), model_type="char", bos_id=-1, eos_id=-1, minloglevel=2,
    )  # fmt: skip
    with pytest.raises(UserError, match="no end-of-text token"):
        build_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": null}')
    tokenizer = build_tokenizer(str(tmp_path))
    assert tokenizer.eos_id is None
    assert tokenizer.encode_document("to be") == tokenizer.encode("to be")


def test_exports_say_so_or_name_the_token_of_the_key(made, tmp_path):
    transformers = pytest.importorskip("transformers")
    for key, name in ((None, None), ("\n", "\n")):
        tokenizer = build_tokenizer(made, end_of_document=key)
        folder = tmp_path / f"export {name!r}"
        folder.mkdir()
        write_tokenizer(tokenizer, folder, 128)
        assert file_problem(tokenizer, folder) is None
        assert config_of(folder)["eos_token"] == name
        assert build_tokenizer(str(folder)).eos_id == tokenizer.eos_id
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        assert theirs("".join(TEXTS))["input_ids"] == IDS
        assert theirs.eos_token_id == tokenizer.eos_id


def test_token_files_are_the_text(made, tmp_path):
    """And aren't read with an end that they don't have, nor the other way around."""
    argv = ["--input", str(tmp_path / "text.jsonl"), "--tokenizer", made, "--workers", "1"]
    for name, more in (("none", []), ("newline", ["--end-of-document", "\n"])):
        assert tokenize.main([*argv, "--output", str(tmp_path / name), *more]) == 0
    files = {name: [tmp_path / name / "tokens-00000.bin"] for name in ("none", "newline")}
    assert np.fromfile(*files["none"], np.uint16).tolist() == IDS
    ends = {"none": build_tokenizer(made), "newline": build_tokenizer(made, None, "\n")}
    for name, other in (("none", "newline"), ("newline", "none")):
        TokenFiles(files[name], 4, ends[name], "key")
        with pytest.raises(UserError, match=r"another tokenizer .* and model.end_of_document to"):
            TokenFiles(files[name], 4, ends[other], "key")


LONG_TEXTS = [*TEXTS, "be that " * 10, "to"]


def a_lane(tokenizer):
    """One pass over `LONG_TEXTS`."""
    cursor = DocumentCursor(LONG_TEXTS, 0, 1, None, lambda name, read: read())
    return StreamLane(cursor, tokenizer)


def test_rows_are_cut_from_the_text_alone(made, monkeypatch):
    """The same from every position, also within and at the end of a document read in pieces."""
    tokenizer = build_tokenizer(made)
    monkeypatch.setattr(base, "LONG", 30)
    monkeypatch.setattr(base, "PIECE", 12)
    lane = a_lane(tokenizer)
    rows, positions = [], [lane.position()]
    while (row := lane.row(5)) is not None:
        rows.append(row)
        positions.append(lane.position())
    expected = [STOI[c] for c in "".join(LONG_TEXTS)]
    whole = np.concatenate([row[:-1] for row in rows])
    assert whole[: len(expected) - 1].tolist() == expected[:-1]
    for number, position in enumerate(positions[:-1]):
        again = a_lane(tokenizer)
        again.seek(position)
        for row in rows[number:]:
            assert again.row(5).tolist() == row.tolist()
        assert again.row(5) is None


REFUSED = {
    "training.document_mask": ["--training.document_mask"],
    'training.packing = "best_fit"': ["--training.packing=best_fit"],
    "eval.enable": ["--eval.enable", "--eval.tasks=a"],
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_needs_an_end_refuses_at_the_start(made, tmp_path, key):
    argv = [f"--model.hf_assets_path={made}", f"--job.dump_folder={tmp_path / 'out'}"]
    argv += [f"--training.dataset_path={tmp_path / 'text.jsonl'}", *REFUSED[key]]
    with pytest.raises(ConfigError) as refused:
        preflight(resolve(argv, 1).config)
    assert f"{key} needs a token that ends documents, which {made}" in str(refused.value)
    assert "set model.end_of_document to one of its tokens" in str(refused.value)
    assert not (tmp_path / "out").exists()
    argv += ["--model.end_of_document=b"]
    if key != "eval.enable":  # there is no such task
        preflight(resolve(argv, 1).config)


def test_an_empty_prompt_needs_a_token(made, tmp_path):
    argv = [f"--model.hf_assets_path={made}", f"--job.dump_folder={tmp_path / 'out'}"]
    argv += [f"--training.dataset_path={tmp_path / 'text.jsonl'}", '--sampling.prompts=["b", ""]']
    with pytest.raises(ConfigError, match=r"sampling\.prompts: prompt 2 has no tokens"):
        preflight(resolve(argv, 1).config)
    preflight(resolve([*argv, "--model.end_of_document=b"], 1).config)


def test_other_places_that_need_an_end(made, tmp_path):
    tokenizer = build_tokenizer(made)
    with pytest.raises(UserError, match=r"training\.messages_column needs a token that ends"):
        Chat(tokenizer, "training.messages_column")
    argv = ["--input", str(tmp_path / "text.jsonl"), "--tokenizer", made]
    argv += ["--output", str(tmp_path / "tokens"), "--best-fit", "8"]
    with pytest.raises(UserError, match="--best-fit needs a token that ends documents"):
        tokenize.main(argv)
    assert not (tmp_path / "tokens").exists()

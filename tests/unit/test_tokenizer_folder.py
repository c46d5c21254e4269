"""The files of a tokenizer's folder are obeyed: which tokens begin and end a document, and what is
switched off. transformers is the reference where it reads the same files.
"""

import json
import pickle

import numpy as np
import pytest

from torchtitan.checkpoint.hf.tokenizer import file_problem, write_tokenizer
from torchtitan.data.encode.tokenizer import build_tokenizer
from torchtitan.utils.assets import find_asset
from torchtitan.utils.errors import UserError

BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"
TURN = {"id": 2048, "content": "<|im_end|>", "special": True}
FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
TEXT = "def f(x):  # two words"


def write(folder, config=None, special_map=None, **changes):
    """The shipped tokenizer with other files beside it, and changes to its own."""
    folder.mkdir(exist_ok=True)
    content = json.loads((find_asset("./tests/assets/tokenizer") / "tokenizer.json").read_text())
    for key, value in changes.items():
        content[key] = {**content[key], **value} if isinstance(content[key], dict) else value
    (folder / "tokenizer.json").write_text(json.dumps(content))
    if config is not None:
        config = {"tokenizer_class": "PreTrainedTokenizerFast"} | config
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if special_map is not None:
        (folder / "special_tokens_map.json").write_text(json.dumps(special_map))
    return str(folder)


def added(*tokens):
    return [FLAGS | token for token in tokens]


BOS, EOS = ({"id": i, "content": name, "special": True} for i, name in enumerate((BEGIN, END)))
BOTH = {"bos_token": BEGIN, "eos_token": END}
AROUND = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "<|im_end|>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
        {"SpecialToken": {"id": BEGIN, "type_id": 0}},
    ],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
    "special_tokens": {
        "<|im_end|>": {"id": "<|im_end|>", "ids": [2048], "tokens": ["<|im_end|>"]},
        BEGIN: {"id": BEGIN, "ids": [0], "tokens": [BEGIN]},
    },
}
LISTED = {"2048": FLAGS | {"content": "<|im_end|>", "special": True}}
THREE = {"added_tokens": added(BOS, EOS, TURN)}
CASES = {
    # name: (config, special_tokens_map, changes, begin, end)
    "named": (BOTH, None, {}, 0, 1),
    "as objects": ({"bos_token": {"content": BEGIN}, "eos_token": EOS}, None, {}, 0, 1),
    "null": ({"bos_token": None, "eos_token": END}, None, {}, None, 1),
    "not added": (BOTH | {"add_bos_token": False}, None, {}, None, 1),
    "added": (BOTH | {"add_bos_token": True}, None, {}, 0, 1),
    "map": ({}, {"bos_token": BEGIN, "eos_token": "<|im_end|>"}, THREE, 0, 2048),
    "map without config": (None, {"eos_token": "<|im_end|>"}, THREE, 0, 2048),
    "null in the map": ({"eos_token": END}, {"bos_token": None}, {}, None, 1),
    "map before config": (BOTH, {"bos_token": END, "eos_token": BEGIN}, {}, 1, 0),
    "config before map": (
        BOTH | {"added_tokens_decoder": {"0": BOS, "1": EOS}},
        {"bos_token": END, "eos_token": BEGIN},
        {},
        0,
        1,
    ),
    "decoder": ({"eos_token": "<|im_end|>", "added_tokens_decoder": LISTED}, None, {}, 0, 2048),
    "template": ({}, None, THREE | {"post_processor": AROUND}, 2048, 0),
    "names before template": (BOTH, None, THREE | {"post_processor": AROUND}, 0, 1),
    "null before template": (
        {"bos_token": None, "eos_token": END},
        None,
        THREE | {"post_processor": AROUND},
        None,
        1,
    ),
    "usual names": ({}, None, {}, 0, 1),
    "a usual name is a word": ({}, None, {"added_tokens": added(EOS)}, None, 1),
    "a usual name isn't special": (
        {},
        None,
        {"added_tokens": added(BOS | {"special": False}, EOS)},
        None,
        1,
    ),
    "one token for both": ({"bos_token": END, "eos_token": END}, None, {}, None, 1),
}


@pytest.mark.parametrize("case", CASES)
def test_begin_and_end_are_the_folders(case, tmp_path):
    config, special_map, changes, bos, eos = CASES[case]
    tokenizer = build_tokenizer(write(tmp_path, config, special_map, **changes))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (bos, eos)
    ids = tokenizer.encode(TEXT)
    document = [*([] if bos is None else [bos]), *ids, eos]
    assert tokenizer.encode_document(TEXT) == document
    assert tokenizer.encode_batch([TEXT], np.dtype("uint32"))[0].tolist() == document
    ((_, whole),) = tokenizer.encode_in_pieces(TEXT)
    assert whole.tolist() == document
    assert f"({eos})" in tokenizer.describe()
    assert ("no token at the beginning" in tokenizer.describe()) == (bos is None)


@pytest.mark.parametrize("case", CASES)
def test_exports_write_back_what_was_there(case, tmp_path):
    transformers = pytest.importorskip("transformers")
    config, special_map, changes, bos, _ = CASES[case]
    tokenizer = build_tokenizer(write(tmp_path / "a", config, special_map, **changes))
    (tmp_path / "b").mkdir()
    write_tokenizer(tokenizer, tmp_path / "b", 128)
    again = build_tokenizer(str(tmp_path / "b"))
    assert (again.bos_id, again.eos_id) == (tokenizer.bos_id, tokenizer.eos_id)
    assert file_problem(tokenizer, tmp_path / "b") is None
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "b")
    assert theirs(TEXT)["input_ids"] == tokenizer.encode(TEXT, bos=True)
    assert theirs.eos_token_id == tokenizer.eos_id
    written = json.loads((tmp_path / "b/tokenizer_config.json").read_text())
    assert written["add_bos_token"] == (bos is not None)
    for role in ("bos_token", "eos_token"):
        if config and role in config:
            name = config[role]
            assert written[role] == (name["content"] if isinstance(name, dict) else name)


def test_a_named_token_must_exist(tmp_path):
    with pytest.raises(UserError, match=r"eos_token is '<\|gone\|>', which .* doesn't have"):
        build_tokenizer(write(tmp_path, {"eos_token": "<|gone|>"}))
    with pytest.raises(UserError, match=r"add_bos_token is 'false', must be true or false"):
        build_tokenizer(write(tmp_path, BOTH | {"add_bos_token": "false"}))
    with pytest.raises(UserError, match="no end-of-text token"):
        build_tokenizer(write(tmp_path, {"eos_token": None}))
    listed = {"3000": {"content": "<|new|>", "special": True}}
    with pytest.raises(UserError, match=r"the id 3000, but its place is 2048"):
        build_tokenizer(write(tmp_path, BOTH | {"added_tokens_decoder": listed}))


def test_files_that_contradict_each_other_are_noted(tmp_path):
    tokenizer = build_tokenizer(write(tmp_path, BOTH, {"eos_token": BEGIN}))
    assert "says that eos_token is <|end_of_text|>" in " ".join(tokenizer.notes)


RANDOM = {
    "dropout": {"model": {"dropout": 0.5}},
    "truncation": {
        "truncation": {
            "direction": "Right",
            "max_length": 3,
            "strategy": "LongestFirst",
            "stride": 0,
        }
    },
    "padding": {
        "padding": {
            "strategy": {"Fixed": 40},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 1,
            "pad_type_id": 0,
            "pad_token": END,
        }
    },
}


@pytest.mark.parametrize("setting", RANDOM)
def test_what_makes_ids_random_or_shorter_is_off_and_said(setting, tmp_path):
    plain = build_tokenizer(write(tmp_path / "a", BOTH))
    assert plain.notes == ()
    tokenizer = build_tokenizer(write(tmp_path / "b", BOTH, **RANDOM[setting]))
    found = {tuple(tokenizer.encode(TEXT * 5)) for _ in range(10)}
    assert found == {tuple(plain.encode(TEXT * 5))}
    assert setting in " ".join(tokenizer.notes)
    (tmp_path / "c").mkdir()
    write_tokenizer(tokenizer, tmp_path / "c", 128)
    assert build_tokenizer(str(tmp_path / "c")).notes == ()


def test_unigram_sampling_is_off(tmp_path):
    model = {
        "type": "Unigram",
        "unk_id": 0,
        "vocab": [["<unk>", 0.0], ["</s>", 0.0], ["a", -1.0], ["b", -1.1], ["ab", -2.0]],
        "byte_fallback": False,
        "alpha": 0.1,
        "nbest_size": 64,
    }
    content = {"version": "1.0", "added_tokens": added(EOS | {"content": "</s>"}), "model": model}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = build_tokenizer(str(tmp_path))
    assert len({tuple(tokenizer.encode("ab" * 20)) for _ in range(20)}) == 1


def test_a_key_says_which_token_ends_documents(tmp_path):
    """An instruct model's folder, used as its base model's."""
    folder = write(
        tmp_path / "a", {"eos_token": "<|im_end|>"}, {"eos_token": "<|im_end|>"}, **THREE
    )
    instruct = build_tokenizer(folder)
    assert 'set model.end_of_document = "<|end_of_text|>"' in " ".join(instruct.notes)
    base = build_tokenizer(folder, end_of_document=END)
    assert base.notes == ()
    assert (base.eos_id, base.stop_ids) == (1, (2048,))
    assert base.fingerprint != instruct.fingerprint
    again = pickle.loads(pickle.dumps(base))
    assert (again.eos_id, again.fingerprint) == (1, base.fingerprint)
    (tmp_path / "b").mkdir()
    write_tokenizer(base, tmp_path / "b", 128)
    assert build_tokenizer(str(tmp_path / "b")).eos_id == 1
    same = build_tokenizer(folder, end_of_document="<|im_end|>")
    assert same.fingerprint == instruct.fingerprint
    with pytest.raises(UserError, match=r"model.end_of_document: .* has no token '<eod>'"):
        build_tokenizer(folder, end_of_document="<eod>")


def test_special_tokens_after_the_last_word_need_no_row(tmp_path):
    """As Gemma 3's `<image_soft_token>`, for which its 1b model has none."""
    tokenizer = build_tokenizer(write(tmp_path, BOTH, **THREE))
    assert (tokenizer.vocab_size, tokenizer.text_size) == (2049, 2048)
    plain = added(BOS, EOS, TURN | {"special": False})
    assert build_tokenizer(write(tmp_path, BOTH, added_tokens=plain)).text_size == 2049
    ends = build_tokenizer(write(tmp_path, BOTH | {"eos_token": "<|im_end|>"}, **THREE))
    assert ends.text_size == 2049


def test_one_token_for_both_is_one_document(tmp_path):
    from torchtitan.commands import tokenize

    folder = write(tmp_path / "a", {"bos_token": END, "eos_token": END})
    texts = [f"text number {i} here" for i in range(50)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    common = ["--tokenizer", folder, "--workers", "1"]
    tokenize.run(
        ["--input", str(tmp_path / "d.jsonl"), "--output", str(tmp_path / "tokens"), *common]
    )
    ids = np.fromfile(next((tmp_path / "tokens").glob("*.bin")), np.uint16)
    assert (ids == 1).sum() == 50
    assert not ((ids[1:] == 1) & (ids[:-1] == 1)).any()


def test_token_files_say_which_token_ends_their_documents(tmp_path):
    from torchtitan.commands import tokenize
    from torchtitan.data.tokens.token_files import TokenFiles

    folder = write(tmp_path / "a", BOTH | {"eos_token": "<|im_end|>"}, **THREE)
    (tmp_path / "d.txt").write_text(TEXT)
    flags = tokenize.run(
        [
            *("--input", str(tmp_path / "d.txt"), "--output", str(tmp_path / "tokens")),
            *("--tokenizer", folder, "--end-of-document", END, "--workers", "1"),
        ]
    )
    assert f'--model.end_of_document "{END}"' in flags
    files = sorted((tmp_path / "tokens").glob("*.bin"))
    assert np.fromfile(files[0], np.uint16)[-1] == 1
    TokenFiles(files, 4, build_tokenizer(folder, end_of_document=END), "key")
    with pytest.raises(UserError, match=r"another tokenizer .* and model.end_of_document to the"):
        TokenFiles(files, 4, build_tokenizer(folder), "key")
    # the same file of tokens, and another name in the file beside it
    write(tmp_path / "a", BOTH, **THREE)
    (description,) = (tmp_path / "tokens").glob("tokens-0*.json")
    content = json.loads(description.read_text())
    plain = build_tokenizer(folder)
    content |= {"tokenizer": plain.fingerprint, "end_of_document": 2048}
    description.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"end with id 2048, those of model.hf_assets_path with 1"):
        TokenFiles(files, 4, plain, "key")


def test_a_model_may_lack_rows_that_text_never_reads(tmp_path):
    from torchtitan.config import resolve
    from torchtitan.train.preflight import preflight
    from torchtitan.utils.errors import ConfigError

    def setup(**changes):
        folder = write(tmp_path / "a", BOTH, **changes)
        argv = [f"--model.hf_assets_path={folder}", f"--job.dump_folder={tmp_path / 'out'}"]
        argv += ["--model.overrides.vocab_size=2048"]
        return preflight(resolve(argv, 1).config)

    assert setup(**THREE).tokenizer.vocab_size == 2049
    with pytest.raises(ConfigError, match="the tokenizer has 2049 entries, more than vocab_size"):
        setup(added_tokens=added(BOS, EOS, TURN | {"special": False}))


def test_a_folder_of_old_files_is_named(tmp_path):
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / "merges.txt").write_text("")
    with pytest.raises(UserError, match=r"vocab.json, merges.txt .*save_pretrained"):
        build_tokenizer(str(tmp_path))

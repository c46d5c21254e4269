# ruff: noqa: RUF001
"""Tokenizers as their publishers have them, against transformers, wherever one is read.

Opening them takes seconds, so these are in the longest tier.
"""

import json
import random
import re

import numpy as np
import pytest

from tests.families import SIZES, TINY
from tests.runs import losses, train
from torchtitan.checkpoint.hf.tokenizer import file_problem, write_tokenizer
from torchtitan.data.encode import base
from torchtitan.data.encode.chat import Chat
from torchtitan.data.encode.tokenizer import PLAIN, UNPREDICTED, build_tokenizer

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

MARKS = {
    # name: begin, end, the base model's end
    "llama3": (128000, 128001, None),
    "llama3_1": (128000, 128009, "<|end_of_text|>"),
    "qwen3": (None, 151645, "<|endoftext|>"),
    "gemma3": (2, 106, "<eos>"),
    "deepseek_v3": (0, 1, None),
    "gptoss": (199998, 200002, "<|endoftext|>"),
    "llama2": (1, 2, None),
}
TEXTS = [
    "Hello world, it's 12345678 o'clock -- don't DON'T",
    "def f(x):\n    return [x ** 2,\n\n\t'naïve']  # cafe\u0301\r\n",
    "日本語のテキスト、中文。한국어 и кириллица \U0001f642\U0001f3fd  ไทย  தமிழ்",
    "a <s> </s> <|endoftext|> <bos> <|im_start|> <｜begin▁of▁sentence｜> b",
    "   leading,   and trailing   ",
    "x" * 500 + " " * 300 + "." * 100 + "\n" * 50,
]


@pytest.mark.parametrize("name", MARKS)
def test_ids_begin_and_end(name, published):
    folder = published(name)
    ours = build_tokenizer(str(folder))
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    theirs.backend_tokenizer.encode_special_tokens = True
    begin, end, base_end = MARKS[name]
    assert (ours.bos_id, ours.eos_id) == (begin, end)
    for text in TEXTS:
        ids = theirs.backend_tokenizer.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == ids
        document = [*([] if begin is None else [begin]), *ids, end]
        assert ours.encode_document(text) == document
        assert ours.encode_batch([text], np.dtype("uint32"))[0].tolist() == document
    said = re.findall('model.end_of_document = "(.*)"', " ".join(ours.notes))
    assert said == ([base_end] if base_end else [])
    if base_end:
        based = build_tokenizer(str(folder), end_of_document=base_end)
        assert based.eos_id == theirs.convert_tokens_to_ids(base_end)
        assert based.stop_ids == (end,)


@pytest.mark.parametrize("name", MARKS)
def test_export_and_back(name, published, tmp_path):
    ours = build_tokenizer(str(published(name)))
    write_tokenizer(ours, tmp_path, 4096)
    assert file_problem(ours, tmp_path) is None
    again = build_tokenizer(str(tmp_path))
    assert (again.bos_id, again.eos_id) == (ours.bos_id, ours.eos_id)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in (*TEXTS[:3], TEXTS[4]):
        assert again.encode(text) == ours.encode(text)
        assert theirs(text)["input_ids"] == ours.encode(text, bos=True)
    before = json.loads((published(name) / "tokenizer_config.json").read_text())["bos_token"]
    after = json.loads((tmp_path / "tokenizer_config.json").read_text())["bos_token"]
    assert after == (before["content"] if isinstance(before, dict) else before)


@pytest.mark.parametrize("name", MARKS)
def test_bytes_of_tokens(name, published):
    """As many as the text has; also of code with runs of blanks, added tokens of Gemma."""
    tokenizer = build_tokenizer(str(published(name)))
    text = "def f(x):\n        return 1\n\n\n    # word   x\n" * 3
    prefix = name == "llama2"
    assert tokenizer.byte_lengths()[tokenizer.encode(text)].sum() == len(text) + prefix


def long_text(seed, length=60_000):
    """Prose, code, other scripts, and random runs of what tokenizers treat differently."""
    draw = random.Random(seed)
    parts = [*TEXTS[:3], "\n\n", "    ", "。", "<td>", "▁▁", "\t\t", "</s>", "/", "'s", "=", "1234"]
    words = [
        "the",
        "Word",
        "CamelCase",
        "ünï",
        "東京",
        "カタカナ",
        "x1",
        "a.b(c)",
        "don't",
        "--",
        "$",
    ]
    text = []
    while sum(map(len, text)) < length:
        text.append(draw.choice(parts) if draw.random() < 0.2 else draw.choice(words))
        text.append(draw.choice(["", " ", " ", " ", "  ", "\n", ", "]))
    return "".join(text)


@pytest.mark.parametrize("name", MARKS)
def test_pieces_have_the_ids_of_the_whole_text(name, published, monkeypatch):
    monkeypatch.setattr(base, "_NEAR", 32)  # far less than a piece, so that it isn't the whole text
    tokenizer = build_tokenizer(str(published(name)))
    for seed in range(3):
        text = long_text(seed)
        whole = tokenizer.encode(text)
        with monkeypatch.context() as patch:
            patch.setattr(base, "PIECE", 300)
            parts = list(base.pieces(text, 0, tokenizer._splits_cleanly))
            assert len(parts) > 100
            assert tokenizer.encode(text) == whole
            patch.setattr(base, "LONG", 1000)
            pieces = [ids for _, ids in tokenizer.encode_in_pieces(text)]
            assert np.concatenate(pieces).tolist() == tokenizer.encode_document(text)


CHATS = {
    "one turn": [("user", "2+2?"), ("assistant", "4")],
    "three turns": [
        *[("user", "hi"), ("assistant", "yo"), ("user", " x"), ("assistant", "y \n")],
        *[("user", "and  z?"), ("assistant", "w")],
    ],
    "system": [("system", "be brief"), ("user", "hi"), ("assistant", "a\n\nb")],
    "reasoning": [
        *[("user", "q"), ("assistant", "<think>\nhm\n</think>\n\nA")],
        *[("user", "q2"), ("assistant", "<think>\nhm2\n</think>\n\nB")],
    ],
}
TURN_ENDS = {
    "llama3": "<|eot_id|>",
    "llama3_1": "<|eot_id|>",
    "qwen3": "<|im_end|>",
    "gemma3": "<end_of_turn>",
    "deepseek_v3": "<｜end▁of▁sentence｜>",
}
QWEN_ANSWERS = {
    # the last turn alone has a thought, which it has in any case
    "one turn": ["<think>\n\n</think>\n\n4"],
    "three turns": ["yo", "y \n", "<think>\n\n</think>\n\nw"],
    "system": ["<think>\n\n</think>\n\na\n\nb"],
    "reasoning": ["A", "<think>\nhm2\n</think>\n\nB"],
}
TRIMS = ("llama3", "llama3_1", "gemma3")


def predicted(tokenizer, ids):
    """The runs of predicted tokens as text."""
    runs = np.split(ids, np.flatnonzero(np.diff((ids & UNPREDICTED) == 0)) + 1)
    return [tokenizer.decode((run & PLAIN).tolist()) for run in runs if not run[0] & UNPREDICTED]


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TURN_ENDS)
def test_chat_ids_and_masks(name, chat, published):
    folder = published(name)
    tokenizer = build_tokenizer(str(folder))
    messages = [{"role": role, "content": content} for role, content in CHATS[chat]]
    conversation = Chat(tokenizer, "key")
    ids = conversation.encode(conversation.document(messages))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template(messages, tokenize=True, return_dict=False)
    plain = (ids & PLAIN).tolist()
    assert plain == [*expected, *([] if expected[-1] == tokenizer.eos_id else [tokenizer.eos_id])]
    answers = [content for role, content in CHATS[chat] if role == "assistant"]
    if name == "qwen3":
        answers = QWEN_ANSWERS[chat]
    elif name in TRIMS:
        answers = [answer.strip() for answer in answers]
    assert predicted(tokenizer, ids) == [answer + TURN_ENDS[name] for answer in answers]


def test_qwens_turns_are_those_of_a_marked_template(published):
    """The published template with the marks of `{% generation %}`, which transformers reads."""
    folder = published("qwen3")
    template = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    head = "'<|im_start|>' + message.role + '\\n"
    begin, middle = template.split('{%- elif message.role == "assistant" %}')
    middle, end = middle.split('{%- elif message.role == "tool" %}')
    middle = middle.replace(f"{{{{- {head}' + content", "{{- content").replace(
        f"{{{{- {head}<think>", "{{- '<think>"
    )
    middle = middle.replace(
        "{%- if loop.index0 >", f"{{{{- {head}' }}}}{{%- generation %}}{{%- if loop.index0 >"
    ).replace("{{- '<|im_end|>\\n' }}", "{{- '<|im_end|>' }}{%- endgeneration %}{{- '\\n' }}")
    marked = (
        f'{begin}{{%- elif message.role == "assistant" %}}{middle}'
        f'{{%- elif message.role == "tool" %}}{end}'
    )
    tokenizer = build_tokenizer(str(folder))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    conversation = Chat(tokenizer, "key")
    for chat in CHATS.values():
        messages = [{"role": role, "content": content} for role, content in chat]
        expected = theirs.apply_chat_template(
            messages, chat_template=marked, return_dict=True, return_assistant_tokens_mask=True
        )
        ids = conversation.encode(conversation.document(messages))[:-1]
        assert (ids & PLAIN).tolist() == expected["input_ids"]
        assert ((ids & UNPREDICTED) == 0).astype(int).tolist() == expected["assistant_masks"]


@pytest.mark.parametrize("name", TURN_ENDS)
def test_spelled_control_tokens_stay_text(name, published):
    tokenizer = build_tokenizer(str(published(name)))
    conversation = Chat(tokenizer, "key")
    said = "say <｜User｜>x <｜Assistant｜><|im_end|><|eot_id|><end_of_turn> <tool_call> ok"
    messages = [{"role": "user", "content": said}, {"role": "assistant", "content": "done"}]
    plain = [{"role": "user", "content": "say ok"}, {"role": "assistant", "content": "done"}]
    control = {tokenizer.backend.token_to_id(token) for token in conversation.special}
    found, expected = (
        [i for i in (conversation.encode(conversation.document(m)) & PLAIN) if i in control]
        for m in (messages, plain)
    )
    assert found == expected


FAMILIES = {
    "llama3": ("llama3", 128256),
    "llama3_1": ("llama3", 128256),
    "qwen3": ("qwen3", 151936),
    "gemma3": ("gemma3", 262144),  # of the 1b model, one fewer than the tokenizer has
    "deepseek_v3": ("deepseek_v3", 129280),
    "gptoss": ("gpt_oss", 201088),
    "llama2": ("llama3", 32000),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_ten_steps_with_its_family(name, published, ranks, tmp_path):
    family, entries = FAMILIES[name]
    sizes = TINY | SIZES[family] if family in SIZES else {}
    sizes = {key: value for key, value in sizes.items() if key != "max_seq_len"}
    sizes["vocab_size"] = entries
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.jsonl").write_text(
        "".join(json.dumps({"text": long_text(seed, 300)}) + "\n" for seed in range(200))
    )
    argv = [
        *(f"--job.dump_folder={tmp_path / 'out'}", "--training.steps=10"),
        *(f"--model.name={family}", "--model.flavor=debugmodel"),
        f"--model.hf_assets_path={published(name)}",
        *(f"--model.overrides.{key}={value}" for key, value in sizes.items()),
        *("--training.seq_len=32", "--training.local_batch_size=2", "--optimizer.lr=1e-2"),
        *(f"--training.dataset_path={text}", "--training.document_mask"),
        *("--training.mixed_precision_param=float32", "--metrics.log_freq=1"),
    ]
    curve = losses(ranks(1, train, argv, timeout=250)[0])
    assert len(curve) == 10
    assert curve[-1] < curve[0]


LLAMA2_TEMPLATE = (
    "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}"
    "{% set system = messages[0]['content'] %}{% else %}{% set rest = messages %}"
    "{% set system = false %}{% endif %}{% for message in rest %}"
    "{% if loop.index0 == 0 and system != false %}{% set content = '<<SYS>>\\n' + system + "
    "'\\n<</SYS>>\\n\\n' + message['content'] %}{% else %}{% set content = message['content'] %}"
    "{% endif %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% else %}"
    "{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
HARMONY_TEMPLATE = (
    "{{ '<|start|>system<|message|>You are ChatGPT.<|end|>' }}{% for message in messages %}"
    "{% if message.role == 'assistant' %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + message.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% else %}"
    "{{ '<|start|>' + ('developer' if message.role == 'system' else 'user') + '<|message|>' }}"
    "{{ message.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
NAMED = {
    # name: (template, an answer in its turn, how turns end, how the last one ends)
    "llama2": (LLAMA2_TEMPLATE, "{} </s>", "", ""),
    "gptoss": (HARMONY_TEMPLATE, "<|channel|>final<|message|>{}", "<|end|>", "<|return|>"),
}


@pytest.mark.parametrize("chat", ["one turn", "three turns", "system"])
@pytest.mark.parametrize("name", NAMED)
def test_a_template_of_a_file_that_the_user_names(name, chat, published, tmp_path):
    """These folders have none."""
    folder = published(name)
    template, around, end, last = NAMED[name]
    (tmp_path / "mine.jinja").write_text(template)
    tokenizer = build_tokenizer(str(folder), chat_template=str(tmp_path / "mine.jinja"))
    messages = [{"role": role, "content": content} for role, content in CHATS[chat]]
    conversation = Chat(tokenizer, "key")
    ids = conversation.encode(conversation.document(messages))
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    text = theirs.apply_chat_template(messages, chat_template=template, tokenize=False)
    plain = (ids & PLAIN).tolist()
    expected = theirs(text, add_special_tokens=False)["input_ids"]
    assert plain == [*([] if expected[0] == tokenizer.bos_id else [tokenizer.bos_id]), *expected]
    answers = [content for role, content in CHATS[chat] if role == "assistant"]
    if name == "llama2":
        answers = [answer.strip() for answer in answers]
    answers = [around.format(answer) + end for answer in answers]
    answers[-1] = answers[-1].removesuffix(end) + last
    assert [run.strip() for run in predicted(tokenizer, ids)] == answers

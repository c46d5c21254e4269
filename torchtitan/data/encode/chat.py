"""Conversations as documents: rendered by the tokenizer's chat template, predicted in the
assistant's turns.

    [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]

    <|im_start|>user\\n2+2?<|im_end|>\\n<|im_start|>assistant\\n4<|im_end|>\\n
                                                              -----------

Between reading and encoding, a conversation is the JSON of its messages, a text like others. The
assistant's turns are the text between `{% generation %}` and `{% endgeneration %}` in the template.
In a template without these, a turn is the text added to the conversation before it, rendered with
the prompt for the assistant. If the template renders turns differently once others follow, a turn
is the text after the prompt's text (`turns_after_prompts`).

Special tokens in the template are separate ids, and so are other added tokens in its source. Their
spelling in a message stays text: before rendering, a mark is put into it, which is removed before
encoding. Only tags such as `<think>` are tokens in the assistant's messages. Imports no torch.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchtitan.data.encode.chat_template import BREAK, END, MARKS, START, ChatTemplate
from torchtitan.data.encode.tokenizer import (
    CONTINUES,
    PLAIN,
    UNPREDICTED,
    HuggingFaceTokenizer,
    Tokenizer,
    flagged,
    rust_errors,
)
from torchtitan.data.encode.turns import any_of, end_of_turn, turns_after_prompts
from torchtitan.data.read.opening import BadDocument
from torchtitan.utils.errors import UserError
from torchtitan.utils.limits import MESSAGE_LEVELS

_CONTROL = re.compile(r"<\S+>|\[\S+\]")
_TAG = re.compile(r"</?\w+>")
Messages = Sequence[Mapping[str, Any]]


class Rendered(NamedTuple):
    """A conversation as text."""

    text: str
    turns: list[tuple[int, int]]
    """First character and end of each of the assistant's turns."""
    spelled: set[int]
    """Characters in messages at which the spelling of a special token begins."""


class Chat:
    """Checks, renders and encodes conversations; readers use it like a tokenizer.

    From then on, the token that ends the assistant's turn also ends the tokenizer's generated
    texts (`stop_ids`).
    """

    def __init__(self, tokenizer: Tokenizer, key: str):
        """
        Args:
            key: the configuration key that asks for conversations, for errors.

        Raises:
            UserError: the tokenizer has no end-of-text or chat template, or one that can't be
            parsed.
        """
        if not isinstance(tokenizer, HuggingFaceTokenizer) or tokenizer.path is None:
            raise UserError(
                f"{key}: {tokenizer.name} has no chat template; conversations need a "
                "tokenizer.json with one"
            )
        self.end = tokenizer.end_for(key)
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer.path, tokenizer.names, key, tokenizer.chat_template)
        self.fingerprint = self.template.fingerprint
        tokens = tokenizer.added_tokens.values()
        special = [token.content for token in tokens if token.special]
        template_tokens = [
            token.content
            for token in tokens
            if _CONTROL.fullmatch(token.content) and not token.special
            if token.content in self.template.source
        ]
        self._special = any_of(special)
        self.special = [*special, *template_tokens]
        """Names of the tokens that the template may contain."""
        self._tokens = any_of(self.special)
        tags = [name for name in template_tokens if _TAG.fullmatch(name)]
        self._literal_in_assistant = any_of([name for name in self.special if name not in tags])
        """Tokens that are plain text inside an assistant turn."""
        self._template_tokens = template_tokens
        self._starts = {name[:size] for name in self.special for size in range(1, len(name))}
        self._longest = max(map(len, self.special), default=0)
        self._last: tuple[str, Rendered] | None = None
        tokenizer.stop_ids += self._end_of_turn()

    def _end_of_turn(self) -> tuple[int, ...]:
        """The token that ends the assistant's last turn; nothing, and a note, without one."""
        messages = [{"role": role, "content": "."} for role in ("system", "user", "assistant")]
        special = {self.tokenizer.backend.token_to_id(name) for name in self.special}
        for conversation in (messages[1:], messages):  # a template may demand or refuse the first
            with suppress(BadDocument, UserError):
                ids = self.encode(self.document(conversation))
                end = int(ids[ids < UNPREDICTED][-1]) & PLAIN
                if end in special:
                    return (end,)
        note = (
            f"{self.template.path}: no special token ends the assistant's turn, so no answer will "
            "end by itself; let the template write one there, such as eos_token"
        )
        self.tokenizer.notes = (*(n for n in self.tokenizer.notes if n != note), note)
        return ()

    @cached_property
    def _backend(self) -> Any:
        """The tokenizer's library, set to read no token of the template in a text."""
        if not self._template_tokens:
            return self.tokenizer.backend
        content = json.loads(self.tokenizer.backend.to_str())
        for token in content["added_tokens"]:
            token["special"] |= token["content"] in self._template_tokens
        backend = type(self.tokenizer.backend).from_str(json.dumps(content))
        backend.encode_special_tokens = True
        return backend

    @property
    def vocabulary(self) -> int:
        """Largest id that a conversation can have, plus one."""
        tokens = self.tokenizer.added_tokens.items()
        ids = [id for id, token in tokens if token.content in self.template.source]
        return max(self.tokenizer.text_size, *(id + 1 for id in ids), 0)

    def document(self, value: Any) -> str:
        """The document of a list of messages.

        Raises:
            BadDocument: it is no conversation, has nothing to predict, or the template refuses it.
        """
        messages = _checked(value)
        text = json.dumps(messages, ensure_ascii=False)
        if any(mark in text for mark in MARKS):
            raise BadDocument("noncharacter", "has one of the noncharacters U+FDD0 to U+FDD2")
        self.rendered(text)
        return text

    def rendered(self, text: str) -> Rendered:
        """A document's conversation as text."""
        last = self._last
        if last is None or last[0] != text:
            self._last = last = text, self._render(json.loads(text))
        return last[1]

    def size(self, rendered: Rendered) -> int:
        """Bytes of a conversation without the special tokens of its template."""
        special = (
            match[0]
            for match in self._special.finditer(rendered.text)
            if match.start() not in rendered.spelled
        )
        return len(rendered.text.encode()) - sum(len(token.encode()) for token in special)

    def prompt(self, value: Any) -> tuple[str, list[int]]:
        """A list of messages up to the assistant's next turn, as text and ids.

        Raises:
            BadDocument: it is no conversation, ends with the assistant's turn, or the template
                refuses it.
        """
        messages = _messages(value)
        if messages[-1]["role"] == "assistant":
            raise BadDocument("answered", "the last message is already the assistant's")
        marked = self._marked_messages(messages)
        rendered = _without_marks(self.template.render(marked, prompt=True))
        return rendered.text, self._ids(rendered)[0]

    def text(self, messages: Messages, *, prompt: bool) -> str:
        """Messages as the template renders them.

        Args:
            prompt: begin the assistant's next turn.
        """
        return _without_marks(self.template.render(messages, prompt=prompt)).text

    def _marked_messages(self, messages: Messages) -> Messages:
        literal = self._literal_in_assistant
        return [
            self._marked(message, literal if message["role"] == "assistant" else self._tokens)
            for message in messages
        ]

    def _render(self, messages: Messages) -> Rendered:
        marked = self._marked_messages(messages)
        if self.template.marks_turns:
            full_text = self.template.render(marked)
        else:
            full_text = self._with_turns(marked)
        rendered = _without_marks(full_text)
        if not any(begin < end for begin, end in rendered.turns):
            raise BadDocument(
                "no assistant turn", "the chat template renders no turn of the assistant"
            )
        return rendered

    def _with_turns(self, messages: Messages) -> str:
        """The text, with marks around the turns that the template doesn't mark.

        Raises:
            UserError: the assistant's text is ambiguous.
        """
        full_text = self.template.render(messages)
        always = self._always(messages, full_text)
        chunks = []
        position = 0
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                if i:
                    before = self.template.render(messages[:i], prompt=True)
                else:  # a template may look at the first message, so an empty list isn't rendered
                    prompted = self.template.render(messages, prompt=True)
                    prompt = always or prompted.removeprefix(full_text)
                    before = full_text.partition(prompt)[0] + prompt if prompt else ""
                after = self.template.render(messages[: i + 1])
                after = after[: len(after) - len(always)]
                if not (full_text.startswith(after) and after.startswith(before)):
                    return self._with_turns_after_prompts(messages, full_text)
                end = end_of_turn(after, self._tokens)
                chunks += [
                    full_text[position : len(before)],
                    START,
                    full_text[len(before) : end],
                    END,
                ]
                position = end
        return "".join([*chunks, full_text[position:]])

    def _always(self, messages: Messages, full_text: str) -> str:
        """The prompt for the assistant, if the template puts it behind every conversation."""
        if self.template.render(messages, prompt=True) != full_text:
            return ""
        try:
            nothing = self.template.render([])
        except BadDocument:
            return ""
        nothing = nothing.removeprefix(self.template.special.get("bos_token", ""))
        return nothing if full_text.endswith(nothing) else ""

    def _with_turns_after_prompts(self, messages: Messages, full_text: str) -> str:
        """`_with_turns` of a template that renders turns differently once others follow."""
        first = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
        some = messages[:first] or messages
        before = self.template.render(some)
        prompted = self.template.render(some, prompt=True)
        if not prompted.startswith(before):
            raise UserError(self.template.not_by_prefixes)
        turns = turns_after_prompts(full_text, prompted[len(before) :], self._tokens)
        roles = [role for role, _ in groupby(message["role"] for message in messages)]
        if len(turns) != roles.count("assistant"):
            raise UserError(self.template.not_by_prefixes)
        for begin, end in reversed(turns):
            full_text = f"{full_text[:begin]}{START}{full_text[begin:end]}{END}{full_text[end:]}"
        return full_text

    def _marked(self, value: Any, tokens: re.Pattern[str]) -> Any:
        """Part of a message, with a mark in each spelling of a token."""
        if isinstance(value, dict):
            return {name: self._marked(inner, tokens) for name, inner in value.items()}
        if isinstance(value, list):
            return [self._marked(inner, tokens) for inner in value]
        if not isinstance(value, str):
            return value
        starts = []
        at = -1
        while match := tokens.search(value, at + 1):
            at = match.start()
            starts.append(at)
        # The text that the template adds could complete a beginning at the end.
        for begin in range(max(len(value) - self._longest, at + 1, 0), len(value)):
            if value[begin:] in self._starts:
                starts.append(begin)
        for begin in reversed(starts):
            value = value[: begin + 1] + BREAK + value[begin + 1 :]
        return value

    def encode(self, text: str) -> NDArray[np.int64]:
        """The ids of a document as training sees it. Ids outside the assistant's turns are flagged,
        and so is each end-of-text except the last. Begin-of-text and end-of-text are added unless
        the template has them.

        Raises:
            UserError: the tokenizer fails on this text.
        """
        conversation = self.rendered(text)
        ids, spans = self._ids(conversation)
        first, after = spans.T
        predicted = np.zeros(len(ids), bool)
        for begin, end in conversation.turns:
            predicted |= (first < end) & (after > begin)
        if ids[-1:] != [self.end]:
            ids.append(self.end)
            predicted = np.append(predicted, False)
        document = np.asarray(ids, np.int64)
        continues = document == self.end
        continues[-1] = False
        return flagged(flagged(document, UNPREDICTED, ~predicted), CONTINUES, continues)

    def _ids(self, rendered: Rendered) -> tuple[list[int], NDArray[np.int64]]:
        """The ids of a text, begin-of-text first, and the first character and end of each."""
        ids: list[int] = []
        spans: list[NDArray[np.int64]] = []
        for begin, end, special in self._pieces(rendered):
            backend = self.tokenizer.reading_special_tokens if special else self._backend
            with rust_errors(self.tokenizer.name, "can't encode a conversation"):
                encoding = backend.encode(rendered.text[begin:end], add_special_tokens=False)
            ids += encoding.ids
            spans.append(np.asarray(encoding.offsets, np.int64).reshape(-1, 2) + begin)
        bos = self.tokenizer.bos_id
        if bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
            spans.insert(0, np.zeros((1, 2), np.int64))
        return ids, np.concatenate(spans)

    def _pieces(self, rendered: Rendered) -> Iterator[tuple[int, int, bool]]:
        """Pieces of a text: first character, end, and whether to read special tokens there.

        A text whose messages spell no special token is one piece. Else it is cut at the special
        tokens of the template.
        """
        begin = at = 0
        while rendered.spelled and (match := self._tokens.search(rendered.text, at)):
            at = match.start() + 1
            if match.start() not in rendered.spelled:
                at = match.end()
                yield begin, match.start(), False
                yield match.start(), at, True
                begin = at
        yield begin, len(rendered.text), not rendered.spelled

    def encode_in_pieces(
        self, text: str, start: int = 0
    ) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """As `Tokenizer.encode_in_pieces`; a conversation is one piece."""
        yield 0, self.encode(text)


class MessageTexts:
    """Reads conversations without a template: the contents of their messages, a line each."""

    fingerprint = ""

    def document(self, value: Any) -> str:
        """
        Raises:
            BadDocument: it is no conversation.
        """
        return "\n".join(message.get("content") or "" for message in _checked(value))


def _without_marks(text: str) -> Rendered:
    chunks = []
    length = begin = 0
    turns: list[tuple[int, int]] = []
    spelled: set[int] = set()
    for chunk in re.split(f"([{START}{END}{BREAK}])", text):
        if chunk == START:
            begin = length
        elif chunk == END:
            turns.append((begin, length))
        elif chunk == BREAK:
            spelled.add(length - 1)
        else:
            chunks.append(chunk)
            length += len(chunk)
    return Rendered("".join(chunks), turns, spelled)


def _checked(value: Any) -> list[dict[str, Any]]:
    """As `_messages`.

    Raises:
        BadDocument: it is no conversation, or has no turn of the assistant.
    """
    messages = _messages(value)
    if not any(message["role"] == "assistant" for message in messages):
        raise BadDocument("no assistant turn", 'no message has the role "assistant"')
    return messages


def _messages(value: Any) -> list[dict[str, Any]]:
    """A conversation, without keys that are null: columns of tables have all keys in all messages.

    Raises:
        BadDocument: it is no conversation.
    """
    if not isinstance(value, list) or not value:
        what = "an empty list" if value == [] else type(value).__name__
        raise BadDocument("no messages", f"must be a list of messages, got {what}")
    messages = []
    for number, message in enumerate(value, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadDocument(
                "no messages",
                f'message {number} must be an object with a "role" and a "content"; conversations '
                "in other forms, such as from/value, must be converted",
            )
        content = message.get("content")
        if content is None and not message.get("tool_calls"):
            raise BadDocument("no content", f'message {number} has no "content"')
        if not isinstance(content, str | None):
            raise BadDocument(
                "content not text",
                f"message {number} has content of type {type(content).__name__}; only strings can "
                "be trained on: join a list of text parts ahead, images are not supported",
            )
        messages.append({key: _plain(entry) for key, entry in message.items() if entry is not None})
    return messages


def _plain(value: Any, level: int = 1) -> Any:
    """Values of a message as in JSON: dates and other values of tables become strings.

    Raises:
        BadDocument: it is nested too deeply.
    """
    if level > MESSAGE_LEVELS:
        raise BadDocument("nested too deeply", "a message is nested too deeply")
    if isinstance(value, dict):
        return {str(name): _plain(inner, level + 1) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, level + 1) for inner in value]
    return value if isinstance(value, str | int | float | None) else str(value)

"""Our models behind lm-eval's interface: answers to its requests for likelihoods and texts.

Every rank runs the harness on the same tasks, so all make the same calls of the model. Requests
become token ids as in lm-eval's `hf` backend, which this file follows in where a context
ends and in how it truncates.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor

from torchtitan.data.encode.chat import Chat
from torchtitan.data.encode.tokenizer import HuggingFaceTokenizer, TiktokenTokenizer, Tokenizer
from torchtitan.data.read.opening import data_errors
from torchtitan.inference.generator import Continuation, SamplingSettings, continue_prompts
from torchtitan.utils.errors import UserError
from torchtitan.utils.formats import read_json_object

_MAX_NEW_TOKENS = 256
"""Default for requests without a limit, as in the `hf` backend."""

Pair = tuple[Any, list[int], list[int]]
"""A request's name (unused here), and the ids of its context and of its continuation."""


class Logits(Protocol):
    """A model's logits at chosen positions: `train.logits`."""

    device: torch.device
    max_seq_len: int

    @property
    def batch(self) -> int: ...

    def __call__(
        self,
        texts: Sequence[list[int]],
        chosen: Sequence[Sequence[int]],
        read: Callable[[Tensor, Tensor], Tensor],
        width: int,
    ) -> Tensor: ...

    def next_logits(self, texts: Sequence[list[int]], vocab_size: int) -> Tensor: ...


class EvalTokenizer:
    """Encodes texts as transformers does, so that scores equal the `hf` backend's.

    Unlike in training, the spelling of a special token in a text becomes that token. A trained
    model gets begin-of-text where training does, as in its export; for a Hugging Face folder, the
    tokenizer's files decide which tokens are added.
    """

    def __init__(self, tokenizer: Tokenizer, *, by_file: bool = False):
        """
        Args:
            by_file: add special tokens by the tokenizer's files, not as in training.
        """
        bos = tokenizer.bos_id
        self.eos_id = tokenizer.end_for("lm-eval")
        self.prefix_id = self.eos_id if bos is None else bos
        """The token before a text without context."""
        self._before = [] if bos is None else [bos]
        self._after: list[int] = []
        self._ids: Callable[[str, bool], list[int]] = lambda text, _: tokenizer.encode(text)
        self._decode = tokenizer.decode
        self._special = {bos, self.eos_id}
        if isinstance(tokenizer, TiktokenTokenizer):
            backend = tokenizer.backend
            self._ids = lambda text, _: backend.encode(text, allowed_special="all")
            self._special = set(tokenizer.special.values())
        elif isinstance(tokenizer, HuggingFaceTokenizer):
            self._read(tokenizer, by_file)

    def _read(self, tokenizer: HuggingFaceTokenizer, by_file: bool) -> None:
        """Read the files as transformers' fast tokenizers do."""
        assert tokenizer.path is not None
        backend = tokenizer.reading_special_tokens
        self._special = {id for id, token in tokenizer.added_tokens.items() if token.special}
        self._ids = lambda text, _: backend.encode(text, add_special_tokens=False).ids
        if not by_file:
            return
        file = tokenizer.path.with_name("tokenizer_config.json")
        config = read_json_object(file) if file.exists() else {}
        flags = {key: config[key] for key in ("add_bos_token", "add_eos_token") if key in config}
        # a rule of the file for what is added
        by_post_processor = not flags and backend.post_processor is not None
        self._before = [self.prefix_id] if flags.get("add_bos_token") else []
        self._after = [self.eos_id] if flags.get("add_eos_token") else []
        self._ids = lambda text, special: (
            backend.encode(text, add_special_tokens=special and by_post_processor).ids
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """
        Args:
            add_special_tokens: begin the text as in training, or by the tokenizer's files.
        """
        ids = self._ids(text, add_special_tokens)
        return [*self._before, *ids, *self._after] if add_special_tokens else ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if skip_special_tokens:
            ids = [i for i in ids if i not in self._special]
        return self._decode(list(ids))


@dataclass
class _Row:
    """An input that requests share: they differ in the last token of their continuation."""

    text: list[int]
    requests: list[int] = field(default_factory=list)
    """The requests' indices."""
    num_scored: int = 0
    """Number of positions at the end of the text that predict a token of a continuation."""
    last_tokens: list[int] = field(default_factory=list)
    """The tokens that may follow the text."""


class HarnessModel(TemplateLM):
    """Scores and continues texts for lm-eval."""

    tokenizer_name = ""

    def __init__(
        self, logits: Logits, tokenizer: Tokenizer, *, by_file: bool = False, chat: bool = False
    ):
        """
        Args:
            by_file: see `EvalTokenizer`.
            chat: questions are asked by the tokenizer's chat template.

        Raises:
            UserError: `chat`, and the tokenizer has no chat template.
        """
        super().__init__()
        self.chat = Chat(tokenizer, "lm-eval's questions as a chat") if chat else None
        self.logits = logits
        self.texts = EvalTokenizer(tokenizer, by_file=by_file)
        self.ends = tokenizer.all_ends
        self.vocab_size = tokenizer.vocab_size

    @property
    def eot_token_id(self) -> int:
        return self.texts.eos_id

    @property
    def prefix_token_id(self) -> int:
        return self.texts.prefix_id

    @property
    def max_length(self) -> int:
        return self.logits.max_seq_len

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        if add_special_tokens is None:  # a text may bring its own first token
            prefix = self.texts.decode([self.prefix_token_id], skip_special_tokens=False)
            add_special_tokens = not string.startswith(prefix)
        return self.texts.encode(string, add_special_tokens)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A question as text, as in the `hf` backend.

        Args:
            add_generation_prompt: False: the last message is the beginning of the answer.
        """
        assert self.chat
        with data_errors("lm-eval"):
            text = self.chat.text(chat_history, prompt=add_generation_prompt)
        if add_generation_prompt:
            return text
        begin = chat_history[-1]["content"].lstrip()
        begin = begin if begin in text else begin.rstrip()  # a template may trim
        if begin not in text:
            raise UserError(
                "lm-eval: the chat template changes the beginning of an answer, so it can't be "
                "continued; evaluate this task without a chat template"
            )
        return text[: text.rindex(begin) + len(begin)]

    # ---- likelihoods

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm=True)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[float]:
        """Each text whole, in windows of the longest row, each token predicted once."""
        windows: list[Pair] = []
        owners: list[int] = []
        for owner, request in enumerate(requests):
            (text,) = request.args
            for window in get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            ):
                context, continuation = make_disjoint_window(window)
                windows.append((None, context, continuation))
                owners.append(owner)
        sums = [0.0] * len(requests)
        likelihoods = self._loglikelihood_tokens(windows)
        for owner, (value, _) in zip(owners, likelihoods, strict=True):
            sums[owner] += value
        return sums

    def _loglikelihood_tokens(self, requests: Sequence[Pair], **_: Any) -> list[tuple[float, bool]]:
        """The log-likelihood of each continuation, and whether each of its tokens is the likeliest.

        Requests with the same input share a row: they differ in their last token, as the choices of
        a question do.
        """
        rows: dict[tuple[int, ...], _Row] = {}
        for i, (_, context, continuation) in enumerate(requests):
            if len(continuation) > self.max_length:
                raise UserError(
                    f"lm-eval: a continuation has {len(continuation)} tokens, the model "
                    f"reads {self.max_length}; leave out this task"
                )
            *text, last = [*context, *continuation][-(self.max_length + 1) :]
            row = rows.setdefault(tuple(text), _Row(text))
            row.requests.append(i)
            row.num_scored = max(row.num_scored, len(continuation))
            if last not in row.last_tokens:
                row.last_tokens.append(last)
        likely, best = self._score(list(rows.values()))
        answers = [(0.0, False)] * len(requests)
        end = 0
        for row in rows.values():
            end += row.num_scored
            for i in row.requests:
                *head, last = requests[i][2]
                begin = end - 1 - len(head)
                value = sum(values[0] for values in likely[begin : end - 1])
                value += likely[end - 1][row.last_tokens.index(last)]
                expected = [*row.text[len(row.text) - len(head) :], last]
                answers[i] = value, best[begin:end] == expected
        return answers

    def _score(self, rows: Sequence[_Row]) -> tuple[list[list[float]], list[int]]:
        """Log-likelihoods of the tokens after the scored positions, and the likeliest tokens.

        Returns:
            For each position, of all rows in order: the values of the next token, or of each token
            that may follow the row; and the likeliest token.
        """
        positions_of_rows = [range(len(row.text) - row.num_scored, len(row.text)) for row in rows]
        targets: list[list[int]] = []
        for row, positions in zip(rows, positions_of_rows, strict=True):
            targets += [[row.text[position + 1]] for position in positions[:-1]]
            targets.append(row.last_tokens)
        width = max(map(len, targets), default=1)
        padded_targets = [target + [0] * (width - len(target)) for target in targets]
        target_ids = torch.tensor(padded_targets, device=self.logits.device)

        def read(logits: Tensor, numbers: Tensor) -> Tensor:
            values = logits.log_softmax(-1).gather(1, target_ids[numbers])
            return torch.cat([values, logits.argmax(-1, keepdim=True)], dim=1)

        texts = [row.text for row in rows]
        values = self.logits(texts, positions_of_rows, read, width + 1).double().tolist()
        return [row[:-1] for row in values], [int(row[-1]) for row in values]

    # ---- texts

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        continuations = [""] * len(requests)
        by_settings: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            by_settings.setdefault(repr(request.args[1]), []).append(i)
        for members in by_settings.values():
            settings = requests[members[0]].args[1]
            prompts = {i: self.tok_encode(requests[i].args[0]) for i in members}
            members.sort(key=lambda i: -len(prompts[i]))  # similar lengths share a batch
            for first in range(0, len(members), self.logits.batch):
                batch = members[first : first + self.logits.batch]
                texts = self._continue([prompts[i] for i in batch], settings)
                for i, text in zip(batch, texts, strict=True):
                    continuations[i] = text
        return continuations

    def _continue(self, prompts: list[list[int]], kwargs: dict[str, Any]) -> list[str]:
        """Continue prompts by a task's `generation_kwargs`."""
        settings: dict[str, Any] = dict(normalize_gen_kwargs(kwargs, _MAX_NEW_TOKENS))
        end = self.texts.decode([self.eot_token_id], False)
        until = handle_stop_sequences(settings["until"], end)
        new = settings["max_gen_toks"]
        room = self.max_length - new
        if room <= 0:
            raise UserError(
                f"lm-eval: a task asks for {new} new tokens, and the model reads {self.max_length} "
                "in all; leave out the task, or lower max_gen_toks in its generation_kwargs"
            )
        sampling = SamplingSettings(temperature=0)
        if settings["do_sample"]:
            limits = {key: settings[key] for key in ("top_k", "top_p") if settings.get(key)}
            sampling = SamplingSettings(temperature=settings.get("temperature", 1.0), **limits)

        def ends(row: Continuation) -> bool:
            text = self.texts.decode(row.tokens)
            return any(stop and stop in text for stop in until)

        rows = continue_prompts(
            [prompt[-room:] for prompt in prompts],
            lambda texts, _: self.logits.next_logits(texts, self.vocab_size),
            sampling,
            stop=self.ends,
            max_new_tokens=new,
            max_seq_len=self.max_length,
            device=self.logits.device,
            ends=ends,
        )
        texts = [self.texts.decode(row.tokens) for row in rows]
        return [postprocess_generated_text(text, until, None) for text in texts]

"""A model of ours as lm-eval sees models: answers to its requests for likelihoods and texts.

Every rank runs the harness on the same tasks, so all make the same calls of the model. Requests
become token ids as in lm-eval's `hf` backend, which this file follows in what is context and what
continuation, and in how it truncates.
"""

from collections.abc import Callable, Sequence
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

from torchtitan.data.text.tokenizer import Tokenizer
from torchtitan.inference.generator import Continuation, Sampling
from torchtitan.inference.texts import EvalTokenizer
from torchtitan.inference.uncached import continue_prompts
from torchtitan.utils.errors import UserError

_MAX_NEW_TOKENS = 256
"""Of a request that doesn't say how many, as in the `hf` backend."""

Pair = tuple[Any, list[int], list[int]]
"""What a request is called (unused here), the ids of its context and of its continuation."""


class Logits(Protocol):
    """A model's logits at chosen positions: `train.probe.Probe`."""

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


class HarnessModel(TemplateLM):
    """Scores and continues texts for lm-eval."""

    def __init__(self, logits: Logits, tokenizer: Tokenizer, *, by_file: bool = False):
        """
        Args:
            by_file: as for `EvalTokenizer`.
        """
        super().__init__()
        self.logits = logits
        self.texts = EvalTokenizer(tokenizer, by_file=by_file)
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
        for owner, (text,) in enumerate(request.args for request in requests):
            for window in get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            ):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(owner)
        sums = [0.0] * len(requests)
        for owner, (value, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            sums[owner] += value
        return sums

    def _loglikelihood_tokens(self, requests: Sequence[Pair], **_: Any) -> list[tuple[float, bool]]:
        """The log-likelihood of each continuation, and whether each of its tokens is the likeliest.

        Requests with the same input share a row: they differ in their last token, as the choices of
        a question do.
        """
        rows: dict[tuple[int, ...], list[int]] = {}
        for i, (_, context, continuation) in enumerate(requests):
            if len(continuation) > self.max_length:
                raise UserError(
                    f"lm-eval: a continuation has {len(continuation)} tokens, the model "
                    f"reads {self.max_length}; "
                    "leave out this task"
                )
            whole = [*context, *continuation][-(self.max_length + 1) :]
            rows.setdefault(tuple(whole[:-1]), []).append(i)
        texts = [list(row) for row in rows]
        scored = [max(len(requests[i][2]) for i in members) for members in rows.values()]
        lasts = [
            list(dict.fromkeys(requests[i][2][-1] for i in members)) for members in rows.values()
        ]
        likely, best = self._score(texts, scored, lasts)
        found: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        end = 0
        for text, count, last, members in zip(texts, scored, lasts, rows.values(), strict=True):
            end += count
            for i in members:
                own = requests[i][2]
                inner = range(end - len(own), end - 1)
                choice = last.index(own[-1])
                value = sum(likely[number][0] for number in inner) + likely[end - 1][choice]
                greedy = [best[number] for number in inner] == text[len(text) - len(own) + 1 :]
                found[i] = value, greedy and best[end - 1] == own[-1]
        return found

    def _score(
        self, texts: list[list[int]], scored: list[int], lasts: list[list[int]]
    ) -> tuple[list[list[float]], list[int]]:
        """Log-likelihoods of what follows the last `scored` positions of each text, and the
        likeliest tokens.

        Args:
            lasts: the tokens that may follow each text.

        Returns:
            For each position, of all texts in order: the values of the next token, or of each that
            may follow the text; and the likeliest token.
        """
        chosen = [
            range(len(text) - count, len(text)) for text, count in zip(texts, scored, strict=True)
        ]
        targets: list[list[int]] = []
        for text, places, last in zip(texts, chosen, lasts, strict=True):
            targets += [[text[place + 1]] for place in places[:-1]] + [last]
        width = max(map(len, targets), default=1)
        padded = torch.tensor(
            [[*row, *[0] * (width - len(row))] for row in targets], device=self.logits.device
        )

        def read(logits: Tensor, numbers: Tensor) -> Tensor:
            values = logits.log_softmax(-1).gather(1, padded[numbers])
            return torch.cat([values, logits.argmax(-1, keepdim=True)], dim=1)

        values = self.logits(texts, chosen, read, width + 1).double().tolist()
        return [row[:-1] for row in values], [int(row[-1]) for row in values]

    # ---- texts

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        found = [""] * len(requests)
        alike: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            alike.setdefault(repr(request.args[1]), []).append(i)
        for members in alike.values():
            prompts = [self.tok_encode(requests[i].args[0]) for i in members]
            # alike lengths share a batch
            order = sorted(range(len(members)), key=lambda k: -len(prompts[k]))
            for first in range(0, len(order), self.logits.batch):
                together = order[first : first + self.logits.batch]
                made = self._continue([prompts[k] for k in together], requests[members[0]].args[1])
                for k, text in zip(together, made, strict=True):
                    found[members[k]] = text
        return found

    def _continue(self, prompts: list[list[int]], asked: dict[str, Any]) -> list[str]:
        """
        Args:
            asked: the generation settings of a task.
        """
        settings: dict[str, Any] = dict(normalize_gen_kwargs(asked, _MAX_NEW_TOKENS))
        until = handle_stop_sequences(
            settings["until"], self.texts.decode([self.eot_token_id], False)
        )
        new = settings["max_gen_toks"]
        room = self.max_length - settings["max_gen_toks"]
        if room <= 0:
            raise UserError(
                f"lm-eval: a task asks for {new} new tokens, and the model reads "
                f"{self.max_length} in all; leave out "
                "the task, or lower max_gen_toks in its generation_kwargs"
            )
        sampling = Sampling(temperature=0)
        if settings["do_sample"]:
            chosen = {key: settings[key] for key in ("top_k", "top_p") if settings.get(key)}
            sampling = Sampling(temperature=settings.get("temperature", 1.0), **chosen)

        def ends(row: Continuation) -> bool:
            text = self.texts.decode(row.tokens)
            return any(stop and stop in text for stop in until)

        rows = continue_prompts(
            [prompt[-room:] for prompt in prompts],
            lambda texts: self.logits.next_logits(texts, self.vocab_size),
            sampling,
            stop=[self.eot_token_id],
            max_new_tokens=new,
            max_seq_len=self.max_length,
            device=self.logits.device,
            ends=ends,
        )
        return [
            postprocess_generated_text(self.texts.decode(row.tokens), until, None) for row in rows
        ]

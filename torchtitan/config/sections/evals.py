"""The sections `[eval]` and `[sampling]`."""

from typing import Annotated

from pydantic import Field, field_validator

from torchtitan.config.types import (
    Factor,
    FewOrZero,
    LocalPath,
    Name,
    Section,
    Steps,
    Text,
    split_names,
)


class Eval(Section):
    """Benchmarks during training, run by EleutherAI's lm-eval (`pip install
    titan-pretrain[eval]`).
    """

    enable: bool = False
    """Run `tasks` every `freq` steps and after the last one."""
    tasks: list[Name] = []
    """Names of tasks, groups or tags of lm-eval or of `include_path`."""
    freq: Steps = 1000
    """Steps between evaluations."""
    include_path: LocalPath | None = None
    """Folder with your own task files. They may name Python functions, which are run."""
    num_fewshot: FewOrZero | None = None
    """Put this many solved examples before each question. Default: each task's number."""
    limit: Steps | None = None
    """Evaluate only this many documents of each task. Default: all."""
    chat: bool = False
    """Ask each question as a user's message, by the tokenizer's chat template."""

    _names = field_validator("tasks", mode="before")(split_names)


class Sampling(Section):
    """Texts that the model writes during training."""

    prompts: Annotated[list[Text], Field(max_length=1000)] = []
    """Continue each of these every `freq` steps and after the last one. Empty: write nothing."""
    chat: bool = False
    """Answer each prompt as a user's message, by the tokenizer's chat template."""
    freq: Steps = 1000
    """Steps between samples."""
    max_new_tokens: Steps = 64
    """Length of each continuation."""
    temperature: Factor = 0.0
    """Divide the logits by this before sampling a token. 0: always the likeliest token."""
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    """Seed of sampling: the same seed, prompt and weights give the same text."""

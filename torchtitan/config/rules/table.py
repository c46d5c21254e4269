"""The table of rules that refuse configurations, each with its keys and the facts it needs.

    @rule("training.global_batch_size", needs=["layout"])
    def batch_divides(config: Config, facts: Facts) -> Iterator[str]:
        if config.training.global_batch_size % facts.world: yield "..."

    refuse(
        "optimizer.name",
        "optimizer.state_dtype",
        when=lambda config: config.optimizer.name == "Muon" and ...,
        because="optimizer.state_dtype: Muon has no bf16 state; set ...",
    )

A rule belongs to a file of its subject in this folder; every file here is part of the table. A
message starts with the key, and names the problem and the legal values.

Rules on the shape of a batch are checked once per stage of the data.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from torchtitan.config.derive import stages_of
from torchtitan.config.pipeline_schedules import FileSchedule
from torchtitan.config.sections.schema import Config
from torchtitan.utils.errors import ConfigError

ABSENT: Any = object()
"""An unknown fact."""
STAGED = {
    "training.seq_len",
    "training.global_batch_size",
    "training.local_batch_size",
    "training.loss_chunks",
}
"""Rules on these keys are asked again for each of `[[training.stages]]`."""


class ModelArguments(Protocol):
    """Hyper-parameters that every family has."""

    model_fields: ClassVar[Mapping[str, Any]]
    vocab_size: int
    max_seq_len: int


class DecoderArguments(Protocol):
    """Hyper-parameters of decoders that rules are about."""

    qk_norm: bool
    experts_per_token: int
    normalize_expert_weights: bool


class TextEncoder(Protocol):
    """The tokenizer's interface that rules need."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def text_size(self) -> int: ...


@dataclass(frozen=True)
class Accelerator:
    """A kind of device."""

    name: str
    """Its name in torch; `a CPU`."""
    capability: tuple[int, int] | None
    """Its capability in torch: NVIDIA's compute capability, AMD's gfx942 as 9.4, a CPU as (0, 0).
    None: unknown, and nothing is refused.
    """

    @property
    def has_bf16(self) -> bool:
        """False for NVIDIA's GPUs before Ampere, which emulate it. CPUs may also be slow at it:
        `torchtitan init` measures that.
        """
        return self.capability is None or not (0, 0) < self.capability < (8, 0)


@dataclass(frozen=True)
class Facts:
    """Facts beside the configuration. A rule is asked only if all facts that it needs are known.

    The configuration that comes with facts is derived.
    """

    world: int = ABSENT
    """Number of ranks."""
    layout: Mapping[str, int] = ABSENT
    """Degree of each mesh axis; absent if their product isn't `world`."""
    torch: str | None = ABSENT
    """Installed release of torch; None if there is none."""
    old_torch: bool = ABSENT
    """Whether that is older than 2.13."""
    device: Accelerator = ABSENT

    # ---- the model
    args: ModelArguments = ABSENT
    decoder: DecoderArguments | None = ABSENT
    """`args` if the model is a decoder, else None."""
    mtp_modules: int = ABSENT
    """`ModelSpec.mtp_modules`."""
    unused: Mapping[str, str] = ABSENT
    """`ModelSpec.unused`."""
    parameters: Collection[str] = ABSENT
    """Names of all parameters."""
    block_matrices: Collection[str] = ABSENT
    """Names of the blocks' parameters that are matrices."""
    tensor_parallel_sizes: Mapping[str, int] = ABSENT
    """`ModelSpec.tensor_parallel_sizes`."""
    context_parallel_sizes: Mapping[str, int] = ABSENT
    """`ModelSpec.context_parallel_sizes`."""
    expert_sizes: Mapping[str, int] = ABSENT
    """`ModelSpec.expert_sizes`."""
    export_problems: Sequence[str] = ABSENT
    """Why Hugging Face's class of the family can't express the model."""
    has_hf_class: bool = ABSENT
    """Whether transformers has a class of the family."""
    exported_buffers: Collection[str] = ABSENT
    """Names of the buffers that Hugging Face's class stores, if the model is exported."""
    module_flops: Mapping[str, float] = ABSENT
    """FLOPs per token of each module that can be on its own pipeline stage, in execution order."""
    tied_modules: Sequence[str] = ABSENT
    """Modules that share a weight."""
    schedule_file: FileSchedule | None = ABSENT
    """The pipeline schedule, if it comes from a file."""
    tokenizer: TextEncoder = ABSENT

    # ---- this machine
    data_problems: Mapping[str, str] = ABSENT
    """Key of a `dataset_path` to why nothing can be read from there."""
    folders: Collection[str] = ABSENT
    """The folders that exist, among those the configuration names as inputs."""
    packages: Collection[str] = ABSENT
    """The optional packages that are installed."""
    compilers: Collection[str] = ABSENT
    """Backends of `torch.compile` that packages register."""
    missing_for_kernels: str = ABSENT
    """What is missing to compile kernels here; empty if nothing is."""
    unwritable: str | None = ABSENT
    """Why `job.dump_folder` can't be written to."""


HERE = ("tokenizer", "data_problems", "folders", "packages")
"""The facts that depend on files of this machine."""

Problem = Callable[[Config, Facts], str | Iterable[str] | None]
"""Returns the problems of a configuration: no message, one, or several."""


@dataclass(frozen=True)
class Rule:
    """A reason why configurations can't run."""

    keys: tuple[str, ...]
    """Keys that it is about; the first is blamed."""
    problem: Problem
    needs: tuple[str, ...]
    """Facts without which it isn't asked."""
    refuses: bool = True
    """False: it reports legal settings that are probably mistakes."""

    def applies(self, facts: Facts) -> bool:
        """Whether all facts that it needs are known."""
        return not any(getattr(facts, name) is ABSENT for name in self.needs)

    def ask(self, config: Config, facts: Facts) -> list[str]:
        """The messages of this rule about a configuration."""
        answer = self.problem(config, facts)
        if answer is None:
            return []
        return [answer] if isinstance(answer, str) else list(answer)


RULES: list[Rule] = []
"""The table, filled by the modules of this folder in the order of `rules.SUBJECTS`."""


def rule(
    *keys: str, needs: Sequence[str] = ("world",), refuses: bool = True
) -> Callable[[Problem], Problem]:
    """Add the decorated function to the table."""

    def add(problem: Problem) -> Problem:
        RULES.append(Rule(keys, problem, tuple(needs), refuses))
        return problem

    return add


def refuse(
    *keys: str, when: Callable[[Config], bool], because: str, needs: Sequence[str] = ("world",)
) -> None:
    """Add a combination of settings that is refused, with the message `because`."""

    def problem(config: Config, facts: Facts) -> str | None:
        return because if when(config) else None

    RULES.append(Rule(keys, problem, tuple(needs)))


def problems(config: Config, facts: Facts, *, refuses: bool = True) -> list[str]:
    """Messages on a derived configuration, as far as `facts` allow.

    Args:
        refuses: False: ask the rules on legal settings that are probably mistakes.
    """
    rules = [rule for rule in RULES if rule.refuses == refuses and rule.applies(facts)]
    messages = [problem for rule in rules for problem in rule.ask(config, facts)]
    return [*messages, *_stage_problems(config, facts, rules, messages)]


def _stage_problems(
    config: Config, facts: Facts, rules: Sequence[Rule], earlier: Collection[str]
) -> Iterator[str]:
    """Problems that the rules on shapes find only in later stages of the data.

    Args:
        rules: the rules that apply.
        earlier: problems before the first stage.
    """
    on_shapes = [rule for rule in rules if not STAGED.isdisjoint(rule.keys)]
    messages = set(earlier)
    for stage, stage_config in zip(config.training.stages, stages_of(config)[1:], strict=True):
        for rule in on_shapes:
            for problem in rule.ask(stage_config, facts):
                if problem not in messages:
                    messages.add(problem)
                    yield f"training.stages: the stage from_step {stage.from_step}: {problem}"


def check(config: Config, facts: Facts, sources: Mapping[str, str] | None = None) -> None:
    """Refuse a derived configuration that can't run.

    Args:
        sources: key to where it was set, named in the messages.

    Raises:
        ConfigError: every problem.
    """
    if messages := problems(config, facts):
        raise ConfigError([located(problem, sources or {}) for problem in messages])


def located(problem: str, sources: Mapping[str, str]) -> str:
    """The problem, preceded by where the first key in it that isn't at its default was set."""
    key = next((word for word in re.findall(r"[\w.]+", problem) if word in sources), "")
    where = sources.get(key)
    return f"{where}: {problem}" if where and where != f"--{key}" else problem

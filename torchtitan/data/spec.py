"""The data of a run as plain values: `DataSpec`."""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal

from torchtitan.config.derive import validation_rows
from torchtitan.config.registry import data_sources
from torchtitan.config.sections.data import DataLoader, DataStage, Source, ValidationSet
from torchtitan.config.sections.schema import Config
from torchtitan.config.sections.training import Training, Validation
from torchtitan.data.encode.tokenizer import Tokenizer
from torchtitan.data.order.rows import BatchPlan
from torchtitan.data.read.documents import OnBad
from torchtitan.data.read.opening import Retry


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """The data to read, as plain values: worker processes get a copy."""

    sources: Sequence[Source]
    stages: Sequence[DataStage] = ()
    tokenizer: Tokenizer
    seq_len: int
    """Predicted tokens of a row, before the first stage that changes them."""
    rows_per_step: int
    """Rows over all ranks, before the first stage that changes it; at least one per rank."""
    local_batch_size: int = 1
    """Rows that a rank computes at once, before the first stage that changes them."""
    seed: int
    infinite: bool
    """Read epoch after epoch, shuffled; else make one pass in order."""
    options: DataLoader
    on_bad_document: OnBad = "stop"
    """Whether documents that can't be decoded or have no text end the run."""
    on_changed_data: Literal["stop", "continue"] = "stop"
    """Whether files with other contents than at the checkpoint end a resume."""
    packing: Literal["stream", "best_fit"] = "stream"
    """The way that documents become rows."""
    section: str = "training"
    """Section of the configuration: `training` or `validation`."""
    custom: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """Registered sources: name to `make`."""

    @property
    def name(self) -> str:
        return ", ".join(source.dataset_path or source.dataset for source in self.sources)

    @cached_property
    def plans(self) -> list[BatchPlan]:
        """The batch size and weights of each stage, in order."""
        weights = {source.name: Fraction(str(source.weight)) for source in self.sources}
        first = BatchPlan(0, self.rows_per_step, weights, self.seq_len, self.local_batch_size)
        plans = [first]
        for stage in self.stages:
            changed = {name: Fraction(str(weight)) for name, weight in stage.weights.items()}
            before = plans[-1]
            plan = BatchPlan(
                stage.from_step - 1,
                stage.global_batch_size or before.rows,
                {**before.weights, **changed},
                stage.seq_len or before.seq_len,
                stage.local_batch_size or before.local_batch_size,
            )
            plans.append(plan)
        return plans

    def stage(self, step: int) -> int:
        """The index in `plans` of the plan for a step, counted from 0."""
        return bisect_right(self.plans, step, key=lambda plan: plan.first) - 1

    def at(self, step: int) -> BatchPlan:
        """The plan for a step, counted from 0."""
        return self.plans[self.stage(step)]

    @property
    def longest_row(self) -> int:
        """The largest `seq_len` of any step."""
        return max(plan.seq_len for plan in self.plans)

    @property
    def batch_sizes(self) -> set[int]:
        """All numbers of rows that a step may have."""
        return {plan.rows for plan in self.plans}

    def key(self, source: Source) -> str:
        """The section or table of the configuration that names a source."""
        return self.section if len(self.sources) == 1 else f"{self.section}.sources.{source.name}"

    def retry(self, source: Source) -> Retry:
        return Retry(self.key(source), source.dataset_path or source.dataset, self.options)


def data_spec(
    config: Config,
    key: Literal["training", "validation"],
    tokenizer: Tokenizer,
    validation_set: ValidationSet | None = None,
) -> DataSpec:
    """The data that `[training]` or `[validation]` reads.

    Args:
        validation_set: one of several validation sets.
    """
    section: Training | Validation = getattr(config, key)
    keys = {"dataset", "dataset_path", "text_column", "messages_column"}
    sources = [Source(name="data", **(validation_set or section).model_dump(include=keys))]
    stages: Sequence[DataStage] = ()
    size = validation_rows(config)
    if isinstance(section, Training):
        size = section.local_batch_size
        sources = section.sources or sources
        stages = section.stages
    return DataSpec(
        sources=sources,
        stages=stages,
        tokenizer=tokenizer,
        seq_len=section.seq_len,
        rows_per_step=section.global_batch_size,
        local_batch_size=size,
        seed=config.debug.seed,
        infinite=key == "training",
        options=section.dataloader,
        on_bad_document=config.training.on_bad_document,
        on_changed_data=config.training.on_changed_data,
        packing=section.packing if isinstance(section, Training) else "stream",
        section=key if validation_set is None else f"{key}.sets.{validation_set.name}",
        custom={
            source.dataset: make
            for source in sources
            if (make := data_sources.maker(source.dataset, config.custom))
        },
    )

"""Rules for `[[training.sources]]` and `[[training.stages]]`."""

from collections import Counter
from collections.abc import Callable, Iterator

from torchtitan.config.derive import data_parallel_degree, degrees_fill
from torchtitan.config.load.keys import FIELDS
from torchtitan.config.sections.schema import Config
from torchtitan.utils.errors import did_you_mean
from torchtitan.utils.text import brief


def sources_are_named_once(config: Config, world: int) -> Iterator[str]:
    t = config.training
    for name, count in Counter(source.name for source in t.sources).items():
        if count > 1:
            yield (
                f"training.sources: {count} sources are named {brief(name)}; a name stands "
                "for one position"
            )
        if "/" in name:
            yield (
                f"training.sources: the name {brief(name)} has a slash, which separates the "
                "parts of a metric's name"
            )


def sources_replace_the_dataset(config: Config, world: int) -> Iterator[str]:
    t = config.training
    for key in ("dataset", "dataset_path"):
        if t.sources and getattr(t, key) != FIELDS[f"training.{key}"].default:
            yield (
                f"training.{key}: training.sources name the data; make it one of them, or "
                "remove one of the two"
            )


def stages_follow_each_other(config: Config, world: int) -> Iterator[str]:
    t = config.training
    names = {source.name for source in t.sources}
    before = 0
    weights = {source.name: source.weight for source in t.sources}
    for stage in t.stages:
        where = f"training.stages: the stage from_step {stage.from_step}"
        if stage.from_step <= before:
            yield (
                f"{where} follows that of step {before}; list the stages in the order of "
                "their steps"
            )
        for name in stage.weights.keys() - names:
            hint = (
                did_you_mean(name, names) if names else "; name the sources as [[training.sources]]"
            )
            yield (
                f"{where} has a weight for {brief(name)}, but there is no source of that name{hint}"
            )
        before = max(before, stage.from_step)
        weights |= stage.weights
        if weights and not any(weights.values()):
            yield f"{where} has no source with a weight above 0"
    if (
        t.sources
        and not any(source.weight for source in t.sources)
        and (not t.stages or t.stages[0].from_step > 1)
    ):
        yield "training.sources: no source has a weight above 0"


def stages_divide(config: Config, world: int) -> Iterator[str]:
    """As `batch_divides` for the batch of the whole run."""
    t = config.training
    dp = data_parallel_degree(config)
    unit = t.local_batch_size * dp
    if not degrees_fill(config, world):
        return
    for stage in t.stages:
        size = stage.global_batch_size
        where = f"training.stages: the stage from_step {stage.from_step}"
        if size is None:
            continue
        if config.fault_tolerance.elastic:
            if size < dp:
                yield (
                    f"{where}: global_batch_size {size} is too small for {dp} data-parallel "
                    f"ranks; set {dp} or more"
                )
        elif size % unit:
            below = size // unit * unit
            legal = " or ".join(str(n) for n in (below, below + unit) if n)
            yield (
                f"{where}: global_batch_size {size} is not a multiple of "
                f"local_batch_size {t.local_batch_size} x "
                f"data-parallel degree {dp} = {unit}; set it to {legal}"
            )


RULES: tuple[Callable[[Config, int], Iterator[str]], ...] = (
    sources_are_named_once,
    sources_replace_the_dataset,
    stages_follow_each_other,
    stages_divide,
)

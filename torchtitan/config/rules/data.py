"""Rules on data: sources, their mixture, held-out sets, loaders, and where they read from."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from torchtitan.config.derive import data_sections
from torchtitan.config.registry import unknown_dataset
from torchtitan.config.rules.table import Facts, rule
from torchtitan.config.sections.schema import Config
from torchtitan.utils.errors import did_you_mean
from torchtitan.utils.storage import is_url
from torchtitan.utils.wording import brief

_NAME_DATA = ("dataset", "dataset_path", "text_column", "messages_column")
"""Keys of a section that has one data set."""
_SIZES = ("local_batch_size", "global_batch_size", "seq_len")
"""Keys of a batch."""


@rule("training.dataloader.persistent_workers", "validation.dataloader.persistent_workers")
def worker_options_need_workers(config: Config, facts: Facts) -> Iterator[str]:
    for key in ("training", "validation"):
        loader = getattr(config, key).dataloader
        if loader.persistent_workers and loader.num_workers == 0:
            yield f"{key}.dataloader.persistent_workers needs num_workers of 1 or more"


@rule(
    "training.dataloader.timeout_seconds",
    "validation.dataloader.timeout_seconds",
    "comm.train_timeout_seconds",
)
def data_fails_before_collectives(config: Config, facts: Facts) -> Iterator[str]:
    limit = config.comm.train_timeout_seconds
    for key in ("training", "validation"):
        seconds = getattr(config, key).dataloader.timeout_seconds
        if seconds is not None and seconds >= limit:
            yield (
                f"{key}.dataloader.timeout_seconds: the other ranks' collectives would time out "
                f"first, after comm.train_timeout_seconds {limit}; set it to {limit / 2:g} "
                f"instead of {seconds:g}, or raise that one"
            )


@rule("validation.steps", "validation.sets", *(f"validation.{key}" for key in _SIZES))
def validation_sees_data(config: Config, facts: Facts) -> Iterator[str]:
    v = config.validation
    if not v.enable:
        return
    if any((v.steps if table.steps is None else table.steps) == 0 for table in v.sets or (v,)):
        yield (
            "validation.steps: 0 batches give no loss, also in [[validation.sets]]; set -1 for the "
            "whole data set"
        )
    for key in _SIZES:
        if getattr(v, key) == 0:
            yield f"validation.{key}: 0 gives no loss; set 1 or more, or -1 for the default"


@rule("training.sources", "training.dataset", "validation.sets")
def data_tables_are_distinct(config: Config, facts: Facts) -> Iterator[str]:
    """And they replace the data that their section names."""
    t, v = config.training, config.validation
    lists = ("training.sources", t, t.sources), ("validation.sets", v, v.sets)
    for key, section, tables in lists:
        for name, count in Counter(table.name for table in tables).items():
            if count > 1:
                yield f"{key}: {brief(name)} names {count} of them; give each a name of its own"
            if "/" in name and section is t:
                yield (
                    f"{key}: the name {brief(name)} has a slash, which separates the parts of a "
                    "metric's name"
                )
        for name in _NAME_DATA if tables else ():
            if getattr(section, name) != getattr(type(section)(), name):
                yield (
                    f"{key.partition('.')[0]}.{name} and {key} can't both be set; move {name} to a "
                    f"[[{key}]] table, or remove one of the two"
                )


@rule("training.dataset", "training.sources", "validation.dataset", "validation.sets")
def datasets_are_known(config: Config, facts: Facts) -> Iterator[str]:
    """A `dataset` with a path is only a label, so any name is legal."""
    for key, data in data_sections(config):
        if data.dataset_path is None and (problem := unknown_dataset(data.dataset)):
            yield f"{key}.dataset: {problem}"


@rule(
    "training.messages_column", "validation.messages_column", "training.sources", "validation.sets"
)
def conversations_are_read_from_a_column(config: Config, facts: Facts) -> Iterator[str]:
    for key, data in data_sections(config):
        if data.messages_column is None:
            continue
        if data.text_column != "text":
            yield (
                f"{key}.messages_column: documents are text or conversations; remove it or "
                f"text_column {brief(data.text_column)}"
            )
        if data.dataset_path is None and data.dataset in ("demo", "c4_test", "demo_validation"):
            yield f"{key}.messages_column: {data.dataset} has no conversations; name other data"


@rule("training.packing", "training.seq_len", "training.stages")
def rows_are_packed_for_one_length(config: Config, facts: Facts) -> Iterator[str]:
    t = config.training
    if t.packing != "best_fit":
        return
    if t.seq_len < 2:
        yield f"training.seq_len: packing needs rows of 2 tokens or more, got {t.seq_len}"
    for stage in t.stages:
        if stage.seq_len not in (None, t.seq_len):
            yield (
                f'training.packing: "best_fit" packs rows of one length, but the stage from_step '
                f"{stage.from_step} has seq_len {stage.seq_len} instead of {t.seq_len}; remove it, "
                'or set "stream"'
            )


@rule("training.stages", "training.sources")
def stages_follow_each_other(config: Config, facts: Facts) -> Iterator[str]:
    t = config.training
    names = {source.name for source in t.sources}
    last_step = 0
    weights = {source.name: source.weight for source in t.sources}
    for stage in t.stages:
        where = f"training.stages: the stage from_step {stage.from_step}"
        if stage.from_step <= last_step:
            yield (
                f"{where} follows that of step {last_step}; list the stages in the order of their "
                "steps"
            )
        for name in stage.weights.keys() - names:
            hint = "; name the sources as [[training.sources]]"
            if names:
                hint = did_you_mean(name, names)
            yield (
                f"{where} has a weight for {brief(name)}, but there is no source of that name{hint}"
            )
        last_step = max(last_step, stage.from_step)
        weights |= stage.weights
        if weights and not any(weights.values()):
            yield f"{where} has no source with a weight above 0"
    starts_plain = not t.stages or t.stages[0].from_step > 1
    if t.sources and starts_plain and not any(source.weight for source in t.sources):
        yield "training.sources: no source has a weight above 0"


@rule("training.dataset_path", "validation.dataset_path", needs=["data_problems"])
def data_can_be_read(config: Config, facts: Facts) -> Iterator[str]:
    for key, problem in facts.data_problems.items():
        yield f"{key}: {problem}"


@rule("eval.include_path", needs=["folders"])
def tasks_have_a_folder(config: Config, facts: Facts) -> str | None:
    path = config.eval.include_path
    if not config.eval.enable or not path or path in facts.folders:
        return None
    return f"eval.include_path: {path!r} is no folder (relative to {Path.cwd()})"


@rule("job.dump_folder", needs=["folders"])
def logs_are_local(config: Config, facts: Facts) -> str | None:
    folder = config.job.dump_folder
    if "://" not in folder:
        return None
    if not is_url(folder):
        return f"job.dump_folder: {folder!r}: write the path without file://"
    return (
        f"job.dump_folder: {folder!r} must be a local folder, because logs are appended to; for "
        "remote checkpoints set checkpoint.folder to the URL"
    )

"""Notices at a resume that data has changed since the checkpoint was saved."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torchtitan.config.sections.data import Source
from torchtitan.data.read.contents import (
    Contents,
    DataFile,
    FileLists,
    changes,
    in_words,
    render_lists,
)
from torchtitan.data.read.positions import DataState, SourceFingerprint, SourcePosition
from torchtitan.data.spec import DataSpec
from torchtitan.utils.errors import UserError
from torchtitan.utils.logging import logger


class ContentsRecord:
    """The contents of a run's sources and validation sets, which checkpoints record."""

    def __init__(self, spec: DataSpec, contents: Mapping[str, Contents]):
        """
        Args:
            contents: the contents of each source by its name.
        """
        self.spec = spec
        self.contents = contents
        self.fingerprints = {
            source.name: SourceFingerprint(
                dataset=source.dataset_path or source.dataset,
                contents=contents[source.name].fingerprint,
            )
            for source in spec.sources
        }
        self.validation_sets: dict[str, SourceFingerprint] = {}
        self._lists: dict[str, dict[str, Sequence[DataFile]]] = {
            "sources": {name: source_contents.files for name, source_contents in contents.items()}
        }
        self._validation_records: dict[str, ContentsRecord] = {}
        self._rendered: bytes | None = None

    def add_validation_set(self, other: "ContentsRecord") -> None:
        """Also record a validation set, and warn if it is trained on, too."""
        (source,) = other.spec.sources
        section = other.spec.section
        held_out = self.validation_sets[section] = other.fingerprints[source.name]
        if held_out.contents in {each.contents for each in self.fingerprints.values()}:
            logger.warning(f"{section}: training reads this data, too: its loss proves nothing")
        self._validation_records[section] = other
        self._lists.setdefault("held_out", {})[section] = other.contents[source.name].files
        self._rendered = None

    def lists(self) -> bytes:
        """The checkpoint's file with the files of all sources."""
        if self._rendered is None:
            self._rendered = render_lists(self._lists)
        return self._rendered

    def compare(self, state: DataState, lists: Callable[[], FileLists]) -> list[str]:
        """The sources whose contents have changed since a position was recorded.

        Args:
            lists: reads the recorded files of the sources; called only if something has changed.

        Raises:
            UserError: sources or validation sets have changed, unless `on_changed_data` allows it.
        """
        positions = state.sources
        if names := positions.keys() - self.contents.keys():
            old_lists = lists().get("sources", {})
            self._lists["sources"] |= {name: old_lists[name] for name in names & old_lists.keys()}
            self._rendered = None
        comparisons: list[tuple[ContentsRecord, Source, str, str]] = [
            (self, source, positions[source.name].contents, "sources")
            for source in self.spec.sources
            if source.name in positions
        ]
        for section, other in self._validation_records.items():
            before = state.fingerprint.held_out.get(section)
            # With another name, the set was changed on purpose; no position depends on it.
            if before is not None and before.dataset == self.validation_sets[section].dataset:
                comparisons.append((other, other.spec.sources[0], before.contents, "held_out"))
        changed_sources = []
        for record, source, fingerprint, section in comparisons:
            name = source.name if record is self else record.spec.section
            key = f"{record.spec.key(source)}.dataset{'_path' if source.dataset_path else ''}"
            now = record.contents[source.name]
            old_files = partial(_files, lists, section, name)
            if problem := _difference(fingerprint, now, old_files):
                self._report(
                    f"{key}: the data has changed since the checkpoint was saved: {problem}"
                )
                if record is self:
                    changed_sources.append(name)
        return changed_sources

    def _report(self, problem: str) -> None:
        """
        Raises:
            UserError: `on_changed_data` doesn't allow a change.
        """
        if self.spec.on_changed_data != "continue":
            raise UserError(
                f'{problem}.\nRestore it, or set training.on_changed_data = "continue" to '
                "continue with it as it is, or "
                'restart the data with checkpoint.exclude_from_loading = ["dataloader"].'
            )
        logger.warning(f"{problem}. Continuing with it as it is, as training.on_changed_data says")


def _difference(before: str, now: Contents, files: Callable[[], Sequence[DataFile]]) -> str | None:
    """The change of a source's contents since the checkpoint, in words; None without one.

    Args:
        before: the fingerprint at the checkpoint.
        files: reads the files at the checkpoint.
    """
    if before == now.fingerprint:
        return None
    old_files = files() if now.files else ()
    same_reading = before.partition("; ")[2] == now.fingerprint.partition("; ")[2]
    if not (old_files and same_reading):
        return f"it was {before}, and is {now.fingerprint}"
    return in_words(differences) if (differences := changes(old_files, now.files)) else None


def check_same(what: str, key: str, old: object, now: object) -> None:
    """
    Raises:
        UserError: a position that depends on `key` is for another value.
    """
    if old != now:
        raise UserError(
            f"{key}: the checkpoint's data position is for {what} {old}, but this "
            f"run has {now}.\n"
            f"Set {key} back, or restart the data with "
            'checkpoint.exclude_from_loading = ["dataloader"].'
        )


def check_packing(spec: DataSpec, position: SourcePosition) -> None:
    """
    Raises:
        UserError: the position was recorded with another packing.
    """
    if not position.lanes:
        return
    length = position.packed_length
    packing = "stream" if length is None else "best_fit"
    check_same("packing", f"{spec.section}.packing", packing, spec.packing)
    if length is not None:
        check_same("packed rows of", f"{spec.section}.seq_len", length, spec.seq_len)


def _files(lists: Callable[[], FileLists], section: str, name: str) -> Sequence[DataFile]:
    return lists().get(section, {}).get(name, ())

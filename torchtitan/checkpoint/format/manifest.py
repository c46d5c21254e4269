"""`manifest.json`: description of a checkpoint, the state of its run, and size and CRC-32 of the
common files. `__N.json` lists the files of rank N, see `index.py`.

The models below define the format, together with the data position's models in
`torchtitan.data.read.positions`. The file's last line is the SHA-256 of everything before it, so
every flipped bit is detected.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import tomli
from pydantic import (
    AfterValidator,
    Field,
    NonNegativeInt,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from torchtitan.data.read.positions import DataState
from torchtitan.utils.errors import DamageError, FormatBugError
from torchtitan.utils.files import read_regular
from torchtitan.utils.formats import Count, Strict
from torchtitan.utils.limits import CONFIG_TABLE_LEVELS, JSON_BYTES
from torchtitan.utils.storage import patiently

MANIFEST = "manifest.json"
FORMAT = 4
"""The only format that this version reads."""
_FORMAT = re.compile(rb'\{\s*"format": (\d{1,9}),')
_WRITER = re.compile(rb'"torchtitan": "([\w.+-]{1,40})"')
T = TypeVar("T", bound="CheckpointInfo")
_SEAL = b',\n "sha256": '

Crc32 = Annotated[int, Field(ge=0, lt=2**32)]
"""CRC-32."""
FileName = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9_.-]*[A-Za-z0-9_-][A-Za-z0-9_.-]*$", max_length=255)
]
"""A plain name: without slashes, and not only dots."""


SaveNumber = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
"""Random; the same in all files of one save."""


class FileEntry(Strict):
    """One file of the checkpoint."""

    bytes: Count
    crc32: Crc32


class ProgressState(Strict):
    step: Count
    tokens: Count
    skipped: Count


class ScheduleState(Strict):
    steps: Count


class GuardState(Strict):
    windows: dict[str, list[float]]
    streak: Count
    calm: Count
    rows: Count
    skipped: list[Annotated[list[Count], Field(min_length=2, max_length=2)]]


class AverageState(Strict):
    counted: Count


def _share(value: object, validate: ValidatorFunctionWrapHandler) -> DataState:
    """Accept a rank's local state, which lacks other ranks' lanes; `render` checks all of it."""
    return value if isinstance(value, DataState) else validate(value)


class TrainState(Strict):
    """Everything except tensors that a run needs to resume."""

    progress: ProgressState
    lr_scheduler: ScheduleState
    data: Annotated[DataState, WrapValidator(_share)]
    guard: GuardState
    branches: dict[str, Count] = Field(default_factory=dict)
    """The first step of each branch of the run's history that leads here, oldest first."""
    ema: AverageState | None = None
    """None if the run has no average of the weights."""
    callbacks: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """States of the user's callbacks, by name."""


class RankTotals(Strict):
    """Totals of the files that single ranks wrote."""

    ranks: Annotated[int, Field(ge=1, lt=2**20)]
    """Number of ranks; each wrote a file `__N.json`."""
    files: Count
    """Number of their files, including `__N.json`."""
    bytes: Count


def _configuration(toml: str) -> str:
    """Check that the sections are tables, and not nested too deeply."""
    try:
        sections = tomli.loads(toml)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if wrong := [name for name, section in sections.items() if not isinstance(section, dict)]:
        raise ValueError(f"no section {wrong[0]!a}")
    tables = [sections]
    for _ in range(CONFIG_TABLE_LEVELS):
        tables = [value for table in tables for value in table.values() if isinstance(value, dict)]
    if tables:
        raise ValueError("nested too deeply")
    return toml


class CheckpointInfo(Strict):
    """The contents of a manifest that are known before the checkpoint is written."""

    step: Count
    model_only: bool
    """Whether the checkpoint has only weights."""
    averaged: bool = False
    """Whether the weights are the run's averaged ones (`ema.export`)."""
    merged: list[dict[str, Any]] | None = None
    """Sources of merged weights, in checkpoints of earlier versions."""
    versions: dict[str, str]
    model: dict[str, Any]
    """The family's `name`, and the hyper-parameters."""
    git: str | None = None
    ranks: NonNegativeInt | None = None
    data: dict[str, Any]
    """Fingerprint of the training data."""
    ends: list[Count] = Field(default_factory=list)
    """Tokens that end a generated text."""
    generation: dict[str, Any] = Field(default_factory=dict)
    """The other entries of `generation_config.json` in the folder that the weights come from."""
    config: Annotated[str, AfterValidator(_configuration)]
    """The run's configuration as TOML."""
    train_state: TrainState | None
    """None if no run wrote the checkpoint. While a rank saves, it has only the local data lanes."""

    @model_validator(mode="after")
    def _has_state(self) -> Self:
        if self.train_state is None and not self.model_only:
            raise ValueError("train_state is missing")
        if self.train_state is not None and self.train_state.progress.step != self.step:
            raise ValueError(f"train_state is of step {self.train_state.progress.step}")
        return self


class Manifest(CheckpointInfo):
    """The contents of `manifest.json`."""

    format: Literal[4]
    saved: str
    """Time, ISO 8601."""
    parameters: Count
    """Number of elements in the weights."""
    tensor_bytes: dict[str, dict[str, Count]]
    """Bytes by part (`model`, `optimizer`, `ema`) and dtype."""
    files: Annotated[dict[FileName, FileEntry], Field(min_length=1)]
    """All files except the manifest and the files of single ranks."""
    save: SaveNumber
    written: RankTotals

    @model_validator(mode="after")
    def _has_average(self) -> Self:
        has_average = self.train_state is not None and self.train_state.ema is not None
        if has_average != ("ema" in self.tensor_bytes):
            raise ValueError(
                "train_state and tensor_bytes disagree about the average of the weights"
            )
        return self

    def state(self) -> dict[str, Any]:
        """`train_state` as a dictionary, with the data position as a `DataState`."""
        if self.train_state is None:
            return {}
        return self.train_state.model_dump(exclude_unset=True, exclude={"data"}) | {
            "data": self.train_state.data
        }

    def branch(self) -> str | None:
        """The checkpoint's branch of the run's history; None if it records none."""
        branches = self.train_state.branches if self.train_state else {}
        return next(reversed(branches), None)

    def file_bytes(self) -> int:
        """Size of all files except the manifest."""
        return self.written.bytes + sum(file.bytes for file in self.files.values())

    def file_count(self) -> int:
        """Number of all files except the manifest."""
        return self.written.files + len(self.files)

    def settings(self) -> dict[str, Any]:
        """The run's configuration, by sections."""
        return tomli.loads(self.config)


def validate(kind: type[T], content: dict[str, Any]) -> T:
    """Validate `content` as an instance of `kind`.

    Raises:
        FormatBugError: the content doesn't fit the format.
    """
    problem = ""
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        problem = first_problem(error)
    raise _bug(problem)  # outside, so that no other error is its context


def render(manifest: Manifest) -> bytes:
    """The content of `manifest.json`, without the models' defaults.

    Raises:
        FormatBugError: `parse` would refuse the file.
    """
    problem = ""
    try:
        content = {"format": FORMAT, **manifest.model_dump(exclude_defaults=True)}
        body = json.dumps(content, indent=1).encode()
        Manifest.model_validate_json(body)
        return seal(body)
    except ValidationError as error:
        problem = first_problem(error)
    except (TypeError, ValueError) as error:
        problem = str(error)
    raise _bug(problem)


def _bug(problem: str) -> FormatBugError:
    return FormatBugError(
        f"{problem} ({MANIFEST}): this is a bug in torchtitan, please report it with this line"
    )


def seal(content: bytes) -> bytes:
    """Append the SHA-256 of a JSON object as its last entry."""
    body = content.removesuffix(b"}").removesuffix(b"\n")
    return body + _SEAL + _checksum(body)


def unseal(file: bytes) -> bytes:
    """The JSON object that was passed to `seal`.

    Raises:
        ValueError: the checksum is missing or wrong.
    """
    body, separator, checksum = file.rpartition(_SEAL)
    if not separator:
        raise ValueError("it is cut, or has no checksum")
    if checksum != _checksum(body):
        raise ValueError("its checksum is wrong")
    return body + b"\n}"


class OtherFormatError(ValueError):
    """The manifest has a format that this version does not read."""

    def __init__(self, number: int, file: bytes):
        match = _WRITER.search(file)
        writer = f"torchtitan {match[1].decode()}" if match else "another torchtitan"
        if number > FORMAT:
            advice = f"{writer} wrote it: update to that version"
        else:
            advice = (
                f"{writer}, which wrote it, reads it: export its weights there with `torchtitan "
                "ckpt to-hf`, and import them here with `torchtitan ckpt from-hf`"
            )
        super().__init__(f"has format {number}, and this version reads format {FORMAT}; {advice}")


def parse(file: bytes) -> Manifest:
    """The contents of a file from `render`.

    Raises:
        OtherFormatError: the format is another one.
        ValueError: it differs from what `render` would write.
    """
    match = _FORMAT.match(file)
    number = int(match[1]) if match else FORMAT
    if _SEAL in file or number == FORMAT:  # format 1 has no checksum
        content = unseal(file)
    if number != FORMAT:
        raise OtherFormatError(number, file)
    try:
        return Manifest.model_validate_json(content)
    except ValidationError as error:
        raise ValueError(first_problem(error)) from None


def first_problem(error: ValidationError) -> str:
    """The first problem that pydantic reports, in one line that is safe to print."""
    first = error.errors(include_url=False)[0]
    location = ".".join(map(str, first["loc"]))
    return ascii(f"{location}: {first['msg']}" if location else first["msg"])[1:-1][:300]


def _checksum(body: bytes) -> bytes:
    return f'"{hashlib.sha256(body).hexdigest()}"\n}}\n'.encode()


def manifest_bytes(path: Path) -> bytes:
    """The manifest of a checkpoint, as it is on disk.

    Raises:
        OSError: it can't be read.
    """
    return patiently(path, lambda: read_regular(path / MANIFEST, JSON_BYTES))


def read_manifest(path: Path, content: bytes | None = None) -> Manifest:
    """The manifest of a committed checkpoint.

    Args:
        content: `manifest_bytes`, if they were read already.

    Raises:
        DamageError: it is missing, damaged, or of another format.
    """
    try:
        return parse(manifest_bytes(path) if content is None else content)
    except OSError as error:
        raise DamageError(
            f"{path} is not a complete checkpoint: {MANIFEST}: {error.strerror or error}"
        ) from None
    except OtherFormatError as error:
        raise DamageError(f"{path} {error}") from None
    except ValueError as error:
        raise DamageError(f"{path} is damaged: {MANIFEST}: {error}") from None

"""The folders that a run writes to, which no other run may hold."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from torchtitan.config.sections.schema import Config
from torchtitan.parallel.agree import from_rank_0
from torchtitan.utils.errors import ConfigError, UserError
from torchtitan.utils.files import remove_leftovers
from torchtitan.utils.lock import FolderLock
from torchtitan.utils.logging import log_to_file
from torchtitan.utils.storage import is_remote, storage_path


@dataclass(frozen=True)
class HeldFolders:
    """A run's claims on its folders; only rank 0 has any."""

    locks: list[FolderLock]
    copies: list[FolderLock]
    """The lock of `checkpoint.upload_folder`. Losing it ends the uploads, not the run."""

    def confirm(self, *, remote: bool = False) -> bool:
        """Check that the run still holds its folders.

        Args:
            remote: also of folders in object storage, which takes a request.

        Returns:
            False if one was deleted; it exists again now.

        Raises:
            UserError: another run has taken one.
        """
        held = [lock.confirm() for lock in self.locks if remote or not is_remote(lock.folder)]
        return all(held)

    def confirm_copies(self) -> None:
        """
        Raises:
            UserError: another run has taken the folder that checkpoints are uploaded to.
        """
        for lock in self.copies:
            lock.confirm()

    def release(self) -> None:
        """Give the folders up."""
        for lock in (*self.locks, *self.copies):
            lock.release()


def hold_folders(config: Config) -> HeldFolders:
    """Claim the folders that this run writes to. Called by all ranks.

    Raises:
        ConfigError: another run holds one of them, or it can't be written to.
    """
    folders = {"job.dump_folder": Path(config.job.dump_folder)}
    if config.checkpoint.enable and not config.checkpoint.load_only:
        folders["checkpoint.folder"] = storage_path(
            config.checkpoint.folder, config.job.dump_folder
        )
    upload = "checkpoint.upload_folder"
    if config.checkpoint.upload_folder and "checkpoint.folder" in folders:
        folders[upload] = storage_path(config.checkpoint.upload_folder)
    held = HeldFolders([], [])
    problem = None
    if dist.get_rank() == 0:
        locks, problem = _take(folders)
        if problem is None:
            remove_leftovers(folders["job.dump_folder"])
        held.copies.extend(lock for key, lock in locks.items() if key == upload)
        held.locks.extend(lock for key, lock in locks.items() if key != upload)
    if problem := from_rank_0(problem):
        held.release()
        raise ConfigError([problem])
    return held


def open_log(config: Config) -> None:
    """Log to this rank's file from now on. Only for a run that holds its folders: another one's log
    is left alone.
    """
    log = config.logging
    log_to_file(
        Path(config.job.dump_folder, log.folder),
        dist.get_rank(),
        as_json=log.format == "json",
        max_megabytes=log.max_megabytes,
        keep=log.keep,
    )


def _take(folders: dict[str, Path]) -> tuple[dict[str, FolderLock], str | None]:
    """Claim all folders at once, as each claim may wait long; those got, and the first problem."""
    locks = {}
    problems = []
    with ThreadPoolExecutor(len(folders)) as pool:
        claims = {key: pool.submit(FolderLock, folder) for key, folder in folders.items()}
    for key, claim in claims.items():
        try:
            locks[key] = claim.result()
        except UserError as error:
            problems.append(f"{key}: {error}")
        except OSError as error:
            problems.append(f"{key}: can't write to {folders[key]}: {error.strerror or error}")
    return locks, next(iter(problems), None)

"""Locks on the folders that a run writes to, so that no other run writes to them."""

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
class FolderLocks:
    """The locks that a run has on its folders; only rank 0 has any."""

    locks: list[FolderLock]

    def confirm(self, *, remote: bool = False) -> bool:
        """Check that the run still has the locks on its folders.

        Args:
            remote: also check folders in object storage, at the cost of a request.

        Returns:
            False if one was deleted; it exists again now.

        Raises:
            UserError: another run has locked one.
        """
        intact = [lock.confirm() for lock in self.locks if remote or not is_remote(lock.folder)]
        return all(intact)

    def release(self) -> None:
        """Release all locks."""
        for lock in self.locks:
            lock.release()


def lock_folders(config: Config) -> FolderLocks:
    """Lock the folders that this run writes to. Called by all ranks.

    Raises:
        ConfigError: another run has locked one of them, or it can't be written to.
    """
    folders = {"job.dump_folder": Path(config.job.dump_folder)}
    if config.checkpoint.enable and not config.checkpoint.load_only:
        folders["checkpoint.folder"] = storage_path(
            config.checkpoint.folder, config.job.dump_folder
        )
    folder_locks = FolderLocks([])
    problem = None
    if dist.get_rank() == 0:
        locks, problem = _take(folders)
        if problem is None:
            remove_leftovers(folders["job.dump_folder"])
        folder_locks.locks.extend(locks)
    if problem := from_rank_0(problem):
        folder_locks.release()
        raise ConfigError([problem])
    return folder_locks


def open_log(config: Config) -> None:
    """Log to this rank's file from now on. Called after `lock_folders`, so that no log of another
    run is overwritten.
    """
    log = config.logging
    log_to_file(
        Path(config.job.dump_folder, log.folder),
        dist.get_rank(),
        as_json=log.format == "json",
        max_megabytes=log.max_megabytes,
        keep=log.keep,
    )


def _take(folders: dict[str, Path]) -> tuple[list[FolderLock], str | None]:
    """Lock all folders at once, as each may be slow. Returns the locks and the first problem."""
    locks = []
    problems = []
    with ThreadPoolExecutor(len(folders)) as pool:
        claims = {key: pool.submit(FolderLock, folder) for key, folder in folders.items()}
    for key, claim in claims.items():
        try:
            locks.append(claim.result())
        except UserError as error:
            problems.append(f"{key}: {error}")
        except OSError as error:
            problems.append(f"{key}: can't write to {folders[key]}: {error.strerror or error}")
    return locks, next(iter(problems), None)

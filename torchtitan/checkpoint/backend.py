"""Storage of a run's checkpoints."""

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from torchtitan.checkpoint.commit import committed_steps
from torchtitan.checkpoint.format.index import Index, index_bytes
from torchtitan.checkpoint.format.manifest import CheckpointInfo, Manifest, manifest_bytes
from torchtitan.checkpoint.load import Reader
from torchtitan.checkpoint.save import Writer
from torchtitan.checkpoint.writer import CommittingWriter
from torchtitan.utils.storage import is_remote


class Storage:
    """Folders of checkpoints, local or at a URL. A rehearsal overrides all methods."""

    def steps(self, folder: Path, *, abandoned: bool = False) -> list[int]:
        """Steps with a complete checkpoint to continue from, or with `abandoned` the abandoned
        steps; oldest first.
        """
        return committed_steps(folder, abandoned=abandoned)

    def manifest_bytes(self, path: Path) -> bytes:
        """The manifest of the checkpoint `path`. Raises OSError if it can't be read."""
        return manifest_bytes(path)

    def sees(self, path: Path, manifest: bytes) -> bool:
        """Whether this node sees the manifest that rank 0 has read."""
        try:
            return manifest_bytes(path) == manifest
        except OSError:
            if not is_remote(path):
                with suppress(OSError):
                    os.listdir(path.parent)  # makes NFS fetch the folder's names from the server
            return False

    def index_bytes(self, path: Path, manifest: Manifest) -> bytes:
        """The checkpoint's index. Raises DamageError if it can't be read."""
        return index_bytes(path, manifest)

    def reader(self, path: Path, manifest: Manifest, index: bytes | None) -> Reader:
        """A reader of the checkpoint's tensors. Raises DamageError if the index is damaged."""
        return Reader(path, Index(path, manifest, index))

    def writer(
        self,
        path: Path,
        info: CheckpointInfo,
        confirm: Callable[[], object],
        on_commit: Callable[[], None],
        *,
        extra_files: Mapping[str, bytes],
        staged: bool,
    ) -> Writer:
        """A writer of the checkpoint, with the arguments of `CommittingWriter`."""
        return CommittingWriter(
            path, info, confirm, on_commit, extra_files=extra_files, staged=staged
        )

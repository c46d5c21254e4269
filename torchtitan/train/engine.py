"""The objects of a run, for the built-in callbacks. Users' callbacks see only its `run`."""

from dataclasses import dataclass
from typing import Any

from torchtitan.checkpoint import Checkpointer
from torchtitan.config.sections.schema import Config
from torchtitan.health.hang_watch import Watch
from torchtitan.train.callbacks import Callback, Run
from torchtitan.train.folder_locks import FolderLocks
from torchtitan.train.preflight import Setup
from torchtitan.train.restore import RunState
from torchtitan.train.run_telemetry import Telemetry
from torchtitan.train.state import Components


@dataclass
class Engine:
    """The objects of a run. `run` is the view of them that users' callbacks get."""

    config: Config
    setup: Setup
    components: Components
    state: RunState
    checkpointer: Checkpointer
    telemetry: Telemetry
    folder_locks: FolderLocks
    watch: Watch | None
    """None if the caller owns the process group."""
    run: Run
    callbacks: tuple[Callback, ...] = ()
    """All callbacks, in the order in which they are called."""

    def notify(self, event: str, *details: Any) -> None:
        """Call a method of all callbacks, in order."""
        for callback in self.callbacks:
            getattr(callback, event)(self.run, *details)

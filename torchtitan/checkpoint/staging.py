"""Copies of tensors on the host, for saves in the background."""

from typing import Any

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions


def build_stager(async_mode: str) -> "Stager | None":
    """The stager of `checkpoint.async_mode`; None for `disabled`."""
    if async_mode == "disabled":
        return None
    overlap = async_mode == "async_with_pinned_mem"
    pinned = overlap and torch.cuda.is_available()
    return Stager(
        StagingOptions(
            use_pinned_memory=pinned,
            use_shared_memory=False,
            use_async_staging=overlap,
            use_non_blocking_copy=pinned,
        )
    )


class Stager(DefaultStager):
    """DCP's stager, with workarounds for three faults of torch 2.11 to 2.15. Ends with `release`,
    not `close`.

    1. Before 2.13, DCP's `close` after each save drops the buffers, so every save allocates them
       again. Remove `close`, `release` and `_drop_buffers` with support for 2.12.
    2. Copies run on a stream of their own without waiting for the current one, on which the
       optimizer's step was only enqueued. Remove `stage` once torch waits.
    3. The staging thread uses the first GPU, whichever the rank uses, and creates a context there.
       Remove `_stage` once the thread takes over the rank's device.
    """

    def __init__(self, options: StagingOptions):
        super().__init__(options)
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._drop_buffers = self._state_dict_stager.close
        self._state_dict_stager.close = lambda: None

    def stage(self, state_dict: dict[str, Any], **kwargs: Any) -> Any:
        if self._staging_stream is not None:
            self._staging_stream.wait_stream(torch.accelerator.current_stream())
        return super().stage(state_dict, **kwargs)

    def _stage(self, state_dict: dict[str, Any], **kwargs: Any) -> Any:
        if self._device is not None:
            torch.cuda.set_device(self._device)
        return super()._stage(state_dict, **kwargs)

    def close(self) -> None: ...

    def release(self) -> None:
        """Stop the thread and free the buffers."""
        super().close()
        self._drop_buffers()

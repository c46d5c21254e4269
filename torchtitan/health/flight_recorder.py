"""Configures torch's Flight Recorder, a ring of each rank's last collectives, and dumps it."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchtitan.config.sections.schema import Comm
from torchtitan.utils.files import write_whole
from torchtitan.utils.formats import safe_loads
from torchtitan.utils.torch_compat import torch_is_before_2_13

MAX_COLLECTIVES = 2000
"""Maximum number of collectives written per rank; one rank reads all dumps."""


def configure_flight_recorder(comm: Comm, dump_folder: str) -> None:
    """Set the Flight Recorder's environment for old and new torch, before any group exists."""
    folder = Path(dump_folder, comm.save_traces_folder)
    size = str(comm.trace_buf_size)
    settings = {"TORCH_FR_BUFFER_SIZE": size}
    if torch_is_before_2_13():  # parts of the recorder read only the old name
        settings["TORCH_NCCL_TRACE_BUFFER_SIZE"] = size
    if comm.trace_buf_size:
        folder.mkdir(parents=True, exist_ok=True)
        prefix = str(folder / comm.save_traces_file_prefix)
        settings |= {
            "TORCH_FR_DUMP_TEMP_FILE": prefix,
            "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": prefix,
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
            # 3 lets NCCL's watchdog write its dump before the process dies; torchrun sets 1.
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        }
    os.environ.update(settings)


def dump_flight_recorder(path: Path, *, stacks: bool) -> None:
    """Write this rank's last collectives in the format of `torchfrtrace`.

    NCCL's watchdog dumps by itself on a timeout; gloo never does. gloo's record also has a wrong
    group table and marks finished collectives as scheduled. Both are corrected here, because the
    analyzer fails on them.

    Args:
        stacks: include Python stacks, which may need seconds to look up.
    """
    trace = safe_loads(_recorder()(includeStackTraces=stacks))
    if not _records_nccl():
        world = dist.distributed_c10d._world
        trace["pg_config"] = {
            world.pg_names[group]: {
                "name": world.pg_names[group],
                "desc": group.group_desc,
                "ranks": str(sorted(ranks)),
            }
            for group, ranks in list(world.pg_group_ranks.items())
            if isinstance(group, dist.ProcessGroup)
        }
        # The record may name destroyed groups; the analyzer accepts only groups in the table.
        entries = []
        for entry in trace.get("entries", ()):
            group = trace["pg_config"].get(entry["process_group"][0])
            if group is None:
                continue
            entries.append(entry)
            if entry["retired"]:
                entry["state"] = "completed"
            # some entries record the shape of one part
            if entry["profiling_name"] == "gloo:all_gather":
                members = len(json.loads(group["ranks"]))
                entry["output_sizes"] = [[members, *size] for size in entry["input_sizes"]]
        trace["entries"] = entries
    trace["entries"] = trace.get("entries", [])[-MAX_COLLECTIVES:]
    write_whole(path, pickle.dumps(trace))


def collective_counts() -> dict[str, dict[str, int]]:
    """Number of collectives that each process group has started and completed."""
    trace = safe_loads(_recorder()(includeCollectives=False, includeStackTraces=False))
    return trace.get("pg_status", {})


def _records_nccl() -> bool:
    in_use = "nccl" in str(dist.get_backend_config())
    return in_use and hasattr(torch._C._distributed_c10d, "_dump_nccl_trace")


def _recorder() -> Callable[..., bytes]:
    """The function that dumps the Flight Recorder of NCCL, if in use, else gloo's."""
    c10d: Any = torch._C._distributed_c10d
    return c10d._dump_nccl_trace if _records_nccl() else c10d._dump_fr_trace

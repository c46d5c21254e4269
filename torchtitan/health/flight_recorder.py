"""torch's Flight Recorder: a ring of the last collectives of each rank, configured and written to
disk.
"""

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

DUMPED = 2000
"""Collectives written per rank. One rank reads those of all ranks, so this is bounded."""


def configure_flight_recorder(comm: Comm, dump_folder: str) -> None:
    """Set the Flight Recorder's environment, as torch before 2.13 and since spell it. Call before
    any group exists.
    """
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


def dump_flight_recorder(comm: Comm, dump_folder: str, *, stacks: bool = True) -> None:
    """Write this rank's last collectives in the format of `torchfrtrace`.

    NCCL's watchdog dumps by itself on a timeout; gloo never does. gloo's record also has a wrong
    group table and marks finished collectives as scheduled. Both are corrected here, because the
    analyzer fails on them.

    Args:
        stacks: include Python stacks, which can take seconds to look up.
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
        trace["entries"] = [
            e for e in trace.get("entries", ()) if e["process_group"][0] in trace["pg_config"]
        ]
        for entry in trace["entries"]:
            if entry["retired"]:
                entry["state"] = "completed"
            if (
                entry["profiling_name"] == "gloo:all_gather"
            ):  # some entries record the shape of one part
                members = json.loads(trace["pg_config"][entry["process_group"][0]]["ranks"])
                entry["output_sizes"] = [[len(members), *size] for size in entry["input_sizes"]]
    trace["entries"] = trace.get("entries", [])[-DUMPED:]
    path = Path(
        dump_folder, comm.save_traces_folder, f"{comm.save_traces_file_prefix}{dist.get_rank()}"
    )
    write_whole(path, pickle.dumps(trace))


def collective_counts() -> dict[str, dict[str, int]]:
    """Number of collectives that each process group has started and completed."""
    return safe_loads(_recorder()(includeCollectives=False, includeStackTraces=False)).get(
        "pg_status", {}
    )


def _records_nccl() -> bool:
    return "nccl" in str(dist.get_backend_config()) and hasattr(
        torch._C._distributed_c10d, "_dump_nccl_trace"
    )


def _recorder() -> Callable[..., bytes]:
    """The function that returns the Flight Recorder's contents, pickled: NCCL's if NCCL is in use,
    else gloo's.
    """
    c10d: Any = torch._C._distributed_c10d
    return c10d._dump_nccl_trace if _records_nccl() else c10d._dump_fr_trace

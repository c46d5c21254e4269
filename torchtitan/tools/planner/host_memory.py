"""Host memory that a rank needs, in closed form, by category."""

from torchtitan.tools.planner.memory import GIB, offloaded_bytes, state_bytes
from torchtitan.tools.planner.pipeline_costs import in_flight
from torchtitan.tools.planner.workload import Workload

WORKER_BYTES = 0.25 * GIB
"""Resident memory of a process that has imported torch and the loader, measured without CUDA."""


def host_memory(w: Workload) -> dict[str, float]:
    """Bytes by category, of the pipeline rank that needs most.

    Saves in the background keep the copy of their state from one save to the next.
    """
    return max(
        (_host_memory(w, rank) for rank in range(w.pp)), key=lambda sizes: sum(sizes.values())
    )


def _host_memory(w: Workload, pp_rank: int) -> dict[str, float]:
    config = w.config
    state = state_bytes(w, w.stages_of(pp_rank))
    saves = config.checkpoint.enable and not config.checkpoint.load_only
    copies = saves and config.checkpoint.async_mode != "disabled"
    if w.pipeline is None:
        activations = offloaded_bytes(w, w.stages)
    else:
        activations = max(
            sum(n * offloaded_bytes(w, [w.stages[i]]) for i, n in m.microbatches.items())
            for m in in_flight(w.pipeline, w.microbatches, pp_rank)
        )
    sizes = {
        "copies for saves": copies * (state["parameters"] + state["optimizer"]),
        "parameters, gradients, optimizer": config.training.enable_cpu_offload
        * sum(state.values()),
        "activations": activations,
        "data workers": config.training.dataloader.num_workers * WORKER_BYTES,
    }
    return {name: size for name, size in sizes.items() if size}

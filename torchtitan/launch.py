"""Start the ranks of this node: `python -m torchtitan.launch --nproc-per-node 8 -- --job.config_file X.toml ...`.

torchrun with three additions: the configuration is checked first, in this one process; restarts get a fresh store;
and a failure ends with the failing rank's own message instead of torchrun's report.
"""

import argparse
import logging
import os
import sys

from torchtitan.config import resolve
from torchtitan.trainer.preflight import preflight
from torchtitan.utils.errors import DEBUG_ENV, run_main


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    split = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(prog="python -m torchtitan.launch", description=__doc__)
    parser.add_argument("--nproc-per-node", type=int, default=1, help="ranks on this node")
    parser.add_argument("--nnodes", type=int, default=1, help="number of nodes")
    parser.add_argument("--rdzv-endpoint", default="", help="host:port of the first node (several nodes)")
    return parser.parse_args(argv[:split]), argv[split + 1 :]


def main(argv: list[str]) -> int:
    options, train_argv = _parse(argv)
    world = options.nproc_per_node * options.nnodes
    if world == 1 and "RANK" not in os.environ:
        from torchtitan.train import main as train

        return train(train_argv)
    preflight(resolve(train_argv, world).config)

    # Without this a restarted worker reads its predecessor's addresses from the agent's store.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    if "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // options.nproc_per_node))

    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    if os.environ.get(DEBUG_ENV) != "1":
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    where = (
        ["--standalone"] if options.nnodes == 1 else ["--rdzv-backend=c10d", f"--rdzv-endpoint={options.rdzv_endpoint}"]
    )
    nodes = [f"--nnodes={options.nnodes}", f"--nproc-per-node={options.nproc_per_node}"]
    try:
        torchrun([*where, *nodes, "-m", "torchtitan.train", *train_argv])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(f"error: rank {rank} ended with exit code {failure.exitcode}", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 1
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))

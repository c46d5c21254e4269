"""Fixed exchanges of experts' rows: `python benchmarks/cpu/exchange.py [--ranks 2] [--steps 1000]`.

Trains a small Qwen3-MoE with expert parallelism over all ranks, once with what balances its experts
and once without. Prints how many steps were done again because some rows had no room; then, for
several headrooms, that number and the share of slots without a row. Both follow from the rows of
each step, because results don't depend on the headroom.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist

from torchtitan.parallel.exchange import FixedExchange
from torchtitan.parallel.room import Room

SIZES = {"n_layers": 4, "dim": 64, "n_heads": 4, "n_kv_heads": 2, "head_size": 16, "expert_dim": 32}
SEQ_LEN = 128
ROWS = 2
TOP_K = 4
"""Of the debug model."""
SIDES = {
    "balanced": ["--moe.balance_bias_rate=0.001"],
    "not balanced": ["--moe.global_balance_loss=0"],
}
HEADROOMS = (1.0, 1.05, 1.1, 1.25, 1.5)


def train(folder: str, steps: int, extra: list[str]) -> None:
    """Train on this rank, and write the rows that each step's exchanges needed."""
    from torchtitan.config import resolve
    from torchtitan.train.preflight import preflight
    from torchtitan.train.trainer import Trainer

    argv = [
        "--job.config_file=train_configs/qwen3_moe_debug.toml",
        f"--job.dump_folder={folder}/run",
        f"--training.steps={steps}",
        f"--training.seq_len={SEQ_LEN}",
        f"--training.local_batch_size={ROWS}",
        "--parallelism.expert_parallel_exchange=fixed",
        "--parallelism.expert_parallel_headroom=1.25",
        "--validation.enable=false",
        "--checkpoint.enable=false",
        "--metrics.log_freq=50",
        *(f"--model.overrides.{name}={value}" for name, value in SIZES.items()),
        *extra,
    ]
    needed = []
    learn = FixedExchange.learn

    def noted(exchange: FixedExchange) -> None:
        needed.append(exchange._last)
        learn(exchange)

    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    config = resolve([*argv, f"--parallelism.expert_parallel_degree={ranks}"], ranks).config
    trainer = Trainer(config, preflight(config))
    with mock.patch.object(FixedExchange, "learn", noted):
        trainer.train()
    assert trainer.parts.exchange is not None
    trainer.close()
    if dist.get_rank() == 0:
        result = {"needed": needed, "redone": trainer.parts.exchange.redone}
        Path(folder, "needed.json").write_text(json.dumps(result))


def replay(needed: list[list[Room]], headroom: float, ranks: int) -> tuple[int, float]:
    """Steps done again, and the mean share of empty slots, with this headroom."""
    layers = {i: SimpleNamespace(room=None, empty=0.0) for i in range(len(needed[0]))}
    exchange = FixedExchange(layers, len(layers), headroom, torch.device("cpu"))  # type: ignore[arg-type]
    rows = SEQ_LEN * ROWS * TOP_K
    redone = 0
    empty = []
    for step in needed:
        exchange._last = step
        redone += exchange.overflowed
        for layer in layers.values():
            if layer.room is not None:
                empty.append(1 - rows / (ranks * layer.room.within(rows, ranks).pair))
        exchange.learn()
    return redone, sum(empty) / len(empty)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--side", choices=SIDES, help="only this one")
    parser.add_argument("--folder", help="of a rank, which this process then is")
    options = parser.parse_args()
    if options.folder:
        return train(options.folder, options.steps, SIDES[options.side])
    for side in [options.side] if options.side else SIDES:
        with tempfile.TemporaryDirectory() as folder:
            launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            own = [__file__, f"--steps={options.steps}", f"--side={side}", f"--folder={folder}"]
            command = [*launch, f"--nproc-per-node={options.ranks}", *own]
            subprocess.run(command, check=True, stdout=sys.stderr)
            result = json.loads(Path(folder, "needed.json").read_text())
        needed = [[Room(*room) for room in step] for step in result["needed"]]
        print(f"{side}: {result['redone']} of {options.steps} steps done again")
        for headroom in HEADROOMS:
            redone, empty = replay(needed, headroom, options.ranks)
            print(f"  headroom {headroom}: {redone} again, {100 * empty:.1f}% of slots empty")
        sys.stdout.flush()
    return None


if __name__ == "__main__":
    main()

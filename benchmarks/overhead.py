"""What the framework costs over a hand-written loop: `python benchmarks/overhead.py [--ranks 2] [--rounds 5]`.

Both sides train the debug model in fp32 on the same rows, with the same optimizer, clipping and learning rate, for the
same steps; the hand-written side is plain PyTorch (one process) or bare FSDP2 (several). They alternate. Printed:
tokens per CPU-second (user + system over all ranks, from the first to the last timed step) and peak resident memory.
"""

import argparse
import json
import resource
import sys
import time

STEPS, WARM, SEQ_LEN, BATCH, LR = 12, 3, 512, 8, 1e-3


def arguments(ranks: int) -> list[str]:
    return [
        "--job.dump_folder=/tmp/titan-overhead",
        f"--training.steps={STEPS}",
        f"--training.seq_len={SEQ_LEN}",
        f"--training.local_batch_size={BATCH // ranks}",
        "--training.mixed_precision_param=float32",
        f"--optimizer.lr={LR}",
        "--lr_scheduler.warmup_steps=1",
        "--lr_scheduler.decay_ratio=0.0",
    ]


class Meter:
    """CPU-seconds of this process between the end of the warm-up and the end of the run."""

    def tick(self, step: int) -> None:
        if step == WARM:
            self.cpu, self.wall = time.process_time(), time.perf_counter()
        elif step == STEPS:
            self.cpu, self.wall = time.process_time() - self.cpu, time.perf_counter() - self.wall

    def report(self, loss: float) -> None:
        """Print rank 0's line: all ranks' CPU time and the largest peak."""
        import torch
        import torch.distributed as dist

        totals = torch.tensor([self.cpu], dtype=torch.float64)
        peak = torch.tensor([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20], dtype=torch.float64)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(totals)
            dist.all_reduce(peak, dist.ReduceOp.MAX)
        if not dist.is_initialized() or dist.get_rank() == 0:
            tokens = (STEPS - WARM) * BATCH * SEQ_LEN
            print(json.dumps({"tokens_per_cpu_s": tokens / totals.item(), "peak_gib": peak.item(), "loss": loss}))


def framework(ranks: int) -> None:
    """This project's trainer, as a user runs it."""
    import os

    from torchtitan.config import resolve
    from torchtitan.trainer.preflight import preflight
    from torchtitan.trainer.trainer import Trainer

    config = resolve(arguments(ranks), int(os.environ.get("WORLD_SIZE", "1"))).config
    meter = Meter()
    trainer = Trainer(config, preflight(config))
    after_step = trainer._after_step

    def ticking() -> None:
        after_step()
        meter.tick(trainer.progress.step)

    trainer._after_step = ticking
    progress = trainer.train()
    meter.report(progress.last_loss)
    trainer.close()


def by_hand(ranks: int) -> None:
    """The loop a careful person would write for this one model: no checks, no metrics, no checkpoints."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F

    from torchtitan.components.data import build_loader
    from torchtitan.components.tokenizer import build_tokenizer
    from torchtitan.config.schema import DataLoader
    from torchtitan.models import get_spec
    from torchtitan.models.layers import attention_backend

    torch.manual_seed(0)
    spec = get_spec("llama3")
    args = spec.args("debugmodel", {}, max_seq_len=SEQ_LEN)
    model = spec.build(args, attention_backend("cpu"))
    with torch.no_grad():
        for name, param in model.named_parameters():
            init = spec.init(name, args)
            param.fill_(1.0) if init.kind == "ones" else param.normal_(0.0, init.std)
    rank = 0
    if ranks > 1:
        from torch.distributed.fsdp import fully_shard

        dist.init_process_group("gloo")
        rank = dist.get_rank()
        for block in list(model.layers.values())[:-1]:
            fully_shard(block)
        fully_shard(model.layers[str(args.n_layers - 1)], reshard_after_forward=False)
        fully_shard(model, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    loader = build_loader(
        dataset="demo",
        dataset_path=None,
        tokenizer=build_tokenizer("./tests/assets/tokenizer"),
        seq_len=SEQ_LEN,
        rows_per_step=BATCH,
        dp_rank=rank,
        dp_degree=ranks,
        seed=0,
        dataloader=DataLoader(),
        infinite=True,
    )
    batches, meter = iter(loader), Meter()
    for step in range(1, STEPS + 1):
        batch = next(batches)
        loss = F.cross_entropy(model(batch.tokens).flatten(0, 1), batch.labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        value = loss.item()
        meter.tick(step)
    meter.report(value)
    loader.close()
    if ranks > 1:
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--side", choices=["framework", "by_hand"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        return {"framework": framework, "by_hand": by_hand}[options.side](options.ranks)

    from _sides import alternate, ratios

    start = [sys.executable]
    if options.ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
    sides = {
        side: [*start, __file__, f"--ranks={options.ranks}", f"--side={side}"] for side in ("framework", "by_hand")
    }
    results = alternate(sides, options.rounds, threads=1)
    print(f"framework / by hand, {options.ranks} rank(s), fp32, debug model, seq {SEQ_LEN}, batch {BATCH}:")
    print(f"  tokens per CPU-second  {ratios(results, 'framework', 'by_hand', 'tokens_per_cpu_s')}")
    print(f"  peak memory            {ratios(results, 'framework', 'by_hand', 'peak_gib')}")
    return None


if __name__ == "__main__":
    main()

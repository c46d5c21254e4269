"""What the framework costs over a hand-written loop: `python benchmarks/cpu/overhead.py [--ranks 2]
[--compile] [--tp] [--bf16] [--small]`.

Both sides train the debug model on the same rows, with the same optimizer, clipping and
learning rate, for the same steps; the hand-written side is plain PyTorch (one process) or bare
FSDP2 (several). They alternate. Printed: tokens per CPU-second (user + system over all ranks, from
the first to the last timed step), peak resident memory, and CPU-seconds from the start of the
processes to the end of the first step, imports and compilation included.

With `--compile` both also run compiled, with `--bf16` in bf16: the hand-written side by autocast,
on several ranks by FSDP2's mixed precision. Without it, both compute in fp32. With `--tp` the
framework alone, on two tensor-parallel ranks, eager and compiled.

With `--small` the example for users of nanoGPT, of 0.8 M parameters (`_small.py`), in fp32 and as
it comes, against a GPT-2 by hand, for ten times as many steps. With `--small --alternate` (and
`--compile`) a step of each in turn in one process: CPU-milliseconds of a step, and their ratio.
"""

from functools import partial

import _small
from _training import LR, SEQ_LEN, Meter, Run, compare, framework, loader, measure, parser, run_side


def framework_tp(run: Run) -> None:
    framework(run, ["--parallelism.tensor_parallel_degree=2"], dp=1)


def by_hand(run: Run) -> None:
    """The loop a careful person would write for this one model: no checks, no metrics, no
    checkpoints.
    """
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import Tensor

    from torchtitan.models import get_spec

    def attend(q: Tensor, k: Tensor, v: Tensor, *_: object, **__: object) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    torch.manual_seed(0)
    spec = get_spec("llama3")
    args = spec.args("debugmodel", {}, max_seq_len=SEQ_LEN)
    model = spec.build(args, attend)
    with torch.no_grad():
        for name, param in model.named_parameters():
            init = spec.init(name, args)
            param.fill_(1.0) if init.kind == "ones" else param.normal_(0.0, init.std)

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    rank = 0
    if run.ranks > 1:
        from torch.distributed.fsdp import MixedPrecisionPolicy
        from torch.distributed.fsdp import fully_shard as shard

        low = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        fully_shard = partial(shard, mp_policy=low if run.bf16 else MixedPrecisionPolicy())
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        for block in list(model.layers.values())[:-1]:
            fully_shard(block)
        fully_shard(model.layers[str(args.n_layers - 1)], reshard_after_forward=False)
        fully_shard(model, reshard_after_forward=False)
    if run.compiled:
        loss_of = torch.compile(loss_of)
        for part in (
            model.layers.values() if run.ranks > 1 else [model]
        ):  # FSDP2's hooks would break one large graph
            part.compile()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    data = loader(rank, run.ranks)
    meter = Meter(run)
    batches = iter(data)
    for step in range(1, run.steps + 1):
        batch = next(batches)
        with torch.autocast("cpu", torch.bfloat16, enabled=run.bf16 and run.ranks == 1):
            loss = loss_of(model(batch.tokens), batch.labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        value = loss.item()
        meter.tick(step)
    meter.report(value)
    data.close()
    if run.ranks > 1:
        dist.destroy_process_group()


def main() -> None:
    options = parser(__doc__)
    options.add_argument(
        "--tp",
        action="store_true",
        help="the framework's two tensor-parallel ranks, eager, compiled",
    )
    options.add_argument(
        "--small", action="store_true", help="instead: a model of nanoGPT's published size"
    )
    options.add_argument(
        "--alternate", action="store_true", help="with --small: both in one process, step by step"
    )
    options = options.parse_args()
    if options.side:
        return run_side(
            options,
            {
                "framework": framework,
                "framework_tp": framework_tp,
                "by_hand": by_hand,
                "prepare": _small.prepare,
                "small": _small.small,
                "small_default": _small.small_default,
                "gpt2": _small.gpt2,
                "alternating": _small.alternating,
            },
        )
    if options.small:
        options.steps *= 10
        options.warm *= 10
        options.tokens = _small.BATCH * _small.SEQ_LEN
        if options.alternate:
            kinds = ("", "_compiled")[: 1 + options.compile]
            measure(options, [f"alternating{kind}" for kind in kinds], prepare="prepare")
            return None
        pairs = [("small", "gpt2"), ("small_default", "gpt2")]
        sides = ["gpt2", "small", "small_default"]
        return compare(measure(options, sides, prepare="prepare"), pairs, options)
    if options.tp:
        options.ranks = 2
        pairs = [("framework_tp_compiled", "framework_tp")]
    elif options.compile:
        pairs = [
            ("framework", "by_hand"),
            ("framework_compiled", "by_hand_compiled"),
            ("framework_compiled", "framework"),
            ("by_hand_compiled", "by_hand"),
        ]
    else:
        pairs = [("framework", "by_hand")]
    if options.bf16:
        for kind in ("", "_compiled")[: 1 + options.compile]:
            ours = f"framework{kind}_bf16"
            pairs += [
                (ours, other) for other in ("by_hand", f"framework{kind}", f"by_hand{kind}_bf16")
            ]
    sides = sorted({side for pair in pairs for side in pair}, reverse=True)
    return compare(measure(options, sides), pairs, options)


if __name__ == "__main__":
    main()

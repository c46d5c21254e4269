"""Our mixture of experts against transformers': `python benchmarks/cpu/moe.py [--rounds 3]
[--compile]`.

Both sides train Qwen3-MoE's debug model in fp32 from the same weights, on the same tokens, with the
same fused AdamW: forward, loss, backward and update, nothing else; ours with the settings of glibc
that the trainer makes. The printed losses are the same, which shows that the work is. transformers
runs with each implementation of its experts that fits; `batched_mm`, which copies a weight for
every row, would need 9 GiB for the weights of one layer. Printed: tokens per CPU-second, peak
resident memory, the share of our step that routing, dispatch and combine take, and how many
operations an MoE layer dispatches on CUDA.
"""

import json
import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from _training import BATCH, LR, SEQ_LEN, Meter, Run, compare, loader, measure, parser, run_side

WEIGHTS = "hf"
ROWS = "rows.safetensors"
THEIRS = ["eager", "grouped_mm"]


def prepare(run: Run) -> None:
    """Write our initial weights as transformers reads them, and the rows of all steps."""
    import itertools

    import torch
    from safetensors.torch import save_file

    from torchtitan.models import get_spec

    spec = get_spec("qwen3_moe")
    model = our_model()
    names = spec.hf.names(model.args)
    weights = {}
    for name, weight in model.named_parameters():
        theirs = names[name]
        parts = (
            [weight.detach()]
            if isinstance(theirs, str)
            else [part.clone() for part in weight.detach()]
        )
        weights |= dict(zip([theirs] if isinstance(theirs, str) else theirs, parts, strict=True))
    folder = run.folder / WEIGHTS
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(spec.hf.config(model.args, "float32")))

    data = loader(0, 1)
    batches = list(itertools.islice(data, run.steps))
    data.close()
    save_file(
        {
            key: torch.cat([getattr(batch, key) for batch in batches])
            for key in ("tokens", "labels")
        },
        run.folder / ROWS,
    )
    print("{}")


def our_model() -> Any:
    import torch

    from torchtitan.models import get_spec
    from torchtitan.models.attention.backend import attention_backend
    from torchtitan.parallel.init import materialize

    spec = get_spec("qwen3_moe")
    args = spec.args("debugmodel", {}, max_seq_len=SEQ_LEN)
    cpu = torch.device("cpu")
    with torch.device("meta"):
        model = spec.build(args, attention_backend("cpu"))
    materialize(model, cpu, cpu, 0, lambda fqn: spec.init(fqn, args))
    return model


def train(run: Run, model: Any, logits_of: Callable[[Any], Any]) -> None:
    """The steps of either side."""
    import torch
    import torch.nn.functional as F
    from safetensors.torch import load_file

    rows = load_file(run.folder / ROWS)
    meter = Meter(run)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    batches = zip(rows["tokens"].split(BATCH), rows["labels"].split(BATCH), strict=True)
    for step, (tokens, labels) in enumerate(batches, 1):
        loss = F.cross_entropy(logits_of(tokens).flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        value = loss.item()
        meter.tick(step)
    meter.report(value)


def ours(run: Run) -> None:
    import torch

    from torchtitan.utils.device import tune_cpu

    tune_cpu()  # as the trainer does
    model = our_model()
    if run.compiled:
        for block in model.layers.values():
            block.compile(fullgraph=True, dynamic=False)
    train(run, model, lambda tokens: model(tokens, token_weights=torch.ones(tokens.shape)))


def theirs(experts: str) -> Callable[[Run], None]:
    def side(run: Run) -> None:
        os.environ["HF_HUB_OFFLINE"] = "1"
        from transformers import Qwen3MoeForCausalLM

        model = Qwen3MoeForCausalLM.from_pretrained(
            run.folder / WEIGHTS, experts_implementation=experts
        )
        assert model.config._experts_implementation == experts
        model.train()
        train(run, model, lambda tokens: model(tokens, use_cache=False).logits)

    return side


# ---- routing, dispatch and combine


def share() -> None:
    """Print the CPU time of a step's routing, dispatch and combine, forward and backward, as a
    share of the step.
    """
    import torch
    import torch.nn.functional as F

    model = our_model()
    layers = [layer.moe for layer in model.layers.values()]
    tokens = torch.randint(model.args.vocab_size, (BATCH, SEQ_LEN))
    x = torch.randn(BATCH, SEQ_LEN, model.args.dim, requires_grad=True)
    weights = torch.ones(BATCH, SEQ_LEN)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def step() -> None:
        F.cross_entropy(
            model(tokens, token_weights=weights).flatten(0, 1), tokens.flatten()
        ).backward()
        optimizer.step()
        optimizer.zero_grad()

    def without_experts() -> None:
        for moe in layers:
            routed = moe.dispatch(x, weights)
            moe.combine(routed.rows, routed, like=x).backward(x.detach())

    seconds = {part: min(cpu_time(part) for _ in range(5)) for part in (step, without_experts)}
    print(
        f"routing, dispatch and combine: {seconds[without_experts] / seconds[step]:.1%} of our step"
    )


def cpu_time(function: Callable[[], None]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def dispatched(n_experts: int) -> Counter[str]:
    """The operations that an MoE layer's forward and backward dispatch for 8k tokens on CUDA, by a
    trace without one.

    Autograd refuses fake CUDA tensors where torch has no CUDA, so the layer is traced on the meta
    device, where a grouped product is one operation whatever it does; what it does on CUDA is
    traced beside it.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    from torchtitan.models import get_spec
    from torchtitan.models.moe import grouped
    from torchtitan.models.moe.moe import MoE

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            seen[str(operation)] += 1
            return operation(*args, **(kwargs or {}))

    seen = Counter[str]()
    args = get_spec("qwen3_moe").args("debugmodel", {"n_experts": n_experts})
    with torch.device("meta"):
        moe = MoE(args)
        x = torch.empty(1, 8192, args.dim, requires_grad=True)
        with Count():
            routed = moe.dispatch(x, torch.ones(1, 8192))
            moe.combine(moe.experts(routed.rows, routed.ends), routed, like=x).backward(
                torch.empty_like(x)
            )
    with FakeTensorMode(), torch.device("cuda"), torch.no_grad():
        rows, out = (
            torch.empty(8192, width, dtype=torch.bfloat16) for width in (args.dim, args.expert_dim)
        )
        weight = torch.empty(n_experts, args.expert_dim, args.dim, dtype=torch.bfloat16)
        ends = torch.empty(n_experts, dtype=torch.int32)
        with Count():
            grouped._grouped_mm._init_fn(rows, weight, ends)
            grouped._grouped_mm._init_fn(out, weight, ends, transposed=True)
            grouped._grouped_outer._init_fn(out, rows, ends)
    return seen


def main() -> None:
    options = parser(__doc__).parse_args()
    if options.side:
        sides = {
            "ours": ours,
            "prepare": prepare,
            **{side: theirs(side) for side in THEIRS},
            "share": lambda _: share(),
        }
        return run_side(options, sides)
    own = ["ours_compiled", "ours"] if options.compile else ["ours"]
    results = measure(options, [*own, *THEIRS], prepare="prepare")
    compare(results, [(side, other) for side in own for other in THEIRS], options)
    print("loss of the last step:")
    for side, rounds in results.items():
        print(f"  {side:30}{rounds[-1]['loss']:.6f}")
    share()
    few = dispatched(8)
    many = dispatched(256)
    print(
        f"operations of an MoE layer on CUDA: {few.total()} with 8 experts, {many.total()} with 256"
    )
    return None


if __name__ == "__main__":
    main()

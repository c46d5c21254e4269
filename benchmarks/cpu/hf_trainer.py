"""Our trainer against Hugging Face's: `python benchmarks/cpu/hf_trainer.py [--ranks 2] [--compile]
[--bf16] [--rounds 5]`.

`transformers.Trainer` trains `LlamaForCausalLM` (needs `pip install transformers accelerate`) from
our initial weights, on our rows, with our optimizer's settings: the printed losses are the same,
which shows that the work is. Theirs logs, saves and evaluates nothing, and reads rows that are
tokenized already, while ours tokenizes as it trains. With
`--compile` ours runs compiled, and theirs both ways. With `--bf16` both also run in bf16. Printed:
the same as by `overhead.py`, and the losses.

On several CPU ranks theirs can only replicate the model; ours is measured sharded (FSDP2) and
replicated (`_ddp`).
"""

import itertools
import json
import os

from _sides import Results
from _training import (
    BATCH,
    LR,
    SEQ_LEN,
    Meter,
    Run,
    compare,
    framework,
    loader,
    measure,
    parser,
    run_side,
)

WEIGHTS = "hf"
ROWS = "rows.safetensors"
QUIET = ["--metrics.log_freq=1000000"]


def quiet_framework(run: Run) -> None:
    framework(run, QUIET)


def framework_ddp(run: Run) -> None:
    framework(run, [*QUIET, f"--parallelism.data_parallel_replicate_degree={run.ranks}"])


def prepare(run: Run) -> None:
    """Write our initial weights as Hugging Face reads them, and the rows of all steps.

    So their side imports nothing of ours, which would count as their start-up.
    """
    import torch
    from safetensors.torch import save_file

    from torchtitan.models import get_spec
    from torchtitan.models.attention.backend import attention_backend
    from torchtitan.parallel.init import materialize

    spec = get_spec("llama3")
    args = spec.args("debugmodel", {}, max_seq_len=SEQ_LEN)
    cpu = torch.device("cpu")
    with torch.device("meta"):
        model = spec.build(args, attention_backend("cpu"))
    materialize(model, cpu, cpu, 0, lambda fqn: spec.init(fqn, args))
    names = spec.hf.names(args)
    folder = run.folder / WEIGHTS
    folder.mkdir()
    weights = {names[name]: weight.detach() for name, weight in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(spec.hf.config(args, "float32")))

    data = loader(0, 1)
    batches = list(itertools.islice(data, run.steps))
    data.close()
    tokens, labels = (
        torch.cat([getattr(batch, name) for batch in batches]) for name in ("tokens", "labels")
    )
    save_file({"tokens": tokens, "labels": labels}, run.folder / ROWS)
    print("{}")


def hugging_face(run: Run) -> None:
    """`transformers.Trainer`, with all that it does besides training switched off."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import torch.distributed as dist
    from safetensors.torch import load_file
    from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    rows = load_file(run.folder / ROWS)
    meter = Meter(run)

    class Ticking(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            meter.tick(state.global_step)

    class LossKeeping(Trainer):
        def training_step(self, *args, **kwargs):
            self.last_loss = super().training_step(*args, **kwargs)
            return self.last_loss

    arguments = TrainingArguments(
        output_dir=str(run.folder / "hugging_face"),
        max_steps=run.steps,
        per_device_train_batch_size=BATCH // run.ranks,
        optim="adamw_torch_fused",
        learning_rate=LR,
        lr_scheduler_type="constant",
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.1,
        max_grad_norm=1.0,
        torch_compile=run.compiled,
        bf16=run.bf16,
        fsdp=run.ranks > 1 or None,
        use_cpu=True,
        train_sampling_strategy="sequential",
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        logging_strategy="no",
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = LossKeeping(
        model=LlamaForCausalLM.from_pretrained(run.folder / WEIGHTS),
        args=arguments,
        # The labels are the next tokens already; of `labels` alone the model would take the next
        # ones once more.
        train_dataset=[
            {"input_ids": tokens, "labels": labels, "shift_labels": labels}
            for tokens, labels in zip(rows["tokens"], rows["labels"], strict=True)
        ],
        callbacks=[Ticking()],
    )
    trainer.train()
    loss = trainer.last_loss
    if run.ranks > 1:
        dist.all_reduce(loss)
        loss /= run.ranks
    ddp = any(
        isinstance(part, torch.nn.parallel.DistributedDataParallel)
        for part in trainer.model_wrapped.modules()
    )
    meter.report(loss.item(), ddp=float(ddp))
    if run.ranks > 1:
        dist.barrier()
        # DDP's destructor joins gloo's threads with the GIL held, and one of them may be waiting
        # for it
        os._exit(0)


def losses(results: Results) -> None:
    """Print each side's last loss, which every round repeats."""
    print("loss of the last step:")
    for side, rounds in results.items():
        print(f"  {side:30}{rounds[-1]['loss']:.6f}")


def main() -> None:
    options = parser(__doc__).parse_args()
    if options.side:
        sides = {
            "framework": quiet_framework,
            "framework_ddp": framework_ddp,
            "hugging_face": hugging_face,
            "prepare": prepare,
        }
        return run_side(options, sides)
    ours = ["framework", "framework_ddp"] if options.ranks > 1 else ["framework"]
    theirs = ["hugging_face"]
    if options.compile:
        ours = [f"{side}_compiled" for side in ours]
        theirs = ["hugging_face_compiled", *theirs]
    pairs = list(itertools.product(ours, theirs))
    if options.bf16:
        pairs += [(f"{side}_bf16", "hugging_face") for side in ours]
        pairs += [(f"{side}_bf16", "hugging_face_bf16") for side in ours]
    sides = dict.fromkeys(side for pair in pairs for side in pair)
    results = measure(options, list(sides), prepare="prepare")
    compare(results, pairs, options)
    losses(results)
    if results["hugging_face"][0]["ddp"]:
        print(
            "Theirs, told to use FSDP, ran DDP without a word: accelerate knows no FSDP on the CPU."
        )
    return None


if __name__ == "__main__":
    main()

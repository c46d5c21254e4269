"""The smallest model that people train here: nanoGPT's published size for a CPU, as sides of
`overhead.py`.

0.8 M parameters, 12 x 64 characters a step, of 62 kinds in this text; the GPT-2 has 65 entries.
Ours is the Llama of `examples/shakespeare/train.toml`; by hand it is a GPT-2 after nanoGPT's
description (learned positions, LayerNorm and GELU, one projection for queries, keys and values, no
biases, tied embeddings), with fused AdamW, clipping at 1.0, and the loss read in every step. They
have about the same number of parameters, but not the same operations: RoPE, RMSNorm and SwiGLU have
more.
"""

import itertools
import math
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pydoc_data.topics import topics
from typing import Any

from _training import Meter, Run, train

EXAMPLE = "examples/shakespeare/train.toml"
SEQ_LEN = 64
BATCH = 12
VOCAB = 65
DIM = 128
LAYERS = HEADS = 4


def prepare(run: Run) -> None:
    """Write the text, its tokenizer, and its tokens."""
    text = "".join(topics.values())
    kinds = sorted(set(re.sub(r"[^\n !',-.:;?A-Za-z]", "", text)))[:VOCAB]
    text = "".join(character for character in text if character in kinds)
    (run.folder / "input.txt").write_text(text)
    characters = f"{run.folder}/characters"
    source = f"{run.folder}/input.txt"
    ours = [sys.executable, "-m", "torchtitan"]
    subprocess.run([*ours, "tokenizer", source, "--characters", "--output", characters], check=True)
    tokens = f"{run.folder}/tokens"
    more = ["--input", source, "--tokenizer", characters, "--output", tokens]
    subprocess.run([*ours, "tokenize", *more], check=True)
    print("{}")


def small(run: Run) -> None:
    """The example, without validation and checkpoints."""
    train(run, [f"--job.config_file={EXAMPLE}", *_flags(run)])


def small_default(run: Run) -> None:
    """The same, but as it comes: the file names neither a type nor what to recompute."""
    config = run.folder / "default.toml"
    with open(EXAMPLE) as example:
        text = re.sub(
            r"mixed_precision_param.*\n|\[activation_checkpoint\]\nmode.*\n", "", example.read()
        )
    config.write_text(text)
    train(run, [f"--job.config_file={config}", *_flags(run)])


def _flags(run: Run) -> list[str]:
    return [
        f"--model.hf_assets_path={run.folder}/characters",
        f"--model.overrides.vocab_size={len(set((run.folder / 'input.txt').read_text()))}",
        f"--training.dataset_path={run.folder}/tokens",
        "--validation.enable=false",
        "--checkpoint.enable=false",
    ]


def gpt2(run: Run) -> None:
    meter = Meter(run)
    losses = []
    for loss in gpt2_steps(run):
        losses.append(loss)
        meter.tick(len(losses))
    meter.report(losses[-1])


def alternating(run: Run) -> None:
    """The example and the GPT-2, a step of each in turn. Both run through the same changes of the
    machine's speed, so their ratio is steadier than between processes.
    """
    ends = [time.process_time()]
    theirs = gpt2_steps(run)

    def step() -> None:
        ends.append(time.process_time())
        next(theirs)
        ends.append(time.process_time())

    def summary() -> dict[str, float]:
        seconds = [after - before for before, after in itertools.pairwise(ends)][2 * run.warm :]
        medians = [1000 * statistics.median(seconds[side::2]) for side in (0, 1)]
        return {"ms": medians[0], "gpt2_ms": medians[1], "ratio": medians[0] / medians[1]}

    extra = ["--compile.enable"] if run.compiled else []
    train(run, [f"--job.config_file={EXAMPLE}", *_flags(run), *extra], step, summary)


def gpt2_steps(run: Run) -> Iterator[float]:
    """A loop by hand: no checks, no metrics, no checkpoints. Yields the loss of each step."""
    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1 = nn.LayerNorm(DIM, bias=False)
            self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
            self.out = nn.Linear(DIM, DIM, bias=False)
            self.norm2 = nn.LayerNorm(DIM, bias=False)
            self.up = nn.Linear(DIM, 4 * DIM, bias=False)
            self.down = nn.Linear(4 * DIM, DIM, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            heads = [
                part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
                for part in self.qkv(self.norm1(x)).split(DIM, dim=-1)
            ]
            mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).flatten(2))
            return x + self.down(F.gelu(self.up(self.norm2(x))))

    class GPT2(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(VOCAB, DIM)
            self.positions = nn.Embedding(SEQ_LEN, DIM)
            self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
            self.norm = nn.LayerNorm(DIM, bias=False)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
            for block in self.blocks:
                x = block(x)
            return F.linear(self.norm(x), self.tokens.weight)

    torch.manual_seed(0)
    model = GPT2()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, 0.0, 0.02)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), fused=True)
    text = (run.folder / "input.txt").read_text()
    ids = {character: i for i, character in enumerate(sorted(set(text)))}
    data = torch.tensor([ids[character] for character in text])
    for step in range(1, run.steps + 1):
        starts = torch.randint(len(data) - SEQ_LEN, (BATCH,)).tolist()
        tokens = torch.stack([data[i : i + SEQ_LEN] for i in starts])
        labels = torch.stack([data[i + 1 : i + 1 + SEQ_LEN] for i in starts])
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * 0.5 * (1 + math.cos(math.pi * step / run.steps))
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield loss.item()

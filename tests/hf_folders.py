"""Small checkpoints to export, and tokenizers in the formats of others."""

import base64
import json
from pathlib import Path
from typing import Any

import torch

from tests.families import TINY
from torchtitan.checkpoint.commit import versions
from torchtitan.checkpoint.format.manifest import CheckpointInfo
from torchtitan.checkpoint.save import write_streamed
from torchtitan.checkpoint.state import model_state
from torchtitan.models import get_spec
from torchtitan.models.attention.backend import attention_backend
from torchtitan.utils.assets import find_asset

SHIPPED = find_asset("./tests/assets/tokenizer")


def write_checkpoint(folder: Path, family: str, assets: Path = SHIPPED, **overrides: Any) -> Any:
    """Write `folder/step-0`, the checkpoint of a tiny model with random weights and 2,048 tokens;
    the model.
    """
    spec = get_spec(family)
    args = spec.args("debugmodel", TINY | {"vocab_size": 2048} | overrides)
    torch.manual_seed(0)
    model = spec.build(args, attention_backend("cpu"))
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.uniform_(0.5, 1.5) if "norm" in name else param.normal_(std=0.2)
    state = model_state([model])
    toml = f"[model]\nname = {json.dumps(family)}\nhf_assets_path = {json.dumps(str(assets))}\n"
    info = CheckpointInfo(
        step=0,
        model_only=True,
        versions=versions(),
        model={"name": family, **args.model_dump()},
        data={},
        config=toml,
        train_state=None,
    )
    shapes = {name: value.to("meta") for name, value in state.items()}
    read = lambda key, box: state[key.removeprefix("model.")][box].detach().clone()  # noqa: E731
    write_streamed(folder / "step-0", info, {"model": shapes}, read)
    return model


def write_tiktoken(folder: Path) -> None:
    """Write the shipped vocabulary as a Llama-3 style `tokenizer.model`, without the two special
    tokens.
    """
    vocab = json.loads((SHIPPED / "tokenizer.json").read_text())["model"]["vocab"]
    keep = [
        *range(33, 127),
        *range(161, 173),
        *range(174, 256),
    ]  # bytes that GPT-2's alphabet spells as themselves
    rest = [byte for byte in range(256) if byte not in keep]
    alphabet = {chr(byte): byte for byte in keep} | {
        chr(256 + i): byte for i, byte in enumerate(rest)
    }
    ranks = [
        bytes(alphabet[c] for c in name)
        for name in sorted(vocab, key=vocab.get)
        if not name.startswith("<|")
    ]
    lines = (base64.b64encode(token) + b" %d\n" % i for i, token in enumerate(ranks))
    (folder / "tokenizer.model").write_bytes(b"".join(lines))

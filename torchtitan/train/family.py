"""Checks of a model family that is defined by a user's code, before anything trains.

The framework relies on more than a model's forward: a chunked loss projects the final hidden states
itself, a pipeline stage lacks the modules of the others, and MFU follows from a formula. A family
that changes only one of these would train another model, or report a wrong speed, without an error.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from torchtitan.config.sections.schema import Config
from torchtitan.models.attention.backend import attention_backend
from torchtitan.models.moe.moe import Experts
from torchtitan.models.spec import ModelSpec
from torchtitan.parallel.pipeline.pipeline import keep_modules
from torchtitan.utils.wording import cut, plural, printable

_LAYERS = 2
_VOCABULARY = 64
_ROWS = 2
_LENGTH = 16
_SAME = 1e-4
"""Largest difference, relative to the largest logit, of logits that differ only by rounding."""
_SAME_FLOPS = 0.01
"""Largest relative difference between FLOPs that are declared and counted."""
_STAGE = "tok_embeddings, norm or output may be None, and the input hidden states"


@dataclass(frozen=True)
class Findings:
    """The mistakes of a family."""

    problems: list[str]
    """Reasons why it would train another model than it seems to."""
    warnings: list[str]
    """Numbers that would be reported wrong, and checks that couldn't run."""


def check_family(config: Config, spec: ModelSpec, args: Any) -> Findings:
    """Run a small copy of the model on the CPU, and count the FLOPs of the whole one on the meta
    device.

    Args:
        args: hyper-parameters of the model that will be trained.
    """
    name = f"model.name {spec.name}"
    problems: list[str] = []
    warnings: list[str] = []
    try:
        small = _SmallCopy(config, spec, args)
        logits = small.run(small.model, small.inputs)
        F.cross_entropy(logits.float().flatten(0, -2), small.inputs.flatten()).backward()
    except Exception as error:  # it may need a GPU
        warnings.append(
            f"{name}: not checked, because a small copy of it doesn't run on the CPU: "
            f"{_text(error)}"
        )
    else:
        problems += small.buffer_problems
        problems += _projection_problems(small, logits)
        problems += _gradient_problems(small)
        if config.parallelism.pipeline_parallel_degree > 1:
            problems += _stage_problems(small, logits)
        if config.parallelism.expert_parallel_degree > 1:
            problems += _expert_problems(small)
    warnings += (f"{name}: {text}" for text in _flops_warnings(spec, args, config.training.seq_len))
    return Findings([f"{name}: {problem}" for problem in problems], warnings)


class _SmallCopy:
    """The model with few small layers, on the CPU, with random weights."""

    def __init__(self, config: Config, spec: ModelSpec, args: Any):
        sizes = {**spec.tiny(args, _LAYERS, 2), "vocab_size": _VOCABULARY}
        self.spec = spec
        self.args = spec.args(
            config.model.flavor, {**config.model.overrides, **sizes}, max_seq_len=_LENGTH
        )
        with torch.device("meta"):
            model: Any = spec.build(self.args, attention_backend("cpu"))
        self.model = model.to_empty(device="cpu")
        self.buffer_problems = list(_buffer_problems(self.model))
        random = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in self.model.parameters():
                param.normal_(std=0.5, generator=random)
        self.tokens = torch.randint(_VOCABULARY, (_ROWS, _LENGTH), generator=random)
        self.inputs = _training_inputs(spec, self.args, self.tokens)

    def run(self, model: Any, inputs: Tensor, *, project: bool = True) -> Tensor:
        """Call `model`, or a stage of it, as training does."""
        single = inputs is self.tokens
        options = _token_weights(self.spec, self.args, self.tokens if single else self.inputs)
        return model(inputs, torch.arange(_LENGTH), None, project=project, **options)


def _training_inputs(spec: ModelSpec, args: Any, tokens: Tensor) -> Tensor:
    """The model's input for tokens `[b, s]`: with multi-token prediction also the next tokens."""
    mtp_modules = spec.mtp_modules(args)
    if not mtp_modules:
        return tokens
    return torch.stack([tokens.roll(-k, 1) for k in range(1 + mtp_modules)], dim=-1)


def _token_weights(spec: ModelSpec, args: Any, tokens: Tensor) -> dict[str, Tensor]:
    if not spec.expert_sizes(args):
        return {}
    return {"token_weights": torch.ones(tokens.shape, device=tokens.device)}


def _buffer_problems(model: Any) -> Iterator[str]:
    """Problems of buffers that `init_buffers` doesn't overwrite."""
    computed = []
    for value in (0, 1):
        for buffer in model.buffers():
            buffer.fill_(value)
        model.init_buffers()
        computed.append({name: buffer.clone() for name, buffer in model.named_buffers()})
    for name, buffer in computed[0].items():
        if not torch.equal(buffer, computed[1][name]):
            yield (
                f"init_buffers() doesn't compute the buffer {name}, which would keep what "
                "was in memory; do it there"
            )


def _projection_problems(small: _SmallCopy, logits: Tensor) -> Iterator[str]:
    try:
        with torch.no_grad():
            hidden = small.run(small.model, small.tokens, project=False)
            projected = small.model.project(hidden, small.model.output_weight)
            if logits.dim() > projected.dim():  # the model also predicts further tokens
                logits = logits[:, :, 0]
    except Exception as error:
        yield f"project(forward(tokens, project=False), output_weight) doesn't run: {_text(error)}"
        return
    if off := _difference(projected, logits):
        yield (
            "forward returns other logits than project() makes of its hidden states, off by "
            f"{off}; a loss in chunks (training.loss_chunks) and generation call project(). "
            "Override project() instead of forward, which calls it"
        )


def _gradient_problems(small: _SmallCopy) -> Iterator[str]:
    params = dict(small.model.named_parameters())
    unused = [name for name, param in params.items() if param.requires_grad and param.grad is None]
    if unused:
        others = f" and {plural(len(unused) - 1, 'other parameter')}" if len(unused) > 1 else ""
        yield (
            f"forward gives {unused[0]}{others} no gradient; use them there, or delete them "
            "in __init__"
        )


def _stage_problems(small: _SmallCopy, logits: Tensor) -> Iterator[str]:
    names = list(small.spec.module_flops(small.args, _LENGTH))
    middle = names.index("layers.0") + 1
    x = small.inputs
    for modules in (names[:middle], names[middle:]):
        stage = copy.deepcopy(small.model)
        keep_modules(stage, modules)
        try:
            with torch.no_grad():
                x = small.run(stage, x)
        except Exception as error:
            yield f"forward doesn't run on a pipeline stage, where {_STAGE}: {_text(error)}"
            return
    if off := _difference(x, logits):
        yield (
            f"two pipeline stages return other logits than the whole model, off by {off}; forward "
            f"runs on each, where {_STAGE}: change project() or a block instead"
        )


def _expert_problems(small: _SmallCopy) -> Iterator[str]:
    for module in small.model.modules():
        if isinstance(module, Experts) and type(module).forward is not Experts.forward:
            kind = type(module).__name__
            yield (
                f"{kind} overrides forward, which expert parallelism replaces; override "
                "compute() instead"
            )
            return


def _flops_warnings(spec: ModelSpec, args: Any, seq_len: int) -> Iterator[str]:
    try:
        # a backward computes two products for each of the forward
        counted = 3 * _forward_flops(spec, args, seq_len)
    except Exception as error:
        yield (
            "TFLOP/s and MFU rest on an unchecked module_flops, as FLOPs can't be counted: "
            f"{_text(error)}"
        )
        return
    declared = spec.flops_per_token(args, seq_len)
    if abs(declared - counted) > _SAME_FLOPS * counted:
        more = "more" if declared > counted else "less"
        yield (
            f"module_flops declares {declared:.4g} FLOPs per token, "
            f"{abs(declared / counted - 1):.0%} {more} than the {counted:.4g} of the model's "
            "matrix products, and TFLOP/s and MFU are off by as much; pass module_flops= to its "
            "ModelSpec"
        )


def _forward_flops(spec: ModelSpec, args: Any, seq_len: int) -> float:
    """FLOPs per token that torch counts in a forward of one row."""
    with torch.device("meta"):
        model: Any = spec.build(args, attention_backend("cpu"))
        tokens = _training_inputs(spec, args, torch.zeros(1, seq_len, dtype=torch.int64))
        positions = torch.arange(seq_len)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(tokens, positions, None, **_token_weights(spec, args, tokens))
    return counter.get_total_flops() / seq_len


def _difference(logits: Tensor, expected: Tensor) -> str | None:
    """The error of `logits` relative to the largest, in words; None if it is only rounding."""
    if logits.shape != expected.shape:
        return f"their shape {list(logits.shape)} instead of {list(expected.shape)}"
    off = ((logits - expected).abs().max() / expected.abs().max()).item()
    return f"{off:.2g} of the largest" if not off <= _SAME else None


def _text(error: Exception) -> str:
    """The first line of an error."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}{': ' if lines else ''}{printable(cut(lines[0], 200)) if lines else ''}"  # noqa: E501

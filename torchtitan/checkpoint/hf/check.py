"""Comparison of an export with its source, before the folder gets its final name."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from torchtitan.checkpoint.hf.opening import meta_model, open_hf
from torchtitan.checkpoint.hf.tokenizer import differing_text, file_problem
from torchtitan.data.encode.tokenizer import Tokenizer
from torchtitan.models import ModelSpec, hf_map
from torchtitan.models.args import DecoderArgs
from torchtitan.models.attention.backend import attention_backend
from torchtitan.utils.errors import CheckpointError, UserError
from torchtitan.utils.torch_compat import silence_false_alarms
from torchtitan.utils.wording import brief

PROMPT = 64
"""Tokens of the prompt for the comparison of logits."""
MAX_COMPARED_IN_RUN = 3 * 10**9
"""Parameters of the largest model whose logits a run compares at its end, while all ranks wait."""
_LOGITS_AGREE = 1e-3
"""Tolerated difference of logits, from rounding, relative to the largest logit."""


def check_description(folder: Path, spec: ModelSpec, args: Any) -> None:
    """Compare the model with `config.json` and the weights' names and shapes, read by `from-hf`.

    Raises:
        CheckpointError, ConfigError: they describe another model.
    """
    open_hf(folder, spec, args)


def check_tokenizer_file(folder: Path, tokenizer: Tokenizer | None) -> None:
    """
    Raises:
        CheckpointError: the folder's tokenizer gives other ids than training sees.
    """
    if tokenizer is None or not _is_written(folder, tokenizer):
        return
    if problem := file_problem(tokenizer, folder):
        raise CheckpointError(f"tokenizer.json gives other ids than training: {problem}")


def _is_written(folder: Path, tokenizer: Tokenizer) -> bool:
    """Whether the export writes `tokenizer.json`; a registered tokenizer's files are copied."""
    built_in = type(tokenizer).__module__.startswith("torchtitan.data.encode.")
    return built_in and (folder / "tokenizer.json").is_file()


def compare(
    folder: Path,
    spec: ModelSpec,
    args: Any,
    tokenizer: Tokenizer | None,
    read: Callable[[str], Tensor],
    max_parameters: float,
    *,
    anyway: bool = False,
) -> list[str]:
    """Compare logits and token ids of transformers with ours, if it is installed.

    Args:
        read: returns the exported weight or buffer with one of our names.
        max_parameters: compare the logits of models of up to this many parameters.
        anyway: compare the logits even if memory may not suffice.

    Returns:
        Messages about the comparisons, and about those left out.

    Raises:
        CheckpointError: they differ.
    """
    if importlib.util.find_spec("transformers") is None:
        return ["Not compared with transformers: pip install transformers"]
    silence_false_alarms()  # transformers imports torchao
    try:
        import transformers
        from transformers.utils import logging
    except Exception as error:  # it doesn't fit the other packages that are installed
        problem = f"{type(error).__name__}: {error}"
        return [f"Not compared with transformers, which can't be imported: {problem}"]
    silence_false_alarms()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    kind = hf_map(spec).model_type
    notes = [_tokenizer_note(folder, kind, tokenizer)]
    reason = None
    if kind not in transformers.CONFIG_MAPPING:
        reason = f"transformers {transformers.__version__} has no {kind}"
    elif not anyway:
        reason = _too_large(spec, args, max_parameters)
    if reason:
        return [*notes, f"Logits not compared: {reason}"]
    try:
        return [*notes, _logits_note(folder, spec, args, read)]
    except _TheirError as error:
        if anyway:
            raise
        return [*notes, f"Warning: logits not compared: {error}"]


def _too_large(spec: ModelSpec, args: Any, max_parameters: float) -> str | None:
    count = sum(param.numel() for param in meta_model(spec, args).parameters())
    if count > max_parameters:
        return (
            f"{count / 1e9:.1f} billion parameters, at the end of a run up to "
            f"{max_parameters / 1e9:g} are compared; `torchtitan ckpt to-hf` compares larger models"
        )
    size = 5 * count  # one model in float32 at a time
    if size > psutil.virtual_memory().available:
        return f"needs {size / 1e9:.0f} GB of memory (--check compares anyway)"
    return None


def _logits_note(folder: Path, spec: ModelSpec, args: Any, read: Callable[[str], Tensor]) -> str:
    """Compare the logits of both models, in float32 with the exported weights, in a message."""
    training_only = _training_only_prefixes(spec, args)
    tokens = torch.arange(PROMPT)[None] * 7919 % args.vocab_size
    with torch.no_grad():
        expected = _our_logits(spec, args, read, tokens)
        logits, info = _their_logits(folder, tokens)
        for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if keys := sorted(
                k for k in map(str, info[problem]) if not k.startswith(training_only)
            ):
                words = problem.replace("_", " ")
                raise CheckpointError(f"transformers finds {words}: {', '.join(keys[:3])}")
        gap = (logits - expected).abs().max().item()
    size = expected.abs().max().item()
    if not gap <= _LOGITS_AGREE * size:
        raise CheckpointError(
            "transformers computes other logits than this project's model: they differ by up to "
            f"{gap:.2g} (logits up to {size:.3g})"
        )
    return f"Largest logit difference to transformers: {gap:.2g} (logits up to {size:.3g})"


class _TheirError(UserError):
    """transformers can't run the model, which doesn't mean that the files are wrong."""


def _their_logits(folder: Path, tokens: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """The logits of transformers' model in float32, and its report on loading."""
    import transformers

    options: dict[str, Any] = {}
    if hasattr(getattr(transformers, "PreTrainedConfig", None), "_experts_implementation"):
        # grouped products on a CPU need widths that are multiples of 4
        options["experts_implementation"] = "eager"
    load = transformers.AutoModelForCausalLM.from_pretrained
    try:
        model, info = load(folder, dtype=torch.float32, output_loading_info=True, **options)
        return model(tokens).logits, info
    except Exception as error:
        reason = f"{type(error).__name__}: {brief(str(error))}"
        raise _TheirError(f"transformers can't run the model: {reason}") from error


def _training_only_prefixes(spec: ModelSpec, args: Any) -> tuple[str, ...]:
    """Prefixes of the exported weights that transformers' models lack: the modules that predict
    further tokens.
    """
    if not isinstance(args, DecoderArgs):
        return ()
    names = hf_map(spec).names(args)
    joint = "eh_proj.weight"
    theirs = [names[f"layers.{i}.{joint}"] for i in args.mtp_layers]
    return tuple(str(name).removesuffix(joint) for name in theirs)


def _our_logits(
    spec: ModelSpec, args: Any, read: Callable[[str], Tensor], tokens: Tensor
) -> Tensor:
    short = args.model_copy(update={"max_seq_len": PROMPT})
    with torch.device("meta"):
        model = spec.build(short, attention_backend("cpu"))
    model.to_empty(device="cpu")
    model.init_buffers()
    state = model.state_dict()
    for name in hf_map(spec).names(args):
        state[name].copy_(read(name))
    return model(tokens)


def _tokenizer_note(folder: Path, kind: str, tokenizer: Tokenizer | None) -> str:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if tokenizer is None:
        return "Token ids not compared: the export has no tokenizer"
    is_written = _is_written(folder, tokenizer)
    try:
        loaded = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        problem = differing_text(tokenizer, lambda text: loaded(text)["input_ids"])
    except Exception as error:  # it fails in any way on files that it doesn't know
        if is_written:
            raise
        problem = f"{type(error).__name__}: {brief(str(error))}"
    if problem is None:
        return "Token ids: AutoTokenizer of transformers gives those of training"
    if not is_written:
        return (
            f"Warning: AutoTokenizer of transformers can't give the token ids of {tokenizer.name}: "
            f"{problem}"
        )
    generic = PreTrainedTokenizerFast.from_pretrained(folder)
    if differing_text(tokenizer, lambda text: generic(text)["input_ids"]) is None:
        # transformers 5 builds the tokenizer of some types of models, such as qwen2, without
        # looking into the folder.
        return (
            f"Warning: AutoTokenizer takes {type(loaded).__name__} for every model of type {kind}, "
            "whatever its files say, and gives other token ids than training; load it with "
            "PreTrainedTokenizerFast.from_pretrained"
        )
    raise CheckpointError(f"transformers' tokenizer gives other ids than training: {problem}")

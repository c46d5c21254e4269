"""Parts of a tokenizer's Hugging Face files that make a text begin there as in training."""

from collections.abc import Mapping
from typing import Any


def post_processor(bos: str | None, bos_id: int | None) -> dict[str, Any] | None:
    """The entry of `tokenizer.json` that adds only begin-of-text, as training does if the tokenizer
    has it.
    """
    if bos is None:
        return None
    parts: list[dict[str, Any]] = []
    for type_id, sequence in enumerate("AB"):
        parts.append({"SpecialToken": {"id": bos, "type_id": type_id}})
        parts.append({"Sequence": {"id": sequence, "type_id": type_id}})
    return {
        "type": "TemplateProcessing",
        "single": parts[:2],
        "pair": parts,
        "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
    }


def tokenizer_config(
    given: Mapping[str, Any], bos: str | None, eos: str, max_length: int | None = None
) -> dict[str, Any]:
    """`tokenizer_config.json`, naming the class that uses `tokenizer.json` as it is.

    Args:
        given: its contents so far.
        max_length: tokens that the model takes, for a file that doesn't say.
    """
    own = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bos is not None,
        "add_eos_token": False,
    }
    usual: dict[str, Any] = {"clean_up_tokenization_spaces": False}
    if max_length is not None:
        usual["model_max_length"] = max_length
    kept = {key: value for key, value in given.items() if key != "auto_map"}
    return usual | kept | own | {"bos_token": bos, "eos_token": eos}

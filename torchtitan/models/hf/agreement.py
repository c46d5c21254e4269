"""What the files of a Hugging Face folder say twice: one value, or an error that names both places.
Imports no torch.
"""

from collections.abc import Collection, Mapping
from typing import Any

from torchtitan.utils.wording import brief

_SYNONYMS = (
    ("num_experts", "num_local_experts", "n_routed_experts"),
    ("num_experts_per_tok", "experts_per_token"),
    ("num_nextn_predict_layers", "num_mtp_layers"),
)
"""Keys of which classes in transformers read one as the other, or that publishers give twice."""


def one_value(given: Mapping[str, Any]) -> Any:
    """The value of several places, or None.

    Args:
        given: the value of each place, None where it gives none.

    Raises:
        ValueError: two values differ.
    """
    stated = {place: value for place, value in given.items() if value is not None}
    for place, value in stated.items():
        first = next(iter(stated))
        if value != stated[first]:
            raise ValueError(
                f"{first} is {brief(stated[first])}, but {place} is {brief(value)}: they must be "
                "the same; remove the wrong one"
            )
    return next(iter(stated.values()), None)


def with_text_config(config: dict[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """The settings of the text model, which a model with a vision tower has in its `text_config`.

    Args:
        keys: those that may not contradict the outer ones.

    Raises:
        ValueError: one does.
    """
    text = config.get("text_config")
    if not isinstance(text, dict):
        return config
    for key in keys & config.keys() & text.keys():
        one_value({key: config[key], f"text_config.{key}": text[key]})
    return config | text


def with_one_name(config: dict[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """The settings of `keys`, under those names.

    Raises:
        ValueError: another name of one of them has another value.
    """
    for group in _SYNONYMS:
        key = next((name for name in group if name in keys), None)
        if key and (value := one_value({name: config.get(name) for name in group})) is not None:
            config = config | {key: value}
    return config

"""Values that a Hugging Face folder has in two places: one value, or an error naming both places.
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
"""Names of the same key: transformers reads one as the other, or publishers write both."""


def common_value(values: Mapping[str, Any]) -> Any:
    """The value that all places agree on; None if no place has one.

    Args:
        values: the value in each place, None if absent.

    Raises:
        ValueError: two values differ.
    """
    settings = {place: value for place, value in values.items() if value is not None}
    for place, value in settings.items():
        first = next(iter(settings))
        if value != settings[first]:
            raise ValueError(
                f"{first} is {brief(settings[first])}, but {place} is {brief(value)}: they must be "
                "the same; remove the wrong one"
            )
    return next(iter(settings.values()), None)


def with_text_config(config: dict[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """The settings of the text model, which a model with a vision tower has in its `text_config`.

    Args:
        keys: keys that may not contradict the outer ones.

    Raises:
        ValueError: one of them does.
    """
    text = config.get("text_config")
    if not isinstance(text, dict):
        return config
    for key in keys & config.keys() & text.keys():
        common_value({key: config[key], f"text_config.{key}": text[key]})
    return config | text


def with_usual_names(config: dict[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """The configuration with the values of synonyms of `keys` under the names in `keys`.

    Raises:
        ValueError: two names of a key have different values.
    """
    for group in _SYNONYMS:
        key = next((name for name in group if name in keys), None)
        if key and (value := common_value({name: config.get(name) for name in group})) is not None:
            config = config | {key: value}
    return config

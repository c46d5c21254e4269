"""How blocks mix tokens, in a `config.json` of Hugging Face's transformers. Imports no torch."""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator

from torchtitan.models.decoder_args import DecoderArgs, LayerKind
from torchtitan.utils.text import brief

_TYPES: dict[str, LayerKind] = {
    "full_attention": "full",
    "sliding_attention": "window",
    "linear_attention": "delta",
}
_OF_KINDS = {kind: name for name, kind in _TYPES.items()} | {"nope": "full_attention"}


def _read_types(value: Any) -> Any:
    if value is None:
        return None
    if not isinstance(value, list):
        raise ValueError(f"got {brief(value)}, must be a list with the type of each layer")
    for name in value:
        if not isinstance(name, str) or name not in _TYPES:
            known = ", ".join(repr(kind) for kind in _TYPES)
            raise ValueError(f"got {brief(name)}, must be one of {known}")
    return tuple(_TYPES[name] for name in value)


LayerTypes = Annotated[tuple[LayerKind, ...] | None, BeforeValidator(_read_types)]
"""`layer_types`: the kind of each layer, or None."""


def all_kinds(args: DecoderArgs) -> list[LayerKind]:
    """The kind of each block."""
    return [args.kind(layer) for layer in range(args.n_layers)]


def type_of(kind: LayerKind) -> str:
    """Hugging Face's name of a kind. Layers without positions have no own one."""
    return _OF_KINDS[kind]


def shortest_pattern(kinds: Sequence[LayerKind]) -> tuple[LayerKind, ...]:
    """The fewest kinds that, repeated over the layers, give each layer its own."""
    for period in range(1, len(kinds)):
        if all(kind == kinds[i % period] for i, kind in enumerate(kinds)):
            return tuple(kinds[:period])
    return tuple(kinds)

"""Models for a new project: the sizes of each family, and local Hugging Face folders."""

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tomli

from torchtitan.config.sections.schema import Config
from torchtitan.models import ModelSpec, all_families, get_spec, hf_map, spec_of_hf
from torchtitan.tools.planner.predict import derived_workload
from torchtitan.utils.errors import ConfigError, UserError, did_you_mean
from torchtitan.utils.formats import read_json_object
from torchtitan.utils.storage import path_argument

DEBUG = "debugmodel"
"""The flavor of each family that trains on a CPU, with the shipped tokenizer."""

REPOSITORIES: dict[str, str] = tomli.loads(
    Path(__file__).with_name("repositories.toml").read_text(encoding="utf-8")
)
"""Repository of each size's tokenizer on the hub, by FAMILY/SIZE."""
_PUBLISHED = "HuggingFaceTB/SmolLM2-135M"
_PUBLISHED_ENTRIES = 49152
"""Fallback tokenizer and its number of entries, for sizes without one if none can be trained."""


@dataclass(frozen=True)
class ModelChoice:
    """A model to train: a size of a family, or a Hugging Face folder."""

    spec: ModelSpec
    flavor: str
    overrides: dict[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    """Its Hugging Face folder; None for a size of a family."""
    published: str | None = None
    """Repository of the fallback tokenizer, if the model uses it."""

    @property
    def name(self) -> str:
        return f"{self.spec.name}/{self.flavor}" if self.folder is None else self.folder.name

    @property
    def args(self) -> Any:
        return self.spec.args(self.flavor, self.overrides)

    @property
    def has_weights(self) -> bool:
        return self.folder is not None and any(self.folder.glob("*.safetensors"))

    @property
    def repository(self) -> str | None:
        """Repository of the tokenizer on the hub; None for debug models, which use the shipped one,
        and for unpublished sizes.
        """
        return self.published or (None if self.folder else REPOSITORIES.get(self.name))

    @property
    def overrides_from(self) -> str:
        """The reason for `overrides`."""
        return "from config.json" if self.folder else f"entries of the tokenizer of {_PUBLISHED}"

    def with_published_tokenizer(self) -> "ModelChoice":
        """The model with the fallback tokenizer and its vocabulary size, if it has no tokenizer."""
        if self.folder or self.flavor == DEBUG or self.repository:
            return self
        entries = max(self.args.vocab_size, _PUBLISHED_ENTRIES)
        overrides = self.overrides | {"vocab_size": entries}
        return replace(self, overrides=overrides, published=_PUBLISHED)

    @property
    def is_gated(self) -> bool:
        """Whether the hub requires accepting a licence."""
        return (self.repository or "").startswith(("meta-llama/", "google/gemma-"))

    def parameters(self) -> tuple[int, int]:
        """Total and active parameters. A token activates only the experts it is routed to."""
        model = {"name": self.spec.name, "flavor": self.flavor, "overrides": self.overrides}
        w = derived_workload(Config.model_validate({"model": model}), self.spec, 1)
        total = w.params(w.stages[0])
        idle = sum(
            count * block.expert_params * (1 - block.expert_rows / block.experts)
            for block, count in w.block_counts(w.stages)
            if block.experts
        )
        return total, round(total - idle)


def offered() -> list[ModelChoice]:
    """Every size of every family."""
    return [ModelChoice(spec, flavor) for spec in all_families() for flavor in spec.flavors]


def find_model(text: str) -> ModelChoice:
    """Find a model by `FAMILY/SIZE` or by the path of a Hugging Face folder.

    Raises:
        UserError: there is no such model, or no family can represent it.
    """
    folder = path_argument(text, "MODEL")
    if folder.is_dir():
        return hugging_face_model(folder, "MODEL: ")
    family, _, flavor = text.partition("/")
    families = {spec.name: spec for spec in all_families()}
    if family not in families:
        names = [model.name for model in offered()]
        hint = did_you_mean(text, [*names, *families])
        raise ConfigError(
            [
                f"MODEL: {text!r} is neither a folder nor FAMILY/SIZE; the families "
                f"are {', '.join(families)}{hint}"
            ]
        )
    spec = families[family]
    flavors = [name for name in spec.flavors if name.lower() == flavor.lower()]
    if not flavors:
        hint = did_you_mean(flavor, spec.flavors) if flavor else ""
        sizes = ", ".join(f"{family}/{name}" for name in spec.flavors)
        raise ConfigError([f"MODEL: {family} has no size {flavor!r}; choose {sizes}{hint}"])
    return ModelChoice(spec, flavors[0])


def hugging_face_model(path: Path, prefix: str = "") -> ModelChoice:
    """The model in a Hugging Face folder, or of a `config.json` alone.

    Args:
        prefix: starts messages, for example with the flag that named the path.

    Raises:
        UserError: there is no such model, or no family can represent it.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = read_json_object(file)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{prefix}{path} is not the folder of a Hugging Face model: {error}"
        ) from None
    from torchtitan.checkpoint.hf.convert import nearest_flavor  # imports torch
    from torchtitan.checkpoint.hf.opening import open_hf

    try:
        if path.is_dir() and any(path.glob("*.safetensors")):
            spec, args = open_hf(path)[1:3]
        else:
            spec = spec_of_hf(config)
            args = hf_map(spec).args(config)
        flavor, overrides = nearest_flavor(spec, args)
    except ConfigError as error:
        raise ConfigError([f"{prefix}{path}: {problem}" for problem in error.problems]) from None
    return ModelChoice(get_spec(spec.name), flavor, overrides, Path(os.path.abspath(file.parent)))

"""Which trackers the configuration chooses, and the packages they need. Imports none of them."""

import importlib.util
from collections.abc import Iterator

from torchtitan.config.sections.metrics import Metrics

PACKAGES = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "trackio": "trackio",
    "prometheus": "prometheus_client",
}
"""Built-in tracker, which is also the name of its extra, to the module it imports."""


def chosen(config: Metrics) -> dict[str, str]:
    """Names of the chosen trackers, each with the key that chooses it."""
    names = {name: "metrics.sinks" for name in config.sinks if name != "jsonl"}
    for name, enabled in (
        ("wandb", config.enable_wandb),
        ("tensorboard", config.enable_tensorboard),
    ):
        if enabled:
            names[name] = f"metrics.enable_{name}"
    return names


def missing_packages(config: Metrics) -> Iterator[str]:
    """What is wrong with the chosen trackers on this machine."""
    for name, key in chosen(config).items():
        if name in PACKAGES and importlib.util.find_spec(PACKAGES[name]) is None:
            off = "set it to false" if key != "metrics.sinks" else "remove it"
            what = key if key != "metrics.sinks" else f'{key}: "{name}"'
            yield (
                f"{what} needs the package {PACKAGES[name]}: pip install "
                f"'titan-pretrain[{name}]', or {off}"
            )

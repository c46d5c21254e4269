"""Rules on the machine that trains: packages, compilers, folders."""

from collections.abc import Iterator

from torchtitan.config.registry import TRACKER_PACKAGES
from torchtitan.config.rules.table import Facts, rule
from torchtitan.config.sections.schema import Config
from torchtitan.utils.errors import did_you_mean
from torchtitan.utils.torch_versions import too_old
from torchtitan.utils.wording import brief

_BACKENDS = (
    "inductor",
    "aot_eager",
    "eager",
    "cudagraphs",
    "tvm",
    "openxla",
    "onnxrt",
    "ts",
    "aot_ts",
    "aot_eager_decomp_partition",
    "aot_eager_decomp_partition_crossref",
    "aot_eager_decomp_partition_with_mode",
    "aot_eager_default_partitioner",
    "eager_debug",
    "eager_noexcept",
    "invoke_subgraph",
    "openxla_eval",
    "pre_dispatch_eager",
)
"""`torch._dynamo.list_backends`, which would import torch."""


@rule("eval.enable", needs=["packages"])
def evals_have_their_package(config: Config, facts: Facts) -> str | None:
    if not config.eval.enable or "lm_eval" in facts.packages:
        return None
    return (
        "eval.enable needs the package lm-eval: pip install 'titan-pretrain[eval]', or set it to "
        "false"
    )


@rule("model.delta_rule", needs=["packages"])
def delta_kernels_are_installed(config: Config, facts: Facts) -> str | None:
    if config.model.delta_rule != "fla" or "fla" in facts.packages:
        return None
    return (
        'model.delta_rule: "fla" needs the package flash-linear-attention: pip install '
        "'titan-pretrain[fla]', or set it to \"torch\""
    )


@rule("model.delta_rule", needs=["device"])
def delta_kernels_run_on_cuda(config: Config, facts: Facts) -> str | None:
    if config.model.delta_rule != "fla" or facts.device.capability != (0, 0):
        return None
    return f'model.delta_rule: "fla" needs a GPU, this is {facts.device.name}; set it to "torch"'


@rule("metrics.sinks", "metrics.enable_wandb", "metrics.enable_tensorboard", needs=["packages"])
def trackers_have_their_packages(config: Config, facts: Facts) -> Iterator[str]:
    for name, key in config.metrics.trackers.items():
        package = TRACKER_PACKAGES.get(name)
        if package is None or package in facts.packages:
            continue
        start = key
        off = "set it to false"
        if key == "metrics.sinks":
            start = f'{key}: "{name}"'
            off = "remove it"
        yield f"{start} needs the package {package}: pip install 'titan-pretrain[{name}]', or {off}"


@rule(needs=["torch", "packages"])
def torch_is_new_enough(config: Config, facts: Facts) -> str | None:
    return too_old(facts.torch)


@rule("activation_checkpoint.visualize_memory_budget_pareto", needs=["packages"])
def pareto_plot_has_its_package(config: Config, facts: Facts) -> str | None:
    ac = config.activation_checkpoint
    draws = ac.mode == "memory_budget" and ac.visualize_memory_budget_pareto
    if not draws or "matplotlib" in facts.packages:
        return None
    return (
        "activation_checkpoint.visualize_memory_budget_pareto needs the package matplotlib; "
        "install it, or set the key to false"
    )


@rule("compile.backend", "experimental.custom_import", needs=["compilers"])
def compiler_is_known(config: Config, facts: Facts) -> str | None:
    """An unknown backend would fail only in the first step. A custom import may register one."""
    name = config.compile.backend
    names = [*_BACKENDS, *facts.compilers]
    if name in names or config.experimental.custom_import:
        return None
    return (
        f"compile.backend: torch has no compiler backend {brief(name)}{did_you_mean(name, names)}; "
        "import the module that registers it as experimental.custom_import, or set it to one of "
        f"{', '.join(_BACKENDS[:4])}"
    )


@rule("compile.enable", "compile.backend", "model.delta_rule", needs=["missing_for_kernels"])
def kernels_can_be_compiled(config: Config, facts: Facts) -> str | None:
    """torch would fail only in the first step."""
    compiles = config.compile.enable and config.compile.backend == "inductor"
    if not facts.missing_for_kernels or not (compiles or config.model.delta_rule == "fla"):
        return None
    key = "compile.enable" if compiles else "model.delta_rule"
    return (
        f"{key}: this machine has {facts.missing_for_kernels}, which compiled kernels need; "
        "install it, or set the key to its default"
    )


@rule("job.dump_folder", needs=["unwritable"])
def dump_folder_is_writable(config: Config, facts: Facts) -> str | None:
    if facts.unwritable is None:
        return None
    return (
        f"job.dump_folder: can't write to {config.job.dump_folder!r} ({facts.unwritable}); choose "
        "another folder"
    )

"""The keys of the TorchTitan 0.2 convention: known, refused unless off, or taken under their old
spellings.
"""

import subprocess
import sys

import pytest

from tests.config_loading import load, problems
from tests.doc_blocks import BLOCKS
from torchtitan.config import load_config
from torchtitan.config.load.compat import (
    REMOVED,
    RENAMED,
    RENAMED_SECTIONS,
    UNSUPPORTED,
    NotSupported,
)
from torchtitan.config.load.keys import FIELDS

# Every key of the TorchTitan 0.2 TOML convention.
CONVENTION = """
job: config_file dump_folder description print_config save_config_file custom_config_module
profiling: enable_profiling save_traces_folder profile_freq profiler_active profiler_warmup enable_memory_snapshot
  save_memory_snapshot_folder
metrics: log_freq enable_tensorboard disable_color_printing save_tb_folder save_for_all_ranks enable_wandb
model: name flavor hf_assets_path tokenizer_path converters print_after_conversion
optimizer: name lr beta1 beta2 eps weight_decay implementation early_step_in_backward
lr_scheduler: warmup_steps total_steps decay_ratio decay_type min_lr_factor
training: dataset dataset_path local_batch_size global_batch_size seq_len max_norm steps enable_cpu_offload dtype
  mixed_precision_param mixed_precision_reduce gc_freq gc_debug
training.dataloader: num_workers persistent_workers pin_memory prefetch_factor
parallelism: data_parallel_replicate_degree data_parallel_shard_degree fsdp_reshard_after_forward tensor_parallel_degree
  disable_loss_parallel enable_async_tensor_parallel pipeline_parallel_degree module_fqns_per_model_part
  pipeline_parallel_first_stage_less_layers pipeline_parallel_last_stage_less_layers pipeline_parallel_layers_per_stage
  pipeline_parallel_schedule pipeline_parallel_schedule_csv pipeline_parallel_microbatch_size
  pipeline_parallel_expert_parallel_overlap context_parallel_degree context_parallel_load_balancer
  context_parallel_rotate_method expert_parallel_degree expert_tensor_parallel_degree expert_parallel_comm_backend
checkpoint: enable enable_ft_dataloader_checkpoints folder interval initial_load_path initial_load_model_only
  initial_load_in_hf initial_load_in_hf_quantized last_save_model_only last_save_in_hf export_dtype async_mode
  keep_latest_k load_step exclude_from_loading enable_first_step_checkpoint create_seed_checkpoint load_only
activation_checkpoint: mode selective_ac_option per_op_sac_force_recompute_mm_shapes_by_fqns early_stop memory_budget
  visualize_memory_budget_pareto preserve_rng_state determinism_check debug
compile: enable components backend
quantize.linear.float8: enable_fsdp_float8_all_gather precompute_float8_dynamic_scale_for_fsdp recipe_name filter_fqns
  emulate
quantize.linear.mx: mxfp8_dim1_cast_kernel_choice recipe_name filter_fqns
quantize.grouped_mm.float8: fqns
quantize.grouped_mm.mx: recipe_name fqns
comm: init_timeout_seconds train_timeout_seconds trace_buf_size save_traces_folder save_traces_file_prefix mode
memory_estimation: enable disable_fake_mode
fault_tolerance: enable process_group process_group_timeout_ms replica_id group_size min_replica_size semi_sync_method
experimental: custom_import custom_args_module
validation: enable dataset dataset_path local_batch_size seq_len freq steps
validation.dataloader: num_workers persistent_workers pin_memory prefetch_factor
debug: seed deterministic deterministic_warn_only moe_force_load_balance
"""  # noqa: E501


def convention_keys():
    section = ""
    for word in CONVENTION.split():
        if word.endswith(":"):
            section = word[:-1]
        else:
            yield f"{section}.{word}"


def test_every_key_of_the_convention_is_known():
    keys = list(convention_keys())
    assert len(keys) == len(set(keys)) > 130
    for key in keys:
        assert key in FIELDS or key in UNSUPPORTED or key in RENAMED, key
    assert set(UNSUPPORTED) <= set(keys), "the table of unsupported keys holds nothing else"
    assert not set(UNSUPPORTED) & set(FIELDS)


@pytest.mark.parametrize(
    "key", [key for key, entry in UNSUPPORTED.items() if isinstance(entry, NotSupported)]
)
def test_unsupported_keys_are_refused_unless_off(key):
    entry = UNSUPPORTED[key]
    assert entry.off
    for off in entry.off:
        text = str(off).lower() if isinstance(off, bool) else str(off)
        load(f"--{key}={text}")
    (problem,) = problems(f"--{key}=16")
    assert problem.startswith(f"--{key}: not supported yet: {entry.what}")


@pytest.mark.parametrize("key", REMOVED)
def test_removed_keys_are_refused_with_todays_way(key):
    below = key if "." in key else f"{key}.any"
    assert problems(f"--{below}=16") == [f"--{below}: no `{key}` any more: {REMOVED[key]}"]


@pytest.mark.parametrize(("value", "warns"), [("true", True), ("false", False)])
def test_an_overlap_that_does_not_happen_is_admitted(value, warns):
    key = "parallelism.pipeline_parallel_expert_parallel_overlap"
    warnings = load_config([f"--{key}={value}"]).warnings
    assert [f"--{key}: nothing is overlapped" in text for text in warnings] == [True] * warns


def test_a_file_with_everything_off_is_accepted(toml):
    load(
        "--config",
        toml(
            """
[model]
converters = []
[parallelism]
tensor_parallel_degree = 1
enable_async_tensor_parallel = false
pipeline_parallel_schedule = "Interleaved1F1B"
context_parallel_rotate_method = "alltoall"
[activation_checkpoint]
mode = "none"
selective_ac_option = "op"
[compile]
enable = false
components = ["model", "loss"]
[quantize.linear.float8]
filter_fqns = ["output"]
"""
        ),
    )


@pytest.mark.parametrize("old", RENAMED)
def test_old_spellings_are_taken_with_a_warning(old):
    new = RENAMED[old]
    values = {
        "job.print_config": "true",
        "lr_scheduler.min_lr_factor": "0.25",
        "model.hf_assets_path": "somewhere",
    }
    value = values.get(new, "3" if new == "debug.seed" else "false")
    if new in UNSUPPORTED:
        entry = UNSUPPORTED[new]
        value = "false" if isinstance(entry, NotSupported) else "1"
        assert load_config([f"--{old}={value}"]).warnings == [f"--{old}: {old} is called {new} now"]
        return
    loaded = load_config([f"--{old}={value}"])
    assert loaded.warnings == [f"--{old}: {old} is called {new} now"]
    section, _, name = new.partition(".")
    got = getattr(getattr(loaded.config, section), name)
    assert got == [value] if isinstance(got, list) else str(got).lower() == value


def test_a_count_of_microbatches_becomes_their_size(toml):
    file = toml(
        "[training]\nlocal_batch_size = 12\n[parallelism]\npipeline_parallel_microbatches = 4\n"
    )
    loaded = load_config(["--config", file])
    assert loaded.config.parallelism.pipeline_parallel_microbatch_size == 3
    assert "pipeline_parallel_microbatch_size now" in loaded.warnings[0]
    assert (
        load(
            "--parallelism.pipeline_parallel_microbatches=2"
        ).parallelism.pipeline_parallel_microbatch_size
        == 4
    )
    (problem,) = problems("--config", file, "--training.local_batch_size=6")
    assert problem.startswith(
        f"{file}:4: parallelism.pipeline_parallel_microbatches: got 4, must divide"
    )
    (problem,) = problems("--config", file, "--parallelism.pipeline_parallel_microbatch_size=2")
    assert "remove parallelism.pipeline_parallel_microbatches" in problem


@pytest.mark.parametrize("flavor", ["8B_flex", "8B_varlen", "8B_flex_attn", "8B_varlen_attn"])
def test_flavors_that_name_an_attention_kernel_mean_a_document_mask(toml, flavor):
    file = toml(f'[model]\nflavor = "{flavor}"\n')
    loaded = load_config(["--config", file])
    assert loaded.config.model.flavor == "8B"
    assert loaded.config.training.document_mask
    assert loaded.sources["training.document_mask"] == f"{file}:2"
    assert loaded.warnings == [
        f"{file}:2: model.flavor {flavor!r} is '8B' now, with training.document_mask = true"
    ]

    off = load_config(["--config", file, "--training.document_mask=false"])
    assert not off.config.training.document_mask
    assert off.warnings[0].endswith(
        "because training.document_mask is false (--training.document_mask)"
    )
    own = load(
        f"--model.flavor={flavor}", "--model.name=qwen3"
    )  # another family's flavors have names of their own
    assert (own.model.flavor, own.training.document_mask) == (flavor, False)


def test_old_sections_are_renamed(toml):
    for old, new in RENAMED_SECTIONS.items():
        warnings = load_config(["--config", toml(f"[{old}]\nfilter_fqns = []\n")]).warnings
        assert warnings
        assert f"{new}.filter_fqns" in warnings[0]


def test_dataclasses_become_a_file_that_keeps_its_meaning(tmp_path):
    """The script of the page for users of TorchTitan without TOML."""
    (script,) = (block for block in BLOCKS if block.file == "to_toml.py")
    (tmp_path / "to_toml.py").write_text(script.text)
    (tmp_path / "mine.py").write_text(MINE)
    done = subprocess.run(
        [sys.executable, "to_toml.py", "mine:run"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (tmp_path / "run.toml").write_text(done.stdout)
    config = load("--config", str(tmp_path / "run.toml"))
    assert config.training.steps == 7
    assert config.training.dataset_path == 'a "quoted" name'
    assert config.quantize.linear.float8.filter_fqns == ["output"]
    assert config.compile.enable is True
    assert "model_spec" not in done.stdout


MINE = """
from dataclasses import dataclass, field

@dataclass
class Training:
    steps: int = 7
    dataset_path: str = 'a "quoted" name'
    global_batch_size: int | None = None

@dataclass
class Float8:
    filter_fqns: list[str] = field(default_factory=lambda: ["output"])

@dataclass
class Linear:
    float8: Float8 = field(default_factory=Float8)

@dataclass
class Quantize:
    linear: Linear = field(default_factory=Linear)

@dataclass
class Compile:
    enable: bool = True

@dataclass
class Run:
    training: Training = field(default_factory=Training)
    quantize: Quantize = field(default_factory=Quantize)
    compile: Compile = field(default_factory=Compile)
    model_spec: object = object()

def run():
    return Run()
"""

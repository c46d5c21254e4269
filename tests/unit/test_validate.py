"""Every cross-field rule refuses what it should, names the keys, and offers something that is then
accepted.
"""

import pytest

from torchtitan.config import gradient_accumulation_steps, resolve, rules
from torchtitan.config.derive import axis_degrees, degrees_fill, derive
from torchtitan.config.load.decode import load_config
from torchtitan.config.load.keys import FIELDS, prefixes
from torchtitan.config.rules import RULES, Facts
from torchtitan.utils.errors import ConfigError

TP = ["--parallelism.tensor_parallel_degree=2"]
OP = ["--activation_checkpoint.selective_ac_option=op"]
BF16_REDUCE = "--training.mixed_precision_reduce=bfloat16"
FLOAT8 = ["--model.converters=float8"]

# rule -> (ranks, arguments it refuses, words of the message, arguments that fix it)
ELASTIC = ["--fault_tolerance.elastic"]
SOURCES = "--training.sources=[{name = 'a'}, {name = 'b'}]"
CASES = {
    "degrees_fill_the_world": [
        (
            8,
            ["--parallelism.data_parallel_shard_degree=3"],
            "there are 8 ranks; set data_parallel_shard_degree = 8",
            ["--parallelism.data_parallel_shard_degree=8"],
        ),
        (
            6,
            ["--parallelism.data_parallel_replicate_degree=4"],
            "must divide 6: 1, 2, 3, 6",
            ["--parallelism.data_parallel_replicate_degree=3"],
        ),
        (
            2,
            ["--parallelism.data_parallel_shard_degree=0"],
            "set 1 for no sharding",
            ["--parallelism.data_parallel_shard_degree=-1"],
        ),
        (
            8,
            ["--parallelism.tensor_parallel_degree=3"],
            "tensor_parallel_degree must divide 8: 1, 2, 4, 8",
            ["--parallelism.tensor_parallel_degree=4"],
        ),
        (
            8,
            ["--parallelism.tensor_parallel_degree=4", "--parallelism.context_parallel_degree=4"],
            "the degrees other than data_parallel_shard_degree, 16, must divide 8",
            ["--parallelism.context_parallel_degree=2"],
        ),
    ],
    "expert_degree_divides": [
        (
            12,
            [
                "--parallelism.data_parallel_replicate_degree=2",
                "--parallelism.tensor_parallel_degree=3",
                "--parallelism.expert_parallel_degree=4",
                "--training.seq_len=2049",
            ],
            "tensor_parallel_degree 3 = 6, whose ranks it shares; set it to one of 1, 2, 3, 6",
            ["--parallelism.expert_parallel_degree=6"],
        ),
    ],
    "batch_divides": [
        (
            2,
            ["--training.local_batch_size=4", "--training.global_batch_size=20"],
            "= 8; set it to 16 or 24",
            ["--training.global_batch_size=24"],
        ),
        (
            4,
            ["--training.global_batch_size=0"],
            "set it to 32",
            ["--training.global_batch_size=32"],
        ),
    ],
    "elastic_run_can_resume": [
        (
            3,
            [*ELASTIC, "--checkpoint.enable"],
            "set it to 3 or more",
            ["--training.global_batch_size=8"],
        ),
        (
            3,
            [*ELASTIC, "--checkpoint.enable", "--training.global_batch_size=2"],
            "2 rows are too few for 3",
            ["--training.global_batch_size=3"],
        ),
        (
            3,
            [*ELASTIC, "--training.global_batch_size=8"],
            "resumes from checkpoints",
            ["--checkpoint.enable"],
        ),
        (
            3,
            [
                *ELASTIC,
                "--training.global_batch_size=8",
                "--checkpoint.enable",
                "--checkpoint.load_step=4",
            ],
            "would go back to step 4",
            ["--checkpoint.load_step=-1"],
        ),
        (
            3,
            [
                *ELASTIC,
                "--training.global_batch_size=8",
                "--checkpoint.enable",
                "--checkpoint.exclude_from_loading=dataloader",
            ],
            "would lose these parts",
            ["--checkpoint.exclude_from_loading="],
        ),
    ],
    "sequence_divides": [
        (
            2,
            ["--parallelism.context_parallel_degree=2", "--training.seq_len=2046"],
            "set it to 2044 or 2048",
            ["--training.seq_len=2044"],
        ),
        (
            2,
            [
                "--parallelism.context_parallel_degree=2",
                "--parallelism.context_parallel_load_balancer=none",
                "--training.seq_len=2047",
            ],
            "a multiple of 2: set it to 2046 or 2048",
            ["--training.seq_len=2046"],
        ),
        (
            12,
            ["--parallelism.context_parallel_degree=2", "--parallelism.tensor_parallel_degree=6"],
            "context_parallel_degree 2 and parallelism.tensor_parallel_degree 6; it must be "
            "a multiple of 12",
            ["--training.seq_len=2040"],
        ),
        (
            2,
            [
                "--parallelism.tensor_parallel_degree=2",
                "--validation.enable",
                "--validation.seq_len=7",
            ],
            "validation.seq_len: 7",
            ["--validation.seq_len=8"],
        ),
    ],
    "loss_chunks_divide": [
        (
            2,
            ["--training.loss_chunks=3", "--parallelism.tensor_parallel_degree=2"],
            "3 does not divide the 1024 positions of training.seq_len on each rank; set "
            "it to 2 or 4",
            ["--training.loss_chunks=4"],
        ),
        (
            1,
            ["--training.loss_chunks=8", "--validation.enable", "--validation.seq_len=4"],
            "positions of validation.seq_len on each rank; set it to 4",
            ["--training.loss_chunks=4"],
        ),
    ],
    "checkpointing_option_is_known": [
        (
            1,
            ["--activation_checkpoint.selective_ac_option=ops"],
            "a positive number k",
            ["--activation_checkpoint.selective_ac_option=op"],
        ),
        (
            1,
            ["--activation_checkpoint.selective_ac_option=0"],
            "got '0'",
            ["--activation_checkpoint.selective_ac_option=1"],
        ),
    ],
    "low_precision_blocks_are_full": [
        (
            1,
            [*FLOAT8, "--training.seq_len=40", "--training.local_batch_size=1"],
            "a multiple of 16 tokens",
            ["--training.local_batch_size=2"],
        ),
        (
            1,
            ["--model.converters=mx", "--training.seq_len=30", "--training.local_batch_size=1"],
            "multiple of 32",
            ["--training.seq_len=64"],
        ),
    ],
    "schedule_is_named": [
        (
            2,
            [
                "--parallelism.pipeline_parallel_degree=2",
                "--parallelism.pipeline_parallel_schedule=PipelineScheduleMulti",
            ],
            "runs a schedule from a file",
            ["--parallelism.pipeline_parallel_schedule_csv=some.csv"],
        ),
    ],
    "features_combine": [
        (
            2,
            [
                "--activation_checkpoint.offload_blocks=1",
                "--parallelism.pipeline_parallel_degree=2",
                "--parallelism.pipeline_parallel_schedule=InterleavedZeroBubble",
                "--activation_checkpoint.mode=full",
            ],
            "activation_checkpoint.offload_blocks: a schedule that splits the backward needs",
            ["--parallelism.pipeline_parallel_schedule=Interleaved1F1B"],
        ),
        (
            2,
            [
                "--optimizer.early_step_in_backward",
                "--training.max_norm=0",
                "--parallelism.pipeline_parallel_degree=2",
            ],
            "none is complete before the last backward ends",
            ["--parallelism.pipeline_parallel_degree=1"],
        ),
        (
            1,
            ["--optimizer.early_step_in_backward"],
            "set training.max_norm = 0",
            ["--training.max_norm=0"],
        ),
        (
            1,
            [
                "--optimizer.early_step_in_backward",
                "--training.max_norm=0",
                "--training.global_batch_size=16",
            ],
            "can't be accumulated",
            ["--training.local_batch_size=16"],
        ),
        (
            1,
            [
                "--optimizer.early_step_in_backward",
                "--training.max_norm=0",
                "--training.on_nonfinite=skip",
            ],
            "before it can be detected",
            ["--training.on_nonfinite=stop"],
        ),
        (
            1,
            [
                "--optimizer.early_step_in_backward",
                "--training.max_norm=0",
                "--training.global_batch_size=8",
                "--checkpoint.enable",
                *ELASTIC,
            ],
            "fewer ranks would need to accumulate",
            ["--fault_tolerance.elastic=false"],
        ),
        (
            1,
            ["--optimizer.early_step_in_backward", "--training.max_norm=0", "--guard.policy=skip"],
            "before it can be detected",
            ["--guard.policy=warn"],
        ),
        (
            2,
            [
                "--parallelism.fsdp_reshard_after_forward=always",
                "--parallelism.pipeline_parallel_degree=2",
            ],
            'set "default"',
            ["--parallelism.fsdp_reshard_after_forward=default"],
        ),
        (
            2,
            ["--parallelism.fsdp_reduce_once_per_step", "--parallelism.pipeline_parallel_degree=2"],
            "reduces gradients after each batch",
            ["--parallelism.fsdp_reduce_once_per_step=false"],
        ),
        (
            2,
            [BF16_REDUCE, "--parallelism.pipeline_parallel_degree=2"],
            "before they are reduced",
            ["--parallelism.pipeline_parallel_degree=1"],
        ),
        (
            2,
            [BF16_REDUCE, "--parallelism.fsdp_reduce_once_per_step"],
            "before they are reduced",
            ["--parallelism.fsdp_reduce_once_per_step=false"],
        ),
        (
            1,
            [BF16_REDUCE, "--training.dtype=bfloat16", "--training.global_batch_size=16"],
            "stored in bf16",
            ["--training.dtype=float32"],
        ),
        (
            2,
            [
                *OP,
                "--parallelism.pipeline_parallel_degree=2",
                "--parallelism.pipeline_parallel_schedule=ZBVZeroBubble",
            ],
            "runs a block's backward in two parts",
            ["--activation_checkpoint.mode=full"],
        ),
        (
            1,
            ["--activation_checkpoint.mode=memory_budget"],
            "implemented by the compiler",
            ["--compile.enable"],
        ),
        (
            2,
            ["--activation_checkpoint.mode=memory_budget", "--compile.enable", *TP],
            "fails on the device mesh",
            ["--parallelism.tensor_parallel_degree=1"],
        ),
        (
            2,
            ["--parallelism.enable_async_tensor_parallel", *TP],
            "implemented by inductor",
            ["--compile.enable"],
        ),
        (
            2,
            [
                "--parallelism.enable_async_tensor_parallel",
                *TP,
                "--compile.enable",
                "--compile.backend=aot_eager",
            ],
            "implemented by inductor",
            ["--compile.backend=inductor"],
        ),
        (1, ["--model.converters=float8,mx"], "convert the same layers", ["--model.converters=mx"]),
        (
            1,
            ["--model.converters=quantize.grouped_mm.float8,quantize.grouped_mm.mx"],
            "convert the same experts",
            ["--model.converters=quantize.grouped_mm.mx"],
        ),
        (
            1,
            [*FLOAT8, "--float8.enable_fsdp_float8_all_gather", "--float8.recipe_name=rowwise"],
            "one scale per weight",
            ["--float8.recipe_name=tensorwise"],
        ),
        (
            1,
            [*FLOAT8, "--float8.precompute_float8_dynamic_scale_for_fsdp"],
            "no effect without",
            ["--float8.enable_fsdp_float8_all_gather"],
        ),
        (
            1,
            ["--optimizer.name=Muon", "--optimizer.state_dtype=bfloat16"],
            "no bf16 state",
            ["--optimizer.name=Adam"],
        ),
    ],
    "storage_is_no_narrower_than_compute": [
        (
            1,
            ["--training.dtype=bfloat16", "--training.mixed_precision_param=float32"],
            "set both to bfloat16",
            ["--training.mixed_precision_param=bfloat16"],
        ),
    ],
    "keys_agree": [
        (
            1,
            ["--lr_scheduler.name=constant", "--lr_scheduler.decay_ratio=0.1"],
            "never decays; remove decay_ratio, or",
            ["--lr_scheduler.name=wsd"],
        ),
        (
            1,
            ["--lr_scheduler.name=constant", "--lr_scheduler.min_lr_factor=0.1"],
            "never decays; remove min_lr_factor",
            ["--lr_scheduler.name=wsd"],
        ),
        (
            1,
            ["--lr_scheduler.name=cosine", "--lr_scheduler.decay_type=sqrt"],
            '"sqrt" contradicts lr_scheduler.name',
            ["--lr_scheduler.name=wsd"],
        ),
        (
            1,
            ["--lr_scheduler.name=sqrt", "--lr_scheduler.decay_ratio=0.1"],
            'name = "wsd" and decay_type = "sqrt"',
            ["--lr_scheduler.name=wsd", "--lr_scheduler.decay_type=sqrt"],
        ),
    ],
    "retention_is_safe": [
        (1, ["--checkpoint.keep_latest_k=1"], "set 2 or more", ["--checkpoint.keep_latest_k=2"]),
        (
            1,
            ["--checkpoint.keep_every_n=1000", "--checkpoint.keep_latest_k=0"],
            "keep_latest_k = 0 keeps all checkpoints",
            ["--checkpoint.keep_latest_k=2"],
        ),
        (
            1,
            ["--checkpoint.keep_every_n=600", "--checkpoint.interval=250"],
            "600 is not a multiple of checkpoint.interval = 250, so few or no",
            ["--checkpoint.keep_every_n=750", "--checkpoint.interval=250"],
        ),
    ],
    "storage_is_shared": [
        (
            2,
            ["--checkpoint.enable", "--checkpoint.folder=memory://run"],
            "has its own memory://",
            ["--checkpoint.folder=checkpoint"],
        ),
    ],
    "uploads_go_elsewhere": [
        (
            1,
            ["--checkpoint.upload_folder=s3://a/b"],
            "without checkpoint.enable = true",
            ["--checkpoint.enable"],
        ),
        (
            1,
            ["--checkpoint.enable", "--checkpoint.upload_folder=/tmp/b"],
            "'/tmp/b' is a local folder; set a URL",
            ["--checkpoint.upload_folder=s3://a/b"],
        ),
        (
            1,
            [
                "--checkpoint.enable",
                "--checkpoint.folder=s3://a/c",
                "--checkpoint.upload_folder=s3://a/b",
            ],
            "checkpoint.folder is a URL already",
            ["--checkpoint.folder=checkpoint"],
        ),
        (
            2,
            ["--checkpoint.enable", "--checkpoint.upload_folder=memory://run"],
            "has its own memory://",
            ["--checkpoint.upload_folder=s3://a/b"],
        ),
    ],
    "loading_is_enabled": [
        (
            1,
            ["--checkpoint.load_step=3"],
            "without checkpoint.enable = true",
            ["--checkpoint.enable"],
        ),
        (
            1,
            ["--checkpoint.last_save_in_hf"],
            "without checkpoint.enable = true",
            ["--checkpoint.enable"],
        ),
    ],
    "hf_weights_have_no_optimizer": [
        (
            1,
            [
                "--checkpoint.enable",
                "--checkpoint.initial_load_in_hf",
                "--checkpoint.initial_load_model_only=false",
            ],
            "needs optimizer state",
            ["--checkpoint.initial_load_model_only=true"],
        ),
    ],
    "hf_weights_have_no_expert_bias": [
        (
            1,
            [
                "--checkpoint.enable",
                "--checkpoint.last_save_in_hf",
                "--moe.balance_bias_rate=0.001",
            ],
            "no place for",
            ["--moe.balance_bias_rate=0"],
        ),
    ],
    "profile_fits_its_period": [
        (
            1,
            ["--profiling.enable_profiling", "--profiling.profile_freq=3"],
            "set it to 4 or more",
            ["--profiling.profile_freq=4"],
        ),
    ],
    "worker_options_need_workers": [
        (
            1,
            ["--validation.dataloader.persistent_workers"],
            "needs num_workers",
            ["--validation.dataloader.num_workers=1"],
        ),
    ],
    "data_fails_before_collectives": [
        (
            1,
            ["--training.dataloader.timeout_seconds=60", "--comm.train_timeout_seconds=60"],
            "to 30 instead of 60, or",
            ["--training.dataloader.timeout_seconds=30"],
        ),
        (
            1,
            ["--validation.dataloader.timeout_seconds=200"],
            "to 50 instead of 200",
            ["--comm.train_timeout_seconds=300"],
        ),
    ],
    "guard_can_act": [
        (1, ["--guard.policy=rewind"], "set checkpoint.enable = true", ["--checkpoint.enable"]),
        (
            1,
            ["--guard.policy=rewind", "--checkpoint.enable", "--checkpoint.load_only"],
            "set checkpoint.load_only = false",
            ["--guard.policy=skip"],
        ),
        (1, ["--guard.straggler_factor=0.9"], "set it above 1", ["--guard.straggler_factor=1.2"]),
    ],
    "warn_only_needs_determinism": [
        (
            1,
            ["--debug.deterministic_warn_only"],
            "without debug.deterministic",
            ["--debug.deterministic"],
        ),
    ],
    "validation_sees_data": [
        (
            1,
            ["--validation.enable", "--validation.steps=0"],
            "-1 for the whole data set",
            ["--validation.steps=-1"],
        ),
        (
            1,
            ["--validation.enable", "--validation.global_batch_size=0"],
            "set 1 or more",
            ["--validation.global_batch_size=4"],
        ),
        (
            1,
            ["--validation.enable", "--validation.sets=[{name = 'a', steps = 0}]"],
            "steps: 0 batches",
            ["--validation.sets=[{name = 'a', steps = 1}]"],
        ),
    ],
    "average_has_a_use": [
        (
            1,
            ["--ema.validation", "--validation.enable"],
            "no effect without ema.enable",
            ["--ema.enable"],
        ),
        (
            1,
            ["--ema.enable", "--ema.validation"],
            "without validation.enable",
            ["--validation.enable"],
        ),
        (
            1,
            ["--ema.enable", "--ema.export", "--checkpoint.enable"],
            "nothing is exported",
            ["--checkpoint.last_save_in_hf"],
        ),
        (
            1,
            ["--ema.enable", "--ema.start_step=20", "--training.steps=10"],
            "set it to at most training.steps 10",
            ["--ema.start_step=10"],
        ),
    ],
    "metrics_are_served": [
        (
            1,
            ["--metrics.prometheus.port=9000"],
            'no effect without "prometheus" in metrics.sinks',
            ["--metrics.sinks=prometheus"],
        ),
        (
            1,
            ["--metrics.sinks=prometheus", "--metrics.prometheus.port=0"],
            "nothing can read the metrics",
            ["--metrics.prometheus.textfile=x.prom"],
        ),
        (
            1,
            ["--metrics.sinks=prometheus", "--metrics.prometheus.textfile=x.txt"],
            "must end in .prom",
            ["--metrics.prometheus.textfile=x.prom"],
        ),
    ],
    "notifications_have_a_receiver": [
        (
            1,
            ["--notifications.interval_seconds=9"],
            "no effect without webhook_env or command",
            ["--notifications.command=mail"],
        ),
    ],
    "validation_sets_are_distinct": [
        (
            1,
            ["--validation.sets=[{name = 'a'}, {name = 'a'}]"],
            "names 2 sets",
            ["--validation.sets=[{name = 'a'}, {name = 'b'}]"],
        ),
        (
            1,
            ["--validation.sets=[{name = 'a'}]", "--validation.dataset=demo_validation"],
            "can't both be set",
            ["--validation.dataset=c4_validation"],
        ),
    ],
    "evals_have_tasks": [
        (1, ["--eval.enable"], "at least one task", ["--eval.tasks=hellaswag"]),
    ],
    "datasets_are_known": [
        (
            1,
            ["--training.dataset=c5"],
            "no dataset 'c5'; known: demo, ",
            ["--training.dataset_path=/tmp"],
        ),
        (
            1,
            ["--training.dataset=c5"],
            "did you mean 'c4'?",
            ["--training.dataset=org/c5:en@train"],
        ),
        (
            1,
            ["--training.sources=[{name = 'a', dataset = 'c5'}]"],
            "training.sources: 'a': dataset: no",
            [SOURCES],
        ),
        (
            1,
            ["--validation.enable", "--validation.dataset=demo_validate"],
            "did you mean 'demo_validation'?",
            ["--validation.dataset=demo_validation"],
        ),
        (
            1,
            ["--validation.enable", "--validation.sets=[{name = 'a', dataset = 'c5'}]"],
            "'a': dataset: no dataset",
            ["--validation.sets=[{name = 'a', dataset = 'c4'}]"],
        ),
    ],
    "sources_are_named_once": [
        (1, ["--training.sources=[{name = 'a'}, {name = 'a'}]"], "2 sources are named", [SOURCES]),
        (1, ["--training.sources=[{name = 'a/b'}]"], "has a slash", [SOURCES]),
    ],
    "sources_replace_the_dataset": [
        (1, [SOURCES, "--training.dataset=c4"], "make it one of them", ["--training.dataset=demo"]),
        (
            1,
            [SOURCES, "--training.dataset_path=/tmp"],
            "make it one of them",
            ["--training.dataset_path=none"],
        ),
    ],
    "stages_follow_each_other": [
        (
            1,
            [SOURCES, "--training.stages=[{from_step = 5}, {from_step = 4}]"],
            "from_step 4 follows that of step 5",
            ["--training.stages=[{from_step = 4}, {from_step = 5}]"],
        ),
        (
            1,
            [SOURCES, "--training.stages=[{from_step = 5, weights = {ab = 1}}]"],
            "did you mean ",
            ["--training.stages=[{from_step = 5, weights = {a = 1}}]"],
        ),
        (
            1,
            [SOURCES, "--training.stages=[{from_step = 5, weights = {a = 0, b = 0}}]"],
            "no source with a weight",
            ["--training.stages=[{from_step = 5, weights = {a = 0, b = 1}}]"],
        ),
        (
            1,
            ["--training.sources=[{name = 'a', weight = 0}]"],
            "no source has a weight above 0",
            [SOURCES],
        ),
    ],
    "stages_divide": [
        (
            2,
            ["--training.stages=[{from_step = 5, global_batch_size = 20}]"],
            "= 16; set it to 16 or 32",
            ["--training.stages=[{from_step = 5, global_batch_size = 32}]"],
        ),
        (
            3,
            [
                *ELASTIC,
                "--checkpoint.enable",
                "--training.global_batch_size=8",
                "--training.stages=[{from_step = 5, global_batch_size = 2}]",
            ],
            "set 3 or more",
            ["--training.stages=[{from_step = 5, global_batch_size = 3}]"],
        ),
    ],
}


@pytest.fixture(scope="module")
def broken():
    """For each case, the messages of each rule that it breaks, by the rule's place in the table."""
    out = []
    for world, argv, *_ in (case for cases in CASES.values() for case in cases):
        config, _ = derive(load_config(argv).config, world)
        layout = axis_degrees(config.parallelism)
        facts = Facts(world=world)
        if degrees_fill(config, world):
            facts = Facts(world=world, layout=layout)
        asked = [(place, rule) for place, rule in enumerate(RULES) if rule.applies(facts)]
        out.append({place: rule.ask(config, facts) for place, rule in asked})
    return out


def test_every_rule_that_needs_no_model_has_a_case(broken):
    hit = {place for problems in broken for place, found in problems.items() if found}
    known = Facts(world=1, layout={})
    missing = [r for place, r in enumerate(RULES) if r.applies(known) and place not in hit]
    assert not missing


def test_rules_name_their_keys(broken):
    tables = {table for key in FIELDS for table in prefixes(key)}
    for rule in RULES:
        assert set(rule.keys) <= tables, rule
    for problems in broken:
        for place, found in problems.items():
            for problem in found:
                assert any(key in problem for key in RULES[place].keys), (problem, RULES[place])


@pytest.mark.parametrize(
    ("world", "bad", "text", "fix"), [case for cases in CASES.values() for case in cases]
)
def test_rule(world, bad, text, fix):
    with pytest.raises(ConfigError) as error:
        resolve(bad, world)
    assert len(error.value.problems) == 1
    assert text in str(error.value)
    resolve([*bad, *fix], world)


@pytest.mark.parametrize("extra", [["--compile.enable"], ["--training.loss_chunks=2"], FLOAT8])
def test_old_torch_can_not_split_every_backward(monkeypatch, extra):
    argv = [
        "--parallelism.pipeline_parallel_degree=2",
        "--parallelism.pipeline_parallel_schedule=DualPipeV",
        *extra,
    ]
    monkeypatch.setattr(rules, "torch_is_before_2_13", lambda: False)
    resolve(argv, 2)
    monkeypatch.setattr(rules, "torch_is_before_2_13", lambda: True)
    with pytest.raises(ConfigError, match=r"torch before 2\.13"):
        resolve(argv, 2)
    resolve([*argv, "--parallelism.pipeline_parallel_schedule=Interleaved1F1B"], 2)


def test_several_broken_rules_are_reported_together(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[checkpoint]\nkeep_latest_k = 1\n[training]\nglobal_batch_size = 7\n")
    with pytest.raises(ConfigError) as error:
        resolve(["--config", str(file)], 1)
    places = [problem.split(" ")[0] for problem in error.value.problems]
    assert places == [f"{file}:4:", f"{file}:2:"]


def test_derived_values_and_their_formulas():
    argv = [
        "--parallelism.data_parallel_replicate_degree=2",
        "--training.local_batch_size=3",
        "--training.steps=50",
    ]
    resolved = resolve(argv, 8)
    config = resolved.config
    assert config.parallelism.data_parallel_shard_degree == 4
    assert config.training.global_batch_size == 24
    assert config.lr_scheduler.total_steps == 50
    assert config.lr_scheduler.warmup_steps == 50
    assert set(resolved.formulas) == {
        "parallelism.data_parallel_shard_degree",
        "validation.global_batch_size",
        "training.global_batch_size",
        "lr_scheduler.total_steps",
        "lr_scheduler.warmup_steps",
        "lr_scheduler.decay_type",
    }
    assert (
        gradient_accumulation_steps(resolve([*argv, "--training.global_batch_size=96"], 8).config)
        == 4
    )


@pytest.mark.parametrize(
    ("copies", "shards", "others", "world", "expected"),
    [
        (1, -1, 1, 3, (1, 3)),
        (2, -1, 1, 8, (2, 4)),
        (2, -1, 1, 3, (1, 3)),
        (2, 8, 1, 16, (2, 8)),
        (2, 8, 1, 8, (1, 8)),
        (2, 8, 1, 12, (1, 12)),
        (2, 8, 1, 4, (1, 4)),
        (2, 8, 1, 32, (2, 16)),
        (4, 1, 1, 3, (3, 1)),
        (4, 1, 1, 6, (3, 2)),
        (2, 2, 2, 4, (1, 2)),
    ],
)
def test_elastic_degrees_follow_the_ranks(copies, shards, others, world, expected):
    """Replicas are given up first; sharding stays at its target while enough ranks remain."""
    config = resolve(
        [
            *ELASTIC,
            "--checkpoint.enable",
            "--training.global_batch_size=64",
            f"--parallelism.data_parallel_replicate_degree={copies}",
            f"--parallelism.data_parallel_shard_degree={shards}",
            f"--parallelism.context_parallel_degree={others}",
        ],
        world,
    ).config.parallelism
    assert (config.data_parallel_replicate_degree, config.data_parallel_shard_degree) == expected


@pytest.mark.parametrize(("world", "expected"), [(16, 4), (8, 4), (6, 2), (4, 4), (2, 2)])
def test_elastic_runs_share_experts_among_fewer_ranks(world, expected):
    """By a divisor of the degree, which divides the number of experts like it."""
    argv = [
        *ELASTIC,
        "--checkpoint.enable",
        "--training.global_batch_size=48",
        "--model.name=qwen3_moe",
    ]
    degrees = ["--parallelism.expert_parallel_degree=4", "--parallelism.tensor_parallel_degree=2"]
    config = resolve([*argv, *degrees, "--parallelism.data_parallel_shard_degree=8"], world).config
    assert config.parallelism.expert_parallel_degree == expected


def test_elastic_other_degrees_stay():
    argv = [
        *ELASTIC,
        "--checkpoint.enable",
        "--training.global_batch_size=64",
        "--parallelism.tensor_parallel_degree=2",
    ]
    with pytest.raises(ConfigError, match="tensor_parallel_degree must divide 3"):
        resolve(argv, 3)

"""Arguments that break the rules of layouts, batches and what can be combined."""

TP = ["--parallelism.tensor_parallel_degree=2"]
OP = ["--activation_checkpoint.selective_ac_option=op"]
BF16_REDUCE = "--training.mixed_precision_reduce=bfloat16"
FLOAT8 = ["--model.converters=float8"]
FP32 = "--training.mixed_precision_param=float32"
ELASTIC = ["--fault_tolerance.elastic"]

# rule -> (ranks, arguments it refuses, words of the message, arguments that fix it)
LAYOUT_CASES = {
    "degrees_fill_the_world": [
        (
            8,
            ["--parallelism.data_parallel_shard_degree=3"],
            "the number of ranks is 8; set data_parallel_shard_degree = 8",
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
        )
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
        (
            2,
            ["--training.stages=[{from_step = 5, global_batch_size = 20}]"],
            "the stage from_step 5: training.global_batch_size: 20 is not a multiple",
            ["--training.stages=[{from_step = 5, global_batch_size = 32}]"],
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
            [
                *ELASTIC,
                "--checkpoint.enable",
                "--training.global_batch_size=8",
                "--training.stages=[{from_step = 5, global_batch_size = 2}]",
            ],
            "set 3 or more",
            ["--training.stages=[{from_step = 5, global_batch_size = 3}]"],
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
                "--training.stages=[{from_step = 5, seq_len = 2046}]",
            ],
            "the stage from_step 5: training.seq_len: 2046 can't be split",
            ["--training.stages=[{from_step = 5, seq_len = 4096}]"],
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
    "rowwise_products_are_bf16": [
        (
            1,
            [*FLOAT8, "--float8.recipe_name=rowwise", FP32],
            "quantize.linear.float8: results of Float8",
            ["--training.mixed_precision_param=bfloat16"],
        ),
        (
            1,
            ["--model.converters=quantize.grouped_mm.float8", FP32],
            "set that to bfloat16, or quantize.grouped_mm.float8.emulate = true",
            ["--quantize.grouped_mm.float8.emulate"],
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
        )
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
}

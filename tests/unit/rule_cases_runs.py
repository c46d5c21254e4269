"""Arguments that break the rules of storage, data, validation and services of a run."""

PACKED = "--training.packing=best_fit"
SOURCES = "--training.sources=[{name = 'a'}, {name = 'b'}]"

# rule -> (ranks, arguments it refuses, words of the message, arguments that fix it)
RUN_CASES = {
    "storage_is_no_narrower_than_compute": [
        (
            1,
            ["--training.dtype=bfloat16", "--training.mixed_precision_param=float32"],
            "set both to bfloat16",
            ["--training.mixed_precision_param=bfloat16"],
        )
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
        )
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
        )
    ],
    "profile_fits_its_period": [
        (
            1,
            ["--profiling.enable_profiling", "--profiling.profile_freq=3"],
            "set it to 4 or more",
            ["--profiling.profile_freq=4"],
        )
    ],
    "worker_options_need_workers": [
        (
            1,
            ["--validation.dataloader.persistent_workers"],
            "needs num_workers",
            ["--validation.dataloader.num_workers=1"],
        )
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
        )
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
            ["--validation.enable", "--validation.seq_len=0"],
            "validation.seq_len: 0 gives no loss",
            ["--validation.seq_len=4"],
        ),
        (
            1,
            ["--validation.enable", "--validation.sets=[{name = 'a', steps = 0}]"],
            "validation.steps: 0 batches",
            ["--validation.sets=[{name = 'a', steps = 1}]"],
        ),
    ],
    "every_step_trains": [
        (
            1,
            ["--training.steps=5", "--lr_scheduler.total_steps=3", "--lr_scheduler.warmup_steps=1"],
            "learning rate is 0 after step 3 of training.steps 5; set it to 5, or",
            ["--lr_scheduler.total_steps=5"],
        ),
        (
            1,
            [
                "--training.steps=5",
                "--lr_scheduler.total_steps=3",
                "--lr_scheduler.name=cosine",
                "--lr_scheduler.warmup_steps=0",
            ],
            "set it to 5, or lr_scheduler.min_lr_factor above 0",
            ["--lr_scheduler.min_lr_factor=0.1"],
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
    "data_tables_are_distinct": [
        (
            1,
            ["--validation.sets=[{name = 'a'}, {name = 'a'}]"],
            "validation.sets: 'a' names 2 of them",
            ["--validation.sets=[{name = 'a'}, {name = 'b'}]"],
        ),
        (
            1,
            ["--validation.sets=[{name = 'a'}]", "--validation.dataset=demo_validation"],
            "validation.dataset and validation.sets can't both be set",
            ["--validation.dataset=c4_validation"],
        ),
        (1, ["--training.sources=[{name = 'a'}, {name = 'a'}]"], "'a' names 2 of them", [SOURCES]),
        (1, ["--training.sources=[{name = 'a/b'}]"], "has a slash", [SOURCES]),
        *(
            (
                1,
                [SOURCES, f"--training.{key}={value}"],
                f"training.{key} and training.sources can't both be set",
                [f"--training.{key}={default}"],
            )
            for key, value, default in (
                ("messages_column", "messages", "none"),
                ("dataset", "c4", "demo"),
                ("dataset_path", "/tmp", "none"),
                ("text_column", "content", "text"),
            )
        ),
    ],
    "evals_have_tasks": [(1, ["--eval.enable"], "at least one task", ["--eval.tasks=hellaswag"])],
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
            "training.sources.a.dataset: no",
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
            "validation.sets.a.dataset: no dataset",
            ["--validation.sets=[{name = 'a', dataset = 'c4'}]"],
        ),
    ],
    "conversations_are_read_from_a_column": [
        (
            1,
            [
                "--training.dataset=org/chats",
                "--training.messages_column=messages",
                "--training.text_column=body",
            ],
            "documents are text or conversations",
            ["--training.text_column=text"],
        ),
        (
            1,
            ["--training.sources=[{name = 'a', messages_column = 'messages'}]"],
            "training.sources.a.messages_column: demo has no conversations",
            ["--training.sources=[{name = 'a', dataset = 'org/x', messages_column = 'messages'}]"],
        ),
    ],
    "rows_are_packed_for_one_length": [
        (
            1,
            [PACKED, "--training.stages=[{from_step = 3, seq_len = 4096}]"],
            "packs rows of one length, but the stage from_step 3 has seq_len 4096",
            ["--training.packing=stream"],
        ),
        (1, [PACKED, "--training.seq_len=1"], "2 tokens or more", ["--training.seq_len=2"]),
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
}

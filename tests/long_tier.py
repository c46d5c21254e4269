"""Tests that leave the suite to the longest tier because a cheaper one stays that would also fail.

Of each test, the cases whose ids begin as listed get the marker `slow`; with no ids, all do. Tests
that are long by themselves have the marker in their own file.
"""

import re
from collections.abc import Sequence
from typing import Any

import pytest

LONG_TIER: dict[str, dict[str, tuple[str, ...]]] = {
    # The support matrix has each axis, test_parity.py sharding with and without accumulation.
    "distributed/test_parity.py": {
        "test_curve_and_weights_equal_a_plain_loop": (
            "fsdp 2]",
            "fsdp 2, never",
            "fsdp 2, always",
            "fsdp 2, offloaded",
            "fsdp 4",
            "ddp 2",
        ),
        "test_bf16_stays_near_fp32": ("bfloat16-bfloat16",),
    },
    # The corner has a pipeline with validation; test_parity.py hsdp, and one process accumulating.
    "distributed/test_matrix.py": {
        "test_the_published_matrix_agrees_with_validation": (),
        "test_cell_equals_one_process_or_is_refused": (
            "one rank, no pipeline, plain",
            "dp_replicate 2, no pipeline, plain",
            "pp 2, 1F1B, plain",
        ),
    },
    # Plain heads over cp by all-to-all and latent ones over cp and tp stay, and a pipeline.
    "distributed/test_qk_clip.py": {
        "test_every_layout_clips_as_one_process": ("dp 2", "tp 2-False", "cp 2-False")
    },
    # Schedules with and without split backwards stay.
    "distributed/test_mtp.py": {
        "test_losses_and_gradients_equal_one_process": ("Interleaved1F1B", "one process")
    },
    # 1F1B, a schedule with split backwards, and a cut of each kind stay.
    "distributed/test_pipeline.py": {
        "test_validation_before_between_and_after_steps_changes_nothing": (
            "GPipe",
            "InterleavedZeroBubble",
        ),
        "test_cuts_and_microbatches": (
            "one layer per stage",
            "three microbatches",
            "embedding alone",
            "both ends alone",
        ),
        "test_every_count_of_microbatches_that_is_accepted_is_right": (
            "GPipe",
            "Interleaved",
            "Flexible",
            "LoopedBFS",
            "DualPipeV",
        ),
        "test_bf16": (),
    },
    # The chain of layouts passes through these, and saves in the background.
    "distributed/test_resume.py": {
        "test_resume_under_another_layout": ("1 to fsdp4", "fsdp2 to hsdp", "hsdp to fsdp2"),
        "test_async_modes_write_the_same_checkpoint": ("disabled", "async_with_pinned_mem"),
    },
    "distributed/test_hf_in_training.py": {
        "test_hugging_face_weights_go_in_and_out_of_layouts": ("two",)
    },
    # One mode of saving in a bucket stays; a kill and retention are tested on a local disk.
    "distributed/test_remote_checkpoint.py": {
        "test_resume_from_a_bucket_on_other_ranks": ("async",),
        "test_a_save_that_fails_leaves_nothing_that_looks_complete": (),
        "test_kill_during_a_save_leaves_a_good_checkpoint": (),
        "test_retention_damage_and_the_commands": (),
    },
    # One planted mistake stays for each thing that is compared.
    "distributed/test_parity_tool.py": {
        "test_a_planted_mistake_is_found_and_named": ("shifted labels",),
        "test_a_mistake_after_the_first_gradients_is_found": ("wrong_beta", "decayed_vectors"),
        "test_a_mistake_of_expert_parallelism_is_named": ("doubled bias", "counted padding"),
        "test_the_command": (),
        "test_a_right_run_passes": ("4-argv1", "4-argv2", "2-argv4"),
    },
    "distributed/test_plan_trace.py": {
        "test_peak_is_what_the_allocator_measures": ("tensor", "context", "1F1B"),
        "test_what_reducing_once_costs": (),
    },
    "distributed/test_plan_closed_forms.py": {
        "test_closed_forms_agree_with_a_trace": ("argv1", "argv3")
    },
    "distributed/test_low_precision.py": {
        "test_training_in_8_bits_stays_within_a_percent_of_bf16": (
            "converters=float8 emulate recipe",
            "converters=float8 emulate enable",
        ),
        "test_float8_weights_are_gathered_whole_where_ranks_hold_unequal_rows": ("5",),
        "test_a_checkpoint_continues_under_another_layout": (),
        "test_float8_gather_works_for_chunks_and_for_a_stage_of_one_weight": (),
    },
    "distributed/test_rehearsal.py": {"test_a_start_costs_a_rank_the_same_in_any_world": ()},
    "distributed/test_loop.py": {"test_the_losses_are_the_trainers": ("one rank",)},
    "distributed/test_hf_folders.py": {"test_memory_does_not_grow_with_the_model": ()},
    # One process, sharding, and a guard on the host stay.
    "distributed/test_empty_step.py": {
        "test_it_has_no_loss_and_updates_nothing": (
            "in the backward",
            "pipeline",
            "tensor parallel",
            "context parallel",
        )
    },
    "distributed/test_generate_caches.py": {
        "test_two_ranks_generate_the_same": ("window", "latent]", "latent queries")
    },
    # Tensor parallelism and a pipeline stay.
    "distributed/test_compile.py": {
        "test_four_blocks_and_the_loss_are_two_graphs": (
            "fsdp",
            "context_parallel",
            "tensor_parallel_degree=2 mode=full",
            "mode=memory_budget",
            "pipeline_parallel_first_stage_less_layers=0 pipeline_parallel_last_stage_less_layers=0"
            " pipeline_parallel_degree=2 pipeline_parallel_schedule=DualPipeV",
        )
    },
    "distributed/test_accumulation.py": {
        "test_what_is_kept_between_batches": ("one rank", "fsdp, offloaded", "ddp", "hsdp")
    },
    "distributed/test_checkpoint_tools.py": {
        "test_to_hf_and_back_is_bitwise_equal": ("qwen3]", "qwen2_5", "mistral")
    },
    # The support matrix has a cell of each kind.
    "distributed/test_random_layouts.py": {
        "test_a_random_layout_equals_one_process_or_is_refused": ()
    },
    # The eager block stays, and a compiled model in the corner of the matrix.
    "distributed/test_regather.py": {
        "test_a_block_keeps_shards_and_gathers_them_again": ("compiled",)
    },
    "distributed/test_step.py": {"test_update_before_the_host_knows_the_norm": ("tp", "experts")},
    "distributed/test_examples.py": {"test_gated_attention_trains_as_on_one_process": ("4",)},
    "distributed/test_ema.py": {"test_average_wherever_weights_are": ("bf16, offload",)},
    "distributed/test_sampling.py": {
        "test_greedy_texts_are_those_of_plain_forwards": ("2-layout1", "2-layout3", "2-layout4")
    },
    "distributed/test_evals.py": {
        "test_scores_are_those_of_the_hf_backend": (
            "1-layout0",
            "2-layout1",
            "2-layout2",
            "2-layout3",
        )
    },
    "faults/test_guard.py": {
        "test_rewind_is_a_run_that_never_saw_the_batches_before_the_spike": ("pp",),
        "test_copies_stay_equal_bit_for_bit_in_every_layout": ("pp x tp", "cp x tp"),
        "test_one_flipped_bit_is_found_before_it_is_saved": ("pp x tp",),
        "test_a_spike_with_no_checkpoint_to_go_back_to_is_skipped": ("skip",),
    },
    # A hang in the data, in a collective, in a pipeline and in a save stays.
    "faults/test_hang.py": {"test_a_rank_that_does_not_exchange_rows_with_experts": ()},
    "faults/test_sources.py": {
        "test_a_stall_is_an_error_of_its_rank_before_any_collective_times_out": ()
    },
    # A kill in a collective, before the metadata and between the renames stays.
    "faults/test_kills.py": {
        "test_a_killed_rank_loses_no_checkpoint": (
            "in_a_forward",
            "in_the_manifest",
            "in_a_deletion",
        )
    },
    # Ctrl-C with one rank stays, and so do signals to the launcher.
    "faults/test_preemption.py": {"test_ctrl_c_saves_and_the_same_command_resumes": ("2",)},
    # A save in flight stays; all ranks agree by the same reduction in a pipeline.
    "faults/test_stop_agreement.py": {
        "test_the_last_rank_is_asked_and_all_save_the_same_step": ("pipeline",)
    },
    # Empty data stay, found by the rank as these are; others are found before torch is imported.
    # Two ranks that end with an error stay under plain torchrun, and two that train under
    # run_train.sh.
    "tests/test_launch.py": {
        "test_plain_torchrun": (),
        "test_an_error_on_several_ranks_ends_with_one_cause": (),
        "test_bad_input_is_one_message_without_a_traceback": ("cut data", "hf weights"),
        "test_output_folder_that_cannot_be_written_leaves_earlier_checkpoints": (),
    },
    "faults/test_storage.py": {
        "test_full_disk_leaves_earlier_checkpoints_intact": ("disabled",),
        "test_a_damaged_checkpoint_is_reported_and_the_previous_one_loaded": ("flip_a_bit",),
    },
    "faults/test_resources.py": {
        "test_nan_on_one_rank_or_stage_stops_all_before_the_update": ("pp",)
    },
    "unit/test_data.py": {"test_workers_change_nothing": ("jsonl", "stream")},
    "unit/test_device.py": {"test_a_mac_trains_on_its_cpu_and_says_so": ()},
    "unit/test_skipped_documents.py": {"test_a_run_records_what_it_skipped": ("stream",)},
}
"""File, test, and the beginnings of ids."""


def mark_long_tier(items: list[pytest.Item], whole_files: bool) -> None:
    """Give the tests of `LONG_TIER` their marker.

    Args:
        whole_files: no test was chosen by its name, so that each case of the list has to exist.

    Raises:
        UsageError: no case of a test has an id that begins as the list says.
    """
    cases: dict[tuple[str, str], list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function):
            file = "/".join(item.path.parts[-2:])
            cases.setdefault((file, item.originalname), []).append(item)
    for file, tests in LONG_TIER.items():
        for test, ids in tests.items():
            for beginning in ids or ("",):
                found = [x for x in cases.get((file, test), []) if id_of(x).startswith(beginning)]
                if (file, test) in cases and not found and whole_files:
                    raise pytest.UsageError(f"long_tier.py: {file} has no {test}[{beginning}")
                for item in found:
                    item.add_marker(pytest.mark.slow)


def id_of(item: pytest.Function) -> str:
    """The id of a case, with the bracket that closes it; empty for a test without cases."""
    return item.name[len(item.originalname) + 1 :]


def share_of(items: Sequence[Any], share: str) -> list[Any]:
    """Every N-th item, for the share `I/N`.

    Raises:
        UsageError: there is no such share.
    """
    match = re.fullmatch(r"(\d+)/(\d+)", share)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise pytest.UsageError(f"--share is I/N with I from 1 to N, such as 2/8, not {share}")
    return list(items[int(match[1]) - 1 :: int(match[2])])

"""QK-clip scales the same heads by the same factors under every layout."""

import pytest

from tests.rounding import assert_trained_alike
from tests.runs import LR, arguments, losses, train

P = "--parallelism."
LATENT = {"n_kv_heads": 4, "kv_lora_rank": 16, "rope_head_size": 8, "head_size": 24}
LAYOUTS = {
    "dp 2": [],
    "tp 2": [f"{P}tensor_parallel_degree=2"],
    "cp 2": [f"{P}context_parallel_degree=2", "--training.document_mask"],
    "ulysses 2": [
        f"{P}context_parallel_degree=2",
        f"{P}context_parallel_method=ulysses",
        "--activation_checkpoint.mode=selective",  # records again in the backward
    ],
    "pp 2": [f"{P}pipeline_parallel_degree=2", f"{P}pipeline_parallel_microbatch_size=1"],
}


def clipping(folder, *extra, limit=0.3, name="out"):
    """Arguments of a run whose scores exceed the limit after a few steps."""
    flags = [f"--optimizer.qk_clip={limit}", f"--job.dump_folder={folder / name}"]
    return arguments(folder, *flags, *extra, steps=5)


@pytest.mark.parametrize(
    ("layout", "latent"),
    [
        *(pytest.param(x, False, marks=pytest.mark.slow) for x in ("dp 2", "tp 2", "cp 2")),
        ("ulysses 2", False),
        ("pp 2", False),
        ("tp 2", True),
        ("cp 2", True),
    ],
)
def test_every_layout_clips_as_one_process(ranks, tmp_path, layout, latent):
    model = [f"--model.overrides.{key}={value}" for key, value in LATENT.items()] if latent else []
    mask = ["--training.document_mask"] if layout == "cp 2" else []
    one = ranks(1, train, clipping(tmp_path, *model, *mask, name="one"))[0]
    assert one["metrics"][-1]["clipped_heads"] > 0
    run = ranks(2, train, clipping(tmp_path, *model, *LAYOUTS[layout]))[0]
    assert losses(run) == pytest.approx(losses(one), rel=1e-5)
    for ours, theirs in zip(run["metrics"], one["metrics"], strict=True):
        assert ours["max_attention_logit"] == pytest.approx(theirs["max_attention_logit"], rel=1e-4)
        assert ours["clipped_heads"] == theirs["clipped_heads"]
    for name, value in one["weights"].items():
        assert_trained_alike(run["weights"][name], value, LR, 5, name)


def test_a_limit_that_is_not_reached_changes_nothing(ranks, tmp_path):
    """Bit for bit; also where the record is a side effect of a compiled and recomputed region."""
    flags = [
        "--activation_checkpoint.mode=selective",
        *("--compile.enable", "--compile.backend=eager"),
    ]
    on = ranks(1, train, clipping(tmp_path, *flags, limit=1e6))[0]
    off = ranks(1, train, clipping(tmp_path, *flags, limit=0, name="off"))[0]
    assert losses(on) == losses(off)
    assert on["metrics"][-1]["clipped_heads"] == 0
    assert "max_attention_logit" not in off["metrics"][-1]

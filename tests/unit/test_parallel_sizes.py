"""Sizes of a model that tensor and expert parallelism can divide; others are refused with the
reason.
"""

import pytest

from torchtitan.config import resolve
from torchtitan.train.preflight import preflight
from torchtitan.utils.errors import ConfigError

# ---- tensor parallelism


@pytest.mark.parametrize(
    ("degree", "extra", "text"),
    [
        (
            3,
            ["--training.seq_len=2049"],
            "3 does not divide n_heads 16, n_kv_heads 16, vocab_size 2048",
        ),
        (
            16,
            ["--model.overrides.n_kv_heads=8"],
            "16 does not divide n_kv_heads 8 of model.flavor debugmodel; set it to one of",
        ),
        (
            8,
            ["--model.overrides.ffn_dim=772"],
            "does not divide ffn_dim 772 of model.flavor debugmodel; set it to one of 1, 2, 4",
        ),
    ],
)
def test_tensor_parallel_sizes(degree, extra, text):
    argv = [f"--parallelism.tensor_parallel_degree={degree}", *extra]
    with pytest.raises(ConfigError) as error:
        preflight(resolve(argv, degree).config, output=False)
    assert text in str(error.value)


# ---- context parallelism

DELTA = [
    "--model.overrides.layer_pattern=['delta']",
    *(f"--model.overrides.delta_{name}_heads=12" for name in ("key", "value")),
    *(f"--model.overrides.delta_{name}_size=8" for name in ("key", "value")),
]


@pytest.mark.parametrize(
    ("cp", "tp", "text"),
    [
        (8, 1, "8 does not divide delta_key_heads 12 of model.flavor debugmodel of llama3"),
        (8, 1, "whose ranks exchange heads; set it to one of 1, 2, 3, 4, 6, 12"),
        (4, 2, "4 x parallelism.tensor_parallel_degree 2 = 8 does not divide delta_key_heads 12"),
        (4, 2, "set it to one of 1, 2, 3, 6"),
        (2, 8, "set it to one of 1"),
        (1, 8, "parallelism.tensor_parallel_degree: 8 does not divide delta_key_heads 12"),
    ],
)
def test_context_parallel_sizes(cp, tp, text):
    """Gated DeltaNet exchanges whole key heads."""
    degrees = {"context": cp, "tensor": tp}
    argv = [f"--parallelism.{name}_parallel_degree={n}" for name, n in degrees.items()]
    with pytest.raises(ConfigError) as error:
        preflight(resolve([*DELTA, *argv], cp * tp).config, output=False)
    assert text in str(error.value)


ULYSSES = [
    "--parallelism.context_parallel_method=ulysses",
    "--model.overrides.n_heads=24",
    "--model.overrides.n_kv_heads=12",
    "--model.overrides.head_size=16",
]


@pytest.mark.parametrize(
    ("cp", "tp", "text"),
    [
        (8, 1, "can't split the 24 query heads and 12 key heads of a rank of model.flavor"),
        (8, 1, "over context_parallel_degree 8 ranks; set it to one of 1, 2, 3, 4, 6, 12, 24, or"),
        (8, 4, "6 query heads and 3 key heads of a rank of model.flavor debugmodel of llama3 over"),
    ],
)
def test_heads_of_attention(cp, tp, text):
    """A key head can go to two ranks, as 12 do on 24, but not to 2/3 of one."""
    degrees = {"context": cp, "tensor": tp}
    argv = [f"--parallelism.{name}_parallel_degree={n}" for name, n in degrees.items()]
    with pytest.raises(ConfigError) as error:
        preflight(resolve([*ULYSSES, *argv], cp * tp).config, output=False)
    assert text in str(error.value)
    assert 'context_parallel_method = "ring"' in str(error.value)


# ---- expert parallelism

MOE = ["--model.name=qwen3_moe", "--model.overrides.n_experts=12"]


@pytest.mark.parametrize(
    ("world", "argv", "text", "fix"),
    [
        (
            2,
            ["--parallelism.expert_parallel_degree=2"],
            "expert_parallel_degree: model.flavor debugmodel of llama3 has no experts; set it to 1",
            "--parallelism.expert_parallel_degree=1",
        ),
        (
            1,
            ["--moe.router_z_loss=0.1"],
            "[moe]: model.flavor debugmodel of llama3 has no experts",
            MOE[0],
        ),
        (
            8,
            [*MOE, "--parallelism.expert_parallel_degree=8"],
            "8 does not divide n_experts 12 of model.flavor debugmodel of qwen3_moe; set "
            "it to one of 1, 2, 4",
            "--parallelism.expert_parallel_degree=4",
        ),
        (
            40,
            [*MOE, "--parallelism.expert_parallel_degree=4"],
            "FSDP shards 3 experts over 10 ranks, which divide neither their number nor "
            "dim 256 nor expert_dim 192; "
            "set it to one of 1",
            "--parallelism.expert_parallel_degree=1",
        ),
    ],
)
def test_expert_parallel_sizes(world, argv, text, fix):
    with pytest.raises(ConfigError) as error:
        preflight(resolve(argv, world).config, output=False)
    assert text in str(error.value)
    preflight(resolve([*argv, fix], world).config, output=False)


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (
            "--parallelism.expert_tensor_parallel_degree=2",
            "tensor-parallel ranks have different tokens",
        ),
        ("--parallelism.expert_parallel_comm_backend=deepep", "NVSHMEM"),
    ],
)
def test_what_expert_parallelism_lacks_is_refused_with_the_reason(argv, reason):
    with pytest.raises(ConfigError, match=reason):
        resolve([argv], 1)
    key = argv[2:].partition("=")[0]
    resolve([f"--{key}={'standard' if 'backend' in key else 1}"], 1)

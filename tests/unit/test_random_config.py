"""Random configurations and files of random bytes: each gets an answer within two seconds."""

from typing import Literal, get_args, get_origin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.config_answers import answer
from torchtitan.config import load_config
from torchtitan.config.derive import DEGREE_KEYS
from torchtitan.config.load.keys import FIELDS
from torchtitan.config.load.render import to_toml, to_toml_value

INTEGERS = st.one_of(
    st.sampled_from(
        [
            0,
            -1,
            1,
            2,
            3,
            7,
            8,
            64,
            2**31 - 1,
            2**31,
            2**63 - 1,
            2**63,
            -(2**63),
            2**64,
            10**30,
            1048573,
        ]
    ),
    st.integers(1, 64),
    st.integers(),
)
POSITIVE = st.one_of(
    st.integers(1, 16), st.integers(0, 27).map(lambda power: 2**power), st.integers(1, 2**31)
)
FLOATS = st.one_of(
    st.sampled_from([0.0, -0.0, 1e308, -1e308, 5e-324, 1e-40, float("inf"), float("nan")]),
    st.floats(),
)
TEXTS = st.one_of(
    st.text(max_size=30),
    st.sampled_from(
        [
            "",
            "\0",
            "\x1b[2J",
            "a\nb",
            "~",
            "~root/x",
            "~nobody-here/x",
            "..",
            "../x",
            "/",
            "/dev/zero",
            "/proc/**/*",
        ]
        + [
            "**/*",
            "s3://",
            "://",
            "hf://x",
            "file://",
            "-1",
            "nan",
            "x" * 300,
            "x/" * 2000,
            "x" * 100_000,
            "2" * 5000,
        ]
        + [
            "op",
            "os",
            "none",
            "float8",
            "selective",
            "full",
            "memory_budget",
            "Interleaved1F1B",
            "ZBVZeroBubble",
        ]
    ),
)
SCALARS = st.one_of(INTEGERS, FLOATS, TEXTS, st.booleans(), st.dates(), st.times(), st.datetimes())
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
MODEL_KEYS = [
    "n_layers",
    "dim",
    "n_heads",
    "n_kv_heads",
    "ffn_dim",
    "vocab_size",
    "norm_eps",
    "rope_theta",
]
MODEL_KEYS += [
    "rope_scaling.factor",
    "rope_scaling.high_freq_factor",
    "rope_scaling",
    "tie_embeddings",
    "max_seq_len",
]
COMPUTED = [
    "training.loss_chunks",
    "training.seq_len",
    "training.local_batch_size",
    "training.global_batch_size",
]
COMPUTED += [f"parallelism.{key}" for key in DEGREE_KEYS.values()]
COMPUTED += [
    f"parallelism.pipeline_parallel_{key}"
    for key in ("microbatch_size", "layers_per_stage", "schedule_csv")
]
COMPUTED += [
    "training.dataset_path",
    "model.hf_assets_path",
    "job.dump_folder",
    "model.overrides.n_layers",
]
KEYS = st.one_of(
    st.sampled_from(COMPUTED),  # what rules compute with or look up
    st.sampled_from(sorted(FIELDS.keys() - {"job.config_file", "experimental.custom_import"})),
    st.sampled_from([f"model.overrides.{key}" for key in MODEL_KEYS]),
    st.text("abcdefgh._-", min_size=1, max_size=12).map(lambda name: f"training.{name}"),
)


@st.composite
def values_of(draw, key):
    """Mostly a value that the key's type might accept, so that the rules behind the types are
    reached too.
    """
    kind = FIELDS[key].annotation if key in FIELDS else int
    kinds = [kind, *get_args(kind)]
    if any(get_origin(one) is Literal for one in kinds):
        likely = st.sampled_from(
            [value for one in kinds if get_origin(one) is Literal for value in get_args(one)]
        )
    elif str in kinds:
        likely = TEXTS
    else:
        likely = (
            st.booleans() if bool in kinds else POSITIVE.map(float) if float in kinds else POSITIVE
        )
    return draw(likely if draw(st.integers(0, 9)) else VALUES)


SETTINGS = st.lists(KEYS.flatmap(lambda key: st.tuples(st.just(key), values_of(key))), max_size=3)


def dotted(key):
    return ".".join(part if part.isidentifier() else to_toml_value(part) for part in key.split("."))


def check_random(folder, in_file, in_flags, world):
    lines = [f"{dotted(key)} = {to_toml_value(value)}" for key, value in in_file]
    text = "\n".join(lines)
    file = folder / "run.toml"
    file.write_bytes(text.encode(errors="surrogatepass"))
    flags = [
        f"--{key}={value if isinstance(value, str) else to_toml_value(value)}"
        for key, value in in_flags
    ]
    names = [key for key, _ in (*in_file, *in_flags)]
    argv = ["--config", str(file), *flags]
    if not (problems := answer(argv, world)):
        accepted = to_toml(load_config(argv).config)
        file.write_text(accepted)
        assert to_toml(load_config(["--config", str(file)]).config) == accepted
    for problem in problems:
        named = any(
            key in problem or key.rpartition(".")[2] in problem for key in (*FIELDS, *names)
        )
        assert named or str(file) in problem or "--" in problem, problem


def random_configurations(count):
    def decorate(test):
        test = given(
            in_file=SETTINGS,
            in_flags=SETTINGS,
            world=st.sampled_from([1, 2, 4, 8, 48, 1021, 10**9]),
        )(test)
        return settings(max_examples=count, derandomize=True, database=None, deadline=None)(test)

    return decorate


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hostile")


@random_configurations(80)
def test_random_configurations_are_answered(folder, in_file, in_flags, world):
    check_random(folder, in_file, in_flags, world)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@random_configurations(3000)
def test_many_random_configurations_are_answered(folder, in_file, in_flags, world):
    check_random(folder, in_file, in_flags, world)


TOML = "[]{}=\"'\\\n.#,a1-+:T_eExi \0\r"


@settings(max_examples=50, derandomize=True, database=None, deadline=None)
@given(content=st.one_of(st.binary(max_size=60), st.text(TOML, max_size=60).map(str.encode)))
def test_files_of_any_bytes_are_answered(folder, content):
    file = folder / "bytes.toml"
    file.write_bytes(content)
    for problem in answer(["--config", str(file)]):
        assert str(file) in problem

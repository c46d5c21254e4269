"""The value of a flag: TOML first, words second; and the same through files and arrays of runs."""

import datetime
import shlex
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from tests.config_loading import load, problems
from torchtitan.config import load_config
from torchtitan.config.load.command_line import config_flags, flag_text
from torchtitan.config.load.keys import FIELDS
from torchtitan.config.load.render import to_toml_value
from torchtitan.config.load.toml_file import read_toml
from torchtitan.tools.launch.slurm_script import read_runs


def prompts(*words):
    return load("--sampling.prompts", *words).sampling.prompts


@pytest.mark.parametrize(
    "text",
    [
        "Once upon a time, there was",
        "[INST] Hello [/INST]",
        '"Hi", she said',
        "'tis",
        "[1]",
        "[1, 2",
        '["a"] # a comment in TOML',
        '["a"]\nb = 1',
        '{"role": "user"}',
        "true",
        "none",
        "5",
        "What is in a.toml",
        "debug_model",
        " padded, ",
        "[" * 3000,
    ],
)
def test_a_prompt_is_kept_as_it_is(text):
    assert prompts(text) == [text]
    assert load(f"--sampling.prompts={text}").sampling.prompts == [text]
    assert prompts(text, "b, c") == [text, "b, c"]
    assert prompts(to_toml_value([text, "b, c"])) == [text, "b, c"]


def test_nothing_is_the_empty_list():
    assert load("--sampling.prompts=").sampling.prompts == []
    assert load("--sampling.prompts=[]").sampling.prompts == []
    assert load("--checkpoint.exclude_from_loading=").checkpoint.exclude_from_loading == []
    assert problems("--sampling.prompts") == ["--sampling.prompts: needs a value"]


@pytest.mark.parametrize(
    "words",
    [["float8,mx"], ["float8", "mx"], ["float8, mx"], ["float8,", "mx"], ["['float8','mx']"]],
)
def test_names_may_have_commas_between_them(words):
    assert load("--model.converters", *words).model.converters == ["float8", "mx"]


def test_lists_of_lists_and_tables():
    stages = "--parallelism.module_fqns_per_model_part"
    assert load(stages, '[["a", "b"], ["c"]]').parallelism.module_fqns_per_model_part == [
        ["a", "b"],
        ["c"],
    ]
    assert load(stages, "a,b").parallelism.module_fqns_per_model_part == ["a", "b"]
    for words in (["{name = 'a'}", "{name = 'b, c'}"], ["[{name = 'a'}, {name = 'b, c'}]"]):
        sources = load("--training.sources", *words).training.sources
        assert [source.name for source in sources] == ["a", "b, c"]


@pytest.mark.parametrize("words", [["[float8,mx]"], ["[float8,", "mx]"], ["[[float8],[mx]]"]])
def test_a_list_that_lost_its_quotes_is_refused(words):
    (problem,) = problems("--model.converters", *words)
    assert "not a list of TOML, whose strings have quotes; quote it for the shell" in problem


@pytest.mark.parametrize("flag", ["--validation.no-enable", "--no-validation.enable"])
def test_no_is_false(flag, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("validation.enable = true\n")
    assert load("--config", str(file)).validation.enable
    loaded = load_config(["--config", str(file), flag])
    assert loaded.config.validation.enable is False
    assert loaded.sources["validation.enable"] == flag.replace("no-", "no_")
    assert load("--fault_tolerance.no_enable", "--training.no_compile").compile.enable is False
    assert "takes true or false" in problems(f"{flag}=true")[0]
    assert "unknown key" in problems("--training.no-steps")[0]


# ---- every key

TEXTS = st.one_of(
    st.sampled_from(
        ["a, b", "[INST] a [/INST]", '["a", "b"]', '"a"', "'a", "5", "1e3", "true", "[1]", "{a=1}"]
        + ["-1", "--x", "a#b", "1979-05-27", "nan", "ö, ß", "", " a ", "a.toml", "$HOME `a` \\n"]
    ),
    st.text(st.characters(codec="utf-8", exclude_categories=["C"]), max_size=12),
)
OPEN = st.recursive(
    st.one_of(TEXTS, st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False))
    | st.dates(datetime.date(1000, 1, 1)),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, min_size=1, max_size=2)
    ),
    max_leaves=4,
)


def values_of(kind):
    """Values of a type, ignoring its bounds."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return values_of(inner[0])
    if origin is Literal:
        return st.sampled_from(inner)
    if origin is list:
        return st.lists(values_of(inner[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(TEXTS, OPEN if inner[1] is Any else values_of(inner[1]), max_size=2)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        keys = {name: values_of(info.annotation) for name, info in kind.model_fields.items()}
        return st.fixed_dictionaries({}, optional=keys)
    if inner:
        return st.one_of(*(values_of(one) for one in inner if one is not type(None)))
    scalars = {
        bool: st.booleans(),
        int: st.integers(-3, 10**6),
        float: st.floats(allow_nan=False, allow_infinity=False),
        str: TEXTS,
    }
    return scalars[kind]


KEYS = sorted(FIELDS.keys() - {"job.config_file", "job.dump_folder", "model.overrides"})


def is_kept(value):
    """Not a word that unsets, in a flag, or that is another, in a file."""
    return value not in ("none", "None", "null") and not str(value).startswith("{here}")


VALUES = st.fixed_dictionaries(
    {key: values_of(FIELDS[key].annotation).filter(is_kept) for key in KEYS}
)


def written(settings):
    return "".join(f"{key} = {to_toml_value(value)}\n" for key, value in settings.items())


def flags_of(argv):
    wrong = []
    out = {key: setting.value for key, setting in config_flags(argv, wrong)}
    assert not wrong
    return out


def check_every_form(folder, values):
    file, lines = folder / "run.toml", folder / "runs.txt"
    file.write_text(written(values), encoding="utf-8")
    wrong = []
    read = {
        "file": {key: setting.value for key, setting in read_toml(str(file), "", wrong, []).items()}
    }
    assert not wrong
    argv = [f"--{key}={flag_text(key, value)}" for key, value in values.items()]
    read["flags"] = flags_of(argv)
    lines.write_text(f"{shlex.join(argv)}\n", encoding="utf-8")
    (run,) = read_runs(lines, "out")
    read["line"] = flags_of(run.flags[1:])
    for form, settings_read in read.items():
        for key, value in values.items():
            assert repr(settings_read[key]) == repr(value), (form, key)


def every_key(examples):
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
    decorate = settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=checks,
    )
    return lambda test: decorate(given(values=VALUES)(test))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("values")


@every_key(8)
def test_every_key_is_read_back_from_flag_file_and_array(folder, values):
    check_every_form(folder, values)


@pytest.mark.slow
@every_key(300)
def test_many_values_of_every_key_are_read_back(folder, values):
    check_every_form(folder, values)


def overrides(*argv):
    return load(*argv).model.overrides["depth"]


@settings(max_examples=60, derandomize=True, database=None, deadline=None)
@given(value=OPEN)
def test_open_tables_are_read_back(folder, value):
    key = "model.overrides.depth"
    file = folder / "open.toml"
    file.write_text(f"{key} = {to_toml_value(value)}\n", encoding="utf-8")
    assert repr(overrides("--config", str(file))) == repr(value)
    assert repr(overrides(f"--{key}={flag_text(key, value)}")) == repr(value)


def test_a_number_out_of_bounds_is_a_number():
    for flag, text in {
        "--eval.limit=0": "got 0, must be at least 1",
        "--lr_scheduler.decay_ratio=2": "got 2.0, must be at most 1",
        "--optimizer.lr=0": "got 0.0, must be above 0",
        "--training.sources=[{name=a}]": "not a list of TOML, whose strings have quotes",
    }.items():
        (problem,) = problems(flag)
        assert text in problem


@pytest.mark.parametrize("text", ['["a"]', '["a", "b"]', "a, b"])
def test_a_prompt_of_an_array_is_one_prompt_however_it_is_spelled(tmp_path, text):
    flag = f"--sampling.prompts={to_toml_value([text])}"
    (tmp_path / "runs.txt").write_text(shlex.join([flag]))
    (run,) = read_runs(tmp_path / "runs.txt", "out")
    assert flags_of(run.flags[1:]) == {"sampling.prompts": [text]}

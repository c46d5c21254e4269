"""The decoder's corners: places in awkward files, layers and old names, values that nothing comes
of, exact TOML.
"""

import re
from pathlib import Path

import pytest
import tomli

from tests.config_loading import load, problems
from torchtitan.config import load_config, resolve
from torchtitan.config.load.compat import RENAMED, UNSUPPORTED, NoEffect
from torchtitan.config.load.keys import FIELDS
from torchtitan.config.load.messages import OTHER_NAMES
from torchtitan.config.load.render import help_text
from torchtitan.config.load.toml_file import line_numbers
from torchtitan.utils.errors import ConfigError

ROOT = Path(__file__).parents[2]


def test_lines_of_an_awkward_file():
    text = '''# a comment with """ and [brackets
[first]  # it's '''
    text += """'''
list = [
  ["a"],
  ["b = 1"]  # not a ]
]
text = \"\"\"
x = 1
[hidden]
a quote: \\\"\"\" \"\"\"
inline = { y = 2, z = [1, 2] }
[ second . "part" ]
'quoted' = '[' # ok
a.b = 3
"""
    tomli.loads(text)
    assert line_numbers(text) == {
        "first": 2,
        "first.list": 3,
        "first.text": 7,
        "first.inline": 11,
        "second.part": 12,
        "second.part.quoted": 13,
        "second.part.a.b": 14,
    }


def test_mistakes_are_told_in_the_order_of_the_file(toml):
    file = toml(
        "[validation]\nfreqq = 1\n[checkpoint]\nexclude_from_loading = [\n  'model', 3,\n]\n"
        "[fault_tolerance]\nenable = true\n[training]\ndataloader = { num_worker = 1 "
        "}\nsteps = 1.5\n"
        "[job]\ndescription = 4\n"
    )
    assert problems("--config", file) == [
        f"{file}:2: validation.freqq: unknown key; did you mean 'validation.freq'?",
        f"{file}:4: checkpoint.exclude_from_loading.1: got 3, must be 'model', "
        "'optimizer', 'lr_scheduler', "
        "'dataloader', 'train_state' or 'ema'",
        f"{file}:8: fault_tolerance.enable: not supported yet: torchft's fault "
        "tolerance; remove the key or set it to "
        "false",
        f"{file}:10: training.dataloader.num_worker: unknown key; did you mean "
        "'training.dataloader.num_workers'?",
        f"{file}:11: training.steps: got 1.5, must be an integer",
        f"{file}:13: job.description: got 4, must be a string",
    ]


@pytest.mark.parametrize("value", ["5", "[1]", "{ a = 1 }", "true"])
def test_extends_of_a_wrong_type(toml, value):
    file = toml(f"# first line\nextends = {value}\n")
    (problem,) = problems("--config", file)
    assert problem.startswith(f"{file}:2: extends: got ")
    assert problem.endswith("must be the name of a TOML file or a list of names")


def test_a_missing_base_is_blamed_on_the_line_that_names_it(toml):
    file = toml('extends = "gone.toml"\n')
    (problem,) = problems("--config", file)
    assert problem.startswith(f"{file}:1: extends: can't read ")
    assert problem.endswith("gone.toml: No such file or directory")


def test_a_file_that_is_no_text(tmp_path):
    (tmp_path / "run.toml").write_bytes(b"[job]\ndescription = '\xff'\n")
    (problem,) = problems("--config", str(tmp_path / "run.toml"))
    assert "not UTF-8 text (byte 21" in problem


def test_the_later_layer_wins_under_either_spelling(toml):
    toml("[checkpoint]\nenable_checkpoint = true\n", "base.toml")
    file = toml('extends = "base.toml"\n[checkpoint]\nenable = true\n')
    loaded = load_config(["--config", file, "--checkpoint.enable_checkpoint=false"])
    assert loaded.config.checkpoint.enable is False
    assert loaded.sources["checkpoint.enable"] == "--checkpoint.enable_checkpoint"
    loaded = load_config(
        ["--config", toml('extends = "base.toml"\n[checkpoint]\nenable = false\n')]
    )
    assert loaded.config.checkpoint.enable is False


def test_both_spellings_in_one_file_are_a_contradiction(toml):
    file = toml("[training]\nseed = 1\n[debug]\nseed = 2\n")
    assert problems("--config", file) == [
        f"{file}:2: training.seed: debug.seed is set too ({file}:4); remove training.seed"
    ]


def test_a_key_below_a_value_is_not_dropped(toml):
    file = toml("[training]\nsteps = 3\n")
    assert problems("--config", file, "--training.steps.foo=1") == [
        "--training.steps.foo: unknown key; training.steps is not a table"
    ]


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--stepz", "training.steps"),
        ("--training.stpes", "training.steps"),
        ("--trainig.steps", "training"),
        ("--model.tokenizer_pth", "model.tokenizer_path"),
        ("--compile.componnents", "compile.components"),
        ("--quantize.linear.float8.recipe_nam", "quantize.linear.float8.recipe_name"),
        ("--float8.recipe_nam", "quantize.linear.float8.recipe_name"),
        ("--training.interval", "checkpoint.interval"),
        ("--training.beta1", "optimizer.beta1"),
        ("--checkpoint.log_freq", "metrics.log_freq"),
    ],
)
def test_suggestions(flag, meant):
    (problem,) = problems(f"{flag}=3")
    assert problem.startswith(flag)
    assert problem.endswith(f"did you mean '{meant}'?")


@pytest.mark.parametrize(
    "flag",
    [
        "--training.fake_field",
        "--training.img_size",
        "--validation.save_img_count",
        "--fault_tolerance.num_fragments",
    ],
)
def test_nothing_far_fetched_is_suggested(flag):
    assert problems(f"{flag}=3") == [f"{flag}: unknown key"]


def test_other_programs_names_are_answered_with_the_key():
    """Those of the page for users of the Hugging Face Trainer, whose table has the same keys."""
    page = (ROOT / "docs/start/from-hf-trainer.md").read_text()
    rows = [line.split("|")[1:3] for line in page.splitlines() if line.startswith("| `")]
    for names, keys in rows[1:]:
        for name in re.findall(r"`(\w+)[`=]", names):
            assert name == "TrainingArguments" or (
                OTHER_NAMES[name].split(",")[0].split(" ")[0].rstrip(";") in keys
            ), name
    assert len(OTHER_NAMES) > 40
    for name, here in OTHER_NAMES.items():
        assert here.split(",")[0].split(" ")[0].rstrip(";") in FIELDS, name
        section = "profiling" if f"training.{name}" in {*FIELDS, *RENAMED} else "training"
        for flag in (f"--{name}", f"--{section}.{name}"):
            assert problems(f"{flag}=1") == [f"{flag}: unknown key; here it is {here}"]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (r"C:\Users\me", "Invalid hex value (at line 1, column 24); in double quotes a \\ begins"),
        (r"D:\data", "Unescaped"),
        (r"D:\new", "in double quotes TOML reads \\n and \\t as such"),
    ],
)
def test_backslashes_need_single_quotes(toml, path, text):
    assert text in problems("--config", toml(f'job.dump_folder = "{path}"\n'))[0]
    assert load("--config", toml(f"job.dump_folder = '{path}'\n")).job.dump_folder == path


@pytest.mark.parametrize(
    "key", [key for key, entry in UNSUPPORTED.items() if isinstance(entry, NoEffect)]
)
def test_a_value_nothing_comes_of_must_still_be_well_formed(key, toml):
    section, _, name = key.rpartition(".")
    file = toml(f"[{section}]\n{name} = 1979-05-27\n")  # a date: no key of the convention takes one
    (problem,) = problems("--config", file)
    assert problem.startswith(f"{file}:2: {key}: got datetime.date(1979, 5, 27)")


def test_well_formed_values_of_unsupported_keys_on_the_command_line():
    load_config(
        [
            "--compile.components=model,loss",
            "--activation_checkpoint.memory_budget=1",
            "--activation_checkpoint.selective_ac_option=2",
            "--parallelism.pipeline-parallel-layers-per-stage=None",
            "--parallelism.disable_loss_parallel",
            "--quantize.linear.float8.filter_fqns",
            "output",
            "router",
        ]
    )
    (problem,) = problems("--parallelism.context_parallel_rotate_method=alltoal")
    assert problem.endswith("must be 'allgather' or 'alltoall'; did you mean 'alltoall'?")


@pytest.mark.parametrize("value", ["inf", "nan"])
@pytest.mark.parametrize("key", ["optimizer.lr", "optimizer.eps", "training.max_norm"])
def test_numbers_are_finite(key, value):
    (problem,) = problems(f"--{key}={value}")
    assert problem.startswith(f"--{key}: got {value}")


def test_wrong_degrees_bring_no_advice_about_the_batch(toml):
    file = toml(
        "[parallelism]\ndata_parallel_shard_degree = 3\n[training]\nglobal_batch_size = 32\n"
    )
    with pytest.raises(ConfigError) as error:
        resolve(["--config", file], 4)
    (problem,) = error.value.problems
    assert problem.startswith(
        f"{file}:2: parallelism.data_parallel_shard_degree 3 is 3, but the number of ranks is 4"
    )


def test_help_of_one_section(capsys):
    text = help_text("training")
    assert "--training.steps" in text
    assert "--training.dataloader.num_workers" in text
    assert "--optimizer.lr" not in text
    assert all(f"--{key}  " in help_text() for key in FIELDS)
    text = help_text("training.sources")
    assert text.count("\n[") == 1
    assert "[[training.sources]]  A part of a mixture." in text
    assert "\n  name  string  (default: required)\n" in text
    assert "\n  weight  number 0 to 10^9  (default: 1.0)\n" in text
    with pytest.raises(
        ConfigError, match=r"no section 'lr_schedule' .*did you mean 'lr_scheduler'"
    ):
        resolve(["--help", "lr-schedule"], 1)
    with pytest.raises(SystemExit) as done:
        resolve(["--help", "lr-scheduler"], 1)
    assert done.value.code == 0
    assert "--lr_scheduler.warmup_steps" in capsys.readouterr().out

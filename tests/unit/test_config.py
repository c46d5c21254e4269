"""Loading: both notations, every mistake at once with its place, and what is written back."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.config_loading import load, problems
from torchtitan.commands import config as config_tool
from torchtitan.config import load_config, resolve
from torchtitan.config.derive import DEGREE_KEYS
from torchtitan.config.load.keys import FIELDS, fields_of
from torchtitan.config.load.render import json_schema, markdown
from torchtitan.config.sections.schema import Config
from torchtitan.train.preflight import preflight
from torchtitan.utils.errors import ConfigError
from torchtitan.utils.process import run_main

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "argv",
    [
        ["--training.steps", "5", "--checkpoint.enable", "--training.max-norm=0.5"],
        ["--training.steps=5", "--checkpoint.enable=true", "--training.max_norm", "0.5"],
        ["--checkpoint.enable", "True", "--training.max-norm", "5e-1", "--training.steps", "5"],
    ],
)
def test_every_form_of_a_flag(argv):
    config = load(*argv)
    assert (config.training.steps, config.checkpoint.enable, config.training.max_norm) == (
        5,
        True,
        0.5,
    )


def test_command_line_overrides_the_file(toml):
    file = toml("[training]\nsteps = 7\nseq_len = 64\n[optimizer]\nlr = 1\n")
    for flag in ("--job.config_file", "--config"):
        loaded = load_config([flag, file, "--training.steps", "9"])
        assert (loaded.config.training.steps, loaded.config.training.seq_len) == (9, 64)
        assert loaded.config.optimizer.lr == 1.0
        assert loaded.sources["training.steps"] == "--training.steps"
        assert loaded.sources["training.seq_len"] == f"{file}:3"


def test_extends_composes_files(toml):
    toml("[training]\nsteps = 1\nseq_len = 16\n", "base.toml")
    toml("[training]\nseq_len = 32\n[optimizer]\nlr = 2e-4\n", "more.toml")
    file = toml('extends = ["base.toml", "more.toml"]\n[optimizer]\nlr = 3e-4\n')
    loaded = load_config(["--config", file])
    assert (loaded.config.training.steps, loaded.config.training.seq_len) == (1, 32)
    assert loaded.config.optimizer.lr == 3e-4
    assert loaded.sources["training.steps"].endswith("base.toml:2")


def test_here_is_the_folder_of_each_file(toml, tmp_path, monkeypatch):
    """In tables and lists, and of the file that says it, wherever the command starts."""
    more = tmp_path / "more"
    more.mkdir()
    base = '[job]\ndump_folder = "{here}/run"\ndescription = "not {here}/x"\n'
    (more / "base.toml").write_text(base)
    sources = '[[training.sources]]\nname = "a"\ndataset_path = "{here}/../b/*.txt"\n'
    file = toml('extends = "more/base.toml"\n[model]\nhf_assets_path = "{here}"\n' + sources)
    monkeypatch.chdir("/")
    config = load("--config", file)
    assert config.job.dump_folder == str(more / "run")
    assert config.job.description == "not {here}/x"
    assert config.model.hf_assets_path == str(tmp_path)
    assert config.training.sources[0].dataset_path == f"{tmp_path}/../b/*.txt"


def test_a_file_that_extends_itself_is_refused(toml):
    toml('extends = "run.toml"\n', "base.toml")
    (problem,) = problems("--config", toml('extends = "base.toml"\n'))
    assert "extends itself: run.toml -> base.toml -> run.toml" in problem


@pytest.mark.parametrize(
    ("flags", "warned"),
    [
        (["--model.overrides.experts_per_token=1"], False),
        (["--model.overrides.experts_per_token=1", "--moe.global_balance_loss=0"], True),
        (["--moe.global_balance_loss=0"], False),
        (
            [
                "--model.overrides.experts_per_token=1",
                "--moe.global_balance_loss=0",
                "--moe.sequence_balance_loss=1",
            ],
            False,
        ),
        (
            [
                "--model.overrides.experts_per_token=1",
                "--moe.global_balance_loss=0",
                "--model.overrides.normalize_expert_weights=false",
            ],
            False,
        ),
    ],
)
def test_a_router_that_learns_nothing_is_a_warning(capsys, flags, warned):
    assert config_tool.main(["qwen3_moe_debug", *flags]) == 0
    assert ("the router learns nothing; set it to false" in capsys.readouterr().err) == warned


@pytest.mark.parametrize(
    ("flags", "lacks"),
    [
        (["window=64"], '"window" in layer_pattern'),
        (["window=64", 'layer_pattern=["window", "full"]'], None),
        (["delta_key_size=16"], '"delta" in layer_pattern'),
        (["route_scale=2.5"], "n_experts"),
        (["shared_expert_dim=0"], None),  # as without it
        (["mup_base_head_size=32"], "mup_base_dim"),
    ],
)
def test_overrides_without_an_effect_are_a_warning(capsys, flags, lacks):
    flags = [f"--model.overrides.{flag}" for flag in flags]
    assert config_tool.main(["debug_model", *flags]) == 0
    warned = capsys.readouterr().err
    assert ("has no effect" in warned) == (lacks is not None)
    assert lacks is None or f"without {lacks}; set that, too, or remove it" in warned


@pytest.mark.parametrize(
    ("modules", "flag", "problem"),
    [
        (2, "seq_len=2", "training.seq_len: rows of 2 tokens have no token for the last of"),
        (0, "mtp_loss_weight=0.1", "set [model.overrides] n_mtp = 1, or remove the weight"),
    ],
)
def test_modules_without_further_tokens_or_a_weight_without_modules(modules, flag, problem):
    with pytest.raises(ConfigError, match=re.escape(problem)):
        config_tool.main(
            ["debug_model", f"--model.overrides.n_mtp={modules}", f"--training.{flag}"]
        )


@pytest.mark.parametrize(
    ("flag", "warned"),
    [("seq_len=3", False), ("mtp_loss_weight=0.1", False), ("mtp_loss_weight=0", True)],
)
def test_modules_that_learn_nothing_are_a_warning(capsys, flag, warned):
    argv = ["debug_model", "--model.overrides.n_mtp=2", f"--training.{flag}"]
    assert config_tool.main(argv) == 0
    assert ("with 0 the modules" in capsys.readouterr().err) == warned


def test_all_mistakes_at_once_each_with_its_place(toml):
    file = toml(
        """
[training]
stpes = 4
seq_len = "100a"
note = '''
[optimizer]
lr = 1
'''
steps = true

[optimzer]
lr = 1

[lr_scheduler]
decay_type = "cosin"
min_lr_factor = 1.5

[model]
name = "lama3"
"""
    )
    found = problems(
        "--config",
        file,
        "--metrics.log_frq=3",
        "--training.max_norm",
        "abc",
        "--optimizer.lr",
        "stray",
    )
    expected = [
        f"{file}:3: training.stpes: unknown key; did you mean 'training.steps'?",
        f"{file}:4: training.seq_len: got '100a', must be an integer",
        f"{file}:5: training.note: unknown key",
        f"{file}:9: training.steps: got True, must be an integer",
        f"{file}:12: optimzer: unknown section; did you mean 'optimizer'?",
        f"{file}:15: lr_scheduler.decay_type: got 'cosin', must be 'linear', 'sqrt' or "
        "'cosine'; did you",
        f"{file}:16: lr_scheduler.min_lr_factor: got 1.5, must be at most 1",
        f"{file}:19: model.name: no model family 'lama3'; known: deepseek_v2, ",
        "--metrics.log_frq: unknown key; did you mean 'metrics.log_freq'?",
        "--training.max_norm: got 'abc', must be a number",
        "--optimizer.lr: got 'stray', must be a number",
    ]
    for text in expected:
        assert any(problem.startswith(text) for problem in found), (text, found)
    assert len(found) == len(expected)


def test_a_file_that_is_not_there_may_be_another(toml):
    (problem,) = problems("--config", "llama3_1")
    assert problem.endswith("No such file or directory; did you mean 'llama3_1b'?")
    file = toml("", "narrow.toml")
    (problem,) = problems("--config", file.replace("narrow", "narow"))
    assert problem.endswith("; did you mean 'narrow.toml'?")


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["training.steps=3"], "unexpected argument 'training.steps=3'"),
        (["--training.steps"], "--training.steps: needs a value"),
        (["--training.steps", "1", "2"], "takes one value"),
        (["--config", "missing.toml"], "can't read missing.toml: No such file"),
        (["--config", "."], "can't read .: Is a directory"),
        (["--checkpoint.enable", "yes please"], "must be true or false"),
        (["--training", "3"], "must be a table"),
    ],
)
def test_bad_command_lines(argv, text):
    assert any(text in problem for problem in problems(*argv))


def test_invalid_toml_names_the_line(toml):
    file = toml("[training]\nsteps = \n")
    (problem,) = problems("--config", file)
    assert problem.startswith(f"{file}: not valid TOML")
    assert "line 2" in problem


def test_everything_is_documented():
    for key, info, model in fields_of(Config):
        assert info.description, key
        assert model.__doc__, model


def test_every_key_is_read_somewhere():
    """A key that no code reads would be ignored silently."""
    sources = "\n".join(
        p.read_text()
        for p in (ROOT / "torchtitan").rglob("*.py")
        if "config" not in p.relative_to(ROOT).parts
    )
    for name in ("load/decode", "load/compat", "load/extend", "converters", "derive", "rules/*"):
        for path in (ROOT / "torchtitan/config").glob(f"{name}.py"):
            sources += path.read_text()
    for key in FIELDS:
        name = key.rpartition(".")[2]
        by_name = key == "job.config_file" or name in DEGREE_KEYS.values()
        assert by_name or f".{name}" in sources, key


def test_generated_documents_are_up_to_date():
    folder = ROOT / "docs/reference"
    assert (folder / "config.md").read_text() == markdown(), "torchtitan config --markdown"
    assert (folder / "config.schema.json").read_text() == json_schema(), "... --json-schema"


@pytest.mark.parametrize(
    "file", sorted((ROOT / "train_configs").glob("*.toml")), ids=lambda p: p.name
)
@pytest.mark.parametrize("scale", [1, 8])
def test_shipped_configs_are_legal(file, scale):
    smallest = {
        "llama3_70b.toml": 8,
        "llama3_405b.toml": 64,
        "qwen3_moe_235b_a22b.toml": 2,
        "moonlight_16b_8xh200.toml": 8,
        "deepseek_v3_256xh200.toml": 256,
        "glm4_5_air_64xh200.toml": 8,
        "qwen3_next_80b_32xh200.toml": 8,
    }.get(file.name, 1)
    argv = ["--config", str(file), f"--model.hf_assets_path={ROOT / 'tests/assets/tokenizer'}"]
    config = resolve(argv, smallest * scale).config
    preflight(config, output=False)
    assert config.job.description != "default job"


def test_explain_names_every_origin(toml, tmp_path, capsys):
    file = toml("[training]\nsteps = 7\n")
    argv = [
        file,
        "--explain",
        "--world",
        "4",
        "--optimizer.lr=1e-4",
        f"--job.dump_folder={tmp_path}",
    ]
    assert config_tool.main(argv) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert set(rows) == set(FIELDS)
    assert rows["training.steps"].endswith(f"{file}:2")
    assert rows["optimizer.lr"].endswith("--optimizer.lr")
    assert rows["training.seq_len"].endswith("default")
    assert rows["training.global_batch_size"].split()[1] == "32"
    assert (
        "derived: local_batch_size 8 x data-parallel degree 4" in rows["training.global_batch_size"]
    )


@pytest.mark.e2e
def test_errors_and_help_are_quick_and_need_no_torch():
    """In a second, or in proportion to a fixed sum where the processor is slower."""
    code = (
        "import sys, time; start = time.process_time()\n"
        "sum(range(10**7)); counted = time.process_time()\n"
        "from torchtitan.utils.process import run_main; from torchtitan.train.rank_main "
        "import main\n"
        "try: code = run_main(main, sys.argv[1:])\n"
        "except SystemExit as e: code = e.code\n"
        "assert not any(m == 'torch' or m.startswith('torch.') for m in sys.modules), "
        "'torch was imported'\n"
        "seconds, unit = time.process_time() - counted, counted - start\n"
        "assert seconds < max(1, 25 * unit), (seconds, unit)\n"
        "sys.exit(code)"
    )
    for argv, status, text in (
        (["--help"], 0, "--training.steps  integer 1 to 10^12  (default: 10000)"),
        (["--help", "optimizer"], 0, "--optimizer.lr  number above 0 to 10^6  (default: 0.0008)"),
        (["--training.stpes=3"], 2, "did you mean 'training.steps'?"),
        (["--model.flavor=9B"], 2, "model.flavor: llama3 has no flavor '9B'"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, *argv], capture_output=True, text=True, cwd=ROOT
        )
        assert done.returncode == status, done.stderr
        assert text in done.stdout + done.stderr
        assert "Traceback" not in done.stderr


def test_traceback_only_on_request(monkeypatch, capsys):
    for value, shown in (("0", False), ("1", True)):
        monkeypatch.setenv("TORCHTITAN_DEBUG", value)
        assert run_main(lambda argv: load_config(argv) and 0, ["--training.stpes=3"]) == 2
        assert ("Traceback" in capsys.readouterr().err) == shown


def test_drawing_without_its_package_is_refused(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    drawing = ["--activation_checkpoint.visualize_memory_budget_pareto", "--compile.enable"]
    preflight(resolve(drawing, 1).config, output=False)
    with pytest.raises(ConfigError, match="package matplotlib"):
        preflight(
            resolve([*drawing, "--activation_checkpoint.mode=memory_budget"], 1).config,
            output=False,
        )


def test_validation_has_the_rows_of_training_unless_set():
    stage = "--training.stages=[{from_step = 2, seq_len = 128, local_batch_size = 3}]"

    def resolved(*flags):
        result = resolve(["--validation.enable", "--training.seq_len=64", *flags], 2)
        v = result.config.validation
        return v.seq_len, v.local_batch_size, v.global_batch_size, result.warnings

    rows = "--training.local_batch_size=6"
    assert resolved(rows) == resolved(rows, stage) == (64, 6, 6, [])
    assert resolved(rows, "--training.global_batch_size=24") == (64, 6, 24, [])
    set_ = ("--validation.seq_len=128", "--validation.local_batch_size=5")
    assert resolved(rows, stage, *set_) == (128, 5, 5, [])
    assert resolved(rows, *set_)[3] == [
        "validation.seq_len: 128 is longer than training's rows of 64, so the loss includes "
        "positions that this run doesn't train"
    ]

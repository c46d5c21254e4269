"""Hostile and careless configurations: each gets an answer within two seconds, which names what is
wrong.
"""

import os
import re
import sys

import pytest

from tests.config_answers import answer, answer_in_time
from torchtitan.commands.train import check, node_range
from torchtitan.commands.train import parser as train_parser
from torchtitan.config import load_config, resolve
from torchtitan.config.load.keys import FIELDS
from torchtitan.utils.errors import ConfigError


def write(folder, content, name="run.toml"):
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return ["--config", str(folder / name)]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (
            "\n".join(f"k{i} = 1" for i in range(100_000)),
            "can't read {file}: larger than 131,072 bytes",
        ),
        ("x = [" + "1," * 20_000 + "]", "{file}: more than 10,000 values"),
        ("x = " + "[" * 100_000, "{file}: not valid TOML: TOML inline arrays/tables are nested"),
        (
            "x = " + "[" * 40 + "]" * 40,
            "{file}: tables or lists are nested more than 16 levels deep",
        ),
        (
            ".".join("a" * 500) + " = 1",
            "{file}: tables or lists are nested more than 16 levels deep",
        ),
        ('"' + "a." * 60_000 + '" = 1', "has more than 200 characters"),
        ("x = " + "9" * 5000, "{file}: not valid TOML: Exceeds the limit"),
        ("debug.seed = 0x" + "f" * 16, "{file}: an integer is too large for 64 bits"),
        ("['a" + " " * 100_000 + "b']", "has more than 200 characters"),
        (b"[job]\ndescription = '\0'", "{file}: not valid TOML"),
        (
            'job.dump_folder = "a\\u0000b"',
            "{file}:1: job.dump_folder: got 'a\\x00b', must not contain control",
        ),
        ("training.steps = 0", "{file}:1: training.steps: got 0, must be at least 1"),
        (
            "model.converters = [" + "'floot8'," * 9000 + "]",
            "model.converters.0: got 'floot8', must be",
        ),
        (
            "\n".join(f"section{i}.key = 1" for i in range(4000)),
            "{file}:1: section0: unknown section",
        ),
        (
            "memory_estimation = {" + ",".join(f"k{i} = 1" for i in range(4000)) + "}",
            "memory_estimation.k0: unknown",
        ),
    ],
    ids=lambda value: (
        None if isinstance(value, bytes) or len(value) > 60 else value.format(file="file")
    ),
)
def test_hostile_files(tmp_path, content, text):
    argv = write(tmp_path, content)
    assert text.format(file=argv[1]) in answer(argv)[0]


@pytest.mark.parametrize(
    ("argv", "world", "text"),
    [
        (
            ["--training.loss_chunks=9223372036854775807"],
            1,
            "--training.loss_chunks: got 9223372036854775807",
        ),
        (
            ["--training.loss_chunks=99999988", "--training.seq_len=99999989"],
            1,
            "set it to 1 or 99999989",
        ),
        (
            ["--training.local_batch_size=9223372036854775783"],
            1,
            "--training.local_batch_size: got",
        ),
        (
            ["--training.local_batch_size=1048573", "--parallelism.pipeline_parallel_degree=2"]
            + ["--parallelism.pipeline_parallel_microbatch_size=2"],
            2,
            "does not divide training.local_batch_size 1048573; set it to one of 1, 1048573",
        ),
        (
            ["--parallelism.tensor_parallel_degree=4"],
            999999937,
            "must divide 999999937: 1, 999999937",
        ),
        (
            ["--fault_tolerance.elastic", "--parallelism.data_parallel_replicate_degree=1048576"],
            999999937,
            "elastic",
        ),
        (["--model.overrides.n_layers=1000000"], 1, "model.overrides.n_layers: got 1000000"),
        (
            ["--training.dataset_path=/proc/**/*.nosuch"],
            1,
            "searches more than 50,000 files and folders",
        ),
        (["--training.dataset_path=" + "/*" * 12 + "/nosuch"], 1, "training.dataset_path: "),
        (["--training.dataset_path=a\0b"], 1, "must not contain control characters"),
        (["--config=\0"], 1, "--job.config_file: got '\\x00', must not contain control characters"),
        (["--config", "x" * 300], 1, "whose names must be of at most 255 bytes"),
        (
            ["--config", "/dev/zero"],
            1,
            "--job.config_file: can't read /dev/zero: not a regular file",
        ),
        (["--config", "/"], 1, "--job.config_file: can't read /: Is a directory"),
        (["--training.steps=" + "9" * 5000], 1, "--training.steps: got '999"),
        (["--model.overrides.dim=" + "9" * 5000], 1, "--model.overrides.dim: got '999"),
        (["--model.overrides.dim=" + "[" * 100_000], 1, "--model.overrides.dim: got '[[["),
        (["--" + "a." * 50_000 + "b=1"], 1, "nested more than 16 levels deep"),
        (["--training.steps=1"] * 20_000, 1, "the command line has 20,000 words"),
        (["--job.description=\udcff"], 1, "--job.description: got '\\udcff'"),
    ],
    ids=lambda value: None if isinstance(value, int) else str(value)[:60],
)
def test_hostile_flags(argv, world, text):
    assert text in answer(argv, world)[0]


def test_a_deep_model_is_split_in_time():
    argv = ["--model.overrides.n_layers=512", "--parallelism.pipeline_parallel_degree=200"]
    assert answer([*argv, "--training.local_batch_size=400"], 200) == []


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    pipe = str(tmp_path / "pipe")
    assert answer(["--config", pipe]) == [
        f"--job.config_file: can't read {pipe}: not a regular file"
    ]
    (problem,) = answer(write(tmp_path, 'extends = "pipe"'))
    assert problem.endswith(f"run.toml:1: extends: can't read {pipe}: not a regular file")
    (problem,) = answer(
        [
            "--parallelism.pipeline_parallel_degree=2",
            f"--parallelism.pipeline_parallel_schedule_csv={pipe}",
        ],
        2,
    )
    assert problem.startswith(
        f"parallelism.pipeline_parallel_schedule_csv: can't read '{pipe}': not a regular file"
    )


def test_each_extended_file_is_read_once(tmp_path):
    for number in range(26):
        write(tmp_path, f'extends = ["{number + 1}.toml", "{number + 1}.toml"]\n', f"{number}.toml")
    write(tmp_path, "[training]\nsteps = 3\n", "26.toml")
    with answer_in_time():
        assert load_config(["--config", str(tmp_path / "12.toml")]).config.training.steps == 3
    problems = answer(["--config", str(tmp_path / "0.toml")])
    assert problems[0].endswith(
        "16.toml:1: extends: more than 16 files extend each other; merge some"
    )


def test_only_the_first_problems_are_shown(tmp_path):
    argv = write(tmp_path, "".join(f"k{i} = 1\n" for i in range(1000)))
    with pytest.raises(ConfigError) as error:
        resolve(argv, 1)
    lines = str(error.value).splitlines()
    assert lines[0].startswith(f"{argv[1]}:1: k0: unknown key")
    assert (len(lines), lines[-1]) == (21, "and 980 more")


IMPORTS = {
    "syntax": ("x = (\n", 1, "SyntaxError: '(' was never closed"),
    "leaves": ("import sys\nsys.exit(3)\n", 2, "SystemExit: 3"),
    "parses": ('import json\n\njson.loads("{")\n', 3, "JSONDecodeError: Expecting property name"),
    "lacks": ("import nosuch_module\n", 1, "No module named 'nosuch_module'"),
    "raises": ("raise ValueError('two\\nlines ' + 'x' * 10000)\n", 1, "ValueError: two lines xxx"),
}


@pytest.mark.parametrize("name", IMPORTS)
def test_a_custom_import_that_fails(tmp_path, monkeypatch, name):
    content, line, text = IMPORTS[name]
    (tmp_path / f"hostile_{name}.py").write_text(content)
    (tmp_path / "hostile_outer.py").write_text(f"import hostile_{name}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in (f"hostile_{name}", "hostile_outer"):
        (problem,) = answer([f"--experimental.custom_import={module}"])
        assert problem.startswith("experimental.custom_import: ")
        assert text in problem
        assert f"{tmp_path}/hostile_{name}.py:{line}" in problem
        assert "\n" not in problem
    sys.modules.pop("hostile_outer", None)


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ("--comm.init_timeout_seconds=100000000000000", "at most 1000000000"),
        ("--comm.train_timeout_seconds=9223372036854775807", "at most 1000000000"),
        ("--debug.seed=18446744073709551616", "--debug.seed: an integer is too large for 64 bits"),
        ("--compile.backend=inductr", "no compiler backend 'inductr'; did you mean 'inductor'?"),
        ("--optimizer.eps=0", "optimizer.eps: got 0"),
        ("--model.overrides.rope_scaling.factor=0", "model.overrides.rope_scaling.factor: got 0"),
        (
            "--model.overrides.rope_scaling.factor=nan",
            "rope_scaling.factor: got nan, must be a finite number",
        ),
        (
            "--model.overrides.rope_scaling.high_freq_factor=1.0",
            "must be less than high_freq_factor 1",
        ),
        ("--model.overrides.norm_eps=-1.0", "model.overrides.norm_eps: got -1.0"),
        ("--model.overrides.rope_theta=inf", "model.overrides.rope_theta: got inf"),
        (
            "--model.overrides.vocab_size=1000000000000",
            "model.overrides.vocab_size: got 1000000000000",
        ),
        ("--training.seq_len=1000000000000", "training.seq_len: got 1000000000000"),
        ("--job.save_config_file=../x.toml", "must be below job.dump_folder"),
        ("--job.save_config_file=/etc/passwd", "must be below job.dump_folder"),
        ("--profiling.save_traces_folder=/tmp/x", "must be below job.dump_folder"),
        ("--metrics.save_tb_folder=~/x", "must be below job.dump_folder"),
        ("--comm.save_traces_file_prefix=../rank_", "without /"),
        ("--job.dump_folder=~nobody-here/x", "there is no user 'nobody-here'"),
        ("--job.dump_folder=s3://bucket/run", "must be a local folder"),
        ("--job.dump_folder=$NOT_SET/run", "no environment variable 'NOT_SET' is set"),
        ("--checkpoint.folder=${EMPTY}/run", "no environment variable 'EMPTY' is set"),
        ("--profiling.save_traces_folder=a/${NOT_SET:-b}", "variable 'NOT_SET:-b' is set"),
        ("--training.dataset_path=$(pwd)/text", "no environment variable '(pwd)' is set"),
        ("--metrics.save_tb_folder=${HOME}/x", "must be below job.dump_folder"),
    ],
)
def test_nonsense_is_refused_where_it_is_written(flag, text, monkeypatch):
    monkeypatch.setenv("EMPTY", "")
    (problem,) = answer([flag, "--model.flavor=8B"])
    assert text in problem
    assert flag.partition("=")[0].removeprefix("--").rpartition(".")[2] in problem


def test_nothing_is_a_value_only_where_that_is_documented():
    """An unset variable of a shell, as in `--checkpoint.initial_load_path "$CHECKPOINT"`."""
    texts = {key for key, info in FIELDS.items() if "str" in str(info.annotation)}
    texts = {key for key in texts if not re.search(r"list\[|dict\[", str(FIELDS[key].annotation))}
    with pytest.raises(ConfigError) as error:
        load_config([f"--{key}=" for key in texts])
    refused = {problem.partition(":")[0].removeprefix("--") for problem in error.value.problems}
    assert len(refused) > 30
    assert texts - refused == {
        "experimental.custom_import",
        "parallelism.pipeline_parallel_schedule_csv",
    }


@pytest.mark.parametrize("home", ["~", "$HOME", "${HOME}"])
def test_the_home_folder_is_expanded_in_every_path(monkeypatch, home):
    monkeypatch.setenv("HOME", "/home/someone")
    keys = [
        "job.dump_folder",
        "model.hf_assets_path",
        "training.dataset_path",
        "validation.dataset_path",
    ]
    keys += [
        "checkpoint.folder",
        "checkpoint.initial_load_path",
        "parallelism.pipeline_parallel_schedule_csv",
    ]
    config = load_config([f"--{key}={home}/x" for key in keys]).config
    for key in keys:
        section, _, name = key.rpartition(".")
        assert getattr(getattr(config, section), name) == "/home/someone/x", key


def test_a_folder_with_a_dollar_in_its_name(tmp_path):
    folder = tmp_path / "a$b"
    folder.mkdir()
    (folder / "run.toml").write_text('job.dump_folder = "{here}/run"\n')
    config = load_config(["--config", str(folder / "run.toml")]).config
    assert config.job.dump_folder == f"{folder}/run"


def test_every_backend_of_torch_is_known():
    from torch._dynamo import list_backends

    for name in list_backends(exclude_tags=()):
        if "TESTING" not in name and "minifier" not in name:
            assert answer([f"--compile.backend={name}"]) == []


@pytest.mark.parametrize(
    "option", ["--nproc-per-node=0", "--nproc-per-node=-1", "--nproc-per-node=" + "9" * 5000]
)
def test_hostile_numbers_of_ranks(option, capsys):
    with pytest.raises(SystemExit):
        train_parser().parse_args([option])
    assert "must be 1 or more, and at most 1,024" in capsys.readouterr().err


@pytest.mark.parametrize(
    "nodes", ["1:1000000", "1000000000000", "9" * 5000, "0:0", "-1", "1:", ":", "²"]
)
def test_hostile_numbers_of_nodes(nodes, capsys):
    with answer_in_time(), pytest.raises(SystemExit):
        train_parser().parse_args([f"--nnodes={nodes}"])
    assert len(capsys.readouterr().err.splitlines()[-1]) < 300


def test_a_wide_range_of_nodes_is_checked_in_time():
    argv = [
        "--fault_tolerance.elastic",
        "--checkpoint.enable",
        "--training.global_batch_size=1000000",
    ]
    with answer_in_time():
        check(argv, node_range("1:2000"), 8, output=False)

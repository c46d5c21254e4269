"""`torchtitan init`: what it chooses, writes and says, and what it refuses."""

import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests import damaged_models
from tests.init_runs import DEBUG, H100, SMALL, written
from torchtitan.commands import submit, tokenize, tokenizer
from torchtitan.commands.init import main, parse_length
from torchtitan.config import complete, load_config
from torchtitan.config.load.keys import FIELDS
from torchtitan.models import get_spec
from torchtitan.tools.launch.data_choice import find_data
from torchtitan.tools.launch.model_choice import find_model
from torchtitan.tools.launch.preparation import preparation_commands, prepared_settings
from torchtitan.tools.launch.recipe import suggested_tokens
from torchtitan.tools.launch.request import Choice, Request
from torchtitan.tools.planner.hardware import find_hardware
from torchtitan.train.preflight import preflight
from torchtitan.utils.assets import CHECKOUT
from torchtitan.utils.errors import ConfigError, UserError

pytestmark = pytest.mark.usefixtures("init_folder")


# ---- the result


def test_every_line_differs_from_the_default_and_says_why():
    assert main([DEBUG, "a", *SMALL, *H100, "--seq-len=512", "--optimizer.beta2=0.99"]) == 0
    text, tables = written("a")
    section = ""
    before = ""
    lines = 0
    for line in text.splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            key = f"{section}.{line.split()[0]}"
            value = tables
            for part in key.split("."):
                value = value[part]
            assert value != FIELDS[key].get_default(), key
            assert "  # " in line or before.startswith("# "), key
            lines += 1
        assert len(line) <= 120 or line.startswith("#   torchtitan init")
        before = line
    assert lines > 10
    assert tables["optimizer"]["beta2"] == 0.99
    assert tables["training"]["seq_len"] == 512


def test_hours_and_tokens_become_steps():
    """At the planned speed, which the first line states."""
    main([DEBUG, "a", *SMALL, *H100])
    text, tables = written("a")
    speed = int(re.search(r"Planned: ([\d,]+) tokens/s", text)[1].replace(",", ""))
    batch = tables["training"].get("global_batch_size") * tables["training"]["seq_len"]
    assert tables["training"]["steps"] * batch == pytest.approx(speed * 3600, rel=0.01)
    main([DEBUG, "b", SMALL[0], *H100, "--tokens=1.5M"])
    tables = written("b")[1]
    assert tables["training"]["steps"] == -(-1_500_000 // batch)
    assert tables["lr_scheduler"]["warmup_steps"] == tables["training"]["steps"] // 10


@pytest.mark.parametrize(
    ("tokens", "devices", "rows"),
    [
        ("600M", 1, 128),  # llama2.c's 131,072 tokens
        ("20M", 1, 64),  # the largest power of two that makes 200 steps
        ("1M", 1, 4),
        ("0.1M", 1, 4),  # a single row's loss and gradient are noise
        ("1M", 8, 8),  # a row for each device
    ],
)
def test_a_short_run_gets_a_smaller_batch(tokens, devices, rows):
    argv = ["llama3/30M", "a", "--data=demo", f"--tokens={tokens}"]
    main([*argv, "--hardware=h100-sxm", f"--devices={devices}"])
    training = written("a")[1]["training"]
    assert training["global_batch_size"] == rows
    assert training["seq_len"] == 1024


def test_tokens_are_suggested_for_the_parameters_that_a_token_uses():
    """20 for each. Counted by hand for Qwen3 30B-A3B: 8 of 128 experts of each of its 48 layers."""
    assert suggested_tokens(find_model("llama3/8B")) == 20 * 8_030_261_248
    attention = 2 * 2048 * 32 * 128 + 2 * 2048 * 4 * 128 + 2 * 128
    experts = 2048 * 128 + 8 * 3 * 2048 * 768
    active = 2 * 151_936 * 2048 + 48 * (attention + experts + 2 * 2048) + 2048
    assert suggested_tokens(find_model("qwen3_moe/30B-A3B")) == 20 * active


def test_the_command_in_the_file_makes_the_same_file():
    main(["qwen3/0.6B", "a", "--data=c4", "--hours=1", *H100, "--optimizer.lr", "0.002"])
    text = written("a")[0]
    (command,) = re.findall(r"^#   torchtitan init (.*)$", text, re.M)
    assert main([*command.split(), "--force"]) == 0
    assert written("a")[0] == text
    assert "--optimizer.lr 0.002" in command


def test_the_layout_and_its_figures_are_printed(capsys):
    main([DEBUG, "a", *SMALL, *H100])
    out = capsys.readouterr().out
    match = re.search(r"Planned: ([\d,]+) tokens/s per device \(([\d,]+) to ([\d,]+)\)", out)
    speed, low, high = (int(number.replace(",", "")) for number in match.groups())
    assert low < speed < high
    assert "chance to fit > 99%" in out
    assert re.match(r"one rank: the (fastest|simplest within 2% of the fastest)", out)


def test_what_is_given_prevails():
    main([DEBUG, "a", SMALL[0], *H100, "--training.steps=7", "--training.global_batch_size=16"])
    tables = written("a")[1]
    assert (tables["training"]["steps"], tables["training"]["global_batch_size"]) == (7, 16)


def test_a_given_layout_is_planned_as_it_is(capsys):
    layout = ["--parallelism.tensor_parallel_degree=2", "--activation_checkpoint.mode=full"]
    main(
        [
            DEBUG,
            "a",
            *SMALL,
            "--hardware=h100-sxm",
            "--devices=4",
            *layout,
            "--training.local_batch_size=2",
        ]
    )
    tables = written("a")[1]
    assert tables["parallelism"] == {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2}
    assert tables["activation_checkpoint"]["mode"] == "full"
    assert capsys.readouterr().out.startswith("dp_shard 2 x tp 2: as given\n")
    with pytest.raises(ConfigError, match="must divide 4"):
        main(
            [
                DEBUG,
                "b",
                *SMALL,
                "--hardware=h100-sxm",
                "--devices=4",
                "--parallelism.tensor_parallel_degree=3",
            ]
        )


def test_data_of_a_cluster(capsys):
    main([DEBUG, "a", "--data=/of/the/cluster", SMALL[1], *H100])
    said = capsys.readouterr().out
    assert "--input /of/the/cluster --output a/tokens --held-out 0.5%" in said
    assert "not on this machine" not in said, "the command says it"
    main([DEBUG, "c", "--data=/of/the/cluster/tokens.bin", SMALL[1], *H100])
    note = "training.dataset_path '/of/the/cluster/tokens.bin' is not on this machine; the run will"
    assert note in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--data: no file or folder /of/the/cluster"):
        main([DEBUG, "b", "--data=/of/the/cluster", SMALL[1], "--hardware=cpu.toml"])
    with pytest.raises(ConfigError, match="newline"):
        main([DEBUG, "a\nb", *SMALL, *H100])
    assert {path.name for path in Path().iterdir() if path.is_dir()} == {"a", "c"}


def test_several_nodes_get_a_job(capsys):
    argv = ["--hardware=gb200", "--devices=8", "--training.global_batch_size=4", "--hours=1.51"]
    assert main([DEBUG, "a", *SMALL[:-1], *argv]) == 0
    # a host of gb200 has 4 of its domain's 72
    command = ["torchtitan", "submit", "a/train.toml", "--gpus-per-node", "4", "--time", "1:31:00"]
    assert commands(capsys.readouterr().out)[-1] == command
    assert submit.main(command[2:]) == 0
    script = Path("train.sbatch").read_text()
    assert "#SBATCH --nodes=2\n#SBATCH --gpus-per-node=4\n#SBATCH --time=1:31:00\n" in script
    assert not any(path in script for path in (str(Path.cwd()), str(CHECKOUT), sys.executable))
    with pytest.raises(UserError, match="don't fill nodes of 8"):
        main([DEBUG, "b", *SMALL, "--hardware=h100-sxm", "--devices=12"])
    assert not Path("b").exists()


def test_a_hugging_face_folder(tmp_path, capsys):
    source = tmp_path / "mine"
    source.mkdir()
    spec = get_spec("qwen3")
    args = spec.args("debugmodel", {"n_layers": 3})
    config = spec.hf.config(args, "float32")
    (source / "config.json").write_text(json.dumps(config))
    for file in (Path(__file__).parents[1] / "assets/tokenizer").glob("*.json"):
        (source / file.name).write_bytes(file.read_bytes())
    main([str(source), "a", *SMALL, *H100])
    model = written("a")[1]["model"]
    assert model == {"name": "qwen3", "hf_assets_path": str(source), "overrides": {"n_layers": 3}}
    assert "initial_load_in_hf" not in written("a")[0]
    damaged_models.write_model(source, "qwen3", config)
    main([str(source), "b", *SMALL, *H100])
    assert written("b")[1]["checkpoint"]["initial_load_in_hf"] is True
    (source / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(UserError, match="model_type: got 'gpt2'"):
        main([str(source), "c", *SMALL, *H100])


def corpus(documents: int) -> str:
    Path("texts").mkdir()
    for i in range(documents):
        Path(f"texts/{i}.txt").write_text(f"Document {i} of a few words, and {i * i} more. " * 9)
    return "--data=texts"


def commands(said: str) -> list[list[str]]:
    """Those of the lines after "Next:"."""
    return [shlex.split(line, comments=True) for line in said.partition("Next:\n")[2].splitlines()]


def test_own_text_gets_a_tokenizer_and_a_held_out_part(capsys, monkeypatch, tmp_path):
    """The commands make what the file names, wherever the folder is moved."""
    argv = ["llama3/30M", "a", corpus(60), "--tokens=1M", "--seq-len=64", *H100]
    main([*argv, "--training.global_batch_size=2"])
    tables = written("a")[1]
    assert tables["job"]["dump_folder"] == "{here}/run"
    assert tables["model"] == {"flavor": "30M", "hf_assets_path": "{here}/tokenizer"}
    assert tables["validation"]["dataset_path"] == "{here}/tokens-held-out"
    train, write, *last = commands(capsys.readouterr().out)
    texts = str(Path("texts").absolute())
    assert train[1:] == ["tokenizer", texts, "--vocab-size", "8192", "--output", "a/tokenizer"]
    expected = ["tokenize", "--input", texts, "--output", "a/tokens", "--tokenizer", "a/tokenizer"]
    assert write[1:] == [*expected, "--held-out", "17%"]
    assert last == [["torchtitan", "train", "a/train.toml", "--nproc-per-node", "1"]]
    tokenizer.main(train[2:])
    tokenize.main([*write[2:], "--workers=1"])

    Path("moved").mkdir()
    Path("a").rename("moved/b")
    monkeypatch.chdir("/")
    file = tmp_path / "moved/b/train.toml"
    config = complete(load_config([f"--config={file}"]), 1).config
    assert config.training.dataset_path == str(tmp_path / "moved/b/tokens")
    assert config.job.dump_folder == str(tmp_path / "moved/b/run")
    preflight(config)
    held_out, kept = (
        json.loads((tmp_path / f"moved/b/{name}/tokens-report.json").read_text())["documents"]
        for name in ("tokens-held-out", "tokens")
    )
    assert held_out + kept == 60
    assert held_out > 0


def test_few_documents_are_all_trained_on(capsys):
    main(["llama3/debugmodel", "a", corpus(5), SMALL[1], *H100])
    assert "validation" not in written("a")[1]
    said = capsys.readouterr().out
    assert "too few documents to hold some out" in said
    assert re.search(r"note: .*[BM] tokens read the text about [\d,]+ times; beyond 4, ", said)
    assert [words[1] for words in commands(said)] == ["tokenize", "train"]
    assert "--held-out" not in said
    assert "--tokenizer" not in said, "debug models take the shipped one"


def test_conversations_are_read_as_they_are():
    request = Request(
        find_model("llama3/30M"),
        find_data(corpus(30).removeprefix("--data=")),
        find_hardware("h100-sxm"),
        1,
        1024,
        Path("a"),
        flag_settings={"training.messages_column": Choice("messages", "as given")},
    )
    settings = prepared_settings(request)
    assert settings["training.dataset_path"].value == str(Path("texts").absolute())
    assert [step.split()[0] for step in preparation_commands(request)] == ["hf"], "no tokenizer"


def test_a_size_without_a_tokenizer_takes_one_of_the_hub_for_streamed_data(capsys):
    main(["llama3/125M", "a", "--data=c4", SMALL[1], *H100])
    model = written("a")[1]["model"]
    assert model["overrides"] == {"vocab_size": 49152}
    assert "hf download HuggingFaceTB/SmolLM2-135M" in capsys.readouterr().out
    main(["llama3/125M", "b", "--data=c4", *H100, SMALL[1], "--model.hf_assets_path=mine"])
    assert written("b")[1]["model"] == {"flavor": "125M", "hf_assets_path": "mine"}


def test_token_files_bring_their_held_out_part_but_no_tokenizer():
    for folder in ("tokens", "tokens-held-out"):
        Path(folder).mkdir()
        Path(folder, "tokens-00000.bin").write_bytes(b"12")
    data = find_data("./tokens")
    assert data.held_out_path == str(Path("tokens-held-out").absolute())
    assert data.corpus is None
    with pytest.raises(ConfigError, match=r"add --model\.hf_assets_path with the one that made"):
        main(["llama3/30M", "a", "--data=./tokens", SMALL[1], *H100])


def test_data(tmp_path):
    (tmp_path / "texts").mkdir()
    with pytest.raises(ConfigError, match="no file matches"):
        find_data("./texts")
    (tmp_path / "texts/a.jsonl").write_text('{"text": "x"}\n')
    assert find_data("texts").path == str(tmp_path / "texts")
    (tmp_path / "texts/tokens-0.bin").write_bytes(b"12")
    assert find_data("texts").kind.startswith("token files")
    assert find_data("org/name:config@split").path is None
    assert find_data("c4").held_out == "c4_validation"
    assert not find_data("/of/the/cluster").is_here
    for wrong in ("dmeo", "./none", "/none/*.txt", "org/name/more"):
        with pytest.raises(ConfigError, match=r"--data"):
            find_data(wrong)


@pytest.mark.parametrize(
    ("text", "tokens", "hours"),
    [
        ("160B", 160e9, None),
        ("1.5e9", 1.5e9, None),
        ("1,000,000", 1e6, None),
        ("10M", 1e7, None),
        ("2t", 2e12, None),
        ("10m", None, 1 / 6),
        ("10min", None, 1 / 6),
        ("12h", None, 12),
        ("3 d", None, 72),
    ],
)
def test_lengths(text, tokens, hours):
    assert parse_length(text) == (
        pytest.approx(tokens) if tokens else None,
        pytest.approx(hours) if hours else None,
    )


@pytest.mark.parametrize(
    "text", ["", "x", "-1", "0", "1e400", "1q", "nan", "1_000", "1.2.3", "9" * 400, "1e99"]
)
def test_no_lengths(text):
    with pytest.raises(ConfigError, match="neither a number of tokens"):
        parse_length(text)


# ---- refusals


def test_without_a_terminal_every_missing_flag_is_named():
    with pytest.raises(ConfigError) as error:
        main([])
    for flag in (
        "MODEL is missing",
        "--data",
        "--hardware NAME",
        "--devices N",
        "--tokens N or --hours N",
        "--yes",
    ):
        assert flag in str(error.value)
    assert "llama3/8B" in str(error.value)
    assert "mi300x" in str(error.value)
    assert len(error.value.problems) == 5, "the advice is none"
    assert error.value.where == "on the command line"
    assert [path.name for path in Path().iterdir()] == ["cpu.toml"]


@pytest.mark.parametrize("name", ["mps", "m3-max"])
def test_apples_gpus_are_refused_alone(name):
    with pytest.raises(ConfigError) as error:
        main([DEBUG, "a", "--data=demo", f"--hardware={name}", "--hours=1"])
    assert [*error.value.problems] == [
        f"--hardware: {name} is not supported, only GPUs of NVIDIA and AMD are; `--hardware cpu` "
        "computes on this machine's CPU"
    ]


def test_every_wrong_flag_is_named_at_once():
    argv = [
        "llama3/9B",
        "--data=dmeo",
        "--hardware=h10",
        "--devices=0",
        "--tokens=x",
        "--seq-len=y",
    ]
    with pytest.raises(ConfigError) as error:
        main(argv)
    found = [problem.partition(":")[0] for problem in error.value.problems]
    assert found == ["MODEL", "--data", "--hardware", "--devices", "--tokens, --hours", "--seq-len"]
    with pytest.raises(ConfigError, match=r"did you mean .optimizer\.lr."):
        main([DEBUG, "a", *SMALL, *H100, "--optimizer.lrr=1"])
    assert not Path("a").exists()


def test_nothing_is_overwritten_without_force():
    main([DEBUG, "a", *SMALL, *H100])
    Path("a/train.toml").write_text("mine")
    for argv in ([DEBUG, "a", *SMALL, *H100], [DEBUG, "a"]):
        with pytest.raises(ConfigError, match=r"a has train.toml; choose another, or --force"):
            main(argv)
    assert Path("a/train.toml").read_text() == "mine"
    main([DEBUG, "a", *SMALL, *H100, "--force"])
    assert "Planned" in Path("a/train.toml").read_text()


def test_a_failed_write_leaves_nothing(monkeypatch):
    """The disk is full while the second file is written."""
    synced = []

    def fsync(handle):
        synced.append(handle)
        if len(synced) == 2:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(UserError, match=r"can't write a/.*: No space left"):
        main([DEBUG, "a", *SMALL, "--hardware=cpu"])
    assert list(Path("a").iterdir()) == []


@pytest.mark.parametrize(
    ("model", "hardware", "changes"),
    [
        (
            "1B",
            "rtx-4090",
            ["--optimizer.state_dtype=bfloat16", "--training.enable_cpu_offload=true"],
        ),
        ("1B", "rtx-4080", ["--training.enable_cpu_offload=true"]),
    ],
)
def test_one_small_gpu_is_told_what_would_fit(model, hardware, changes):
    argv = [f"llama3/{model}", "a", "--data=c4", f"--hardware={hardware}", "--devices=1"]
    with pytest.raises(UserError, match="is likely to fit") as error:
        main([*argv, "--hours=1"])
    offered = re.findall(r"--[a-z_]+\.[a-z_]+=\w+", str(error.value))
    assert offered == changes
    for change in changes:
        assert main([*argv, "--hours=1", "--force", change]) == 0


def test_a_model_that_does_not_fit_says_what_would():
    message = r"llama3/8B: none of .* is likely to fit in the 77[.0-9]* GiB .* try --devices \d"
    with pytest.raises(UserError, match=message):
        main(["llama3/8B", "a", "--data=c4", *H100, "--hours=1", "--training.global_batch_size=1"])
    assert not Path("a").exists()


def test_a_terminal_is_asked_for_what_is_missing(monkeypatch, capsys):
    """Until the answer is right; an empty one is the default."""
    answers = iter(["dmeo", "", "1M"])
    monkeypatch.setattr("rich.console.Console.input", lambda *_, **__: next(answers))
    for stream in ("stdin", "stdout"):
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True)
    assert main([DEBUG, "a", *H100]) == 0
    assert "'dmeo' is no file or folder" in capsys.readouterr().err
    assert f"init --data demo --tokens 1M {DEBUG} a {' '.join(H100)}" in written("a")[0]

"""The command line itself: commands, help, and how the launcher reads its arguments."""

import sys

import pytest

from torchtitan import __version__
from torchtitan.commands import COMMANDS, REPLACEMENTS, command_module, main
from torchtitan.commands.train import _parse
from torchtitan.tools.launch.torchrun import _torchrun_options
from torchtitan.train import rank_main as entry
from torchtitan.utils.process import run_main


def run(monkeypatch, *argv):
    monkeypatch.setattr(sys, "argv", ["torchtitan", *argv])
    return main()


@pytest.mark.parametrize("argv", [[], ["--help"]])
def test_help_lists_every_command_with_a_sentence(monkeypatch, capsys, argv):
    assert run(monkeypatch, *argv) == 0
    lines = capsys.readouterr().out.splitlines()
    for command, text in COMMANDS.items():
        assert any(line.split() == [command, *text.split()] for line in lines)
        assert text.endswith(".")


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_itself(monkeypatch, capsys, command):
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, command, "--help")
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: torchtitan {command}")
    assert command_module(command).__doc__.split(".")[0].split()[0] in out


def test_version(monkeypatch, capsys):
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"torchtitan {__version__}\n"


def test_a_misspelt_command(monkeypatch, capsys):
    assert run(monkeypatch, "trian") == 2
    assert capsys.readouterr().err == "error: no command 'trian'; did you mean 'train'?\n"


@pytest.mark.parametrize("removed", REPLACEMENTS)
def test_what_was_removed_names_the_way_to_do_it_now(monkeypatch, capsys, removed):
    assert run(monkeypatch, *removed.split(), "more") == 2
    assert capsys.readouterr().err == f"error: no `{removed}` any more: {REPLACEMENTS[removed]}\n"


def test_a_removed_option_is_found_among_others(monkeypatch, capsys):
    assert run(monkeypatch, "plan", "debug_model", "--search", "--try=3") == 2
    assert "no `plan --try` any more: write one layout" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rank", "world"),
    [("x", "2"), ("0", "abc"), ("-1", "2"), ("2", "2"), ("9" * 5000, "1"), ("٣", "4")],
)
def test_an_environment_that_no_launcher_made(monkeypatch, capsys, rank, world):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", world)
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")  # the entry sets it; restored after the test
    assert run_main(entry.main, []) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: RANK='")
    assert len(error) < 200


# ---- the launcher's arguments


@pytest.mark.parametrize(
    "argv",
    [
        ["my.toml", "--nproc-per-node", "8", "--log-dir", "logs", "--training.steps", "100"],
        ["--training.steps", "100", "--nproc-per-node=8", "--log-dir", "logs", "my.toml"],
        ["--log-dir", "logs", "--nproc_per_node", "8", "my.toml", "--training.steps", "100"],
        [
            "--nproc-per-node",
            "8",
            "--log-dir",
            "logs",
            "--",
            "--job.config_file=my.toml",
            "--training.steps",
            "100",
        ],
    ],
)
def test_options_and_flags_mix_in_any_order(argv):
    options, torchrun, config = _parse(argv)
    assert (options.nproc_per_node, options.nnodes, options.max_restarts) == (8, (1, 1), 0)
    assert torchrun == ["--log-dir", "logs"]
    assert config == ["--job.config_file=my.toml", "--training.steps", "100"]


def test_a_flag_of_torchrun_does_not_take_a_configuration_for_its_value():
    _, torchrun, config = _parse(["--no-python", "llama3_8b", "--nproc-per-node", "2"])
    assert (torchrun, config) == (["--no-python"], ["--job.config_file=llama3_8b"])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--nproc-per-nod", "8"], "did you mean '--nproc-per-node'?"),
        (["--max-restart=1"], "did you mean '--max-restarts'?"),
        (["--nprocs", "2"], "did you mean '--nproc-per-node'?"),
        (["--num-nodes=2"], "did you mean '--nnodes'?"),
        (["--nproc-per-node", "0"], "must be 1 or more"),
        (["--nnodes", "2:1"], "neither a number of nodes nor MIN:MAX"),
        (["--nnodes", "2"], "--rdzv-endpoint: with several nodes"),
        (["--nnodes", "2", "--rdzv-endpoint=a:1"], "RDZV_SECRET: with several nodes"),
        (["my.toml", "--config", "other.toml"], "two configurations"),
        (["--numa-binding", "node"], "--numa-binding: no GPU here"),
        (["--numa-binding", "on"], "choose from"),
    ],
)
def test_wrong_launcher_options(capsys, monkeypatch, argv, message):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("RDZV_SECRET", "too short")
    with pytest.raises(SystemExit) as ended:
        _parse(argv)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_numa_binding_reaches_torchrun_if_it_can_work(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("PATH", str(tmp_path))
    argv = ["--numa-binding", "node", "debug_model"]
    with pytest.raises(SystemExit):
        _parse(argv)
    assert "install it" in capsys.readouterr().err
    (tmp_path / "numactl").touch(mode=0o755)
    options, passed_on, _ = _parse(argv)
    assert passed_on == []
    assert "--numa-binding=node" in _torchrun_options(options)
    assert not any("numa" in option for option in _torchrun_options(_parse([])[0]))

"""A command's own options and the configuration's flags on one line, in any order."""

import argparse

import pytest

from torchtitan.commands import COMMANDS, command_module
from torchtitan.config.load.command_line import parse_args, split_args
from torchtitan.config.load.decode import load_config
from torchtitan.utils.errors import ConfigError


def parse(*argv, **kwargs):
    parser = argparse.ArgumentParser(prog="tool")
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--fast", action="store_true")
    return parse_args(parser, list(argv), **kwargs)


@pytest.mark.parametrize(
    "argv",
    [
        "run.toml --world 4 --fast --training.steps 5 --checkpoint.enable",
        "--training.steps 5 --checkpoint.enable run.toml --world=4 --fast",
        "--fast --checkpoint.enable --world 4 --training.steps=5 run.toml",
        "--fast --config run.toml --world 4 --training.steps=5 --checkpoint.enable",
        "--world 4 --fast run.toml -- --training.steps 5 --checkpoint.enable",
        "--checkpoint.enable --job.config-file=run.toml --training.steps 5 --fast --world 4",
    ],
)
def test_any_order(argv, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text("[training]\nseq_len = 64\nsteps = 9\n")
    options, flags = parse(*argv.split())
    assert (options.config, options.world, options.fast) == ("run.toml", 4, True)
    config = load_config(flags).config
    assert (config.training.seq_len, config.training.steps, config.checkpoint.enable) == (
        64,
        5,
        True,
    )


def test_a_flag_takes_its_values_and_leaves_the_file():
    listed = ["--checkpoint.exclude_from_loading", "model", "optimizer"]
    assert split_args([*listed, "run.toml", "--fast"]) == (["run.toml", "--fast"], listed)
    saved = ["--job.save_config_file", "used.toml"]
    assert split_args([*saved, "run.toml"]) == (["run.toml"], saved)
    assert split_args(["--training.steps=5", "7"]) == (["7"], ["--training.steps=5"])
    assert split_args(["--checkpoint.load_step", "-1", "--world", "2"])[0] == ["--world", "2"]


@pytest.mark.parametrize(
    ("flag", "meant"),
    [("--training.stpes", "training.steps"), ("--traning.steps", "training"), ("--fast.x", "")],
)
def test_a_misspelt_key_or_section_is_the_configurations(flag, meant):
    options, flags = parse("--fast", flag, "5")
    assert options.fast
    with pytest.raises(ConfigError, match=f"unknown (key|section).*{meant}"):
        load_config(flags)


def test_after_the_separator_every_flag_is_the_configurations():
    options, flags = parse("run.toml", "--", "--steps", "5")
    assert options.config == "run.toml"
    with pytest.raises(ConfigError, match=r"--steps: unknown key; did you mean 'training\.steps'"):
        load_config(flags[1:])


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--fsat"], "unrecognized arguments: --fsat"),
        (["a.toml", "b.toml"], "unrecognized arguments: b.toml"),
        (["a.toml", "--config", "b.toml"], "two configurations"),
        (["--world", "x"], "invalid int value: 'x'"),
        ([], "name the configuration"),
    ],
)
def test_other_mistakes_are_argparses(argv, text, capsys):
    with pytest.raises(SystemExit) as done:
        parse(*argv, file_required=True)
    assert done.value.code == 2
    assert text in capsys.readouterr().err


def test_help(capsys):
    for argv, text in (
        (["--help"], "--fast"),
        (["run.toml", "--help", "training"], "--training.seq_len  integer"),
    ):
        with pytest.raises(SystemExit) as done:
            parse(*argv)
        assert done.value.code == 0
        assert text in capsys.readouterr().out
    with pytest.raises(ConfigError, match="no section 'trainin'"):
        parse("--help", "trainin")


def arguments_of(parser):
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                yield from arguments_of(subparser)
        elif action.nargs != 0 and not action.choices:
            yield parser, action


ARGUMENTS = [pair for name in COMMANDS for pair in arguments_of(command_module(name).parser())]


def read(parser, action, text):
    """The value of an argument's text, or None if it is refused."""
    try:
        return parser._get_value(action, text)
    except (argparse.ArgumentError, ConfigError):
        return None


def test_every_argument_refuses_nothing_and_numbers_that_are_none():
    """Nothing is an unset variable of the shell; but a prompt may be empty."""
    empty = {action.dest for parser, action in ARGUMENTS if read(parser, action, "") is not None}
    assert (empty, len(ARGUMENTS) > 80) == ({"prompt"}, True)
    numbers = [pair for pair in ARGUMENTS if read(*pair, "1") in (1, (1, 1))]
    assert len(numbers) > 25
    for text in ("nan", "inf", "-1", "1e999"):
        taken = {
            action.dest for parser, action in numbers if read(parser, action, text) is not None
        }
        assert taken == ({"ranks"} if text == "-1" else set()), text  # rehearse checks its ranks


def test_a_path_means_the_same_to_every_command(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    kinds = ("FILE", "DIR", "FOLDER", "PATH", "CONFIG|PATH", "RUN")
    paths = [(parser, action) for parser, action in ARGUMENTS if action.metavar in kinds]
    assert len(paths) >= 20
    for text in ("~/x", "$HOME/x"):
        assert {str(read(*pair, text)) for pair in paths} == {"/home/someone/x"}
    assert {read(*pair, "$NOT_SET/x") for pair in paths} == {None}

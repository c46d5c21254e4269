"""Print a completion script for bash or zsh: commands, options, configuration keys and TOML files.

torchtitan completion bash > ~/.local/share/bash-completion/completions/torchtitan
torchtitan completion zsh > ~/.torchtitan.zsh
and in ~/.zshrc, after compinit: source ~/.torchtitan.zsh
"""

import argparse

from torchtitan.commands import COMMANDS, command_module
from torchtitan.config.load.keys import FIELDS
from torchtitan.utils.argument_types import command_parser
from torchtitan.utils.assets import shipped_configs

CONFIGURED = ("init", "train", "data", "plan", "rehearse", "config", "parity", "submit")
"""Commands that take a configuration file and its flags."""

SCRIPT = """\
_torchtitan() {
    local word=${COMP_WORDS[COMP_CWORD]} words=
    COMPREPLY=()
    if ((COMP_CWORD == 1)); then
        COMPREPLY=($(compgen -W '%(commands)s --help --version' -- "$word"))
        return
    fi
    case ${COMP_WORDS[1]} in
%(cases)s
    esac
    case ${COMP_WORDS[1]} in
        %(configured)s)
            if [[ $word == -* ]]; then
                words+=' %(keys)s'
            else
                words+=' %(configs)s'
                COMPREPLY=($(compgen -f -X '!*.toml' -- "$word") $(compgen -d -- "$word"))
            fi ;;
    esac
    COMPREPLY+=($(compgen -W "$words" -- "$word"))
}
complete -o default -o filenames -F _torchtitan torchtitan
"""
ZSH_HEAD = "autoload -U +X bashcompinit && bashcompinit\n"
"""Makes zsh run bash's completion functions."""


def words_for(parser: argparse.ArgumentParser) -> list[str]:
    """A command's options, the choices of its arguments, and the options of its subcommands."""
    words: list[str] = []
    for action in parser._actions:
        words += [option for option in action.option_strings if option.startswith("--")]
        if not action.option_strings:
            words += action.choices or ()
        if isinstance(action, argparse._SubParsersAction):
            words += [
                word for subcommand in action.choices.values() for word in words_for(subcommand)
            ]
    return list(dict.fromkeys(words))


def script(shell: str) -> str:
    """The completion script, which answers without starting Python."""
    cases = []
    for name in COMMANDS:
        words = " ".join(words_for(command_module(name).parser()))
        cases.append(f"        {name}) words='{words}' ;;")
    filled = SCRIPT % {
        "commands": " ".join(COMMANDS),
        "cases": "\n".join(cases),
        "configured": " | ".join(CONFIGURED),
        "keys": " ".join(f"--{key}" for key in FIELDS),
        "configs": " ".join(shipped_configs()),
    }
    return ZSH_HEAD + filled if shell == "zsh" else filled


def parser() -> argparse.ArgumentParser:
    parser = command_parser("completion", __doc__)
    parser.add_argument("shell", choices=["bash", "zsh"])
    return parser


def main(argv: list[str]) -> int:
    print(script(parser().parse_args(argv).shell), end="")
    return 0

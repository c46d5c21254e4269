"""Print a completion script for the shell: commands, options, configuration keys and TOML files.

eval "$(torchtitan completion bash)"     in ~/.bashrc
eval "$(torchtitan completion zsh)"      in ~/.zshrc, after compinit
"""

import argparse
import importlib

from torchtitan.commands import COMMANDS
from torchtitan.config.keys import FIELDS
from torchtitan.utils.assets import shipped_configs

CONFIGURED = ("train", "plan", "config", "parity", "submit")
"""Commands that take a configuration."""

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


def words_of(parser: argparse.ArgumentParser) -> list[str]:
    """A command's options and subcommands, and the options of those."""
    words: list[str] = []
    for action in parser._actions:
        words += [option for option in action.option_strings if option.startswith("--")]
        if isinstance(action, argparse._SubParsersAction):
            words += [*action.choices, *(word for sub in action.choices.values() for word in words_of(sub))]
    return list(dict.fromkeys(words))


def script(shell: str) -> str:
    cases = []
    for command in COMMANDS:
        words = words_of(importlib.import_module(f"torchtitan.commands.{command}").parser())
        cases.append(f"        {command}) words='{' '.join(words)}' ;;")
    filled = SCRIPT % {
        "commands": " ".join(COMMANDS),
        "cases": "\n".join(cases),
        "configured": " | ".join(CONFIGURED),
        "keys": " ".join(f"--{key}" for key in FIELDS),
        "configs": " ".join(shipped_configs()),
    }
    return ZSH_HEAD + filled if shell == "zsh" else filled


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchtitan completion", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shell", choices=["bash", "zsh"])
    return parser


def main(argv: list[str]) -> int:
    print(script(parser().parse_args(argv).shell), end="")
    return 0

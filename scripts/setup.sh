#!/usr/bin/env bash
# Finds or creates a Python environment for this project, and prints the path of its interpreter.
#
#   scripts/setup.sh                          installs what training needs
#   scripts/setup.sh --dev                    also installs what the tests need
#   scripts/setup.sh [--dev] --torch 2.15.0   with this release of torch, in .venv-torch-2.15.0
#
# An interpreter that already has torch (an active environment, a cluster image) is used, and its torch never replaced.
# Otherwise .venv is created once, with the files listed in requirements/, by their SHA-256.
#   TORCHTITAN_PYTHON  use this interpreter      TORCHTITAN_VENV  create the environment here instead of in .venv
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
say() { echo "setup: $*" >&2; }

extra=
release= # of torch, if not that of constraints.txt
while (($#)); do
    case $1 in
        --dev) extra=dev ;;
        --torch)
            release=${2:-}
            [[ $release =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] || { say "--torch needs a release, such as 2.15.0"; exit 2; }
            shift
            ;;
        *) say "unknown option $1; the options are --dev and --torch RELEASE"; exit 2 ;;
    esac
    shift
done
venv=${TORCHTITAN_VENV:-$root/.venv${release:+-torch-$release}}

# Prints the requirements that `$1` lacks, one per line; fails if it is older than Python 3.11.
missing() {
    "$1" - "$root/pyproject.toml" ${extra:+"$extra"} <<'PY'
import sys
if sys.version_info < (3, 11):
    sys.exit(1)
import re, tomllib
from importlib import metadata
project = tomllib.load(open(sys.argv[1], "rb"))["project"]
wanted = list(project["dependencies"])
for extra in sys.argv[2:]:
    wanted += project["optional-dependencies"][extra]
for requirement in wanted:
    try:
        metadata.version(re.split(r"[<>=\[ ]", requirement)[0])
    except metadata.PackageNotFoundError:
        print(requirement)
PY
}

has_torch() { "$1" -c 'from importlib import metadata; metadata.version("torch")' 2>/dev/null; }

# An interpreter whose torch is too old is left alone and not used. Of a newer one than any tested, training warns.
supported_torch() {
    local refusal
    refusal=$(PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} "$1" -c '
from torchtitan.utils.torch_versions import installed_torch, too_old
print(too_old(installed_torch()) or "")')
    [[ -z $refusal ]] || { say "not using $(command -v "$1"): $refusal"; false; }
}

pip_install() { # interpreter, arguments
    local python=$1
    shift
    "$python" -m pip install -qq --disable-pip-version-check "$@" >&2
}

# Installs with uv, if the environment has it: several GB take it seconds of CPU time, and pip minutes. It doesn't know
# pip's settings, such as a private index, so pip is tried next.
uv_install() { # interpreter, arguments
    "$1" -m uv pip install --quiet --python "$@" 2>/dev/null || pip_install "$@"
}

# Installs what is missing; a constraint keeps the installed torch.
complete() { # interpreter with torch, interpreter to install with
    local lacking version
    lacking=$(missing "$2")
    [[ -z $lacking ]] && return
    version=$("$1" -c 'from importlib import metadata; print(metadata.version("torch"))')
    say "keeping torch $version, adding: $(tr '\n' ' ' <<<"$lacking")"
    pip_install "$2" --requirement <(echo "$lacking") --constraint <(
        echo "torch==$version"
        grep -v '^torch==' "$root/constraints.txt"
    )
}

use_existing() { # interpreter with torch: prints the interpreter to use
    local python=$1
    if [[ -z $(missing "$python") ]]; then
        echo "$python"
    elif "$python" -c 'import os, sys; sys.exit(sys.prefix == sys.base_prefix and "CONDA_PREFIX" not in os.environ)'; then
        complete "$python" "$python"
        echo "$python"
    else # a system-wide installation: extend it in an environment of its own
        [[ -x $venv/bin/python ]] || "$python" -m venv --system-site-packages "$venv"
        complete "$python" "$venv/bin/python"
        echo "$venv/bin/python"
    fi
}

install_torch() { # interpreter
    local pin
    pin=${release:+torch==$release}
    pin=${pin:-$(grep '^torch==' "$root/constraints.txt")}
    if [[ $(uname -s) == Linux ]] && ! command -v nvidia-smi >/dev/null; then
        # No NVIDIA driver: install a CPU build, from pip's configured index if it has one, else from PyTorch's.
        pip_install "$1" "$pin+cpu" 2>/dev/null && return
        pip_install "$1" "$pin" --index-url https://download.pytorch.org/whl/cpu 2>/dev/null && return
    fi
    uv_install "$1" "$pin"
}

make_venv() {
    local python stamp=$venv/.ready-${extra:-run} wanted locked
    wanted=$(cat "$root/pyproject.toml" "$root/constraints.txt" "$root/requirements/${extra:-run}.txt" | cksum)
    [[ -f $stamp && $(<"$stamp") == "$wanted" ]] && return
    if [[ ! -x $venv/bin/python ]]; then
        for python in python3 python3.13 python3.12 python3.11 python; do
            command -v "$python" >/dev/null && missing "$python" >/dev/null 2>&1 && break
            python=
        done
        [[ -n $python ]] || { say "needs Python 3.11 or newer; none found on PATH"; exit 1; }
        say "creating $venv (once; takes a few minutes)"
        "$python" -m venv "$venv"
    fi
    locked=(--require-hashes --no-deps --requirement)
    if [[ -n $extra$release ]]; then # the hundreds of packages of the tests take pip minutes
        pip_install "$venv/bin/python" "${locked[@]}" <(awk '/^[^ ]/ {uv = /^uv==/} uv' "$root/requirements/dev.txt")
    fi
    uv_install "$venv/bin/python" "${locked[@]}" "$root/requirements/${extra:-run}.txt"
    has_torch "$venv/bin/python" || install_torch "$venv/bin/python"
    pip_install "$venv/bin/python" --no-deps --no-build-isolation --editable "$root"
    echo "$wanted" >"$stamp"
}

if [[ -n $release ]]; then
    make_venv
    echo "$venv/bin/python"
    exit
fi
if [[ -n ${TORCHTITAN_PYTHON:-} ]]; then
    supported_torch "$TORCHTITAN_PYTHON"
    complete "$TORCHTITAN_PYTHON" "$TORCHTITAN_PYTHON"
    echo "$TORCHTITAN_PYTHON"
    exit
fi
for python in python python3; do
    if command -v "$python" >/dev/null && missing "$python" >/dev/null 2>&1 && has_torch "$python"; then
        supported_torch "$python" || continue
        use_existing "$(command -v "$python")"
        exit
    fi
done
make_venv
echo "$venv/bin/python"

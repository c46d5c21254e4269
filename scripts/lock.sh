#!/usr/bin/env bash
# Writes requirements/run.txt and requirements/dev.txt: every package that scripts/setup.sh installs, with the SHA-256 of
# its files. Run it after changing pyproject.toml or constraints.txt. Needs uv.
#
# torch and its CUDA packages are left out, because their files differ between indexes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
lock() { # options
    "$python" -m uv pip compile pyproject.toml --constraint constraints.txt --universal --python-version 3.11 \
        --generate-hashes --no-annotate --custom-compile-command scripts/lock.sh --quiet "${skip[@]}" "$@" >/dev/null
}
skip=(--no-emit-package torch --no-emit-package triton)
cuda=$("$python" -m uv pip compile pyproject.toml --constraint constraints.txt --universal \
    --python-version 3.11 --no-annotate --no-header --quiet | sed -nE 's/^((nvidia|cuda)-[a-z0-9-]*)==.*/\1/p')
for name in $cuda; do skip+=(--no-emit-package "$name"); done
lock -o requirements/run.txt
lock -o requirements/dev.txt --extra dev

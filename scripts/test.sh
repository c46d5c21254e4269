#!/usr/bin/env bash
# Sets up what the tests need, then checks style, types and behavior. Arguments go to pytest:
#   scripts/test.sh tests/unit -k config
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$("$root/scripts/setup.sh" --dev)
cd "$root"
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m mypy
exec "$python" -m pytest "$@"

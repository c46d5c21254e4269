#!/usr/bin/env bash
# Checks style, types and behavior, after setting up what the tests need.
#
#   scripts/test.sh --fast    tests that start no processes: a minute
#   scripts/test.sh           the suite
#   scripts/test.sh --all     and the long tests: the whole support matrix, the long soak
#
# Other arguments go to pytest: scripts/test.sh tests/unit -k config -n 0 (-n 0: in one process, for a debugger)
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case ${1:-} in
    --fast) shift; tier=(tests/unit -m "not slow and not e2e") ;;
    --all) shift; tier=() ;;
    *) tier=(-m "not slow") ;;
esac
python=$("$root/scripts/setup.sh" --dev)
cd "$root"
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m mypy
# Two workers: many tests wait for processes, and most others use one core.
exec "$python" -m pytest -n 2 --dist worksteal "${tier[@]}" "$@"

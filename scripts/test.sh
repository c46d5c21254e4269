#!/usr/bin/env bash
# Checks style, types and behavior, after setting up what the tests need.
#
#   scripts/test.sh --fast    tests that start no processes: a minute
#   scripts/test.sh           the suite
#   scripts/test.sh --all     and the long tests: the whole support matrix, the long soak
#
# Other arguments go to pytest: scripts/test.sh tests/unit -k config
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
exec "$python" -m pytest "${tier[@]}" "$@"

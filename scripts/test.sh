#!/usr/bin/env bash
# Checks style, types and behavior, after setting up what the tests need.
#
#   scripts/test.sh --fast    tests that start no processes: a minute
#   scripts/test.sh           the suite
#   scripts/test.sh --all     and the long tests: the whole support matrix, the long soak
#   scripts/test.sh --long    the long tests alone; with --share 2/8 the second of eight equal shares
#   scripts/test.sh --corner  unit tests of what computes or saves with torch, a cell of the support matrix per feature, and
#                             steps compiled for a GPU: what a release of torch breaks
#
# `--torch 2.15.0` before any of these tests on that release, in an environment of its own (.venv-torch-2.15.0), and
# leaves out style and types.
# Other arguments go to pytest: scripts/test.sh tests/unit -k config -n 0 (-n 0: in one process, for a debugger)
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# Where it is set, as in many containers, each of hundreds of processes compiles 900 modules again, which takes 3 to 5 s.
unset PYTHONDONTWRITEBYTECODE
release=()
[[ ${1:-} == --torch ]] && release=(--torch "${2:-}") && shift 2
tests=()
corner=
marks="not slow"
case ${1:-} in
    --fast)
        tests=(tests/unit)
        marks="not slow and not e2e and not ranks"
        shift
        ;;
    --corner)
        corner=1
        marks="not e2e and (not slow or corner)"
        shift
        ;;
    --all) marks= && shift ;;
    --long) marks=slow && shift ;;
esac
python=$("$root/scripts/setup.sh" --dev "${release[@]}")
cd "$root"
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
if [[ -n $corner ]]; then
    files=$("$python" -m tests.import_graph)
    mapfile -t tests <<<"$files"
    tests+=(tests/distributed/test_matrix.py::test_corner tests/cuda)
fi
if ((${#release[@]} == 0)); then
    "$python" -m ruff check .
    "$python" -m ruff format --check .
    # Beside the tests, some of which wait; its findings are shown at the end.
    types=$(mktemp)
    nice "$python" -m mypy >"$types" 2>&1 &
    trap 'kill "$!" 2>/dev/null || true; rm -f "$types"' EXIT
fi
# Two workers: many tests wait for processes, and most others use one core.
status=0
"$python" -m pytest -n 2 --dist worksteal -m "$marks" "${tests[@]}" "$@" || status=$?
if ((${#release[@]} == 0)); then
    wait "$!" || status=1
    cat "$types"
fi
exit "$status"

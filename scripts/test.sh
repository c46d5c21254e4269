#!/usr/bin/env bash
# Checks style, types and behavior, after setting up what the tests need.
#
#   scripts/test.sh           tests that start no processes, and the shortest real proof of each promise: 6 minutes
#   scripts/test.sh --rest    the rest of the suite
#   scripts/test.sh --long    the long tests: the whole support matrix, the long soak; with --share 2/8 the second of eight
#                             equal shares
#   scripts/test.sh --all     all three
#   scripts/test.sh --corner  unit tests of what computes or saves with torch, a cell of the support matrix per feature, and
#                             steps compiled for a GPU: what a release of torch breaks
#   scripts/test.sh --record  the first two, and enters the seconds of each file into tests/seconds.csv
#
# `--torch 2.15.0` before any of these tests on that release, in an environment of its own (.venv-torch-2.15.0), and
# leaves out style and types.
# Other arguments go to pytest: scripts/test.sh tests/unit -k config -n 0 (-n 0: in one process, for a debugger)
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# Where it is set, as in many containers, each of hundreds of processes compiles 900 modules again, which takes 3 to 5 s.
unset PYTHONDONTWRITEBYTECODE
release=
[[ ${1:-} == --torch ]] && release=${2:-none} && shift 2
style=1
beside= # tests that wait for processes, run beside the others
marks="not slow and (proof or not (ranks or e2e))"
case ${1:-} in
    --rest)
        style=
        marks="not slow and not proof and ranks and not e2e"
        beside="not slow and not proof and e2e"
        shift
        ;;
    --long) style= && marks=slow && shift ;;
    --all) marks= && shift ;;
    --corner)
        style=
        marks="not e2e and (not slow or corner)"
        shift
        ;;
    --record)
        marks="not slow"
        shift
        set -- --record tests/seconds.csv "$@"
        ;;
esac
[[ -n $release ]] && style=
python=$("$root/scripts/setup.sh" --dev ${release:+--torch "$release"})
cd "$root"
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
if [[ $marks == *corner* ]]; then
    files=$("$python" -m tests.import_graph)
    # shellcheck disable=SC2086 # names without spaces
    set -- $files tests/distributed/test_matrix.py::test_corner tests/cuda "$@"
fi
output=$(mktemp)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -f "$output"' EXIT
if [[ -n $style ]]; then
    "$python" -m ruff check .
    "$python" -m ruff format --check .
    # Beside the tests, some of which wait; its findings are shown at the end.
    nice "$python" -m mypy >"$output" 2>&1 &
elif [[ -n $beside ]]; then
    "$python" -m pytest -n 2 --dist worksteal -m "$beside" "$@" >"$output" 2>&1 &
fi
# Two workers: many tests wait for processes, and most others use one core.
status=0
"$python" -m pytest -n 2 --dist worksteal -m "$marks" "$@" || status=$?
if [[ -n $style$beside ]]; then
    wait "$!" || (($? == 5)) || status=1 # 5: no test of this kind among the arguments
    cat "$output"
fi
exit "$status"

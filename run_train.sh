#!/usr/bin/env bash
# Pretrains a model. Sets up an environment the first time; uses all GPUs of this machine, or the CPU.
#
#   ./run_train.sh                                             the demo: a small Llama on real text
#   NGPU=8 CONFIG_FILE=train_configs/llama3_8b.toml ./run_train.sh --training.steps 100
#
# Arguments are overrides (--section.key value; --help lists them). Environment:
#   CONFIG_FILE  TOML file (train_configs/debug_model.toml)   NGPU     ranks on this node (its GPUs; 1 on a CPU)
#   LOG_RANK     ranks that log, comma-separated (0)          NNODES   nodes (1), or MIN:MAX; RDZV_ENDPOINT=host:port too
#   MAX_RESTARTS starts after a failure (0; 10 with MIN:MAX nodes)
# Exit status 75: asked to stop (SIGTERM, SIGUSR1), everything saved; the same command goes on.
set -euo pipefail
trap 'exit 75' TERM USR1
command=
for name in CONFIG_FILE NGPU LOG_RANK NNODES RDZV_ENDPOINT MAX_RESTARTS; do
    [[ -n ${!name:-} ]] && command+="$name=$(printf '%q' "${!name}") "
done
TORCHTITAN_COMMAND=$command$(printf '%q ' "$0" "$@")
export TORCHTITAN_COMMAND
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=$("$root/scripts/setup.sh")
if [[ -z ${NGPU:-} && -n ${CUDA_VISIBLE_DEVICES+set} ]]; then # to which nvidia-smi pays no heed
    NGPU=$(tr , '\n' <<<"${CUDA_VISIBLE_DEVICES%%-1*}" | grep -c . || true)
    ((NGPU > 0)) || NGPU=1
elif [[ -z ${NGPU:-} ]]; then
    NGPU=$(nvidia-smi --list-gpus 2>/dev/null | grep -c . || true)
    ((NGPU > 0)) || NGPU=1
fi
# One segment that grows instead of many: less memory lost to fragmentation. The planner counts on it.
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}}
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} LOG_RANK=${LOG_RANK:-0}
exec "$python" -m torchtitan train --nproc-per-node "$NGPU" --nnodes "${NNODES:-1}" \
    --rdzv-endpoint "${RDZV_ENDPOINT:-}" ${MAX_RESTARTS:+--max-restarts "$MAX_RESTARTS"} -- \
    --job.config_file "${CONFIG_FILE:-$root/train_configs/debug_model.toml}" "$@"

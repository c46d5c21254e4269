#!/usr/bin/env bash
# Pretrain a model. Sets up an environment the first time; uses all GPUs of this machine, or the CPU.
#
#   ./run_train.sh                                             the demo: a small Llama on real text
#   NGPU=8 CONFIG_FILE=train_configs/llama3_8b.toml ./run_train.sh --training.steps 100
#
# Arguments override the configuration: --section.key value. Environment:
#   CONFIG_FILE    TOML file, or the bare name of one in train_configs (debug_model)
#   NGPU           ranks on this node (its GPUs; 1 without)
#   NNODES         number of nodes (1), or MIN:MAX; with several, also
#   RDZV_ENDPOINT  HOST:PORT of the first node; more after commas, which take over when it is lost
#   RDZV_SECRET    the same on all nodes, and known to nobody else: openssl rand -hex 16
#   MAX_RESTARTS   restarts after a failure (0; 10 with MIN:MAX nodes)
#   NUMA_BINDING   node: bind each rank to the CPUs next to its GPU; needs numactl
#   LOG_RANK       ranks that log, comma-separated (0)
#   TORCHTITAN_PYTHON  interpreter to use instead of the environment in .venv
# Exit status 75: stopped by SIGTERM, SIGUSR1, SIGHUP or Ctrl-C and everything is saved; the same command resumes.

set -euo pipefail
trap 'exit 75' TERM USR1 INT HUP
command=
for name in CONFIG_FILE NGPU LOG_RANK NNODES RDZV_ENDPOINT MAX_RESTARTS NUMA_BINDING; do
    [[ -n ${!name:-} ]] && command+="$name=$(printf '%q' "${!name}") "
done
TORCHTITAN_COMMAND=$command$(printf '%q ' "$0" "$@")
export TORCHTITAN_COMMAND
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=$("$root/scripts/setup.sh")
if [[ ${!#} == --help || ${!#} == -h ]]; then
    sed -n '2,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    echo
fi
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
# Python handles a signal that arrives while it starts later, if this is GNU env.
blocked=(env --block-signal=TERM --block-signal=USR1 --block-signal=INT --block-signal=HUP)
"${blocked[@]}" true 2>/dev/null || blocked=(env)
exec "${blocked[@]}" "$python" -m torchtitan train ${NGPU:+--nproc-per-node="$NGPU"} \
    --nnodes="${NNODES:-1}" ${RDZV_ENDPOINT:+--rdzv-endpoint="$RDZV_ENDPOINT"} ${MAX_RESTARTS:+--max-restarts="$MAX_RESTARTS"} \
    ${NUMA_BINDING:+--numa-binding="$NUMA_BINDING"} -- \
    --job.config_file "${CONFIG_FILE:-$root/train_configs/debug_model.toml}" "$@"

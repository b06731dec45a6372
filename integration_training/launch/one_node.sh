#!/usr/bin/env bash
# Several ranks on this machine. Arguments are those of train.py:
#
#   RANKS=2 integration_training/launch/one_node.sh --config FILE [--mode sft+rl] [--section.key value …]
#
# RANKS: processes, one per device.  MAX_RESTARTS: times that all are started again after one was lost.  PYTHON: the one that has rollouts.
set -euo pipefail
train=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/train.py

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"           # what torchrun would set, with a warning; torch's own threads are model.threads
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1              # else ranks that are started again find the addresses of dead ones
exec "${PYTHON:-python}" -m torch.distributed.run \
    --standalone --nproc-per-node="${RANKS:-2}" --max-restarts="${MAX_RESTARTS:-1}" \
    "$train" "$@"

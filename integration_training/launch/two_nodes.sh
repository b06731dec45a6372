#!/usr/bin/env bash
# Several ranks on several machines, which find each other at HEAD. The same line on every machine, all within a few minutes:
#
#   HEAD=node1:29400 RANKS=8 integration_training/launch/two_nodes.sh --config FILE [--mode sft+rl] --output.dir /shared/runs/NAME
#
# and with HEAD=localhost:29400 in two shells of one machine. output.dir is on a filesystem that all machines see.
# HEAD: a machine of them and a free port; it keeps the rendezvous.  NODES: how many machines.  RANKS: processes on each, one per device.
# A run in output.dir that this launch has begun goes on when a machine was lost or replaced; one of an earlier launch needs --resume.
# MAX_RESTARTS, PYTHON: as in one_node.sh.  RUN_ID: tells two runs at one HEAD apart.
set -euo pipefail
train=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/train.py

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"           # what torchrun would set, with a warning; torch's own threads are model.threads
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1              # else ranks that are started again find the addresses of dead ones
exec "${PYTHON:-python}" -m torch.distributed.run \
    --nnodes="${NODES:-2}" --nproc-per-node="${RANKS:-1}" --max-restarts="${MAX_RESTARTS:-1}" \
    --rdzv-backend=c10d --rdzv-endpoint="${HEAD:?HOST:PORT of one of the machines}" --rdzv-id="${RUN_ID:-rollouts}" \
    "$train" "$@"

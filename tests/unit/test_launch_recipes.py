"""The launch scripts are scripts; what they start is tried in tests/e2e/test_ranks.py."""

import os
import subprocess
from pathlib import Path

from tests.support.text_tables import cases

LAUNCH = Path(__file__).resolve().parents[2] / "integration_training" / "launch"


@cases("name: one_node.sh two_nodes.sh slurm.sbatch")
def test_bash_can_read_it(name):
    done = subprocess.run(["bash", "-n", str(LAUNCH / name)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert name.endswith(".sbatch") or os.access(LAUNCH / name, os.X_OK)


def test_slurm_trains_on_the_first_nodes_and_serves_on_the_others(tmp_path):
    """With stand-ins for Slurm, curl and both Pythons, which write down what they are called with."""
    stand_ins = {
        "scontrol": "printf 'n%s\\n' 1 2 3",
        "srun": 'echo "srun $*" >> "$CALLS"; while [[ $1 == --* ]]; do shift; done; exec "$@"',
        "curl": 'echo "curl $*" >> "$CALLS"',
        "any-python": "true",
    }
    for name, body in stand_ins.items():
        path = tmp_path / name
        path.write_text(f"#!/usr/bin/env bash\n{body}\n", encoding="utf-8")
        path.chmod(0o755)
    calls = tmp_path / "calls"
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "CALLS": str(calls),
        "SLURM_JOB_NODELIST": "n[1-3]",
        "SLURM_JOB_ID": "77",
        "SLURM_GPUS_PER_NODE": "4",
        "MODEL": "/models/m",
        "PYTHON": "any-python",
        "ENGINE_PYTHON": "any-python",
    }
    arguments = ["--config", "c.toml", "--mode", "rl"]
    words = ["bash", str(LAUNCH / "slurm.sbatch"), *arguments]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    server, health, trainers = sorted(
        calls.read_text().splitlines(), key=lambda line: ("--nnodes" in line, line.startswith("curl"))
    )
    assert "--nodelist=n3" in server and "--model /models/m" in server
    assert health == "curl -sf http://n3:8000/health"
    assert "--nodelist=n1,n2" in trainers
    assert "--nnodes=2 --nproc-per-node=4" in trainers and "--rdzv-endpoint=n1:29400 --rdzv-id=77" in trainers
    ending = '--model.name /models/m --engine.kind vllm --engine.urls ["http://n3:8000"] --resume'
    assert trainers.endswith(" ".join([ending, *arguments]))

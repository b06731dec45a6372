"""Which rank a process is, whoever launched it, the command that launches several, and the launch scripts;
what these start is tried in tests/e2e/test_ranks.py.
"""

import json
import os
import subprocess
import sys
import tomllib

import pytest

from rollouts.errors import ConfigError
from rollouts.ranks.launch import Launch, read_launch, torchrun_command
from tests import ROOT
from tests.support.text_tables import cases, read_cells

TORCHRUN = tomllib.loads("""
RANK = "5"
WORLD_SIZE = "8"
LOCAL_RANK = "1"
LOCAL_WORLD_SIZE = "4"
MASTER_ADDR = "node-a"
MASTER_PORT = "29500"
TORCHELASTIC_RESTART_COUNT = "2"
""")


def test_what_torchrun_sets_is_the_place_of_the_process():
    assert read_launch(TORCHRUN) == Launch(5, 8, 1, 4, "node-a", 2)
    assert not read_launch(TORCHRUN).on_one_node
    assert read_launch({**TORCHRUN, "LOCAL_WORLD_SIZE": "8"}).on_one_node


def test_a_process_that_nobody_launched_is_alone():
    slurm = {"SLURM_PROCID": "3", "SLURM_NTASKS": "8"}  # a shell inside an allocation has these too
    for environ in ({}, {"RANK": "", "WORLD_SIZE": ""}, slurm, {"RANK": "0", "WORLD_SIZE": "1"}):
        assert read_launch(environ) == Launch(0, 1, 0, 1, "127.0.0.1", 0)


@cases(
    """
changes                          | message
RANK = ""                        | RANK='' must be a number from 0 to 7; .*torchrun
RANK = "one"                     | RANK='one' must be a number from 0 to 7; .*torchrun
RANK = "-1"                      | RANK=
RANK = "1.0"                     | RANK=
RANK = "1_0"                     | RANK=
RANK = "²"                       | RANK=
RANK = "8"                       | RANK=
RANK = "LONG"                    | RANK=
WORLD_SIZE = ""                  | WORLD_SIZE='' must be a number
WORLD_SIZE = "0"                 | WORLD_SIZE='0' must be a number from 1 to
LOCAL_WORLD_SIZE = "9"           | LOCAL_WORLD_SIZE='9' must be a number from 1 to 8
LOCAL_RANK = "4"                 | LOCAL_RANK='4' must be a number from 0 to 3
MASTER_ADDR = " "                | MASTER_ADDR is not set, but WORLD_SIZE=8
TORCHELASTIC_RESTART_COUNT = "x" | TORCHELASTIC_RESTART_COUNT='x' must be a number
""".replace("LONG", "9" * 5000)
)
def test_a_variable_that_is_wrong_is_named(changes: dict, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        read_launch({**TORCHRUN, **changes})


JOB = """
import json, os, sys
from pathlib import Path
from rollouts.ranks.launch import read_launch
launch = read_launch(os.environ)
told = json.dumps([launch._asdict(), sys.argv[1:]])
Path(f"rank-{launch.rank}-restart-{launch.restart}").write_text(told)
sys.exit(75 if launch.restart == 0 and launch.rank == 1 else 0)
"""


@pytest.mark.slow
def test_torchrun_starts_every_rank_with_the_arguments_and_starts_again_after_a_failure(tmp_path):
    (tmp_path / "job.py").write_text(JOB)
    command = torchrun_command(2, ["-m", "job", "--section.key", "a b"])
    assert command[0] == sys.executable
    command[command.index("--max-restarts=0")] = "--max-restarts=1"
    environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{ROOT}:{tmp_path}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    first, arguments = json.loads((tmp_path / "rank-1-restart-0").read_text())
    assert arguments == ["--section.key", "a b"]
    assert first["run_id"] and first["agent"]
    for rank in (0, 1):
        again = {**first, "rank": rank, "local_rank": rank, "restart": 1}
        # the launch is the same
        assert json.loads((tmp_path / f"rank-{rank}-restart-1").read_text()) == [again, arguments]


# --- scripts ------------------------------------------------------------------------------------------------


LAUNCH = ROOT / "integration_training/launch"


@cases("name: one_node.sh two_nodes.sh slurm.sbatch")
def test_bash_can_read_it(name):
    done = subprocess.run(["bash", "-n", str(LAUNCH / name)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert name.endswith(".sbatch") or os.access(LAUNCH / name, os.X_OK)


STAND_INS = r"""
scontrol   | printf 'n%s\n' 1 2 3
srun       | echo "srun $*" >> "$CALLS"; while [[ $1 == --* ]]; do shift; done; exec "$@"
curl       | echo "curl $*" >> "$CALLS"
any-python | true
"""


def test_slurm_trains_on_the_first_nodes_and_serves_on_the_others(tmp_path):
    """With stand-ins for Slurm, curl and both Pythons, which write down what they are called with."""
    for name, body in read_cells(STAND_INS):
        path = tmp_path / name
        path.write_text(f"#!/usr/bin/env bash\n{body}\n")
        path.chmod(0o755)
    calls, arguments = tmp_path / "calls", "--config c.toml --mode rl"
    settings = f"""SLURM_JOB_NODELIST=n[1-3] SLURM_JOB_ID=77 SLURM_GPUS_PER_NODE=4 MODEL=/models/m
        PYTHON=any-python ENGINE_PYTHON=any-python CALLS={calls} PATH={tmp_path}:{os.environ["PATH"]}"""
    environment = os.environ | dict(word.split("=", 1) for word in settings.split())
    words = ["bash", str(LAUNCH / "slurm.sbatch"), *arguments.split()]
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
    assert trainers.endswith(f"{ending} {arguments}")

"""Which rank a process is, whoever launched it, and the command that launches several."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from rollouts.errors import ConfigError
from rollouts.ranks.launch import Launch, read_launch, torchrun_command
from tests.support.text_tables import cases

ROOT = Path(__file__).resolve().parents[2]
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
    assert read_launch(TORCHRUN) == Launch(
        rank=5, world_size=8, local_rank=1, local_world_size=4, master_addr="node-a", restart=2
    )
    assert not read_launch(TORCHRUN).on_one_node
    assert read_launch({**TORCHRUN, "LOCAL_WORLD_SIZE": "8"}).on_one_node


def test_a_process_that_nobody_launched_is_alone():
    alone = Launch(rank=0, world_size=1, local_rank=0, local_world_size=1, master_addr="127.0.0.1", restart=0)
    assert read_launch({}) == alone
    assert read_launch({"RANK": "", "WORLD_SIZE": "", "PATH": "/bin"}) == alone
    assert read_launch({"SLURM_PROCID": "3", "SLURM_NTASKS": "8"}) == alone, (
        "a shell inside an allocation has these too"
    )
    assert read_launch({"RANK": "0", "WORLD_SIZE": "1"}) == alone


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
        assert json.loads((tmp_path / f"rank-{rank}-restart-1").read_text()) == [again, arguments], (
            "the launch is the same"
        )

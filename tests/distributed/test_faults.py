"""What one rank alone meets while a backend opens ends the run on all of them, named; no launcher helps here."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
SOON_S = 120.0  # a collective would wait for half an hour


def test_a_rank_that_fails_alone_in_the_probe_ends_both_and_is_named_with_its_phase():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    place = {
        "WORLD_SIZE": 2,
        "LOCAL_WORLD_SIZE": 2,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": 1,
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.distributed.fault_program"],
            cwd=ROOT,
            env={
                **os.environ,
                **{name: str(value) for name, value in {**place, "RANK": rank, "LOCAL_RANK": rank}.items()},
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        assert ranks[1].stdout is not None
        assert ranks[1].stdout.readline() == "out of memory\n", ranks[1].communicate()
        since = time.monotonic()
        said = [rank.communicate(timeout=SOON_S) for rank in ranks]
        print(f"both had ended {time.monotonic() - since:.1f} s later")
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert "it opened" not in said[0][0]
    line = (
        "rollouts: rank 1 was lost during opening the model: OutOfMemoryError: no memory for 8 bytes; this"
        " process ends too\n"
    )
    assert said[0][1].endswith(line), said[0][1]
    assert [rank.returncode for rank in ranks] == [75, 1]
    assert "OutOfMemoryError: no memory for 8 bytes" in said[1][1]

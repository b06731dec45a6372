"""Real ranks without a launcher: what they tell each other, and who is named when one is killed, frozen or
fails while another hangs in a collective.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import Any

import pytest

from tests import ROOT
from tests.support.fork_server import place_ranks
from tests.support.text_tables import cases

SOON_S = 120.0  # for a busy machine; a collective would wait for half an hour


@contextmanager
def open_processes(job, count=2, *, silent_beats=20):
    """Ranks that are connected."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "SILENT_BEATS": str(silent_beats)}
    command = [sys.executable, "-m", "tests.distributed.rank_program", job]
    pipe = subprocess.PIPE
    ranks = [
        subprocess.Popen(command, cwd=ROOT, env=environ | place, stdout=pipe, stderr=pipe, text=True)
        for place in place_ranks(count)
    ]
    try:
        for rank in ranks:
            assert rank.stdout.readline() == "ready\n", rank.communicate()
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


@cases("lost: 0 1")
@cases(
    "how, reason",
    [
        (signal.SIGKILL, "its process has ended"),
        pytest.param(signal.SIGSTOP, "no heartbeat came for 20 s", marks=pytest.mark.slow),
    ],
)
def test_ranks_that_hang_in_a_collective_end_and_name_the_one_that_is_killed_or_frozen(
    lost: int, how, reason
):
    with open_processes("hang", 3) as ranks:
        ranks[lost].send_signal(how)
        since = time.monotonic()
        others = [rank for number, rank in enumerate(ranks) if number != lost]
        said = [rank.communicate(timeout=SOON_S)[1] for rank in others]
        line = f"rollouts: rank {lost} was lost during step {lost + 1}: {reason}; this process ends too\n"
        assert all(text.endswith(line) for text in said), said
        assert [rank.returncode for rank in others] == [75, 75]
        print(f"the others ended after {time.monotonic() - since:.1f} s")
        if how == signal.SIGSTOP:  # it goes on as if nothing had happened
            ranks[lost].send_signal(signal.SIGCONT)
            ranks[lost].communicate(timeout=SOON_S)
            assert ranks[lost].returncode == 75


@pytest.mark.slow
def test_ranks_that_are_all_frozen_for_long_have_lost_nobody():
    """As when a laptop sleeps."""
    with open_processes("hang", silent_beats=3) as ranks:
        for how in (signal.SIGSTOP, signal.SIGCONT):
            for rank in ranks:
                rank.send_signal(how)
            time.sleep(6.0)
        assert [rank.poll() for rank in ranks] == [None, None]


@cases("""
job    | codes     | first                     | last | …
answer | [0, 0, 0] | {1: '[2, 4]', 2: '[2, 4]'} |     | commands are answered, and leaving ends all
fail   | [75, 1]   | rollouts: rank 1 was lost during step 3: \
ModelError: no memory for 8 bytes; this process | ModelError: no memory for 8 bytes | the other names rank 1
force  | [0, 0]    |                           |      | rank 0 ends by force in a stop
""")
def test_ranks_end_together(job, codes: Any, first, last):
    with open_processes(job, len(codes)) as ranks:
        said = ["".join(rank.communicate(timeout=SOON_S)) for rank in ranks]
        assert [rank.returncode for rank in ranks] == codes, said
        assert first in said[0] and last in said[-1], said

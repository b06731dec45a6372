"""Three real processes over loopback: when one is killed or stopped, the others end within ten seconds and
say who it was.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXIT_RANK_LOST = 75
NOTICED_S = 10.0  # what is promised
SOON_S = 60.0


@contextmanager
def open_ranks(count: int = 3) -> Iterator[list[subprocess.Popen[str]]]:
    """Ranks that are connected and wait in something that cannot be interrupted."""
    ranks: list[subprocess.Popen[str]] = []
    try:
        for rank in range(count):
            place = {
                "RANK": rank,
                "WORLD_SIZE": count,
                "LOCAL_RANK": rank,
                "LOCAL_WORLD_SIZE": count,
                "MASTER_ADDR": "localhost",
            }
            ranks.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.distributed.control_rank"],
                    cwd=ROOT,
                    env={**os.environ, **{name: str(value) for name, value in place.items()}},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        address = ranks[0].stdout.readline()
        for rank in ranks[1:]:
            rank.stdin.write(address)
            rank.stdin.flush()
        assert [rank.stdout.readline() for rank in ranks] == ["ready\n"] * count, [
            rank.poll() for rank in ranks
        ]
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize(
    ("how", "reason"),
    [
        (signal.SIGKILL, "its connection ended, as when its process is killed"),
        pytest.param(signal.SIGSTOP, "nothing was heard from it for 6 s", marks=pytest.mark.slow),
    ],
)
def test_when_a_rank_is_killed_or_stopped_the_others_end_and_name_it_and_its_phase(
    lost: int, how: signal.Signals, reason: str
):
    with open_ranks() as ranks:
        ranks[lost].send_signal(how)
        since = time.monotonic()
        others = [rank for number, rank in enumerate(ranks) if number != lost]
        said = [rank.communicate(timeout=SOON_S)[1] for rank in others]
        took_s = time.monotonic() - since
        assert (
            said
            == [f"rollouts: rank {lost} was lost during step {lost + 1}: {reason}; this process ends too\n"]
            * 2
        )
        assert [rank.returncode for rank in others] == [EXIT_RANK_LOST] * 2
        assert took_s < NOTICED_S
        if how == signal.SIGSTOP:  # it goes on as if nothing had happened, and is told
            ranks[lost].send_signal(signal.SIGCONT)
            assert ranks[lost].communicate(timeout=SOON_S)[1] == said[0]
            assert ranks[lost].returncode == EXIT_RANK_LOST


@pytest.mark.slow
def test_a_launcher_that_was_stopped_as_a_whole_and_goes_on_has_lost_nobody():
    """As when a laptop sleeps: every clock stands still for longer than any silence."""
    with open_ranks() as ranks:
        for rank in ranks:
            rank.send_signal(signal.SIGSTOP)
        time.sleep(8.0)
        for rank in ranks:
            rank.send_signal(signal.SIGCONT)
        time.sleep(2.0)
        assert [rank.poll() for rank in ranks] == [None] * 3

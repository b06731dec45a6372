"""The follower as a process: what an outage of a tracker costs the run, that all rows arrive afterwards, and
that nothing outlives its purpose.
"""

import fcntl
import signal
import subprocess
import sys
import time

import pytest
import trio

from rollouts.run_dir import RunDir
from rollouts.trackers import launch
from rollouts.trackers.follower import position_path, read_position
from rollouts.trackers.launch import open_trackers
from tests.support.processes import find_processes, wait_until
from tests.support.text_tables import cases
from tests.support.tracker_runs import append, make_row, make_run, read_events, write_follower

pytest.importorskip("tensorboard")
NAMES = ["tensorboard"]
WHOLE = [(step, -float(step)) for step in range(1, 21)]
TRACK = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may start tests with it ignored
from rollouts.cli import main
sys.exit(main(["track", *sys.argv[1:]]))
"""


@pytest.fixture
def root(tmp_path):
    return make_run(tmp_path / "run")


def count_rows(root):
    return read_position(position_path(root, "tensorboard")).number


# --- beside a run -------------------------------------------------------------------------------------------


@cases("""
fault
refuse 2
hang
kill 2
middle 2
""")
async def test_an_outage_costs_the_run_nothing_and_all_rows_arrive_once(root, tmp_path, monkeypatch, fault):
    command, faults = write_follower(tmp_path)
    monkeypatch.setattr(launch, "FOLLOWER", command)
    monkeypatch.setattr(launch, "END_S", 0.3)
    faults.write_text(fault)
    took_s = []
    async with open_trackers(RunDir(root), NAMES, say=lambda text: None):
        await wait_until(position_path(root, "tensorboard").exists)
        for step in range(1, 21):
            began = time.perf_counter()
            append(root, make_row(step))
            took_s.append(time.perf_counter() - began)
            await trio.sleep(0.01)
        await wait_until(lambda: not faults.read_text() or fault == "hang")
    assert sorted(took_s)[10] < 0.1
    faults.unlink()
    track = start_track(root)
    assert (track.communicate(timeout=60)[0], track.returncode) == ("tensorboard: 20 rows sent\n", 0)
    assert read_events(root)["loss/total"] == WHOLE
    await wait_until(lambda: not find_processes(str(root)))


@cases("command", [["/nowhere/python"], [sys.executable, "-c", "raise SystemExit(7)"]])
async def test_a_follower_that_cannot_start_or_ends_at_once_is_said_and_no_more(root, monkeypatch, command):
    monkeypatch.setattr(launch, "FOLLOWER", command)
    said = []
    async with open_trackers(RunDir(root), NAMES, say=said.append):
        append(root, make_row(1))
        await wait_until(lambda: bool(said))
    assert "the follower of output.trackers" in said[0]
    assert "the follower has ended; to send the rest" in said[-1]


def test_a_killed_run_leaves_no_follower_but_all_rows_sent(root, tmp_path):
    command, _ = write_follower(tmp_path)
    script = f"""
import os, signal, trio
from pathlib import Path
from rollouts.run_dir import RunDir
from rollouts.trackers import launch
launch.FOLLOWER = {command!r}
async def run():
    async with launch.open_trackers(RunDir(Path({str(root)!r})), {NAMES!r}, say=print):
        while not Path({str(position_path(root, "tensorboard"))!r}).exists():
            await trio.sleep(0.02)
        os.kill(os.getpid(), signal.SIGKILL)
trio.run(run)
"""
    append(root, *(make_row(step) for step in range(1, 21)))
    done = subprocess.run([sys.executable, "-c", script], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    trio.run(wait_until, lambda: count_rows(root) == 20 and not find_processes(str(root)))
    assert read_events(root)["loss/total"] == WHOLE


# --- the command --------------------------------------------------------------------------------------------


def start_track(root, *arguments):
    command = [sys.executable, "-c", TRACK, str(root), "--to", "tensorboard", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_second_follower_waits_and_with_once_ends(root):
    append(root, make_row(1))
    (root / "trackers").mkdir()
    with (root / "trackers/tensorboard.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        once = start_track(root, "--once")
        out, _ = once.communicate(timeout=60)
        expected = "tensorboard: 0 rows sent; another process follows the run for it already\n"
        assert (once.returncode, out) == (3, expected)
        waiting = start_track(root)
        assert "waiting for it to end" in waiting.stderr.readline()
    out, _ = waiting.communicate(timeout=60)
    assert (waiting.returncode, out) == (0, "tensorboard: 1 rows sent\n")

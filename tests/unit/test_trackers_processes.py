"""Followers as processes: what an outage of a tracker costs the run, that all rows arrive afterwards, and
that nothing outlives its purpose.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import trio

from rollouts.run_dir import RunDir
from rollouts.trackers.commands import add_parser, run_track
from rollouts.trackers.launch import open_trackers
from rollouts.trackers.position import LeftOut, Position, position_path, read_position, write_position
from rollouts.trackers.supervisor import Limits, supervise
from tests.unit.tracker_files import append, make_row, make_run, read_events, write_supervisor, write_worker

pytest.importorskip("tensorboard")
NAMES = ["tensorboard"]
WHOLE = [(step, float(step)) for step in range(1, 21)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run")


async def follow_once(
    root: Path, command: Sequence[str], said: list[str], limits: Limits | None = None
) -> list[str]:
    """What `track` does of a run that is over, with workers that have faults: the trackers that did not take
    everything.
    """
    outcomes = await supervise(
        root,
        NAMES,
        wait_over=trio.lowlevel.checkpoint,
        limits=limits or Limits(),
        say_for=lambda name: said.append,
        command=command,
    )
    return [name for name, outcome in outcomes.items() if outcome != "sent"]


async def wait_until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    with trio.fail_after(seconds):
        while not true():  # noqa: ASYNC110
            await trio.sleep(0.02)


def count_rows(root: Path) -> int:
    position = read_position(position_path(root, "tensorboard"))
    return 0 if position is None else position.number


def find_processes(word: str) -> list[int]:
    """Processes with this word in their command line."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            found += [int(entry.name)] if word.encode() in command else []
    return found


# --- failures, real TensorBoard -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [
        "refuse 2",
        "kill 1",
        "hang 1",
        *(pytest.param(fault, marks=pytest.mark.slow) for fault in ("middle 2", "die 2", "kill 3")),
    ],
)
def test_all_rows_arrive_once_after_a_tracker_failed(root: Path, tmp_path: Path, fault: str):
    append(root, *(make_row(step) for step in range(1, 21)))
    command, faults = write_worker(tmp_path)
    faults.write_text(fault)
    said: list[str] = []
    assert trio.run(follow_once, root, command, said) == []
    assert read_events(root)["loss/total"] == WHOLE
    expected = {
        "refuse": "refused",
        "middle": "in the middle",
        "kill": "signal 9",
        "die": "signal 9",
        "hang": "hung and was ended",
    }
    assert expected[fault.split()[0]] in said[0]
    assert find_processes(str(root)) == []


def test_a_service_that_stays_away_is_given_up_in_time_and_caught_up_with_later(root: Path, tmp_path: Path):
    append(root, *(make_row(step) for step in range(1, 21)))
    command, faults = write_worker(tmp_path)
    faults.write_text("refuse")
    began = time.monotonic()
    assert trio.run(follow_once, root, command, [], Limits(drain_s=0.5)) == NAMES
    assert time.monotonic() - began < 10
    assert trio.run(follow_once, root, command, [], Limits(patience_s=0.5)) == NAMES
    faults.unlink()
    assert trio.run(follow_once, root, command, []) == []
    assert read_events(root)["loss/total"] == WHOLE


def test_a_wrong_key_is_told_and_ends_what_is_to_be_sent_once(root: Path, tmp_path: Path):
    append(root, make_row(1))
    command, faults = write_worker(tmp_path)
    faults.write_text("wrong-key")
    said: list[str] = []
    assert trio.run(follow_once, root, command, said) == NAMES
    assert said == ["tensorboard: refuses rows: wrong key"]


# --- beside a run -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault", ["refuse", "hang", *(pytest.param(fault, marks=pytest.mark.slow) for fault in ("die", "middle"))]
)
def test_an_outage_costs_the_run_nothing_and_the_rows_arrive_later(root: Path, tmp_path: Path, fault: str):
    command, faults = write_supervisor(tmp_path)
    faults.write_text(fault)
    said: list[str] = []
    took: list[float] = []

    async def run() -> float:
        async with open_trackers(RunDir(root), NAMES, say=said.append, end_s=0.3, command=command):
            await wait_until(lambda: position_path(root, "tensorboard").exists())
            for step in range(1, 21):
                began = time.perf_counter()
                append(root, make_row(step))
                await trio.sleep(0.01)
                took.append(time.perf_counter() - began)
            return time.monotonic()

    async def both() -> float:
        ended = await run()
        waited = time.monotonic() - ended
        faults.unlink()
        await wait_until(lambda: count_rows(root) == 20 and not find_processes(str(root)))
        return waited

    waited = trio.run(both)
    assert sorted(took)[10] < 0.1
    assert waited < 3
    assert len(said) == 1
    assert f"python -m rollouts track {root} --to tensorboard --once" in said[0]
    assert read_events(root)["loss/total"] == WHOLE


def test_followers_end_with_a_run_that_was_told_of_nothing(root: Path, tmp_path: Path):
    command, _ = write_supervisor(tmp_path)
    said: list[str] = []

    async def run() -> None:
        async with open_trackers(RunDir(root), NAMES, say=said.append, end_s=10.0, command=command):
            append(root, make_row(1))
            await wait_until(lambda: count_rows(root) == 1)
            append(root, make_row(2))

    trio.run(run)
    assert said == []
    assert [step for step, _ in read_events(root)["loss/total"]] == [1, 2]
    assert find_processes(str(root)) == []
    assert (root / "trackers" / "followers.log").read_text() == ""


def test_a_follower_that_cannot_start_or_ends_at_once_is_said_and_no_more(root: Path):
    said: list[str] = []

    async def run(command: Sequence[str]) -> None:
        async with open_trackers(RunDir(root), NAMES, say=said.append, command=command):
            append(root, make_row(1))

    trio.run(run, ["/nowhere/python"])
    trio.run(run, [sys.executable, "-c", "raise SystemExit(7)"])
    assert "do not start" in said[0]
    assert "their followers have ended" in said[1]


def test_a_killed_run_leaves_no_follower_but_all_rows_sent(root: Path, tmp_path: Path):
    """Also when a child that it forked, as reward workers are, holds the other end of the pipe."""
    command, _ = write_supervisor(tmp_path)
    script = f"""
import os, signal, trio
from pathlib import Path
from rollouts.run_dir import RunDir
from rollouts.trackers.launch import open_trackers
async def run():
    async with open_trackers(RunDir(Path({str(root)!r})), {NAMES!r}, say=print, command={command!r}):
        if os.fork() == 0:
            os.read(os.pipe()[0], 1)
        await trio.sleep(0.5)
        print(os.getpid(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
trio.run(run)
"""
    append(root, *(make_row(step) for step in range(1, 21)))
    run = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True)
    assert run.wait(30) == -signal.SIGKILL
    try:
        trio.run(wait_until, lambda: count_rows(root) == 20 and not find_processes(str(root)))
    finally:
        os.killpg(run.pid, signal.SIGKILL)
        assert run.stdout is not None
        run.stdout.close()
    assert read_events(root)["loss/total"] == WHOLE


def test_a_killed_supervisor_takes_its_worker_along(root: Path, tmp_path: Path):
    command, faults = write_supervisor(tmp_path)
    faults.write_text("hang")
    append(root, make_row(1))
    said: list[str] = []

    async def run() -> None:
        async with open_trackers(RunDir(root), NAMES, say=said.append, command=command):
            await wait_until(lambda: len(find_processes(str(root))) == 2)
            supervisor = next(
                pid
                for pid in find_processes(str(root))
                if str(pid) in (Path(f"/proc/{pid}/stat").read_text().split()[5])
            )
            os.kill(supervisor, signal.SIGKILL)
            await wait_until(
                lambda: not find_processes(str(root)) or find_processes(str(root)) == [supervisor]
            )

    trio.run(run)
    assert "their followers have ended" in said[0]


def test_two_followers_of_one_tracker_take_turns(root: Path, tmp_path: Path):
    append(root, *(make_row(step) for step in range(1, 21)))
    command, _ = write_worker(tmp_path)
    said: list[str] = []

    async def both() -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(partial(follow_once, root, command, said))

    trio.run(both)
    assert count_rows(root) == 20
    assert read_events(root)["loss/total"] == WHOLE


def test_a_worker_that_cannot_be_started_is_said_and_tried_again(root: Path):
    """As when the machine has no processes left."""
    append(root, make_row(1))
    said: list[str] = []
    assert trio.run(follow_once, root, ["/nowhere/python"], said, Limits(drain_s=0.8)) == NAMES
    assert len(said) >= 2
    assert "tensorboard: its follower cannot start ([Errno 2]" in said[0]


def test_a_machine_without_process_descriptors_costs_the_run_nothing(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As in a sandbox or under an old kernel, or when no descriptor is left."""

    def refuse(pid: int, flags: int = 0) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    command, _ = write_supervisor(tmp_path)
    said: list[str] = []

    async def run() -> None:
        async with open_trackers(RunDir(root), NAMES, say=said.append, end_s=20.0, command=command):
            append(root, make_row(1))

    trio.run(run)
    assert (said, count_rows(root)) == ([], 1)
    append(root, make_row(2))
    assert trio.run(follow_once, root, write_worker(tmp_path)[0], said) == []
    assert count_rows(root) == 2


def test_a_run_says_at_its_end_what_a_tracker_has_refused_for_good(root: Path):
    path = position_path(root, "tensorboard")
    path.parent.mkdir()
    write_position(
        path,
        Position("id", number=3, left_out=LeftOut(2, "row of metrics.jsonl (stage rl, step 7, attempt 1)")),
    )
    said: list[str] = []

    async def run() -> None:
        async with open_trackers(RunDir(root), NAMES, say=said.append, command=[sys.executable, "-c", ""]):
            pass

    trio.run(run)
    assert len(said) == 1
    assert (
        "tensorboard does not have all rows: 2 refused for good and left out, the last: row of metrics.jsonl"
        " (stage rl, step 7" in said[0]
    )
    assert str(root / "trackers" / "tensorboard.log") in said[0]


# --- the command --------------------------------------------------------------------------------------------


def test_the_command_follows_a_run_until_its_lock_is_free(root: Path, capfd: pytest.CaptureFixture[str]):
    import fcntl

    append(root, make_row(1))
    lock = os.open(root / "run.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_EX)
    command = [sys.executable, "-c", TRACK, str(root), "--to", "tensorboard"]
    track = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    trio.run(wait_until, lambda: count_rows(root) == 1)
    append(root, make_row(2))
    assert track.poll() is None
    os.close(lock)
    out, _ = track.communicate(timeout=30)
    assert (track.returncode, out) == (0, "tensorboard: 2 rows sent\n")
    assert run_track(argparse.Namespace(run_dir=root, to=["tensorboard"], once=True)) == 0
    assert capfd.readouterr().out == "tensorboard: 2 rows sent\n"


def lock_tracker(root: Path) -> int:
    """What a follower of the run holds while it is at work; given back when it is closed."""
    import fcntl

    (root / "trackers").mkdir(exist_ok=True)
    held = os.open(root / "trackers" / "tensorboard.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    fcntl.flock(held, fcntl.LOCK_EX)
    return held


def test_once_ends_though_another_process_follows_the_run(
    root: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OTEL_EXPORTER_PROMETHEUS_PORT", "0")
    append(root, make_row(1))
    once = argparse.Namespace(run_dir=root, to=["tensorboard", "prometheus"], once=True)
    held = lock_tracker(root)
    assert run_track(once) == 3
    assert (
        capfd.readouterr().out
        == "tensorboard: 0 rows sent; another process follows the run for it already\nprometheus: 1 rows"
        " sent\n"
    )
    os.close(held)
    assert run_track(once) == 0
    assert capfd.readouterr().out == "tensorboard: 1 rows sent\nprometheus: 1 rows sent\n"


def test_without_once_another_follower_is_waited_for_and_that_is_said_once(root: Path):
    append(root, make_row(1))
    held = lock_tracker(root)
    command = [sys.executable, "-c", TRACK, str(root), "--to", "tensorboard"]
    track = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert track.stderr is not None
    waits = "tensorboard: another process follows the run for this tracker; waiting for it to end\n"
    assert track.stderr.readline() == waits
    assert track.poll() is None
    os.close(held)
    out, err = track.communicate(timeout=30)
    assert (track.returncode, out, err) == (0, "tensorboard: 1 rows sent\n", "")


def test_ctrl_c_ends_it_with_the_command_that_goes_on(root: Path):
    import fcntl

    append(root, make_row(1))
    lock = os.open(root / "run.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_EX)
    command = [sys.executable, "-c", TRACK, str(root), "--to", "tensorboard"]
    track = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    trio.run(wait_until, lambda: count_rows(root) == 1)
    track.send_signal(signal.SIGINT)
    try:
        out, err = track.communicate(timeout=30)
    finally:
        track.kill()
        os.close(lock)
    assert (track.returncode, out) == (130, "")
    assert err == f"stopped; to send the rest: python -m rollouts track {root} --to tensorboard --once\n"
    assert find_processes(str(root)) == []


def test_help_tells_the_exit_codes(capsys: pytest.CaptureFixture[str]):
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    with pytest.raises(SystemExit):
        parser.parse_args(["track", "--help"])
    assert "3 with --once, another process" in " ".join(capsys.readouterr().out.split())


TRACK = """
import argparse, signal, sys
from rollouts.trackers.commands import add_parser
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts tests in the background has it ignored
parser = argparse.ArgumentParser()
add_parser(parser.add_subparsers())
arguments = parser.parse_args(["track", *sys.argv[1:]])
sys.exit(arguments.run(arguments))
"""

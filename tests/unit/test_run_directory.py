"""One run at a time in a directory, whoever starts the second, and however the first ends."""

import errno
import fcntl
import os
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest

from rollouts.config.schema import RunConfig
from rollouts.errors import RunDirError
from rollouts.preflight.run_directory import check_run_dir, lock_run_dir
from rollouts.run_dir import RunDir, describe_activity, find_activity, is_locked
from tests.support.text_tables import cases

HOLD = """
import sys
from pathlib import Path
from rollouts.preflight.run_directory import lock_run_dir
from rollouts.run_dir import RunDir
import subprocess
lock_run_dir(RunDir(Path(sys.argv[1])))
code = "import sys; print('here', flush=True); sys.stdin.read()"
child = subprocess.Popen([sys.executable, "-c", code], close_fds=False)
sys.stdin.read()
"""


check_unlocked = partial(check_run_dir, config=RunConfig(), resume=True)


def test_a_second_run_is_refused_and_told_who_holds_the_directory(tmp_path):
    run_dir = RunDir(tmp_path / "run")
    check_unlocked(run_dir)
    assert not run_dir.root.exists()  # looking changes nothing
    descriptor = lock_run_dir(run_dir)
    named = rf"run is in use by process {os.getpid()} on \S+, since 20\d\d-.*--output\.dir DIR"
    for look in (lock_run_dir, check_unlocked):
        with pytest.raises(RunDirError, match=named):
            look(run_dir)
    os.close(descriptor)
    check_unlocked(run_dir)
    os.close(lock_run_dir(run_dir))


def test_the_lock_ends_with_kill_9_though_a_started_program_lives_on(tmp_path):
    run_dir = RunDir(tmp_path)
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "here\n"  # of the child, which has inherited what a child inherits
        with pytest.raises(RunDirError, match=f"process {holder.pid} on"):
            lock_run_dir(run_dir)
        holder.kill()
        holder.wait()
        os.close(lock_run_dir(run_dir))  # the child ends with the pipe


def test_the_lock_ends_with_the_run_though_a_forked_child_lives_on(tmp_path):
    run_dir = RunDir(tmp_path / "run")
    descriptor, other = lock_run_dir(run_dir), lock_run_dir(RunDir(tmp_path / "other"))
    os.close(other)
    reused = os.open(os.devnull, os.O_RDONLY)
    assert reused == other
    (told, tell), (here, say) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        # says first whether the number that is another file's now is open still, then waits until the other
        # end is closed
        try:
            os.close(tell)
            is_open = os.fstat(reused).st_rdev == Path(os.devnull).stat().st_rdev
            os.write(say, b"open" if is_open else b"another")
            os.read(told, 1)
        finally:
            os._exit(0)
    os.close(say)
    assert os.read(here, 10) == b"open"
    with pytest.raises(RunDirError, match="is in use by"):
        lock_run_dir(run_dir)
    os.close(descriptor)
    os.close(lock_run_dir(run_dir))
    os.close(tell)
    assert os.waitpid(child, 0)[1] == 0
    for number in (told, here, reused):
        os.close(number)


@cases("error: ENOSYS ENOLCK EOPNOTSUPP")
def test_a_file_system_without_locks_is_warned_of_and_used(tmp_path, monkeypatch, caplog, error):
    monkeypatch.setattr(fcntl, "flock", refusing(getattr(errno, error)))
    os.close(lock_run_dir(RunDir(tmp_path)))
    check_unlocked(RunDir(tmp_path))
    assert f"the file system of {tmp_path} has no locks" in caplog.text
    assert f'"pid": {os.getpid()}' in RunDir(tmp_path).lock.read_text()


def test_a_disk_without_room_for_the_holders_name_is_locked_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "pwrite", refusing(errno.ENOSPC))
    descriptor = lock_run_dir(RunDir(tmp_path))
    with pytest.raises(RunDirError, match=r"in use by a process that .* does not name"):
        check_unlocked(RunDir(tmp_path))
    os.close(descriptor)


def refusing(number):
    return Mock(side_effect=OSError(number, os.strerror(number)))


def test_a_lock_that_is_a_link_is_not_followed(tmp_path):
    (tmp_path / "other").write_text("precious")
    RunDir(tmp_path).lock.symlink_to(tmp_path / "other")
    with pytest.raises(RunDirError, match="cannot be written"):
        lock_run_dir(RunDir(tmp_path))
    assert (tmp_path / "other").read_text() == "precious"


def test_a_directory_that_holds_only_a_lock_is_empty(tmp_path):
    config, run_dir = RunConfig(), RunDir(tmp_path / "run")
    descriptor = lock_run_dir(run_dir)
    check_run_dir(run_dir, config, resume=False, locked=True)
    with pytest.raises(RunDirError, match="in use by"):
        check_run_dir(run_dir, config, resume=True)
    os.close(descriptor)
    check_run_dir(run_dir, config, resume=False)
    # of a run that was killed while it wrote its first file; it could not be resumed
    (run_dir.root / ".tmp-config.toml").touch()
    check_run_dir(run_dir, config, resume=True)
    (run_dir.root / "metrics.jsonl").touch()
    with pytest.raises(RunDirError, match="is not empty"):
        check_run_dir(run_dir, config, resume=False)


def test_who_only_asks_whether_a_run_is_at_work_keeps_none_from_starting(tmp_path, monkeypatch):
    run_dir = RunDir(tmp_path)
    asking = os.open(run_dir.lock, os.O_RDONLY | os.O_CREAT)
    fcntl.flock(asking, fcntl.LOCK_SH)
    # the other process goes on, and has its answer
    monkeypatch.setattr(os, "sched_yield", lambda: os.close(asking))
    descriptor = lock_run_dir(run_dir)
    assert is_locked(run_dir)
    os.close(descriptor)
    assert is_locked(run_dir) is False


# --- whether a run is at work -------------------------------------------------------------------------------


def test_a_run_is_at_work_here_while_its_lock_is_held(tmp_path):
    run_dir, host = RunDir(tmp_path), socket.gethostname()
    descriptor = lock_run_dir(run_dir)
    assert find_activity(run_dir) == ("running", host, False)
    run_dir.summary.touch()  # written last, and the process has yet to end
    assert find_activity(run_dir).may_go_on
    os.close(descriptor)
    assert find_activity(run_dir) == ("finished", host, False)
    run_dir.summary.unlink()
    assert describe_activity(find_activity(run_dir)) == "stopped"


def test_a_lock_of_another_machine_that_is_not_seen_proves_nothing_until_there_is_a_summary(tmp_path):
    run_dir = RunDir(tmp_path)
    run_dir.lock.write_text(r'{"pid": 7, "host": "no\u001b[2Jde3"}')
    assert find_activity(run_dir).host == "no\\x1b[2Jde3"
    run_dir.lock.write_text('{"pid": 7, "host": "node3"}\n')
    activity = find_activity(run_dir)
    assert activity == ("perhaps running", "node3", True) and activity.may_go_on and not activity.certain
    assert describe_activity(activity) == "perhaps running on node3, whose lock may not be seen here"
    run_dir.summary.touch()
    assert find_activity(run_dir) == ("finished", "node3", False)


@cases("""
holder            | elsewhere
                  | no
[]                | no
{"host": "node3"} | yes
""")
def test_without_locks_a_run_may_be_at_work_until_it_has_a_summary(
    tmp_path, monkeypatch, holder, elsewhere: bool
):
    run_dir = RunDir(tmp_path)
    monkeypatch.setattr(fcntl, "flock", refusing(errno.ENOSYS))
    run_dir.lock.write_text(holder)
    activity = find_activity(run_dir)
    assert (activity.state, activity.elsewhere, activity.certain) == ("perhaps running", elsewhere, False)
    run_dir.summary.touch()
    assert find_activity(run_dir).state == "finished"

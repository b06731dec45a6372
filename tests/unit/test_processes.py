"""Child processes of a trainer are limited, tell how they ended, and leave nothing, however it ends."""

import json
import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
import trio

from rollouts.processes.process import open_process
from tests.support.processes import is_alive, wait_until
from tests.support.text_tables import cases

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no process can adopt orphans")
PYTHON = [sys.executable, "-I", "-S"]
TREE = [*PYTHON, str(Path(__file__).with_name("fake_inference_server.py"))]


def environment(pids):
    """A child that ignores SIGTERM, with two descendants in sessions of their own."""
    behaviour = {"never": True, "strays": True, "stubborn": True, "pids": str(pids)}
    return {"VLLM_API_KEY": "k", "FAKE_SERVER": json.dumps(behaviour)}


async def read_tree(pids, child):
    """The child with its descendants and guards: child, two strays, inner and outer guard."""
    await wait_until(lambda: pids.exists() and pids.read_text() != "")
    inner = psutil.Process(child).ppid()
    tree = [*map(int, pids.read_text().split()), inner, psutil.Process(inner).ppid()]
    assert len(tree) == 5 and all(map(is_alive, tree))
    return tree


@linux_only
@cases("end: leave kill terminate child inner outer")
async def test_nothing_is_left_of_a_tree(tmp_path, end):
    async def wait():
        assert await process.wait_ended() == (-9 if end == "child" else None)

    pids = tmp_path / "pids"
    async with open_process(TREE, env=environment(pids), log=tmp_path / "log", grace_s=0.2) as process:
        await process.wait_started()
        tree = await read_tree(pids, process.pid)
        if end in ("kill", "terminate"):
            getattr(process, end)()
        elif end != "leave":
            os.kill(tree[{"inner": 3, "outer": 4}.get(end, 0)], signal.SIGKILL)
        if end != "leave":
            with trio.fail_after(30):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(wait)
                    nursery.start_soon(wait)
            assert not any(map(is_alive, tree[:3]))
    assert not any(map(is_alive, tree[:3]))
    await wait_until(lambda: not any(map(is_alive, tree)))  # the guards close their sockets just before


PARENT = """
import json, sys, trio
from pathlib import Path
from rollouts.processes.process import open_process

async def main():
    argv, env, path, linger_s = json.loads(sys.argv[1])
    options = {"env": env, "log": Path(path), "with_channel": True, "linger_s": linger_s}
    async with open_process(argv, **options) as process:
        await process.wait_started()
        print(process.pid, flush=True)
        await trio.sleep_forever()

trio.run(main)
"""


@asynccontextmanager
async def open_parent(argv, env, log, linger_s):
    """A trainer, killed at the end, with a child: the child's id."""
    command = [sys.executable, "-c", PARENT, json.dumps([argv, env, str(log), linger_s])]
    parent = await trio.lowlevel.open_process(command, stdout=subprocess.PIPE)
    async with parent.stdout:
        with trio.fail_after(60):
            child = int(await parent.stdout.receive_some(100))
        try:
            yield child
        finally:
            parent.kill()
            await parent.wait()


@linux_only
@cases("first", [None, 3, 4], ids=["none", "inner", "outer"])
async def test_nothing_survives_a_trainer_that_is_killed(tmp_path, first: str | None):
    """Not even if a guard is killed just before it."""
    pids = tmp_path / "pids"
    async with open_parent(TREE, environment(pids), tmp_path / "log", 0.0) as child:
        tree = await read_tree(pids, child)
        if first:
            os.kill(tree[first], signal.SIGKILL)
    await wait_until(lambda: not any(map(is_alive, tree)))


@linux_only
@cases("""
work            | done
pass            | yes
time.sleep(1e6) | no
""")
async def test_a_process_that_lingers_finishes_its_work_after_a_killed_trainer(tmp_path, work, done: bool):
    code = f"import sys, time; sys.stdin.read(); {work}; open('{tmp_path}/done', 'w')"
    async with open_parent([*PYTHON, "-c", code], {}, tmp_path / "log", 20.0 if done else 0.3) as child:
        pass
    await wait_until(lambda: not is_alive(child))
    assert (tmp_path / "done").exists() == done


async def test_leaving_a_process_that_lingers_does_not_wait_for_it(tmp_path):
    code = f"import sys; sys.stdin.read(); open('{tmp_path}/done', 'w')"
    async with open_process([*PYTHON, "-c", code], with_channel=True, linger_s=60.0) as process:
        await process.wait_started()
    assert not process.has_ended
    await wait_until((tmp_path / "done").exists)
    os.waitpid(process.guard_pid, 0)  # noqa: ASYNC222


@cases("""
argv         | code | how
sh -c exit~3 | 3 | ended with exit code 3
sh -c kill~-9~$$ | -9 | was killed by SIGKILL
sh -c kill~-40~$$ | -40 | was killed by signal 40
/no/such/program | None | did not start: /no/such/program does not start:
""")
async def test_an_end_is_described(argv, code, how):
    async with open_process([word.replace("~", " ") for word in argv.split()]) as process:
        assert str(await process.wait_ended()) == code
        assert process.describe_end().startswith(how)


async def test_a_child_has_an_empty_stdin_and_no_files_of_the_trainers():
    code = "import os, sys; print(repr(sys.stdin.read()), sorted(os.listdir('/dev/fd')), flush=True)"
    readable, writable = os.pipe()
    os.set_inheritable(writable, True)
    async with open_process([*PYTHON, "-c", code]) as process:
        assert await process.wait_ended() == 0
        process.read_output()
        assert process.read_tail() == "'' ['0', '1', '2', '3']\n"  # the last one is the listing's own
    os.close(readable)
    os.close(writable)


async def test_memory_is_limited_also_of_what_a_child_starts():
    code = "import os; pid = os.fork(); pid and os._exit(os.waitpid(pid, 0)[1] >> 8); bytearray(1 << 30)"
    async with open_process([*PYTHON, "-c", code], memory_bytes=1 << 28) as process:
        assert await process.wait_ended() == 1
        process.read_output()
        assert "MemoryError" in process.read_tail()


async def test_output_above_its_limit_is_told_and_only_its_end_is_kept():
    async with open_process(["yes"], output_bytes=1 << 20) as process:
        with trio.fail_after(30):
            await process.wait_printed_too_much()
        assert 1 << 20 < process.printed <= (1 << 20) + (1 << 16)
        assert process.read_tail() == "y\n" * (1 << 15)


async def test_a_log_is_appended_to_and_closed_to_others(tmp_path):
    log = tmp_path / "log"
    log.write_text("an earlier run\n")
    log.chmod(0o644)
    async with open_process(["echo", "hello"], log=log, headline="start 1") as process:
        assert await process.wait_ended() == 0
        assert process.read_tail().endswith(" start 1: echo hello\nhello\n")
    assert log.stat().st_mode & 0o777 == 0o600
    assert log.read_text().startswith("an earlier run\n=== ")


async def test_a_log_that_is_a_device_stays_open_to_others(tmp_path):
    log = tmp_path / "pipe"
    os.mkfifo(log)
    log.chmod(0o644)
    reader = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    async with open_process(["echo"], log=log) as process:
        await process.wait_ended()
    os.close(reader)
    assert log.stat().st_mode & 0o777 == 0o644

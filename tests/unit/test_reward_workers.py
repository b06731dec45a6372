"""Reward functions in worker processes: real processes, real time. Whatever a function does, only its own
sample fails.
"""

import json
import os
import re
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
import trio

from rollouts.config.rollout import RolloutConfig
from rollouts.errors import RewardCrashed, RewardTimeout, UserFunctionError
from rollouts.generation.group import classify_reward_error, fail_sample
from rollouts.preflight.functions import weigh
from rollouts.rewards import workers as workers_module
from rollouts.rewards.call import call_group_reward, call_reward
from rollouts.rewards.check import function_name
from rollouts.rewards.worker import BadAnswer, parse_answer
from rollouts.rewards.workers import RaisedInWorker
from rollouts.rewards.workers import open_workers as open_pool
from rollouts.types import RewardResult, Sample, Status
from tests import ROOT
from tests.support.processes import find_descendants, is_alive, wait_until
from tests.support.text_tables import cases, read_cells

HERE = Path(__file__).parent
# a function of hostile_rewards.py | what its error says
CRASHES = r"""
fork | forked its process
pool | forked its process
allocate | ran out of memory
segfault | was killed by SIGSEGV; .*Fatal Python error: Segmentation fault.*in segfault
abort | was killed by SIGABRT
kill_self | was killed by SIGKILL
sys_exit | called sys.exit\(3\)
os_exit | ended with exit code 4; the last it printed: 'bye'
prints | printed more than output_bytes=65536; the last it printed: 'xxx
prints_a_little_too_much | printed more than output_bytes=65536
long_name | gave an answer of more than output_bytes=65536
closes_files | closed its channel
daemon | left a process running
leaves_child | left a process running
forks_for_ever | left a process running
kills_guard | lost its worker, which was killed with its guard
forges | gave an answer that is none
answers_itself | gave an answer that is none
says_that_it_is_loaded | gave an answer that is none
"""
RAISED = r"""
raises | raised KeyError: 'gold'
nan | returned nan as its reward
prints_and_raises | raised ValueError: oops; the last it printed: 'state: odd'
asynchronous | returned <coroutine object asynchronous .* as its reward; it must be a finite number
missing | cannot be called: .* has no missing
"""
SAMPLE = Sample(id="g0-s0", prompt="p", response="abc", metadata={"row": {"a": [1, None, "ü\ud800"]}})


async def score(workers, name, sample=SAMPLE, directory=HERE):
    """By a function of hostile_rewards.py, or of another file."""
    file = name if ":" in name else f"hostile_rewards.py:{name}"
    return await call_reward(workers.reward(file, directory), sample)


@asynccontextmanager
async def open_workers(*, count=1, timeout_s=20.0):
    """Workers that leave nothing behind."""
    before, limits = find_descendants(), {"memory_bytes": 1 << 30, "output_bytes": 1 << 16}
    async with open_pool(count=count, timeout_s=timeout_s, **limits) as workers:
        yield workers
        closed_s = time.monotonic()
    # the workers' own limits are seconds; waiting for a hung reward would be forever
    assert time.monotonic() - closed_s < 30.0
    assert find_descendants() <= before


# --- one function, one worker ---


async def test_a_function_is_called_by_name_in_a_process_without_secrets_or_input(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "abc")
    async with open_workers() as workers:
        assert function_name(workers.reward("hostile_rewards.py:good", HERE)) == "good"
        assert await score(workers, "good") == RewardResult(3.0, {"length": 3.0}, "counted")
        note = (await score(workers, "where")).note
        assert int(note.split()[0]) in find_descendants() and note.endswith(" None 1 ''")
        for name in ("runs_a_program", "runs_with_preexec"):  # programs that have ended are fine
            assert (await score(workers, name)).reward == 2.0
        for name in ("libc_fork", "libc_fork", "replaces_json"):  # a child never answers for its parent
            assert (await score(workers, name)).reward == 1.0


async def test_a_sample_arrives_as_it_was_and_a_group_is_scored_together():
    fields = """{"id": "s", "response": "x", "tokens": [0, 1, 2, 3, 4], "loss_mask": [0, 1, 1, 1, 1],
        "rollout_log_probs": [0, -0.5, -0.25, -1, -2]}"""
    sample = Sample(
        **json.loads(fields),
        prompt=({"role": "user", "content": "hi"},),
        metadata={"a": {"b": (1, 2)}},
        status=Status.TRUNCATED,
    )
    async with open_workers() as workers:
        result = await score(workers, "seen", sample)
        note = "(({'role': 'user', 'content': 'hi'},), {'a': {'b': [1, 2]}}, 'truncated')"
        assert result == RewardResult(-3.75, {"tokens": 10.0}, note)
        ranks, too_few = (
            workers.reward(f"hostile_rewards.py:{name}", HERE, "group_reward")
            for name in ("ranks", "too_few")
        )
        results = await call_group_reward(ranks, [SAMPLE] * 3)
        assert [result.reward for result in results] == [0.0, 1.0, 2.0]
        message = r"reward function too_few on the group of sample g0-s0 returned \[1.0\]; it must return 2"
        with pytest.raises(UserFunctionError, match=message):
            await call_group_reward(too_few, [SAMPLE] * 2)


# --- hostile functions ---


async def check_good(workers):
    """The next sample is scored."""
    assert (await score(workers, "good")).reward == 3.0


async def check_rest(workers):
    """The next sample is scored, by one worker, for there was one call at a time; it has two guards."""
    await check_good(workers)
    await wait_until(lambda: len(find_descendants()) == 3)


async def check_fails(workers, name, kind, named, message):
    with pytest.raises(kind, match=f"(?s)^reward function {name} on sample g0-s0 {message}") as caught:
        await score(workers, name)
    assert classify_reward_error(caught.value) == named
    await check_good(workers)


async def test_every_hostile_function_fails_its_own_sample_only():
    async with open_workers(count=2) as workers:
        for name, message in read_cells(CRASHES):
            await check_fails(workers, name, RewardCrashed, "reward_crashed", f".*{message}")
        for name, message in read_cells(RAISED):
            await check_fails(workers, name, UserFunctionError, "reward", f".*{message}")
        for _ in range(200):
            await check_good(workers)
        await check_rest(workers)


async def test_functions_that_do_not_end_are_killed_with_all_that_they_started():
    async with open_workers(timeout_s=0.4) as workers:
        for name in ("loop", "ignores_term", "own_session", "writes_nonsense"):
            await check_fails(workers, name, RewardTimeout, "reward_timeout", "took longer than 0.4 s")
        await check_rest(workers)


async def test_a_chain_of_processes_that_fork_and_end_is_killed_whole(tmp_path):
    """One by one they cannot be: whoever is found has a successor by then. They went on for ever, each core
    at its limit.
    """
    note = tmp_path / "group"
    async with open_workers() as workers:
        with pytest.raises(RewardCrashed, match="left a process running"):
            await score(workers, "forks_for_ever", replace(SAMPLE, metadata={"path": str(note)}))
        group = int(note.read_text())

        def is_gone():
            try:
                os.killpg(group, 0)
            except ProcessLookupError:
                return True
            return False

        await wait_until(is_gone)


async def test_neither_waiting_for_a_worker_nor_importing_is_time_of_the_function(tmp_path):
    (tmp_path / "slow.py").write_text("import time; time.sleep(1.2)\ndef reward(sample): return 1.0")
    async with open_workers(timeout_s=0.9) as workers:
        async with trio.open_nursery() as nursery:
            for _ in range(6):  # the last waits for 1.0 s
                nursery.start_soon(score, workers, "nap")
        assert (await score(workers, "slow.py:reward", directory=tmp_path)).reward == 1.0


async def test_a_cancelled_call_kills_its_worker_and_a_call_after_closing_says_so():
    async with open_workers() as workers:
        before = int((await score(workers, "where")).note.split()[0])
        with trio.move_on_after(0.3) as scope:
            await score(workers, "own_session")
        assert scope.cancelled_caught
        await check_rest(workers)
        assert not psutil.pid_exists(before)
    with pytest.raises(RewardCrashed, match="called after the workers had been closed"):
        await score(workers, "good")


async def test_workers_that_cannot_start_fail_calls_and_not_the_run(monkeypatch):
    monkeypatch.setattr(workers_module, "BACK_OFF_S", 0.001)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    said = "a worker process was killed with its guard"
    async with open_workers() as workers:
        for _ in range(2):
            with pytest.raises(RewardCrashed, match=said):
                await score(workers, "good")
        monkeypatch.undo()
        assert (await score(workers, "good")).reward


# --- one call and the next ---


LATE = """
import os, threading, time
called = threading.Event()
def late():
    called.wait()
    time.sleep(0.1)
    os.write(3, bytes(4))
threading.Thread(target=late, daemon=True).start()  # as a module may: it is there before the first call
def reward(sample):
    called.set()
    return 1.0
"""


async def test_bytes_that_wait_before_a_call_cost_the_worker_and_not_the_sample(tmp_path):
    (tmp_path / "late.py").write_text(LATE)
    async with open_workers() as workers:
        assert (await score(workers, "late.py:reward", directory=tmp_path)).reward == 1.0
        await trio.sleep(0.3)
        await check_good(workers)
        assert workers.statistics()["workers_started"] == 2


@cases("""
name
changes_directory
sets_umask
leaves_alarm
sets_handler
sets_environment
lowers_limit
leaves_thread
replaces_stdout
""")
async def test_what_a_call_leaves_behind_does_not_reach_the_next_sample(name):
    async with open_workers() as workers:
        before = (await score(workers, "shows_process")).note
        assert (await score(workers, name)).reward == 1.0  # its answer stands
        assert (await score(workers, "shows_process")).note == before
        assert workers.statistics()["workers_started"] == 2


async def test_a_file_that_is_edited_during_a_run_gives_no_mixture_of_rewards(tmp_path):
    path = tmp_path / "r.py"
    old = "import os\ndef reward(sample): return 1.0 if sample.response != 'die' else os._exit(1)"
    path.write_text(old)
    async with open_workers() as workers:
        ask = partial(score, workers, "r.py:reward", directory=tmp_path)
        assert (await ask()).reward == 1.0
        path.write_text("def reward(sample): return 2.0")
        assert (await ask()).reward == 1.0  # the worker has imported the old one
        with pytest.raises(RewardCrashed):
            await ask(sample=replace(SAMPLE, response="die"))
        message = "^reward function reward on sample g0-s0 cannot be called: .*py:reward was changed"
        for _ in range(2):
            with pytest.raises(UserFunctionError, match=message):
                await ask()
        path.write_text(old)
        assert (await ask()).reward == 1.0


async def test_a_part_without_its_weight_fails_the_sample_and_not_the_run():
    async def in_the_trainer(sample):
        return {"a": 2.0}

    reward = weigh(in_the_trainer, RolloutConfig(reward_weights={"a": 1.0, "b": 1.0}))
    message = "in_the_trainer on sample g0-s0 does not fit rl.rollout.reward_weights: .*'b'"
    with pytest.raises(UserFunctionError, match=message):
        await call_reward(reward, SAMPLE)


async def test_the_record_of_a_failure_has_the_workers_traceback():
    async with open_workers() as workers:
        with pytest.raises(UserFunctionError) as caught:
            await score(workers, "raises")
    assert isinstance(caught.value.__cause__, RaisedInWorker)
    record = fail_sample(SAMPLE, caught.value, "reward", "raises").metadata["failure"]["traceback"]
    said = r"""Traceback \(most recent call last\):\n  File .*hostile_rewards.py", line.*KeyError: 'gold'\n"""
    assert re.fullmatch(said, record, re.DOTALL) and "rewards/worker" not in record


# --- what workers can see ---

LOOK = """
import os
from rollouts.rewards.workers import hide_process
hide_process()
print(b"abc12345" in open("/proc/self/environ", "rb").read(), os.environ["MY_TOKEN"], os.getenv("MY_NAME"))
"""


@cases("""
debugger | shown
no       | False
yes      | True
""")
def test_secrets_are_not_among_what_proc_shows_of_the_environment(debugger: bool, shown):
    environ = {**os.environ, "MY_TOKEN": "abc12345", "MY_NAME": "me"}
    environ |= {"ROLLOUTS_DEBUGGER": "1"} if debugger else {}
    done = subprocess.run(
        [sys.executable, "-c", LOOK], env=environ, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [shown, "abc12345", "me"]


async def test_root_cannot_look_into_another_processs_memory_from_a_worker():
    async with open_workers() as workers:
        status = (await score(workers, "shows_capabilities")).note
    assert not int(status, 16) >> 19 & 1  # CAP_SYS_PTRACE


# --- the end of the trainer ---

TRAINER = """
import sys, trio
from pathlib import Path
from rollouts.rewards.workers import open_workers
from rollouts.types import Sample

async def main():
    here, sample = Path(sys.argv[1]), Sample(id="a", prompt="p")
    async with open_workers(count=2, timeout_s=1000, memory_bytes=1 << 30) as workers:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(workers.reward("hostile_rewards.py:own_session", here), sample)
            await workers.reward("hostile_rewards.py:good", here)(sample)
            print("up", flush=True)
            await trio.sleep_forever()

trio.run(main)
"""


async def test_no_process_survives_a_trainer_that_is_killed():
    command = [sys.executable, "-c", TRAINER, str(HERE)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:  # noqa: ASYNC220
        try:
            assert trainer.stdout.readline() == "up\n"
            # two workers, each with two guards, and what a function started
            await wait_until(lambda: len(find_descendants(trainer.pid)) == 7)
            below = find_descendants(trainer.pid)
        finally:
            trainer.kill()
    # whoever adopted the guard may not have reaped it
    await wait_until(lambda: not any(map(is_alive, below)))


# --- messages ---

GOOD = b'{"id":"r1","kind":"done","value":[{"reward":1,"parts":{"a":2.5},"note":"n"}]}'

parse = partial(parse_answer, request_id="r1", kind=tuple[RewardResult])


def test_an_answer_is_parsed():
    assert parse(GOOD).value == (RewardResult(1.0, {"a": 2.5}, "n"),)


# bytes, or a piece of GOOD and what replaces it
NO_ANSWERS = r"""
[]
{}
{"id":"r1"}
{"id":"r1","kind":"done"}
{"id":"r1","kind":"loaded"}
done => late
:1, => :NaN,
:1, => :1e999,
:1, => :"1",
:1, => :true,
2.5 => null
"n" => 7
{"a":2.5} => []
[{ => [{},{
r1 => r2
"""
LINES = [
    GOOD.replace(*line.encode().split(b" => ")) if "=>" in line else line.encode()
    for line in NO_ANSWERS.strip().splitlines()
]


@cases("line", [b"", b"\xff", b"[" * 100_000, b"1" * 5000, *LINES])
def test_bytes_that_are_no_answer_are_a_typed_error(line):
    with pytest.raises(BadAnswer):
        parse(line)

"""Reward functions in worker processes: real processes, real time. Whatever a function does, only its own
sample fails.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from rollouts.advantages import compute_group_advantages
from rollouts.config.tables import RolloutConfig
from rollouts.data.data_buffer import DataBuffer
from rollouts.errors import RewardCrashed, RewardTimeout, UserFunctionError
from rollouts.generation.async_rollout_manager import AsyncRolloutManager
from rollouts.generation.generate import make_chat_generate
from rollouts.generation.group import classify_reward_error, fail_sample
from rollouts.preflight.functions import weigh
from rollouts.rewards import workers as workers_module
from rollouts.rewards.call import call_group_reward, call_reward
from rollouts.rewards.check import function_name
from rollouts.rewards.worker import BadAnswer, parse_answer
from rollouts.rewards.workers import RaisedInWorker, RewardWorkers, open_reward_workers
from rollouts.testing.fakes import FAKE_END, FakeTokenizer, ScriptedEngine, ScriptedReply
from rollouts.types import RewardResult, Sample, SamplingParams, Status

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
"""
RAISED = r"""
raises | raised KeyError: 'gold'
nan | returned nan as its reward
text | returned '1.0' as its reward
prints_and_raises | raised ValueError: oops; the last it printed: 'state: odd'
asynchronous | returned something to await
missing | cannot be called: .* has no missing
"""
TIMEOUTS = ["loop", "sleep", "ignores_term", "own_session", "writes_nonsense"]
SAMPLE = Sample(id="g0-s0", prompt="p", response="abc", metadata={"row": {"a": [1, None, "ü\ud800"]}})


def read_table(table: str) -> list[tuple[str, str]]:
    return [(name, says) for name, _, says in (line.partition(" | ") for line in table.strip().splitlines())]


def named(workers: RewardWorkers, name: str) -> Any:
    return workers.reward(f"hostile_rewards.py:{name}", HERE)


@asynccontextmanager
async def open_workers(
    *, count: int = 1, timeout_s: float = 20.0, **options: Any
) -> AsyncIterator[RewardWorkers]:
    """Workers that leave nothing behind."""
    before = descendants()
    async with open_reward_workers(
        count=count, timeout_s=timeout_s, memory_bytes=1 << 30, **{"output_bytes": 1 << 16} | options
    ) as workers:
        yield workers
        closed_s = time.monotonic()
    assert (
        time.monotonic() - closed_s < 30.0
    )  # the workers' own limits are seconds; waiting for a hung reward would be forever
    assert descendants() <= before


def processes() -> dict[int, int]:
    """Parent of every process that is alive or not yet reaped."""
    found: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found[int(entry.name)] = int(
                    (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1]
                )
            except OSError:
                continue
    return found


def descendants(of: int | None = None) -> set[int]:
    parents = processes()
    found = {os.getpid() if of is None else of}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {os.getpid() if of is None else of}


async def wait_until(condition) -> None:
    """Real processes tell nobody here that they are gone: looks, at most for five seconds."""
    with trio.fail_after(5):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.01)


async def test_a_chain_of_processes_that_fork_and_end_is_killed_whole(tmp_path):
    """One by one they cannot be: whoever is found has a successor by then. They went on for ever, each core
    at its limit.
    """
    note = tmp_path / "group"
    async with open_workers() as workers:
        with pytest.raises(RewardCrashed, match="left a process running"):
            await call_reward(named(workers, "forks_for_ever"), replace(SAMPLE, metadata={"path": str(note)}))
        group = int(note.read_text())

        def is_gone() -> bool:
            try:
                os.killpg(group, 0)
            except ProcessLookupError:
                return True
            return False

        await wait_until(is_gone)


# --- one function, one worker ---


async def test_a_function_is_called_by_name_in_a_process_without_secrets_or_input(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("MY_API_KEY", "abc")
    async with open_workers() as workers:
        reward = named(workers, "good")
        assert function_name(reward) == "good"
        assert await call_reward(reward, SAMPLE) == RewardResult(3.0, {"length": 3.0}, "counted")
        note = (await call_reward(named(workers, "where"), SAMPLE)).note or ""
        assert int(note.split()[0]) in descendants() and note.endswith(" None 1 ''")
        assert workers.statistics()["calls"] == 2 and workers.statistics()["failed"] == 0


async def test_a_sample_arrives_as_it_was():
    sample = Sample(
        id="s",
        prompt=({"role": "user", "content": "hi"},),
        response="x",
        tokens=np.arange(5),
        loss_mask=[0, 1, 1, 1, 1],
        rollout_log_probs=[0, -0.5, -0.25, -1, -2],
        metadata={"a": {"b": (1, 2)}},
        status=Status.TRUNCATED,
    )
    async with open_workers() as workers:
        result = await call_reward(named(workers, "seen"), sample)
    note = "(({'role': 'user', 'content': 'hi'},), {'a': {'b': [1, 2]}}, 'truncated')"
    assert result == RewardResult(-3.75, {"tokens": 10.0}, note)


async def test_a_group_is_scored_together():
    async with open_workers() as workers:
        results = await call_group_reward(
            workers.group_reward("hostile_rewards.py:ranks", HERE), [SAMPLE, SAMPLE, SAMPLE]
        )
        assert [result.reward for result in results] == [0.0, 1.0, 2.0]
        with pytest.raises(
            UserFunctionError,
            match=(
                r"group reward function too_few on the group of sample g0-s0 returned \[1.0\]; it must"
                r" return 2"
            ),
        ):
            await call_group_reward(
                workers.group_reward("hostile_rewards.py:too_few", HERE), [SAMPLE, SAMPLE]
            )


async def test_programs_that_have_ended_are_fine():
    async with open_workers() as workers:
        assert (await call_reward(named(workers, "runs_a_program"), SAMPLE)).reward == 2.0
        assert (await call_reward(named(workers, "runs_with_preexec"), SAMPLE)).reward == 2.0
        assert workers.statistics()["workers_started"] == 1


async def test_a_child_never_answers_in_the_place_of_its_parent():
    async with open_workers() as workers:
        for _ in range(3):
            assert (await call_reward(named(workers, "libc_fork"), SAMPLE)).reward == 1.0


# --- hostile functions ---


async def test_every_hostile_function_fails_its_own_sample_only():
    async with open_workers(count=2, timeout_s=20.0) as workers:
        for name, message in read_table(CRASHES):
            reward = named(workers, name)
            with pytest.raises(
                RewardCrashed, match=f"(?s)^reward function {name} on sample g0-s0 .*{message}"
            ) as caught:
                await call_reward(reward, SAMPLE)
            assert classify_reward_error(caught.value) == "reward_crashed"
            assert (await call_reward(named(workers, "good"), SAMPLE)).reward == 3.0, name
        for name, message in read_table(RAISED):
            with pytest.raises(
                UserFunctionError, match=f"^reward function {name} on sample g0-s0 {message}"
            ) as other:
                await call_reward(named(workers, name), SAMPLE)
            assert classify_reward_error(other.value) == "reward"
        good = named(workers, "good")
        for _ in range(200):
            assert (await call_reward(good, SAMPLE)).reward == 3.0
        await wait_until(lambda: len(descendants()) == 6)  # two workers, each with two guards


async def test_functions_that_do_not_end_are_killed_with_all_that_they_started():
    async with open_workers(timeout_s=0.4) as workers:
        for name in TIMEOUTS:
            with pytest.raises(
                RewardTimeout, match=f"^reward function {name} on sample g0-s0 took longer than 0.4 s"
            ) as caught:
                await call_reward(named(workers, name), SAMPLE, timeout_s=0.0)
            assert classify_reward_error(caught.value) == "reward_timeout"
        assert (await call_reward(named(workers, "good"), SAMPLE)).reward == 3.0
        await wait_until(lambda: len(descendants()) == 3)


async def test_waiting_for_a_free_worker_is_not_time_of_the_function():
    async with open_workers(timeout_s=0.9) as workers:
        nap = named(workers, "nap")
        async with trio.open_nursery() as nursery:
            for _ in range(6):  # the last waits for 1.0 s
                nursery.start_soon(lambda: call_reward(nap, SAMPLE, timeout_s=0.9))
        assert workers.statistics()["failed"] == 0


async def test_importing_is_not_time_of_the_function(tmp_path: Path):
    (tmp_path / "slow.py").write_text("import time; time.sleep(0.6)\ndef reward(sample): return 1.0")
    async with open_workers(timeout_s=0.4) as workers:
        assert (await call_reward(workers.reward("slow.py:reward", tmp_path), SAMPLE)).reward == 1.0


async def test_a_cancelled_call_kills_its_worker():
    async with open_workers() as workers:
        note = (await call_reward(named(workers, "where"), SAMPLE)).note or ""
        before = int(note.split()[0])
        with trio.move_on_after(0.3) as scope:
            await call_reward(named(workers, "own_session"), SAMPLE)
        assert scope.cancelled_caught
        assert (await call_reward(named(workers, "good"), SAMPLE)).reward == 3.0
        await wait_until(lambda: before not in processes() and len(descendants()) == 3)


async def test_a_call_after_closing_says_so():
    async with open_workers() as workers:
        reward = named(workers, "good")
    with pytest.raises(RewardCrashed, match="called after the reward workers had been closed"):
        await call_reward(reward, SAMPLE)


async def test_workers_that_cannot_start_say_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(workers_module, "BACK_OFF_S", 0.001)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RewardCrashed, match="a process for reward functions was killed with its guard"):
        async with open_workers():
            raise AssertionError("opened")


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


async def test_bytes_that_wait_before_a_call_cost_the_worker_and_not_the_sample(tmp_path: Path):
    (tmp_path / "late.py").write_text(LATE)
    async with open_workers() as workers:
        assert (await call_reward(workers.reward("late.py:reward", tmp_path), SAMPLE)).reward == 1.0
        await trio.sleep(0.3)
        assert (await call_reward(named(workers, "good"), SAMPLE)).reward == 3.0
        assert (workers.statistics()["failed"], workers.statistics()["workers_started"]) == (0, 2)


@pytest.mark.parametrize(
    "name",
    [
        *("changes_directory", "sets_umask", "leaves_alarm", "sets_handler", "sets_environment"),
        *("lowers_limit", "leaves_thread", "replaces_stdout"),
    ],
)
async def test_what_a_call_leaves_behind_does_not_reach_the_next_sample(name: str):
    async with open_workers() as workers:
        before = (await call_reward(named(workers, "shows_process"), SAMPLE)).note
        assert (await call_reward(named(workers, name), SAMPLE)).reward == 1.0, "its answer stands"
        assert (await call_reward(named(workers, "shows_process"), SAMPLE)).note == before
        assert (workers.statistics()["failed"], workers.statistics()["workers_started"]) == (0, 2)


async def test_a_function_that_replaces_json_changes_no_answer():
    async with open_workers() as workers:
        assert (await call_reward(named(workers, "replaces_json"), SAMPLE)).reward == 1.0
        assert (await call_reward(named(workers, "good"), SAMPLE)).reward == 3.0


async def test_a_file_that_is_edited_during_a_run_gives_no_mixture_of_rewards(tmp_path: Path):
    path = tmp_path / "r.py"
    path.write_text("import os\ndef reward(sample): return 1.0 if sample.response != 'die' else os._exit(1)")
    async with open_workers() as workers:
        reward = workers.reward("r.py:reward", tmp_path)
        assert (await call_reward(reward, SAMPLE)).reward == 1.0
        old = path.read_text()
        path.write_text("def reward(sample): return 2.0")
        assert (await call_reward(reward, SAMPLE)).reward == 1.0, "the worker has imported the old one"
        with pytest.raises(RewardCrashed):
            await call_reward(reward, replace(SAMPLE, response="die"))
        for _ in range(2):
            with pytest.raises(
                UserFunctionError,
                match=r"^reward function reward on sample g0-s0 cannot be called: .*py:reward was changed",
            ):
                await call_reward(reward, SAMPLE)
        path.write_text(old)
        assert (await call_reward(reward, SAMPLE)).reward == 1.0


async def scored_in_the_trainer(sample: Sample) -> dict[str, float]:
    return {"a": 2.0}


async def test_a_part_without_its_weight_fails_the_sample_and_not_the_run():
    reward = weigh(scored_in_the_trainer, RolloutConfig(reward_weights={"a": 1.0, "b": 1.0}))
    assert reward is not None
    with pytest.raises(
        UserFunctionError,
        match=r"scored_in_the_trainer on sample g0-s0 does not fit rl.rollout.reward_weights: .*'b'",
    ):
        await call_reward(reward, SAMPLE)


# --- the record of a failure, and the group ---


async def test_the_record_of_a_failure_has_the_workers_traceback():
    async with open_workers() as workers:
        with pytest.raises(UserFunctionError) as caught:
            await call_reward(named(workers, "raises"), SAMPLE)
    assert isinstance(caught.value.__cause__, RaisedInWorker)
    failure = fail_sample(SAMPLE, caught.value, "reward", "raises").metadata["failure"]
    assert failure["traceback"].startswith("Traceback (most recent call last):\n  File ")
    assert 'hostile_rewards.py", line' in failure["traceback"] and failure["traceback"].endswith(
        "KeyError: 'gold'\n"
    )
    assert "rewards/worker" not in failure["traceback"]


async def test_advantages_are_those_of_the_samples_that_did_not_fail():
    """Six samples; three have hostile rewards, the others score 4, 9 and 7, the lengths of the functions'
    names that are their responses.
    """
    texts = ["good", "segfault", "good_too_", "nan", "loop", "good___"]
    script = lambda request: ScriptedReply(text=texts[int(request.request_id[11:14])])  # noqa: E731
    config = RolloutConfig(num_prompts=1, samples_per_prompt=6, max_failed_fraction=0.9)
    async with open_workers(count=2, timeout_s=1.0) as workers:
        manager = AsyncRolloutManager(
            DataBuffer([{"prompt": "q"}], seed=0),
            ScriptedEngine(script),
            generate=make_chat_generate(FakeTokenizer()),
            config=config,
            reward=named(workers, "by_name"),
            sampling=SamplingParams(max_new_tokens=16, stop_token_ids=(FAKE_END,)),
            seed=1,
            policy_version=lambda: 0,
        )
        batch = await manager.generate_batch()
    assert batch.rewards is not None and batch.rewards.tolist() == [4.0, 9.0, 7.0]
    assert batch.group_indices is not None
    expected = (np.array([4.0, 9.0, 7.0]) - 20 / 3) / (
        math.sqrt(((4 - 20 / 3) ** 2 + (9 - 20 / 3) ** 2 + (7 - 20 / 3) ** 2) / 2) + 1e-6
    )
    np.testing.assert_allclose(
        compute_group_advantages(batch.rewards, batch.group_indices), expected, rtol=1e-6
    )
    classes = {sample.id[-1]: sample.metadata["failure"]["class"] for sample in manager.failed_samples()}
    assert classes == {"1": "reward_crashed", "3": "reward", "4": "reward_timeout"}


# --- the end of the trainer ---

TRAINER = """
import sys, trio
from pathlib import Path
from rollouts.rewards.workers import open_reward_workers
from rollouts.types import Sample

async def main():
    here, sample = Path(sys.argv[1]), Sample(id="a", prompt="p")
    async with open_reward_workers(count=2, timeout_s=1000, memory_bytes=1 << 30) as workers:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(workers.reward("hostile_rewards.py:own_session", here), sample)
            await workers.reward("hostile_rewards.py:good", here)(sample)
            print("up", flush=True)
            await trio.sleep_forever()

trio.run(main)
"""


def test_no_process_survives_a_trainer_that_is_killed():
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, str(HERE)], stdout=subprocess.PIPE, text=True)
    try:
        assert trainer.stdout is not None and trainer.stdout.readline() == "up\n"
        deadline = time.monotonic() + 10
        while len(below := descendants(trainer.pid)) < 7 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(below) == 7, "two workers, each with two guards, and what a function started"
    finally:
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
        trainer.stdout.close()  # type: ignore[union-attr]
    deadline = time.monotonic() + 5
    while below & set(processes()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not {
        pid for pid in below & set(processes()) if state_of(pid) != "Z"
    }  # whoever adopted the guard may not have reaped it


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


# --- messages ---

GOOD = b'{"id":"r1","kind":"scored","rewards":[{"reward":1,"parts":{"a":2.5},"note":"n"}]}'


def test_an_answer_is_parsed():
    assert parse_answer(GOOD, request_id="r1", count=1).rewards == [RewardResult(1.0, {"a": 2.5}, "n")]
    assert parse_answer(b'{"id":"r1","kind":"loaded"}', request_id="r1", count=None).kind == "loaded"


NO_ANSWERS = [
    *(
        b"",
        b"\xff",
        b"[" * 100_000,
        b"1" * 5000,
        b"[]",
        b"{}",
        b'{"id":"r1"}',
        b'{"id":"r1","kind":"scored"}',
    ),
    *(b'{"id":"r1","kind":"loaded"}', GOOD.replace(b"scored", b"raised"), GOOD.replace(b"scored", b"late")),
    *(GOOD.replace(b":1,", b) for b in (b":NaN,", b":1e999,", b':"1",', b":true,")),
    *(GOOD.replace(b"2.5", b"null"), GOOD.replace(b'"n"', b"7"), GOOD.replace(b'{"a":2.5}', b"[]")),
    *(GOOD.replace(b"[{", b"[{},{"), GOOD.replace(b"r1", b"r2")),
]


@pytest.mark.parametrize("line", NO_ANSWERS)
def test_bytes_that_are_no_answer_are_a_typed_error(line: bytes):
    with pytest.raises(BadAnswer):
        parse_answer(line, request_id="r1", count=1)

"""The loops on fakes, in virtual time: what they log, in which order they wait, when they save and stop."""

import os
import re
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import trio
import trio.lowlevel
from trio import current_time

from rollouts.config.schema import RLTrainingConfig, SFTTrainingConfig
from rollouts.config.tables import DataSourceConfig
from rollouts.data.data_buffer import DataBuffer
from rollouts.data.samples import SFTSample
from rollouts.errors import ConfigError, FleetDown, NotEnoughSamples, RolloutsError, WeightSyncError
from rollouts.generation.async_rollout_manager import AsyncRolloutManager
from rollouts.loops import steps, stopping
from rollouts.loops.rl import run_rl_training
from rollouts.loops.sft import run_sft_training
from rollouts.loops.steps import StepHooks
from rollouts.loops.stopping import Stop, open_stop, watch_loop
from rollouts.loops.weight_push import WeightPush
from rollouts.processes.nurseries import open_plain_nursery
from rollouts.testing.fakes import ScriptedEngine, ScriptedReply, open_fake_backend
from tests.support.text_tables import cases
from tests.unit.manager_runs import SAMPLING, chat_generate

DATA = DataSourceConfig(kind="jsonl", path="unused.jsonl")


class MemoryLogger:
    """A MetricsLogger that keeps steps, and how many samples of which step it was given."""

    def __init__(self):
        self.steps, self.samples = [], []

    async def log_step(self, stage, step, policy_version, metrics, **rows):
        self.steps.append((stage, step, policy_version, metrics))

    async def log_samples(self, stage, step, policy_version, samples):
        self.samples.append((step, len(samples)))


@dataclass
class Diary:
    """Hooks that write down when they were called, and what the manager and the buffer knew then."""

    checkpoint_every: int = 0
    evaluate_s: float = 0.0
    refused: set[int] = field(default_factory=set)  # steps whose first save did not get in place
    live: Sequence[Any] = ()  # objects with state_dict()
    entries: list[tuple[str, int]] = field(default_factory=list)

    def __post_init__(self):
        self.said = []
        self.states = {}
        self.stop = Stop(say=self.said.append)
        names = ("stop", "hold_state", "save", "is_saved", "checkpoint_every", "evaluate")
        self.hooks = StepHooks(**{name: getattr(self, name) for name in names})

    def hold_state(self):
        states = [one.state_dict() for one in self.live]
        return lambda: {"states": states}

    async def evaluate(self, step):
        await trio.sleep(self.evaluate_s)
        self.entries.append(("evaluate", step))

    async def save(self, step, encode):
        self.entries.append(("save", step))
        self.states[step] = encode()["states"]
        await trio.sleep(0.1)

    async def is_saved(self, step):
        return step not in self.refused

    async def request_at(self, when):
        await trio.sleep_until(when)
        self.stop.request()


def sft_samples(count):
    mask = np.asarray([False, True, True])
    return [SFTSample(np.asarray([row, 1, 2]), mask) for row in range(count)]


def test_a_stream_that_nobody_reads_holds_up_no_end(monkeypatch):
    monkeypatch.setattr(stopping, "TICK_S", 0.01)
    read = threading.Event()
    stopping.call_in_time(lambda text: read.wait(), "stopped by force")
    assert not read.is_set()  # it has not waited
    read.set()


async def test_sft_logs_every_step_gives_back_the_newest_and_trains_the_rows_of_its_step(monkeypatch):
    monkeypatch.setattr(steps, "HELD_STEPS", 2)
    logger, diary = MemoryLogger(), Diary(checkpoint_every=2)
    async with open_fake_backend() as backend:
        config = SFTTrainingConfig(data=DATA, steps=3, batch_size=2, eval_every=1)
        history = await run_sft_training(backend, sft_samples(6), config, logger, hooks=diary.hooks)
    assert [row[:3] for row in logger.steps] == [("sft", 1, 0), ("sft", 2, 1), ("sft", 3, 2)]
    assert [row[3]["loss/total"] for row in logger.steps] == [1.0, 0.5, pytest.approx(1 / 3)]
    assert history == [row[3] for row in logger.steps[1:]]
    rows = [int(tokens[0]) for batch in backend.batches for tokens in batch.tokens]
    assert sorted(rows) == list(range(6))  # an epoch has every row once
    assert diary.entries == [("evaluate", 1), ("save", 2), ("evaluate", 2), ("save", 3)]


async def test_a_loop_that_is_given_epochs_which_nobody_has_counted_says_so():
    config = SFTTrainingConfig(data=DATA, epochs=2)
    async with open_fake_backend() as backend:
        with pytest.raises(ConfigError, match="steps=0: nobody has counted the epochs"):
            await run_sft_training(backend, sft_samples(6), config, MemoryLogger())


async def test_sft_goes_on_after_the_completed_steps_with_the_rows_it_would_have_had():
    found = []
    for completed in (0, 2):
        async with open_fake_backend() as backend:
            config = SFTTrainingConfig(data=DATA, steps=4, batch_size=2)
            await run_sft_training(
                backend, sft_samples(5), config, MemoryLogger(), seed=3, completed_steps=completed
            )
        found.append([[tokens.tolist() for tokens in batch.tokens] for batch in backend.batches])
    assert len(found[0]) == 4 and found[1] == found[0][2:]


def rl_config(**changes):
    rollout = {"num_prompts": 2, "samples_per_prompt": 2, "max_new_tokens": 8}
    return RLTrainingConfig.model_validate({"data": DATA, "steps": 3, "rollout": rollout, **changes})


async def first_is_right(sample):
    return float(sample.id.endswith("s000"))


@dataclass
class RLRun:
    """A run of the RL loop on fakes, whose step takes 3 * step_s."""

    changes: dict[str, Any] = field(default_factory=dict)
    diary: Diary = field(default_factory=Diary)
    reward: Any = first_is_right
    script: Any = None
    sync: Any = None  # (version) -> metrics
    step_s: float = 0.0
    stop_at_s: float = 1e9
    logger: MemoryLogger = field(default_factory=MemoryLogger)

    async def run(self):
        engine = ScriptedEngine(*([self.script] if self.script else []))
        buffer = DataBuffer([{"prompt": str(n)} for n in range(60)], seed=0)
        config = rl_config(**self.changes)
        history, failures = [], []

        async def update(backend, engines, version, **options):
            assert backend.weight_version == version  # the trainer has the weights that are sent
            metrics = await self.sync(version) if self.sync else {}
            engines[0].set_version(version)
            return metrics

        async with open_fake_backend(step_s=self.step_s) as backend, trio.open_nursery() as nursery:
            self.backend = backend
            manager = AsyncRolloutManager(
                buffer, engine, generate=chat_generate, config=config.rollout, reward=self.reward, filters=(),
                sampling=SAMPLING, seed=0, policy_version=lambda: backend.weight_version,
                max_staleness=config.max_staleness,
            )  # fmt: skip
            self.diary.live = buffer, manager
            nursery.start_soon(self.diary.request_at, current_time() + self.stop_at_s)
            try:
                history = await run_rl_training(
                    backend, buffer, manager, [engine], config, self.logger,
                    sync_weights=update, hooks=self.diary.hooks,
                )  # fmt: skip
            except RolloutsError as error:
                failures.append(error)  # raised below, outside the nursery, which would wrap it in a group
            nursery.cancel_scope.cancel()
        assert engine.in_flight == 0
        for failure in failures:
            raise failure
        return history

    def check_saved(self, *steps):
        """Every prompt drawn when a step was saved was trained by then, or is in that state."""
        assert self.diary.entries == [("save", step) for step in steps]
        for step in steps:
            buffer, manager = self.diary.states[step]
            there = sum(len(manager[name]) for name in ("held", "unfinished", "in_flight"))
            assert manager["ledger"]["trained"] == 2 * step
            assert buffer["drawn"] == [2 * step + there + len(buffer["returned"])]


async def test_rl_trains_syncs_and_logs_once_per_step(autojump_clock):
    synced = []

    async def sync(version):
        synced.append(version)
        return {"weight_sync/made_up": 1.0}

    run = RLRun({"updates_per_batch": 2, "eval_every": 2}, sync=sync, step_s=10.0)
    row = (await run.run())[0]
    assert [logged[1:3] for logged in run.logger.steps] == [(1, 0), (2, 1), (3, 2)]
    assert synced == [1, 2, 3]
    assert len(run.backend.batches) == 6  # each batch is used updates_per_batch times
    assert run.logger.samples == [(1, 4), (2, 4), (3, 4)]  # the trained samples; none failed
    assert run.diary.entries == [("evaluate", 2), ("save", 3)]
    assert (row["reward/mean"], row["off_policy/max"], row["weight_sync/made_up"]) == (0.5, 0.0, 1.0)
    found = np.unique(np.concatenate(run.backend.batches[0].advantages))
    np.testing.assert_allclose(found, [-0.70710578, 0.0, 0.70710578], atol=1e-5)


async def test_truncated_samples_count_in_the_mean_of_their_group_and_train_nothing(autojump_clock):
    def cut_one(request):
        return ScriptedReply(finish="length" if request.request_id.endswith("s001") else "stop")

    run = RLRun({"mask_truncated": True, "advantage": "centred", "steps": 1}, script=cut_one)
    row = (await run.run())[0]
    [batch] = run.backend.batches
    assert batch.response_lengths.astype(bool).tolist() == [True, False] * 2
    assert [advantages[-1] for advantages in batch.advantages] == [0.5, -0.5] * 2
    assert row["truncated/frac"] == 0.5
    assert row["loss/tokens"] == batch.response_lengths.sum() > 0


@cases("""
checkpoint_every | saved
0                | [2]
1                | [1, 2]
""")
async def test_a_run_whose_rewards_keep_failing_stops_with_its_complete_steps_saved(
    autojump_clock, checkpoint_every: int, saved: Any
):
    asked = iter(range(10**6))

    async def reward(sample):
        if next(asked) >= 8:  # from the third step on
            raise RuntimeError("the grader is gone")
        return await first_is_right(sample)

    run = RLRun(diary=Diary(checkpoint_every), reward=reward)
    with pytest.raises(NotEnoughSamples, match="the grader is gone"):
        await run.run()
    assert run.logger.samples[-1][0] == 3 and run.logger.samples[-1][1] > 0  # what failed is in the record
    run.check_saved(*saved)


@cases("staleness: 0 1")
@cases("error: WeightSyncError FleetDown")
async def test_a_step_whose_weights_reach_no_engine_is_logged_and_saved_before_the_run_stops(
    autojump_clock, error: Exception, staleness: int
):
    async def sync(version):
        if version == 2:
            raise error
        return {}

    run = RLRun({"max_staleness": staleness, "steps": 9}, sync=sync, step_s=1.0)
    with pytest.raises(type(error)) as raised:
        await run.run()
    assert raised.value is error
    assert len(run.backend.batches) == len(run.logger.steps) == 2  # nothing trains after it
    run.check_saved(2)


# --- stopping -----------------------------------------------------------------------------------------------


@cases("""
at_s | changes        | diary                               | steps | entries | …
10   |                |                                     | 0    | [] | there is nothing to save
70   |                |                                     | 1    | [["save", 1]] | the second is cut
70   |                | checkpoint_every = 1                | 1    | [["save", 1]] | saved already
70   |                | checkpoint_every = 1, refused = [1] | 1    | [["save", 1], ["save", 1]]
100  |                |                                     | 2    | [["save", 2]] | in its optimizer step
70   | eval_every = 1 | evaluate_s = 50                     | 1    | [["save", 1]] | and that is cut
500  | steps = 2      |                                     | 2    | [["save", 2]]
""")
async def test_a_stop_cuts_what_is_under_way_and_saves_the_last_complete_step(
    autojump_clock, at_s: int, changes: dict, diary: dict, steps: int, entries: Any
):
    """forward_backward and optim_step take 30 s each; the first step ends at 60 s, the second at 120 s."""
    config = SFTTrainingConfig.model_validate({"data": DATA, "steps": 9, "batch_size": 2, **changes})
    began, kept = current_time(), Diary(**diary)
    async with open_fake_backend(step_s=30, micro_batch_s=3) as backend, trio.open_nursery() as nursery:
        nursery.start_soon(kept.request_at, began + at_s)
        history = await run_sft_training(backend, sft_samples(6), config, MemoryLogger(), hooks=kept.hooks)
        nursery.cancel_scope.cancel()
    assert (len(history), [*map(list, kept.entries)]) == (steps, entries)
    if at_s == 70:
        assert current_time() - began <= 73.2  # a micro-batch and a save after the signal


def answer_two_groups(request):
    return ScriptedReply(token_s=0.5 if request.request_id < "g00000002" else 1000.0)


async def hang(version):
    await trio.sleep_forever()
    return {}


@cases("""
changes               | script            | sync | step_s | stop_s | steps | saved | said | …
max_staleness = 0     | answer_two_groups |      | 0      | 30     | 1     | [1]   | | generating
max_staleness = 1     | answer_two_groups |      | 0      | 30     | 1     | [1]   | | generating ahead
                      |                   | hang | 1      | 100    | 1     | [1]   | | updating the engines
updates_per_batch = 3 |                   |      | 10     | 15     | 0     | []    | .* | \
between two updates of a step, the first of which ends at 70 s
updates_per_batch = 3 |                   |      | 10     | 85     | 1     | []    | \
step 1 is not saved, because updates of step 2 have been applied already; the newest complete \
checkpoint counts
""")
async def test_a_cut_step_of_rl_is_given_back_and_the_step_before_is_saved_as_it_was(
    autojump_clock, changes: dict, script, sync, step_s: float, stop_s: float, steps: int, saved: Any, said
):
    functions = {"script": globals().get(script), "sync": globals().get(sync)}
    run = RLRun({"steps": 9, **changes}, **functions, step_s=step_s, stop_at_s=stop_s)
    assert len(await run.run()) == len(run.logger.steps) == steps
    run.check_saved(*saved)
    assert re.fullmatch(said, " ".join(run.diary.said))


class Ticks:
    """An Event whose waits are counted and take no time; after `last` of them it is set."""

    def __init__(self, last):
        self.count, self.last = 0, last

    def wait(self, seconds):
        assert seconds == 1.0
        self.count += 1
        return self.count > self.last


class Loop:
    """An event loop that answers at once, but in the ticks of `held`."""

    def __init__(self, ticks, held):
        self.ticks, self.held = ticks, held

    def run_sync_soon(self, function):
        if self.ticks.count not in self.held:
            function()


def watch(stop, *, ticks, held=()):
    counted = Ticks(ticks)
    watch_loop(stop, Loop(counted, held), threading.get_ident(), counted)  # pyright: ignore[reportArgumentType]
    return counted


def test_what_hangs_is_ended_before_the_deadline_and_other_ranks_are_told(monkeypatch):
    events = []
    stop = Stop(say=events.append)
    stop.tell_others = lambda: events.append("told")
    stop.request()
    monkeypatch.setattr("rollouts.loops.stopping.exit_now", lambda: events.append("ended"))
    watch(stop, ticks=20)
    assert events == []
    watch(stop, ticks=21)
    assert events == [
        "stopped by force: something did not end in time; the newest complete checkpoint counts",
        "told",
        "ended",
    ]


@cases("""
held    | ticks | seconds
        | 100   |
1       | 4     |
1       | 5     | 4
1       | 100   | 4 8 16 32 64
""")
def test_an_event_loop_that_does_not_answer_is_said_with_what_holds_it(held, ticks: int, seconds):
    said = []
    watch(Stop(say=said.append), ticks=ticks, held=[*map(int, held.split())])
    pattern = "the event loop has been held for (.+) s, .*, by watch_loop; await"
    assert [found and found[1] for one in said for found in [re.match(pattern, one)]] == seconds.split()
    assert all("in test_an_event_loop_that_does_not_answer" in one for one in said)


@cases("launched: yes no")
async def test_the_first_signal_requests_the_stop_and_the_second_ends_the_process(
    monkeypatch, launched: bool
):
    said, ended, before = [], [], signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(os, "_exit", ended.append)
    async with open_stop(said.append, launched=launched) as stop:
        assert not stop.is_requested()
        signal.raise_signal(signal.SIGHUP)
        await stop.wait_requested()
        signal.raise_signal(signal.SIGTERM)
        assert ended == ([] if launched else [143])
        signal.raise_signal(signal.SIGINT)
        assert ended[-1] == 130
    assert said == ["stopping: the last complete step is saved; once more to stop at once"]
    assert signal.getsignal(signal.SIGTERM) is before


async def test_a_hangup_that_is_ignored_stays_ignored(monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        async with open_stop(print) as stop:
            signal.raise_signal(signal.SIGHUP)
            await trio.lowlevel.checkpoint()
            assert not stop.is_near
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


# --- WeightPush ---------------------------------------------------------------------------------------------


class Updates:
    """Updates that hold the trainer for 1 s and load for 9 s more, or fail after 5 s."""

    overlaps = True

    def __init__(self, **failures):
        self.failures, self.events = failures, list[tuple[str, int]]()

    async def __call__(self, version, *, released):
        self.events.append(("begins", version))
        await trio.sleep(1)
        released.set()
        if error := self.failures.get(f"v{version}"):
            await trio.sleep(4)
            raise error
        await trio.sleep(9)
        return {f"updated/{version}": 1.0}

    def engines_updated(self, version):
        self.events.append(("engines have", version))


async def test_an_update_goes_on_beside_training_and_the_next_one_waits_for_it(autojump_clock):
    updates = Updates()
    async with open_plain_nursery() as nursery:
        push = WeightPush(nursery, updates, updates, rl_config(steps=9), Stop())
        for version, ends_s, metrics in ((1, 1, []), (2, 11, [1]), (9, 30, [2, 9])):  # the last is waited for
            await push.send(version)
            assert current_time() == ends_s
            assert push.take_metrics() == {f"updated/{number}": 1.0 for number in metrics}
        await push.send(1)
    assert updates.events[-2:] == [("engines have", 9), ("begins", 1)]  # leaving cancels an update in flight


async def test_a_failure_cancels_what_is_guarded_and_is_raised_once_by_whoever_asks_next(autojump_clock):
    updates = Updates(v1=FleetDown("nobody serves"), v2=WeightSyncError("late"))
    async with open_plain_nursery() as nursery:
        push = WeightPush(nursery, updates, updates, rl_config(steps=9), Stop())
        await push.send(1)
        with pytest.raises(FleetDown, match="nobody serves"), push.guarding():
            await trio.sleep_forever()
        assert current_time() == 5
        await push.send(2)
        with push.guarding(), trio.CancelScope(shield=True):
            await trio.sleep(10)  # a batch that has left the manager is trained on
        await push.send(3)
        assert updates.events[-1] == ("begins", 2)  # none is begun after a failure that nobody has heard of
        with pytest.raises(WeightSyncError, match="late"):
            await push.wait()
        with pytest.raises(KeyError, match="own"), push.guarding():
            raise KeyError("own")

"""Updates of the engines beside training: when the trainer may go on, who hears of a failure, and what a run
leaves behind.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import pytest
import trio

from rollouts.data.data_buffer import DataBuffer
from rollouts.errors import EngineUnreachable, FleetDown, RolloutsError, WeightSyncError
from rollouts.loops.hooks import LoopHooks
from rollouts.loops.rl import run_rl_training
from rollouts.loops.stopping import StopControl
from rollouts.loops.weight_push import WeightPush, open_weight_push
from rollouts.protocols import TrainingBackend
from rollouts.testing.fakes import ScriptedEngine, ScriptedReply, open_fake_backend
from rollouts.types import GenerateRequest, Sample
from tests.unit.test_loops import MemoryLogger, make_manager, rl_config


class Updates:
    """Engines whose update takes `hold_s` seconds of the trainer and `load_s` more. `failures`: what becomes
    of a version, and after how long.
    """

    def __init__(self, *, hold_s: float = 1.0, load_s: float = 9.0) -> None:
        self.hold_s, self.load_s = hold_s, load_s
        self.failures: dict[int, tuple[float, Exception]] = {}  # seconds after the beginning
        self.events: list[tuple[str, int, float]] = []
        self.running = 0

    async def __call__(self, version: int, released: trio.Event | None) -> Mapping[str, float]:
        assert self.running == 0, "two updates at once"
        self.running += 1
        began = trio.current_time()
        self.note("begins", version)
        after_s, error = self.failures.get(version, (float("inf"), None))
        try:
            with trio.move_on_at(began + after_s):
                await trio.sleep(self.hold_s)
                if released is not None:
                    released.set()
                await trio.sleep(self.load_s)
            if error is not None:
                raise error
        finally:
            self.running -= 1
        self.note("ends", version)
        return {f"updated/{version}": 1.0}

    def note(self, what: str, version: int) -> None:
        self.events.append((what, version, trio.current_time()))


def remember(updates: Updates) -> Callable[[int], None]:
    return lambda version: updates.note("engines have", version)


# --- WeightPush ---------------------------------------------------------------------------------------------


async def test_an_update_goes_on_when_the_trainer_needs_no_longer_wait_and_the_next_one_waits_for_it(
    autojump_clock,
):
    updates = Updates()
    async with open_weight_push(updates, beside=True, on_updated=remember(updates)) as push:
        await push.start(1)
        assert trio.current_time() == 1 and push.take_metrics() == {}
        await push.start(2)
        assert trio.current_time() == 11, "10 s of the first, and 1 s of its own"
        assert push.take_metrics() == {"updated/1": 1.0}
        await push.wait()
        assert trio.current_time() == 20
        assert push.take_metrics() == {"updated/2": 1.0} and push.take_metrics() == {}
        await push.wait()
        assert trio.current_time() == 20
    assert updates.events == [
        ("begins", 1, 0), ("ends", 1, 10), ("engines have", 1, 10), ("begins", 2, 10), ("ends", 2, 20), ("engines have", 2, 20)
    ]  # fmt: skip


async def test_an_update_that_never_releases_the_trainer_is_waited_for(autojump_clock):
    async def update(version: int, released: trio.Event | None) -> Mapping[str, float]:
        await trio.sleep(7)
        return {}

    async with open_weight_push(update, beside=True, on_updated=lambda version: None) as push:
        await push.start(1)
        assert trio.current_time() == 7


async def test_not_beside_training_start_is_the_whole_update(autojump_clock):
    updates = Updates()
    updates.failures[2] = (3, WeightSyncError("nobody"))
    async with open_weight_push(updates, beside=False, on_updated=remember(updates)) as push:
        await push.start(1)
        assert trio.current_time() == 10 and push.take_metrics() == {"updated/1": 1.0}
        with pytest.raises(WeightSyncError, match="nobody"):
            await push.start(2)
        with push.guarding():
            await trio.sleep(1)
        await push.wait()
    assert [what for what, _, _ in updates.events] == ["begins", "ends", "engines have", "begins"]


async def ask_by_start(push: WeightPush) -> None:
    await push.start(2)


async def ask_by_wait(push: WeightPush) -> None:
    await push.wait()


async def ask_by_guarding(push: WeightPush) -> None:
    with push.guarding():
        raise AssertionError("what is inside is not begun")


@pytest.mark.parametrize("ask", [ask_by_start, ask_by_wait, ask_by_guarding])
async def test_a_failure_after_the_release_is_raised_once_by_whoever_asks_next(
    autojump_clock, ask: Callable[[WeightPush], Awaitable[None]]
):
    updates = Updates()
    updates.failures[1] = (5, WeightSyncError("nobody took it"))
    async with open_weight_push(updates, beside=True, on_updated=remember(updates)) as push:
        await push.start(1)
        await trio.sleep(20)
        with pytest.raises(WeightSyncError, match="nobody took it"):
            await ask(push)
        await push.start(3)
        await push.wait()
        assert push.take_metrics() == {"updated/3": 1.0}
    assert [event[:2] for event in updates.events] == [
        ("begins", 1),
        ("begins", 3),
        ("ends", 3),
        ("engines have", 3),
    ]


async def test_a_failure_before_the_release_is_raised_at_once(autojump_clock):
    updates = Updates()
    updates.failures[1] = (0.5, WeightSyncError("no snapshot"))
    async with open_weight_push(updates, beside=True, on_updated=remember(updates)) as push:
        with pytest.raises(WeightSyncError, match="no snapshot"):
            await push.start(1)
        assert trio.current_time() == 0.5
        await push.wait()


async def test_what_is_guarded_is_cancelled_at_once_when_the_update_fails(autojump_clock):
    updates = Updates()
    updates.failures[1] = (5, FleetDown("nobody serves"))
    async with open_weight_push(updates, beside=True, on_updated=remember(updates)) as push:
        await push.start(1)
        with pytest.raises(FleetDown, match="nobody serves"), push.guarding():
            await trio.sleep_forever()
        assert trio.current_time() == 5
        with push.guarding():
            await trio.sleep(1)


async def test_what_was_guarded_and_has_its_result_keeps_it_and_the_failure_waits(autojump_clock):
    """A batch that has left the manager is trained on: else its prompts would be lost."""
    updates, got = Updates(), list[str]()
    updates.failures[1] = (5, WeightSyncError("late"))
    async with open_weight_push(updates, beside=True, on_updated=remember(updates)) as push:
        await push.start(1)
        with push.guarding():
            with trio.CancelScope(shield=True):
                await trio.sleep(10)  # the failure comes in between
            got.append("batch")
        assert got == ["batch"]
        with pytest.raises(WeightSyncError, match="late"):
            await push.wait()


async def test_an_error_of_what_is_guarded_is_raised_as_itself(autojump_clock):
    updates = Updates()
    async with open_weight_push(updates, beside=True, on_updated=remember(updates)) as push:
        await push.start(1)
        with pytest.raises(EngineUnreachable, match="gone"), push.guarding():
            raise EngineUnreachable("gone")


async def test_leaving_cancels_the_update_under_way(autojump_clock):
    updates = Updates()
    async with open_weight_push(updates, beside=True, on_updated=remember(updates)) as push:
        await push.start(1)
    assert trio.current_time() == 1 and updates.running == 0
    assert [event[0] for event in updates.events] == ["begins"]


async def test_an_error_of_the_block_is_raised_as_itself_and_cancels_the_update(autojump_clock):
    updates = Updates()

    async def work() -> None:
        async with open_weight_push(updates, beside=True, on_updated=remember(updates)) as push:
            await push.start(1)
            raise KeyError("own")

    with pytest.raises(KeyError, match="own"):
        await work()
    assert updates.running == 0


async def test_who_waits_for_the_release_may_be_cancelled_and_the_update_goes_on(autojump_clock):
    updates = Updates(hold_s=5)
    async with open_weight_push(updates, beside=True, on_updated=remember(updates)) as push:
        with trio.move_on_after(1) as scope:
            await push.start(1)
        assert scope.cancelled_caught
        await push.wait()
        assert trio.current_time() == 14 and push.take_metrics() == {"updated/1": 1.0}


# --- in the loop --------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Loop:
    """A run of the loop on fakes, where a step of the backend takes 3 * `step_s`."""

    updates: Updates
    staleness: int = 1
    steps: int = 4
    step_s: float = 1.0
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    checkpoint_every: int = 0
    stop_at_s: float | None = None
    reply: Callable[[GenerateRequest], ScriptedReply] = lambda request: ScriptedReply(text="ab", token_s=0.5)
    diary: list[tuple[str, int, float]] = dataclasses.field(default_factory=list)
    states: dict[int, dict[str, Any]] = dataclasses.field(
        default_factory=dict
    )  # of the manager, as they were saved
    logger: MemoryLogger = dataclasses.field(default_factory=MemoryLogger)

    async def run(self) -> list[dict[str, float]]:
        engine = ScriptedEngine(self.reply)
        buffer = DataBuffer([{"prompt": str(number)} for number in range(60)], seed=0)
        config = rl_config(**{"steps": self.steps, "max_staleness": self.staleness, **self.changes})
        stop = self.stop = StopControl()

        async def sync(
            backend: TrainingBackend,
            engines: Sequence[Any],
            version: int,
            *,
            released: trio.Event | None = None,
        ) -> Mapping[str, float]:
            trained = backend.weight_version
            assert trained == version, "the trainer has the weights that are sent when an update begins"
            metrics = await self.updates(version, released)
            engine.set_version(version)
            return metrics

        async def request_stop(at_s: float) -> None:
            await trio.sleep(at_s)
            stop.request()

        failure: RolloutsError | None = None
        history: list[dict[str, float]] = []
        async with open_fake_backend(step_s=self.step_s) as backend, trio.open_nursery() as nursery:
            manager = self.manager = make_manager(engine, buffer, config, lambda: backend.weight_version)

            async def save(step: int) -> None:
                self.diary.append(("save", step, trio.current_time()))
                self.states[step] = manager.state_dict() | {"buffer": buffer.state_dict()}
                await trio.sleep(0.1)

            async def evaluate(step: int) -> None:
                self.diary.append(("evaluate", step, trio.current_time()))
                assert self.updates.running == 0
                await trio.sleep(0.1)

            if self.stop_at_s is not None:
                nursery.start_soon(request_stop, self.stop_at_s)
            hooks = LoopHooks(evaluate, save, stop.is_requested, self.checkpoint_every, stop=stop)
            try:
                with stop.training():
                    history = await run_rl_training(
                        backend,
                        buffer,
                        manager,
                        [engine],
                        config,
                        self.logger,
                        sync_weights=sync,
                        hooks=hooks,
                    )
            except RolloutsError as error:
                failure = error
            nursery.cancel_scope.cancel()
        assert engine.in_flight == 0 and self.updates.running == 0
        if failure is not None:
            raise failure
        return history

    def rows_with(self, name: str) -> list[int]:
        return [step for _, step, _, metrics in self.logger.steps if name in metrics]

    def is_complete(self, step: int) -> bool:
        """Every prompt that was drawn when `step` was saved was trained by then, or is in that state."""
        state = self.states[step]
        there = (
            len(state["held"])
            + len(state["unfinished"])
            + len(state["in_flight"])
            + len(state["buffer"]["returned"])
        )
        return state["ledger"]["trained"] == 2 * step and state["buffer"]["cursor"] == 2 * step + there


async def test_an_update_that_takes_longer_than_a_step_is_in_the_row_of_the_step_that_was_the_last_when_it_ended(
    autojump_clock,
):
    """Steps take 3 s, an update 1 s of the trainer and 4 s more. Batches are there at once, so nobody waits
    for engines.
    """
    loop = Loop(Updates(hold_s=1.0, load_s=4.0), staleness=4, reply=lambda request: ScriptedReply(text="ab"))
    began = trio.current_time()
    await loop.run()
    # step 1: 0 to 3, its update from 3, released at 4, ends at 8; step 2: 4 to 7, waits until 8, released at
    # 9; step 3: 9 to 12; and so on
    assert [(what, version, at - began) for what, version, at in loop.updates.events] == [
        ("begins", 1, 3), ("ends", 1, 8), ("begins", 2, 8), ("ends", 2, 13), ("begins", 3, 13), ("ends", 3, 18), ("begins", 4, 18), ("ends", 4, 23)
    ]  # fmt: skip
    assert [loop.rows_with(f"updated/{version}") for version in (1, 2, 3, 4)] == [[2], [3], [4], [4]]


async def test_at_no_staleness_a_step_waits_for_its_update(autojump_clock):
    loop = Loop(Updates(hold_s=1.0, load_s=4.0), staleness=0, steps=2)
    began = trio.current_time()
    await loop.run()
    # a batch takes 1.5 s and its step 3 s: the first update is from 4.5 to 9.5, the second from 14 on
    assert [at - began for _, _, at in loop.updates.events] == [4.5, 9.5, 14.0, 19.0]
    assert [loop.rows_with(f"updated/{version}") for version in (1, 2)] == [[1], [2]]


@pytest.mark.parametrize("error", [WeightSyncError("a keeps the old weights"), FleetDown("nobody serves")])
@pytest.mark.parametrize("after_s", [1.5, 2.5, 4.0])
async def test_an_update_that_fails_in_the_background_ends_the_run_with_its_steps_saved(
    autojump_clock, after_s: float, error: RolloutsError
):
    updates = Updates(hold_s=1.0, load_s=4.0)
    updates.failures[2] = (after_s, error)
    loop = Loop(updates, staleness=4, steps=9)
    with pytest.raises(type(error), match=str(error)):
        await loop.run()
    (saved,) = [step for what, step, _ in loop.diary if what == "save"]
    assert [row[1] for row in loop.logger.steps] == list(range(1, saved + 1))
    assert saved in (2, 3), "the failure is heard of while the third batch is made, or after the third step"
    assert loop.is_complete(saved)


async def test_an_update_that_fails_while_the_next_one_waits_for_it_ends_the_run_at_once(autojump_clock):
    """The second step's update waits for the first, and hears that it came to nothing."""
    updates = Updates(hold_s=0.5, load_s=100.0)
    updates.failures[1] = (20, WeightSyncError("lost"))
    loop = Loop(updates, steps=9)
    began = trio.current_time()
    with pytest.raises(WeightSyncError, match="lost"):
        await loop.run()
    # the first batch takes 1.5 s, its step 3 s; the second is there, and its step is done at 8 s; its update
    # waits for the first, which began at 4.5
    assert trio.current_time() - began == pytest.approx(4.5 + 20 + 0.1)
    assert [(what, step) for what, step, _ in loop.diary] == [("save", 2)]
    assert loop.is_complete(2)


async def test_an_update_that_fails_while_slow_engines_make_a_batch_cuts_that_at_once(autojump_clock):
    updates = Updates(hold_s=0.5, load_s=100.0)
    updates.failures[1] = (20, WeightSyncError("lost"))
    slow = Loop(
        updates,
        steps=9,
        reply=lambda request: ScriptedReply(
            text="ab", token_s=0.5 if request.request_id < "g00000002" else 1000.0
        ),
    )
    began = trio.current_time()
    with pytest.raises(WeightSyncError, match="lost"):
        await slow.run()
    assert trio.current_time() - began == pytest.approx(4.5 + 20 + 0.1)
    assert [(what, step) for what, step, _ in slow.diary] == [("save", 1)]
    assert slow.is_complete(1)


async def test_a_batch_that_left_the_manager_when_the_update_failed_is_trained_before_the_run_ends(
    autojump_clock,
):
    """The samples of a batch are written down when it has left; an update that fails just then must not lose
    its prompts.
    """
    updates = Updates(hold_s=0.0, load_s=100.0)
    loop = Loop(updates, staleness=4, steps=9)

    async def log_slowly(stage: str, step: int, policy_version: int, samples: Sequence[Sample]) -> None:
        await trio.sleep(10)

    loop.logger.log_samples = log_slowly
    updates.failures[1] = (5, WeightSyncError("lost"))  # while the samples of the second batch are written
    with pytest.raises(WeightSyncError, match="lost"):
        await loop.run()
    assert [(what, step) for what, step, _ in loop.diary] == [("save", 2)]
    assert [row[1] for row in loop.logger.steps] == [1, 2]
    assert loop.is_complete(2)


async def test_the_samples_that_failed_are_in_the_record_once_when_an_update_fails_under_a_batch(
    autojump_clock,
):
    updates = Updates(hold_s=0.5, load_s=100.0)
    updates.failures[1] = (20, WeightSyncError("lost"))
    broken = {"g00000000-s000"}
    loop = Loop(
        updates, steps=9, changes={"rollout": rl_config().rollout.model_copy(update={"samples_per_prompt": 3, "max_failed_fraction": 0.5})},
        reply=lambda request: ScriptedReply(text="ab", token_s=0.5, error=EngineUnreachable("gone") if request.request_id in broken else None),
    )  # fmt: skip
    written: list[str] = []

    async def log_samples(stage: str, step: int, policy_version: int, samples: Sequence[Sample]) -> None:
        written.extend(sample.id for sample in samples)

    loop.logger.log_samples = log_samples
    with pytest.raises(WeightSyncError):
        await loop.run()
    assert "g00000000-s000" in written and len(written) == len(set(written))


async def test_the_last_update_has_ended_before_the_last_row_and_before_the_last_save(autojump_clock):
    loop = Loop(Updates(hold_s=0.1, load_s=50.0), staleness=4, steps=2)
    began = trio.current_time()
    await loop.run()
    ends = [at for what, version, at in loop.updates.events if (what, version) == ("ends", 2)]
    ((_, step, saved_at),) = loop.diary
    assert step == 2 and ends and saved_at >= ends[0] > began + 100
    assert loop.rows_with("updated/2") == [2]


async def test_an_evaluation_waits_for_the_update_under_way(autojump_clock):
    loop = Loop(Updates(hold_s=0.1, load_s=7.0), staleness=4, steps=3, changes={"eval_every": 1})
    await loop.run()
    ended = {version: at for what, version, at in loop.updates.events if what == "ends"}
    evaluated = {step: at for what, step, at in loop.diary if what == "evaluate"}
    assert set(evaluated) == {1, 2}
    assert all(at == ended[step] for step, at in evaluated.items()), (
        "at once when its own step's weights are there, not before"
    )


async def test_an_evaluation_before_which_the_update_fails_is_not_begun(autojump_clock):
    updates = Updates(hold_s=0.1, load_s=7.0)
    updates.failures[1] = (3.0, WeightSyncError("lost"))
    loop = Loop(updates, staleness=4, steps=3, changes={"eval_every": 1})
    with pytest.raises(WeightSyncError, match="lost"):
        await loop.run()
    assert [(what, step) for what, step, _ in loop.diary] == [("save", 1)]


@pytest.mark.parametrize("stop_at_s", [2.0, 4.0, 5.0, 6.5, 9.0, 20.0])
async def test_a_stop_while_an_update_hangs_in_the_background_ends_in_time_and_saves(
    autojump_clock, stop_at_s: float
):
    loop = Loop(Updates(hold_s=0.2, load_s=10_000.0), staleness=4, steps=9, stop_at_s=stop_at_s)
    began = trio.current_time()
    history = await loop.run()
    assert trio.current_time() - began <= stop_at_s + 22, "before the process would be ended by force"
    if history:
        (saved,) = [step for what, step, _ in loop.diary]
        assert saved == len(history) and loop.is_complete(saved)
    else:
        assert loop.diary == []


async def test_a_stop_while_a_batch_is_awaited_saves_the_tokens_that_there_are(autojump_clock):
    """Answers take 40 s each, and the stop comes when the third batch's have some of their tokens."""

    def reply(request: GenerateRequest) -> ScriptedReply:
        begun = int(request.request_id.partition("@")[2] or 0)
        return ScriptedReply(
            text="abcdefg"[begun:], token_s=5.0 if request.request_id[1:9] > "00000001" else 0.5
        )

    loop = Loop(Updates(hold_s=0.1, load_s=0.4), staleness=3, steps=9, reply=reply, stop_at_s=20.0)
    history = await loop.run()
    (saved,) = [step for what, step, _ in loop.diary]
    assert saved == len(history) and loop.is_complete(saved)
    tokens = [
        sum(member["partial"]["loss_mask"])
        for group in loop.states[saved]["unfinished"]
        for member in group["members"]
    ]
    assert len(tokens) == 4 and min(tokens) >= 1, tokens


async def test_a_run_that_ends_holds_what_it_has_begun_before_it_saves(autojump_clock):
    """One step: when it is done, the next batch's answers of 8 tokens, 1 s each, have been on their way for
    3.3 s.
    """
    loop = Loop(Updates(hold_s=0.0, load_s=0.0), staleness=2, steps=1, step_s=1.1, reply=lambda request: ScriptedReply(
        text="abcdefg"[int(request.request_id.partition("@")[2] or 0) :], token_s=0.0 if request.request_id[1:9] < "00000002" else 1.0))  # fmt: skip
    await loop.run()
    (held,) = [loop.states[1]["unfinished"]]
    assert len(held) == 2 and loop.is_complete(1)
    tokens = [sum(member["partial"]["loss_mask"]) for group in held for member in group["members"]]
    assert tokens == [3, 3, 3, 3]

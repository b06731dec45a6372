"""What a requested stop cuts and what it lets end: the estimate by hand, and the loops on fakes in virtual
time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import trio

from rollouts.config.schema import RLTrainingConfig, SFTTrainingConfig
from rollouts.data.data_buffer import DataBuffer
from rollouts.generation.async_rollout_manager import AsyncRolloutManager
from rollouts.loops.hooks import LoopHooks
from rollouts.loops.rl import run_rl_training
from rollouts.loops.sft import run_sft_training
from rollouts.loops.stopping import StopControl, choose_cut, end_overdue, end_unconnected, estimate_rest
from rollouts.testing.fakes import FakeBackend, ScriptedEngine, ScriptedReply, open_fake_backend
from rollouts.types import Sample
from tests.unit.test_loops import DATA, MemoryLogger, make_manager, rl_config, sft_samples

MEASURED = {"generate": 10.0, "log_probs": 1.0, "train": 4.0, "weight_sync": 2.0, "evaluate": 6.0}


@pytest.mark.parametrize(
    ("phase", "elapsed_s", "expected"),
    [
        ("generate", 0.0, 17.0),  # 10 + 1 + 4 + 2
        ("generate", 7.0, 10.0),  # 3 + 1 + 4 + 2
        ("generate", 15.0, 7.0),  # late, but not by much: 0 + 1 + 4 + 2
        ("generate", 20.5, None),  # more than twice as long: nobody knows
        ("train", 1.0, 5.0),  # 3 + 2
        ("weight_sync", 0.5, 1.5),
        ("evaluate", 2.0, 4.0),  # belongs to no step: nothing follows
        ("save", 0.0, None),
    ],
)
def test_the_rest_of_a_step_is_what_its_phases_took_the_last_time(
    phase: str, elapsed_s: float, expected: float | None
):
    assert estimate_rest(MEASURED, phase, elapsed_s) == expected


def test_a_phase_that_was_never_measured_counts_nothing_where_it_follows():
    assert estimate_rest({"generate": 10.0, "train": 4.0}, "generate", 0.0) == 14.0


@pytest.mark.parametrize(
    ("rest_s", "save_s", "piece_s", "expected"),
    [
        (None, 2.0, 0.0, 100.0),  # unknown: now
        (8.0, 2.0, 0.0, 114.0),  # 125 − 7 − 1 − 1.5·2; 1.5·8 = 12 s fit into the 14
        (1.0, 2.0, 0.0, 105.0),  # after 3·1 + 2 s it is not the step that was expected
        (12.0, 2.0, 0.0, 100.0),  # 1.5·12 = 18 s do not fit
        (8.0, 2.0, 4.0, 100.0),  # 125 − 8 − 1.5·6 = 108: 12 s do not fit into 8
        (5.0, 2.0, 4.0, 108.0),  # 7.5 s do
        (0.0, 20.0, 0.0, 100.0),  # a save of 1.5·20 s cannot fit, whatever is done
    ],
)
def test_a_phase_goes_on_only_if_its_step_and_a_save_fit(
    rest_s: float | None, save_s: float, piece_s: float, expected: float
):
    assert choose_cut(now=100.0, deadline=125.0, rest_s=rest_s, save_s=save_s, piece_s=piece_s) == expected


# --- the scope ----------------------------------------------------------------------------------------------


async def request_at(stop: StopControl, when: float) -> None:
    await trio.sleep_until(when)
    stop.request()


async def test_a_stop_in_startup_cancels_all_of_it(autojump_clock):
    stop, began = StopControl(), trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(request_at, stop, began + 3)
        with stop.startup() as scope:
            await trio.sleep(10_000)
    assert scope.cancelled_caught and trio.current_time() == began + 3


async def test_a_stop_between_phases_of_a_training_cancels_nothing(autojump_clock):
    stop, began = StopControl(), trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(request_at, stop, began + 3)
        with stop.startup() as scope, stop.training():
            await trio.sleep(100)
    assert not scope.cancelled_caught and trio.current_time() == began + 100


async def test_a_phase_that_is_expected_to_end_is_cut_only_when_it_does_not(autojump_clock):
    stop, began = StopControl(), trio.current_time()
    with stop.phase("evaluate"):
        await trio.sleep(3)
    with stop.phase("evaluate") as scope:
        stop.request()
        await trio.sleep(10_000)
    # 25 − 7 − 1 − 1.5·8 (no save was measured) leaves 5 s, into which 1.5·3 s fit; the second evaluation
    # begins at 3 s
    assert scope.cancelled_caught and trio.current_time() == began + 3 + 5


async def test_an_evaluation_that_nobody_measured_is_cut_at_once(autojump_clock):
    stop = StopControl()
    with stop.startup() as everything:
        with stop.phase("evaluate") as scope:
            stop.request()
            await trio.sleep(10_000)
        await trio.sleep(10_000)
    assert scope.cancelled_caught and everything.cancelled_caught, (
        "no stage trains: what follows the evaluation is not begun"
    )


async def test_a_save_that_cannot_be_done_in_time_is_not_begun_and_that_is_said(autojump_clock):
    said: list[str] = []
    stop = StopControl(say=said.append)
    saves: list[float] = []

    async def write() -> None:
        await trio.sleep(12)
        saves.append(trio.current_time())

    assert await stop.save(write, what="step 1")
    stop.request()
    assert await stop.save(write, what="step 2"), "12 of 25 s"
    assert not await stop.save(write, what="step 3"), "13 s are left, and 3 of them are not for saving"
    assert len(saves) == 2
    assert said == [
        (
            "stopping: step 3 is not saved: that took 12.0 s the last time, and 10.0 s are left; the newest"
            " complete checkpoint counts"
        )
    ]


async def test_what_hangs_is_ended_before_the_deadline(autojump_clock):
    stop, ended = StopControl(), []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: end_overdue(stop, end_process=lambda: ended.append(trio.current_time())))
        await trio.sleep(10)
        stop.request()
        began = trio.current_time()
        await trio.sleep(100)
    assert ended == [began + 22]


async def test_other_ranks_are_told_before_the_process_is_ended_and_one_that_does_not_hear_is_not_waited_for(
    autojump_clock,
):
    stop, events = StopControl(), list[tuple[str, float]]()
    began = trio.current_time()

    async def tell() -> None:
        events.append(("told", trio.current_time() - began))
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(
            lambda: end_overdue(
                stop, end_process=lambda: events.append(("ended", trio.current_time() - began))
            )
        )
        with stop.telling(tell):
            stop.request()
            await trio.sleep(30)
    assert events == [("told", 22.0), ("ended", 24.0)]


@pytest.mark.parametrize(("connected_s", "ended"), [(3.9, []), (1800.0, [4.0])])
async def test_a_stop_while_ranks_are_connected_waits_for_them_for_some_seconds_only(
    autojump_clock, connected_s: float, ended: list[float]
):
    stop, connecting, found, began = StopControl(), trio.CancelScope(), list[float](), trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(
            lambda: end_unconnected(
                stop, connecting, end_process=lambda: found.append(trio.current_time() - began)
            )
        )
        stop.request()
        await trio.sleep(connected_s)
        connecting.cancel()
    assert found == ended


# --- the loops ----------------------------------------------------------------------------------------------


@dataclass
class StoppedRun:
    """A run on fakes that is asked to stop at a time, and what it saved."""

    at_s: float
    checkpoint_every: int = 0
    saved: list[tuple[str, int, int, float]] = field(
        default_factory=list
    )  # which hook, step, the backend's optimizer steps, when
    said: list[str] = field(default_factory=list)
    evaluate_s: float = 0.0
    evaluated: list[int] = field(default_factory=list)
    refused: set[int] = field(
        default_factory=set
    )  # steps whose first save the disk refused, which training outlived
    buffers: dict[int, dict[str, Any]] = field(
        default_factory=dict
    )  # by step: the buffer's state, as it was saved
    began: float = 0.0

    def hooks(
        self, backend: FakeBackend, read_state: Callable[[], dict] = dict, *, save_s: float = 1.0
    ) -> LoopHooks:
        stop = self.stop = StopControl(say=self.said.append)
        before: dict = {}

        async def write(kind: str, step: int, state: Mapping) -> None:
            async def work() -> None:
                self.saved.append(
                    (kind, step, int(backend.statistics()["steps"]), trio.current_time() - self.began)
                )
                self.buffers[step] = state.get("data_buffer", {})
                await trio.sleep(save_s)

            await stop.save(work, what=f"step {step}")

        async def evaluate(step: int) -> None:
            await trio.sleep(self.evaluate_s)
            self.evaluated.append(step)

        async def save(step: int) -> None:
            await write("save", step, read_state())

        async def save_before(step: int) -> None:
            await write("before", step, before)

        async def is_saved(step: int) -> bool:
            return step not in self.refused

        return LoopHooks(
            evaluate,
            save,
            stop.is_requested,
            self.checkpoint_every,
            lambda step: before.update(read_state()),
            stop=stop,
            save_before_batch=save_before,
            is_saved=is_saved,
        )


async def run_sft(
    run: StoppedRun, *, step_s: float, micro_batch_s: float = 0.0, **changes: object
) -> list[dict[str, float]]:
    config = SFTTrainingConfig.model_validate({"data": DATA, "steps": 9, "batch_size": 2, **changes})
    history: list[list[dict[str, float]]] = []
    async with (
        open_fake_backend(step_s=step_s, micro_batch_s=micro_batch_s) as backend,
        trio.open_nursery() as nursery,
    ):
        hooks = run.hooks(backend)
        run.began = trio.current_time()
        nursery.start_soon(request_at, run.stop, run.began + run.at_s)
        with run.stop.training():
            history.append(
                await run_sft_training(backend, sft_samples(6), config, MemoryLogger(), hooks=hooks)
            )
        nursery.cancel_scope.cancel()
    return history[0]


async def test_an_sft_step_that_fits_is_finished_and_saved(autojump_clock):
    run = StoppedRun(at_s=7)
    history = await run_sft(
        run, step_s=2
    )  # forward_backward and optim_step take 2 s each: a step is 4 s, and the second ends at 8 s
    assert len(history) == 2
    assert run.saved == [("save", 2, 2, 8.0)]


async def test_an_sft_step_that_does_not_fit_ends_at_the_next_micro_batch_and_the_one_before_is_saved(
    autojump_clock,
):
    run = StoppedRun(at_s=70)
    history = await run_sft(
        run, step_s=30, micro_batch_s=3
    )  # the first step ends at 60 s; the second would at 120
    assert len(history) == 1
    assert run.saved == [("before", 1, 1, 73.0)], "3 s after the signal"
    assert run.said == ["stopping: train does not fit into the time that is left, and is cut"]


async def test_a_cut_step_whose_predecessor_is_saved_is_not_saved_again(autojump_clock):
    run = StoppedRun(at_s=70, checkpoint_every=1)
    await run_sft(run, step_s=30)
    assert [(kind, step) for kind, step, _, _ in run.saved] == [("save", 1)]


async def test_a_cut_step_whose_predecessors_save_was_refused_is_saved_after_all(autojump_clock):
    run = StoppedRun(at_s=70, checkpoint_every=1, refused={1})
    await run_sft(run, step_s=30, micro_batch_s=3)
    assert [(kind, step) for kind, step, _, _ in run.saved] == [("save", 1), ("before", 1)]


async def test_a_first_step_that_is_cut_leaves_nothing_to_save(autojump_clock):
    run = StoppedRun(at_s=10)
    assert await run_sft(run, step_s=30) == []
    assert run.saved == []


async def test_a_micro_batch_that_leaves_no_time_to_save_is_said(autojump_clock):
    run = StoppedRun(at_s=700)
    await run_sft(run, step_s=300, micro_batch_s=40)
    assert run.saved == []
    assert (
        run.said[-1]
        == "stopping: a micro-batch (measured: 40.0 s) leaves no time to save step 1; the newest complete"
        " checkpoint counts"
    )


async def test_an_evaluation_is_dropped_and_its_step_saved(autojump_clock):
    run = StoppedRun(at_s=10, evaluate_s=1000)
    history = await run_sft(run, step_s=2, eval_every=1)
    assert len(history) == 1 and run.evaluated == []
    assert run.saved == [("save", 1, 1, 10.0)]


async def test_an_evaluation_that_fits_is_finished(autojump_clock):
    run = StoppedRun(at_s=12, evaluate_s=3)
    history = await run_sft(run, step_s=2, eval_every=1)  # steps end at 4 and 11 s, evaluations at 7 and 14
    assert len(history) == 2 and run.evaluated == [1, 2]
    assert run.saved == [("save", 2, 2, 14.0)]


async def run_rl(
    run: StoppedRun,
    engine: ScriptedEngine,
    *,
    reward=None,
    sync_s: Callable[[int], float] = lambda version: 0.0,
    **changes: object,
):
    buffer = DataBuffer([{"prompt": str(n)} for n in range(50)], seed=0)
    config: RLTrainingConfig = rl_config(**{"steps": 9, **changes})

    async def sync(
        backend: Any, engines: Sequence[Any], version: int, *, released: Any = None
    ) -> Mapping[str, float]:
        await trio.sleep(sync_s(version))
        engines[0].set_version(version)
        return {}

    history: list[list[dict[str, float]]] = []
    logger = MemoryLogger()
    async with open_fake_backend(step_s=1.0) as backend, trio.open_nursery() as nursery:
        options = {"reward": reward} if reward else {}
        manager: AsyncRolloutManager = make_manager(
            engine, buffer, config, lambda: backend.weight_version, **options
        )
        hooks = run.hooks(
            backend, lambda: {"data_buffer": buffer.state_dict(), "manager": manager.state_dict()}
        )
        run.began = trio.current_time()
        nursery.start_soon(request_at, run.stop, run.began + run.at_s)
        with run.stop.training():
            history.append(
                await run_rl_training(
                    backend, buffer, manager, [engine], config, logger, sync_weights=sync, hooks=hooks
                )
            )
        nursery.cancel_scope.cancel()
    assert engine.in_flight == 0
    return history[0], buffer


async def test_a_batch_that_does_not_fit_is_given_back_and_the_step_before_is_saved_as_it_was(autojump_clock):
    slow: list[bool] = []
    engine = ScriptedEngine(lambda request: ScriptedReply(token_s=1000.0 if slow else 0.5))
    run = StoppedRun(at_s=10)

    async def slow_from_the_second_batch(sample: Sample) -> float:
        slow.append(True)
        return float(sample.id.endswith("s000"))

    history, buffer = await run_rl(run, engine, reward=slow_from_the_second_batch)
    assert len(history) == 1
    assert run.saved == [("before", 1, 1, 10.0)]
    assert run.buffers[1]["returned"] == [] and run.buffers[1]["cursor"] == 2, (
        "as before the second batch: two prompts drawn, none given back"
    )
    assert len(buffer.state_dict()["returned"]) == 2, "the prompts of the batch that was cut"


async def test_a_reward_that_hangs_does_not_hold_the_stop(autojump_clock):
    calls: list[str] = []

    async def hangs_in_the_second_batch(sample: Sample) -> float:
        calls.append(sample.id)
        if len(calls) > 4:
            await trio.sleep(10_000)
        return float(sample.id.endswith("s000"))

    run = StoppedRun(at_s=20)
    history, _ = await run_rl(
        run, ScriptedEngine(lambda request: ScriptedReply(token_s=0.5)), reward=hangs_in_the_second_batch
    )
    assert len(history) == 1
    assert run.saved == [("before", 1, 1, 20.0)]


async def test_a_batch_that_fits_is_finished_with_its_step(autojump_clock):
    # a step: 3 tokens of 0.5 s ("ok" and the stop token), then 3 s of the backend; then 1 s for a save. The
    # second begins at 5.5 s
    run = StoppedRun(at_s=6, checkpoint_every=1)
    history, _ = await run_rl(run, ScriptedEngine(lambda request: ScriptedReply(token_s=0.5)))
    assert len(history) == 2
    assert run.saved == [("save", 1, 1, 4.5), ("save", 2, 2, 10.0)]


async def test_an_update_of_the_engines_that_hangs_is_cut_and_its_step_is_logged_and_saved(autojump_clock):
    run = StoppedRun(at_s=50)
    history, _ = await run_rl(
        run,
        ScriptedEngine(lambda request: ScriptedReply(token_s=0.5)),
        sync_s=lambda version: 10_000.0 if version == 2 else 0.0,
    )
    assert len(history) == 2
    assert run.saved == [("save", 2, 2, 50.0)]


async def test_a_stop_between_two_updates_of_the_engines_goes_on_to_the_next_one_if_that_fits(autojump_clock):
    run = StoppedRun(
        at_s=13, checkpoint_every=1
    )  # in the third step; the engines are updated after the second and the fourth
    history, _ = await run_rl(
        run, ScriptedEngine(lambda request: ScriptedReply(token_s=0.5)), sync_every=2, max_staleness=1
    )
    assert len(history) == 4, run.said
    assert [(kind, step) for kind, step, _, _ in run.saved] == [
        ("save", 1),
        ("save", 2),
        ("save", 3),
        ("save", 4),
    ]


async def test_a_stop_between_two_updates_of_the_engines_saves_where_it_is_if_the_next_one_is_too_far(
    autojump_clock,
):
    run = StoppedRun(
        at_s=11
    )  # no save was measured, so 8 s · 1.5 are kept for it: the third step fits, the fourth does not
    history, _ = await run_rl(
        run, ScriptedEngine(lambda request: ScriptedReply(token_s=0.5)), sync_every=2, max_staleness=1
    )
    assert len(history) == 3, run.said
    assert [(kind, step) for kind, step, _, _ in run.saved] == [("save", 3)]  # of now: no batch was taken


async def test_a_step_that_is_cut_between_its_updates_is_not_saved_because_its_weights_are_no_steps(
    autojump_clock,
):
    run = StoppedRun(at_s=60)
    engine = ScriptedEngine(lambda request: ScriptedReply(token_s=0.5))
    async with open_fake_backend(step_s=20.0) as backend, trio.open_nursery() as nursery:
        buffer = DataBuffer([{"prompt": str(n)} for n in range(50)], seed=0)
        config = rl_config(steps=9, updates_per_batch=2)
        manager = make_manager(engine, buffer, config, lambda: backend.weight_version)
        hooks = run.hooks(backend)
        run.began = trio.current_time()
        nursery.start_soon(
            request_at, run.stop, run.began + 101.5 + 1.5 + 50
        )  # 101.5: the first step; then two updates of 40 s each

        async def sync(backend: Any, engines: Sequence[Any], version: int) -> Mapping[str, float]:
            engines[0].set_version(version)
            return {}

        with run.stop.training():
            history = await run_rl_training(
                backend, buffer, manager, [engine], config, MemoryLogger(), sync_weights=sync, hooks=hooks
            )
        nursery.cancel_scope.cancel()
    assert len(history) == 1 and run.saved == []
    assert (
        run.said[-1]
        == "stopping: step 2 was cut after 1 of its updates, so nothing is saved; the newest complete"
        " checkpoint counts"
    )

"""AsyncRolloutManager: which groups make a batch, what happens to the others, and what is left when something goes wrong."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import trio

from rollouts.config.schema import RolloutConfig
from rollouts.data.data_buffer import DataBuffer
from rollouts.errors import ConfigError, DataError, EngineClosed, EngineError, ModelError, NotEnoughSamples, RequestRefused, UserFunctionError
from rollouts.filters import check_reward_nonzero_std
from rollouts.generation.async_rollout_manager import AsyncRolloutManager
from rollouts.generation.batch import metric_segment
from rollouts.generation.generate import compute_request_seed, make_chat_generate
from rollouts.generation.group import MAX_STARTS
from rollouts.generation.ledger import Ledger, LedgerCounts
from rollouts.testing.fakes import FAKE_END, FakeTokenizer, ScriptedEngine, ScriptedReply
from rollouts.types import FilterDecision, GenerateRequest, RewardResult, Sample, SampleGroup, SamplingParams, Status, metric_values

SAMPLING = SamplingParams(max_new_tokens=8, stop_token_ids=(FAKE_END,))
chat_generate: Any = make_chat_generate(FakeTokenizer())


def group_of(request: GenerateRequest) -> int:
    return int(request.request_id[1:9])


def member_of(sample_id: str) -> int:
    return int(sample_id[11:14])


async def index_reward(sample: Sample) -> float:
    """0, 1, 2, … within the group."""
    return float(member_of(sample.id))


@dataclasses.dataclass
class Run:
    """A manager with its parts."""

    manager: AsyncRolloutManager
    buffer: DataBuffer
    engine: ScriptedEngine
    version: list[int]

    async def batch_groups(self) -> list[int]:
        batch = await self.manager.generate_batch()
        assert batch.group_indices is not None
        return list(dict.fromkeys(batch.group_indices.tolist()))

    def upcoming(self, count: int) -> list[tuple[int, str]]:
        """The prompts that would be drawn next."""
        other = DataBuffer(ROWS, seed=0)
        other.load_state_dict(self.buffer.state_dict())
        return [prompt.key for prompt in other.get_prompts(count)]


ROWS = [{"prompt": f"question {index}", "answer": str(index)} for index in range(12)]
STREAM = [prompt.key for prompt in DataBuffer(ROWS, seed=0).get_prompts(36)]


def make_run(
    script: Callable[[GenerateRequest], ScriptedReply] = lambda request: ScriptedReply(text="ab"),
    *,
    num_prompts: int = 2,
    samples_per_prompt: int = 2,
    over_sampling: float = 1.0,
    engine: ScriptedEngine | None = None,
    generate: Any = chat_generate,
    reward: Any = index_reward,
    **options: Any,
) -> Run:
    of_config = {name: options.pop(name) for name in list(options) if name in RolloutConfig.model_fields and name not in ("filters", "group_reward")}
    config = RolloutConfig(num_prompts=num_prompts, samples_per_prompt=samples_per_prompt, over_sampling=over_sampling, **of_config)
    buffer, version = DataBuffer(ROWS, seed=0), [0]
    engine = engine or ScriptedEngine(script)
    manager = AsyncRolloutManager(
        buffer, engine, generate=generate, config=config, reward=reward, seed=1, policy_version=lambda: version[0], **{"sampling": SAMPLING} | options
    )
    return Run(manager, buffer, engine, version)


def books(run: Run) -> dict[str, float]:
    """Where every group is."""
    names = ("drawn", "trained", "held", "in_flight")
    return {name: count for name, count in run.manager.statistics().items() if name in names or name.startswith(("dropped/", "failed/"))}


def keep_groups(*kept: int):
    async def chosen(group: SampleGroup) -> FilterDecision:
        return FilterDecision(group.group_index in kept, "not_chosen")

    return chosen


def fail_on(error: Exception, *sample_ids: str):
    """A reward function that fails for some samples."""

    async def broken_reward(sample: Sample) -> float:
        if not sample_ids or sample.id in sample_ids:
            raise error
        return float(member_of(sample.id))

    return broken_reward


# --- which groups make a batch ---


async def test_a_batch_has_all_rows_in_launch_order_with_everything_a_loss_needs():
    run = make_run(samples_per_prompt=3)
    batch = await run.manager.generate_batch()
    assert [sample.id for sample in batch.samples] == [f"g0000000{group}-s00{member}" for group in (0, 1) for member in (0, 1, 2)]
    assert batch.group_indices is not None and batch.group_indices.tolist() == [0, 0, 0, 1, 1, 1]
    assert batch.rewards is not None and batch.rewards.tolist() == [0, 1, 2, 0, 1, 2] and batch.rewards.dtype == np.float32
    assert batch.rollout_log_probs is not None and batch.weight_versions is not None
    for row, sample in enumerate(batch.samples):
        assert batch.tokens[row] is sample.tokens and batch.loss_masks[row] is sample.loss_mask
        assert batch.rollout_log_probs[row] is sample.rollout_log_probs and batch.weight_versions[row] is sample.weight_versions
        epoch, prompt_id = STREAM[row // 3]
        assert batch.metadata[row] == {"prompt_id": prompt_id, "epoch": epoch, "answer": prompt_id[4:]}
    assert batch.temperature == 1.0
    assert run.upcoming(1) == STREAM[2:3]


@pytest.mark.parametrize(("temperature", "trained_at"), [(0.7, 0.7), (0.0, 1.0)])
async def test_the_batch_says_at_which_temperature_its_log_probs_are(temperature: float, trained_at: float):
    run = make_run(sampling=dataclasses.replace(SAMPLING, temperature=temperature))
    assert (await run.manager.generate_batch()).temperature == trained_at


async def test_every_sample_is_asked_for_with_a_seed_of_its_own():
    run = make_run()
    await run.manager.generate_batch()
    assert {request.request_id: request.sampling.seed for request in run.engine.requests} == {
        f"g0000000{group}-s00{member}": compute_request_seed(1, f"g0000000{group}-s00{member}") for group in (0, 1) for member in (0, 1)
    }


async def test_group_indices_go_on_from_batch_to_batch():
    run = make_run(over_sampling=1.5)
    assert await run.batch_groups() == [0, 1]
    assert await run.batch_groups() == [3, 4]  # 2 was surplus: its id is used up


async def test_at_no_staleness_the_first_groups_by_launch_win_however_slow_they_are(autojump_clock):
    run = make_run(lambda request: ScriptedReply(text="ab", token_s=100.0 - 20 * group_of(request)), over_sampling=2.0)
    assert await run.batch_groups() == [0, 1]
    assert trio.current_time() == 300  # group 0 takes three tokens of 100 s


async def test_surplus_groups_are_aborted_and_their_prompts_drawn_next(autojump_clock):
    run = make_run(lambda request: ScriptedReply(text="ab", token_s=1.0 + 50 * (group_of(request) >= 3)), over_sampling=2.5)
    assert await run.batch_groups() == [0, 1]
    assert trio.current_time() == 3 and run.engine.in_flight == 0
    assert books(run) == {"drawn": 5, "trained": 2, "held": 0, "in_flight": 0, "dropped/surplus": 3}
    assert run.upcoming(4) == STREAM[2:6]


@pytest.mark.parametrize(("over_sampling", "launched"), [(1.0, 10), (1.1, 11), (1.25, 13)])
async def test_over_sampling_is_rounded_up_once(over_sampling: float, launched: int):
    run = make_run(num_prompts=10, samples_per_prompt=1, over_sampling=over_sampling)
    await run.manager.generate_batch()
    assert run.manager.statistics()["drawn"] == launched


async def test_a_filtered_group_is_replaced_by_one_more():
    run = make_run(filters=[keep_groups(1, 3)])
    assert await run.batch_groups() == [1, 3]
    assert books(run) == {"drawn": 4, "trained": 2, "held": 0, "in_flight": 0, "dropped/not_chosen": 2}
    assert run.upcoming(1) == STREAM[4:5], "a filtered prompt does not come back in this epoch"


async def test_filters_run_in_order_and_the_first_objection_counts():
    asked: list[str] = []

    def named(name: str, keep: bool):
        async def filter_(group: SampleGroup) -> FilterDecision:
            asked.append(f"{name}{group.group_index}")
            return FilterDecision(keep or group.group_index > 0, name)

        return filter_

    run = make_run(num_prompts=1, filters=[named("a", True), named("b", False), named("c", True)])
    await run.manager.generate_batch()
    assert asked == ["a0", "b0", "a1", "b1", "c1"]
    assert run.manager.statistics()["dropped/b"] == 1


async def test_samples_are_scored_while_others_are_generated(autojump_clock):
    async def slow_reward(sample: Sample) -> float:
        await trio.sleep(10)
        return float(member_of(sample.id))

    run = make_run(lambda request: ScriptedReply(text="ab", token_s=1.0 + 2 * member_of(request.request_id)), reward=slow_reward, num_prompts=1)
    await run.manager.generate_batch()
    assert trio.current_time() == 19  # the second takes 9 s to generate and 10 to score; the first is scored meanwhile


async def test_sync_functions_run_in_threads():
    def reward(sample: Sample) -> dict[str, float]:
        return {"member": float(member_of(sample.id))}

    run = make_run(reward=reward, filters=[check_reward_nonzero_std])
    batch = await run.manager.generate_batch()
    assert [sample.rewards for sample in batch.samples] == [{"member": 0.0}, {"member": 1.0}] * 2


async def test_another_reward_function_may_score_one_batch():
    async def other(sample: Sample) -> float:
        return 7.0

    run = make_run()
    assert (await run.manager.generate_batch(other)).rewards.tolist() == [7.0] * 4  # type: ignore[union-attr]
    assert (await run.manager.generate_batch()).rewards.tolist() == [0.0, 1.0] * 2  # type: ignore[union-attr]


async def test_a_group_reward_scores_the_samples_together():
    async def best_of(samples) -> list[RewardResult]:
        return [RewardResult(float(index == len(samples) - 1), {"place": index}, "last wins") for index in range(len(samples))]

    run = make_run(reward=None, group_reward=best_of, samples_per_prompt=3)
    batch = await run.manager.generate_batch()
    assert [sample.reward for sample in batch.samples] == [0.0, 0.0, 1.0] * 2
    assert batch.samples[1].rewards == {"place": 1.0} and batch.samples[1].metadata["reward_note"] == "last wins"


async def test_a_generate_function_may_set_the_reward_itself():
    async def generate(sample: Sample, engine, sampling) -> Sample:
        return dataclasses.replace(await chat_generate(sample, engine, sampling), reward=0.5)

    assert (await make_run(generate=generate, reward=None).manager.generate_batch()).rewards.tolist() == [0.5] * 4  # type: ignore[union-attr]


async def test_segments_of_a_trajectory_share_the_reward_of_the_last():
    async def generate(sample: Sample, engine, sampling) -> list[Sample]:
        done = await chat_generate(sample, engine, sampling)
        return [done, dataclasses.replace(done, response="final")]

    async def reward(sample: Sample) -> float:
        assert sample.response == "final"
        return float(member_of(sample.id))

    batch = await make_run(num_prompts=1, generate=generate, reward=reward).manager.generate_batch()
    assert [sample.id for sample in batch.samples] == ["g00000000-s000", "g00000000-s000.1", "g00000000-s001", "g00000000-s001.1"]
    assert [sample.reward for sample in batch.samples] == [0.0, 0.0, 1.0, 1.0]


# --- samples that fail ---


@pytest.mark.parametrize(
    ("options", "failure_class", "function", "message"),
    [
        ({"reward": fail_on(KeyError("gold"), "g00000000-s001")}, "reward", "broken_reward", "raised KeyError: 'gold'"),
        ({"error": RequestRefused("too long")}, "data", "chat_generate", "too long"),
        ({"error": DataError("bad template")}, "data", "chat_generate", "bad template"),
        ({"error": EngineError("out of memory")}, "engine", "chat_generate", "out of memory"),
        ({"error": ValueError("oops")}, "generate", "chat_generate", "raised ValueError: oops"),
    ],
)
async def test_a_sample_that_fails_leaves_its_group_and_says_why(options: dict[str, Any], failure_class: str, function: str, message: str):
    error = options.pop("error", None)
    run = make_run(
        lambda request: ScriptedReply(text="ab", error=error if request.request_id == "g00000000-s001" else None),
        samples_per_prompt=3,
        **options,
    )
    batch = await run.manager.generate_batch()
    assert [sample.id for sample in batch.samples][:2] == ["g00000000-s000", "g00000000-s002"] and len(batch) == 5
    (failed,) = run.manager.failed_samples()
    failure = failed.metadata["failure"]
    assert (failed.id, failed.status, failed.reward) == ("g00000000-s001", Status.FAILED, None)
    assert (failure["class"], failure["function"]) == (failure_class, function)
    assert message in failure["message"] and message.split(": ")[-1] in failure["traceback"]
    assert failure["traceback"].startswith("Traceback") and len(failure["traceback"]) <= 2000
    assert metric_values(run.manager.batch_metrics())[f"fail/{failure_class}"] == 1


async def test_a_reward_that_never_comes_fails_its_sample_and_is_no_reward(autojump_clock):
    async def reward(sample: Sample) -> float:
        await trio.sleep(1000 if sample.id == "g00000001-s000" else 1)
        return float(member_of(sample.id))

    run = make_run(reward=reward, samples_per_prompt=3, reward_timeout_s=5.0)
    batch = await run.manager.generate_batch()
    assert trio.current_time() == 5 and len(batch) == 5
    assert run.manager.failed_samples()[0].metadata["failure"]["class"] == "reward_timeout"


async def test_a_group_needs_two_samples_that_did_not_fail():
    run = make_run(reward=fail_on(ValueError("oops"), "g00000000-s000"), max_failed_fraction=1.0)
    assert await run.batch_groups() == [1, 2]
    assert run.manager.statistics()["failed/reward"] == 1
    metrics = metric_values(run.manager.batch_metrics())
    assert metrics["groups/dropped/failed_samples"] == 1 and metrics["groups/drawn"] == 3


async def test_a_group_of_one_needs_that_one():
    run = make_run(reward=fail_on(ValueError("oops"), "g00000000-s000"), samples_per_prompt=1, max_failed_fraction=1.0)
    assert await run.batch_groups() == [1, 2]


async def test_a_group_reward_that_fails_fails_all_its_samples(autojump_clock):
    async def group_reward(samples) -> list[float]:
        if samples[0].group_index == 0:
            raise ValueError("no judge")
        if samples[0].group_index == 1:
            await trio.sleep(1000)
        return [0.0] * len(samples)

    run = make_run(reward=None, group_reward=group_reward, max_failed_fraction=1.0)
    assert await run.batch_groups() == [2, 3]
    assert {"failed/reward": 1.0, "failed/reward_timeout": 1.0}.items() <= run.manager.statistics().items()
    assert [sample.metadata["failure"]["class"] for sample in run.manager.failed_samples()] == ["reward"] * 2 + ["reward_timeout"] * 2


async def test_a_failed_sample_is_not_shown_to_the_group_reward():
    async def group_reward(samples) -> list[float]:
        return [float(len(samples))] * len(samples)

    run = make_run(
        lambda request: ScriptedReply(error=EngineError("x") if request.request_id == "g00000000-s001" else None),
        reward=None, group_reward=group_reward, samples_per_prompt=3,
    )  # fmt: skip
    assert (await run.manager.generate_batch()).rewards.tolist() == [2.0, 2.0, 3.0, 3.0, 3.0]  # type: ignore[union-attr]


async def test_a_generate_function_may_give_a_sample_up():
    async def generate(sample: Sample, engine, sampling) -> Sample:
        if sample.id == "g00000000-s002":
            return dataclasses.replace(sample, status=Status.FAILED, metadata={**sample.metadata, "failure": "no tool"})
        return await chat_generate(sample, engine, sampling)

    run = make_run(generate=generate, samples_per_prompt=3)
    assert len(await run.manager.generate_batch()) == 5
    failure = run.manager.failed_samples()[0].metadata["failure"]
    assert (failure["class"], failure["function"], failure["message"]) == ("generate", "generate", "no tool")


# --- samples that an engine aborts ---


async def test_an_aborted_sample_goes_on_while_its_tokens_are_fresh_enough(autojump_clock):
    run = make_run(lambda request: ScriptedReply(text="abc"[3 - (request.sampling.max_new_tokens - 5) :], token_s=1.0), num_prompts=1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(abort_after, run, 2.5)
        batch = await run.manager.generate_batch()
    assert [sample.response for sample in batch.samples] == ["abc", "abc"]
    assert sorted(request.request_id for request in run.engine.requests)[:2] == ["g00000000-s000", "g00000000-s000@2"]


async def abort_after(run: Run, seconds: float, new_version: int = 0) -> None:
    await trio.sleep(seconds)
    run.version[0] = new_version
    run.engine.set_version(new_version)
    await run.engine.abort_all()


async def test_an_aborted_sample_starts_again_when_its_tokens_are_too_old(autojump_clock):
    run = make_run(lambda request: ScriptedReply(text="abc", token_s=1.0), num_prompts=1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(abort_after, run, 2.5, 1)
        batch = await run.manager.generate_batch()
    assert [sample.response for sample in batch.samples] == ["abc", "abc"]
    assert {request.request_id for request in run.engine.requests} == {"g00000000-s000", "g00000000-s001"}
    assert all(sample.oldest_version == 1 for sample in batch.samples)


async def test_a_sample_that_is_always_aborted_fails_in_the_end():
    run = make_run(lambda request: ScriptedReply(text="", finish="abort"), num_prompts=1, max_failed_fraction=0.9)
    with pytest.raises(NotEnoughSamples, match=rf"engine: 2.*was aborted by its engine {MAX_STARTS} times"):
        await run.manager.generate_batch()
    assert len(run.engine.requests) == 2 * MAX_STARTS


# --- budgets ---


async def test_the_draw_limit_ends_a_batch_that_cannot_be_filled():
    run = make_run(filters=[keep_groups(1)], max_attempts=3)
    with pytest.raises(NotEnoughSamples, match=r"1 of num_prompts=2 groups were kept of 6 drawn \(not_chosen: 5\), and max_attempts=3"):
        await run.manager.generate_batch()
    assert books(run) == {"drawn": 6, "trained": 0, "held": 0, "in_flight": 0, "dropped/aborted": 1, "dropped/not_chosen": 5}
    assert run.upcoming(2) == [STREAM[1], STREAM[6]], "the kept prompt is back, the filtered ones are used up"


async def test_the_draw_limit_bounds_over_sampling_too():
    run = make_run(over_sampling=3.0, max_attempts=2)
    await run.manager.generate_batch()
    assert run.manager.statistics()["drawn"] == 4


async def test_too_many_failures_end_the_batch_and_show_the_first():
    run = make_run(reward=fail_on(KeyError("gold")), max_failed_fraction=0.4)
    with pytest.raises(NotEnoughSamples, match=r"2 of 4 samples failed \(reward: 2\), more than max_failed_fraction=0.4 .*KeyError: 'gold'"):
        await run.manager.generate_batch()
    assert run.upcoming(2) == STREAM[:2], "both prompts are back: the grader may be mended before they are drawn again"
    assert len(run.manager.failed_samples()) == 2


async def test_the_failed_share_is_of_a_whole_batch_at_least():
    run = make_run(reward=fail_on(KeyError("gold"), "g00000000-s000"), samples_per_prompt=3, max_failed_fraction=1 / 6)
    assert len(await run.manager.generate_batch()) == 5
    run = make_run(reward=fail_on(KeyError("gold"), "g00000000-s000"), samples_per_prompt=3, max_failed_fraction=0.0)
    with pytest.raises(NotEnoughSamples, match="1 of 6 samples failed"):
        await run.manager.generate_batch()


async def test_a_last_failure_counts_although_the_batch_is_full():
    run = make_run(reward=fail_on(KeyError("gold"), "g00000001-s002"), samples_per_prompt=3, max_failed_fraction=0.1)
    with pytest.raises(NotEnoughSamples, match="1 of 6 samples failed"):
        await run.manager.generate_batch()
    assert run.upcoming(2) == STREAM[:2]


# --- what stops the whole call ---


async def test_a_filter_that_raises_stops_the_call_and_loses_nothing():
    async def broken(group: SampleGroup) -> bool:
        raise ZeroDivisionError("oops")

    run = make_run(filters=[broken], over_sampling=2.0)
    with pytest.raises(UserFunctionError, match=r"filter broken on group 0 \(prompt row-\d+\) raised ZeroDivisionError: oops"):
        await run.manager.generate_batch()
    assert run.upcoming(5) == STREAM[:5]
    assert books(run) == {"drawn": 4, "trained": 0, "held": 0, "in_flight": 0, "dropped/aborted": 4}


@pytest.mark.parametrize("error", [EngineClosed("gone"), ModelError("no chat template")])
async def test_an_error_that_is_everybodys_stops_the_call(error: Exception):
    run = make_run(lambda request: ScriptedReply(error=error))
    with pytest.raises(type(error)):
        await run.manager.generate_batch()
    assert run.upcoming(2) == STREAM[:2]


async def test_a_manager_works_again_after_an_error():
    broken = [True]

    async def reward(sample: Sample) -> float:
        if broken[0]:
            raise ValueError("oops")
        return 1.0

    run = make_run(reward=reward)
    with pytest.raises(NotEnoughSamples):
        await run.manager.generate_batch()
    broken[0] = False
    assert len(await run.manager.generate_batch()) == 4


async def test_without_any_reward_the_call_says_so():
    with pytest.raises(ConfigError, match=r"sample g00000000-s00[01] has no reward"):
        await make_run(reward=None, num_prompts=1).manager.generate_batch()


async def test_samples_are_scored_one_by_one_or_together_but_not_both():
    run = make_run(group_reward=index_reward)
    with pytest.raises(ConfigError, match="both reward and group_reward"):
        await run.manager.generate_batch()


@pytest.mark.parametrize("changed", [{"top_p": 0.9}, {"top_k": 40}])
def test_sampling_from_part_of_the_vocabulary_does_not_train(changed: dict[str, Any]):
    with pytest.raises(ConfigError, match="training samples need top_p=1 and top_k=0"):
        make_run(sampling=dataclasses.replace(SAMPLING, **changed))


async def test_one_batch_at_a_time(autojump_clock):
    run = make_run(lambda request: ScriptedReply(token_s=1.0))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run.manager.generate_batch)
        await trio.sleep(0.5)
        with pytest.raises(RuntimeError, match="generate_batch is running already"):
            await run.manager.generate_batch()


async def test_cancelling_gives_every_prompt_back_in_order(autojump_clock):
    run = make_run(lambda request: ScriptedReply(text="ab", token_s=1.0 + group_of(request)), num_prompts=3, over_sampling=1.5)
    before = run.upcoming(8)
    with trio.move_on_after(6.5) as scope:  # groups 0 and 1 are kept, 2 to 4 run
        await run.manager.generate_batch()
    assert scope.cancelled_caught and run.engine.in_flight == 0
    assert run.upcoming(8) == before
    assert books(run) == {"drawn": 5, "trained": 0, "held": 0, "in_flight": 0, "dropped/aborted": 5}


async def test_an_interrupt_gives_every_prompt_back():
    async def interrupted(sample: Sample) -> float:
        raise KeyboardInterrupt

    run = make_run(reward=interrupted)
    with pytest.raises(BaseExceptionGroup) as caught:
        await run.manager.generate_batch()
    assert caught.group_contains(KeyboardInterrupt)
    assert run.upcoming(3) == STREAM[:3]


# --- staleness ---


async def test_groups_that_finish_first_win_when_staleness_is_allowed(autojump_clock):
    run = make_run(lambda request: ScriptedReply(token_s=100.0 - 20 * group_of(request)), over_sampling=2.0, max_staleness=1)
    assert await run.batch_groups() == [2, 3]
    assert run.manager.statistics()["held/unfinished"] == 2, "those that were slower go on in the next batch"
    assert run.upcoming(1) == STREAM[4:5]


async def test_a_kept_group_too_many_is_held_for_the_next_batch():
    run = make_run(over_sampling=2.0, max_staleness=1)  # all finish in the same moment
    first = await run.batch_groups()
    assert run.manager.statistics()["held"] == 2
    run.version[0] = 1
    requests = len(run.engine.requests)
    second = await run.batch_groups()
    assert sorted(first + second) == [0, 1, 2, 3] and len(run.engine.requests) == requests, "the second batch was there already"
    assert books(run) == {"drawn": 4, "trained": 4, "held": 0, "in_flight": 0}
    assert metric_values(run.manager.batch_metrics())["groups/drawn"] == 0


async def test_a_held_group_that_has_become_too_old_is_dropped_and_its_prompt_returned():
    run = make_run(over_sampling=2.0, max_staleness=1)
    dropped = {0, 1, 2, 3} - set(await run.batch_groups())
    run.version[0] = 2
    run.engine.set_version(1)
    assert not dropped & set(await run.batch_groups())
    assert metric_values(run.manager.batch_metrics())["groups/dropped/stale"] == 2 == run.manager.statistics()["dropped/stale"]
    asked = {group_of(request): request.prompt_ids.tolist() for request in run.engine.requests}
    assert [asked[4], asked[5]] == [asked[group_index] for group_index in sorted(dropped)], "their prompts are asked again, before any other"


async def test_an_engine_that_is_too_far_behind_fills_no_batch():
    run = make_run(max_staleness=1, sampling=SAMPLING, max_attempts=2)
    run.version[0] = 2
    with pytest.raises(NotEnoughSamples, match=r"of 4 drawn \(stale: 3\).*max_staleness=1 steps behind"):
        await run.manager.generate_batch()
    assert sorted(run.upcoming(2)) == sorted(STREAM[:2]) and run.upcoming(3)[2] == STREAM[2]


async def test_what_was_finished_before_a_cancellation_is_held(autojump_clock):
    run = make_run(lambda request: ScriptedReply(token_s=1.0 + 10 * group_of(request)), max_staleness=1)
    with trio.move_on_after(5):
        await run.manager.generate_batch()
    # group 2 took the place of group 0; of both nothing was there yet
    assert books(run) == {"drawn": 3, "trained": 0, "held": 1, "in_flight": 0, "dropped/aborted": 2}
    assert run.upcoming(3) == STREAM[1:4]
    assert await run.batch_groups() == [0, 3]


# --- deterministic mode ---


@pytest.mark.parametrize("by_engine", [False, True])
async def test_in_deterministic_mode_replacements_are_launched_together(by_engine: bool, autojump_clock):
    arrivals: dict[int, float] = {}

    def script(request: GenerateRequest) -> ScriptedReply:
        arrivals.setdefault(group_of(request), trio.current_time())
        return ScriptedReply(text="", token_s=float(1 + group_of(request)))

    engine = ScriptedEngine(script, deterministic=by_engine)
    run = make_run(engine=engine, num_prompts=3, filters=[keep_groups(2, 4, 6)], deterministic=not by_engine)
    assert await run.batch_groups() == [2, 4, 6]
    # 0, 1, 2 take 1, 2, 3 s; two were dropped: 3 and 4 start together when the last has ended, and end at 8; one was dropped: 5; then 6
    assert arrivals == {0: 0, 1: 0, 2: 0, 3: 3, 4: 3, 5: 8, 6: 14}


async def test_in_deterministic_mode_a_limit_that_leaves_too_few_replacements_ends_the_batch(autojump_clock):
    run = make_run(num_prompts=2, over_sampling=1.5, max_attempts=2, filters=[keep_groups(3)], deterministic=True)
    with trio.fail_after(100), pytest.raises(NotEnoughSamples, match=r"0 of num_prompts=2 groups were kept of 4 drawn \(not_chosen: 3\)"):
        await run.manager.generate_batch()


async def test_in_deterministic_mode_nothing_is_held():
    run = make_run(over_sampling=2.0, max_staleness=1, deterministic=True)
    assert await run.batch_groups() == [0, 1]
    assert {"held": 0.0, "dropped/surplus": 2.0}.items() <= run.manager.statistics().items()


# --- metrics ---


async def test_metrics_of_a_batch_worked_by_hand():
    async def reward(sample: Sample) -> dict[str, float]:
        group, member = sample.group_index, member_of(sample.id)
        return {"right": float(group == 1 and member == 1), "Two Words": 1.0 if group == 2 else 0.0}

    def script(request: GenerateRequest) -> ScriptedReply:
        return ScriptedReply(text="abcdefghij" if request.request_id == "g00000002-s000" else "a" * (1 + group_of(request)))

    run = make_run(script, reward=reward, filters=[keep_groups(1, 2)], over_sampling=1.5)
    await run.manager.generate_batch()
    metrics = metric_values(run.manager.batch_metrics())
    assert metrics.pop("perf/generate_s/mean") >= 0 and metrics.pop("perf/reward_s/mean") >= 0
    # rewards (0, 0) | (0, 1) | (1, 1): group 0 was filtered; lengths 3, 3 | 8 (cut), 4
    assert metrics == {
        "groups/drawn": 4, "groups/kept": 2, "groups/dropped/not_chosen": 1, "groups/dropped/surplus": 1,
        "response_length/mean": 4.5, "response_length/min": 3, "response_length/max": 8, "truncated/frac": 0.25,
        "reward/mean": 0.75, "reward/std": pytest.approx(np.sqrt(3) / 4),
        "reward/part/right/mean": 0.25, "reward/part/two_words/mean": 0.5,
        "groups/zero_std_frac": pytest.approx(2 / 3), "groups/reward_std/mean": pytest.approx(1 / 6),
    }  # fmt: skip


def test_there_are_no_metrics_before_the_first_batch():
    assert make_run().manager.batch_metrics() == {}


@pytest.mark.parametrize(
    ("name", "segment"), [("Two Words", "two_words"), ("<lambda>", "_lambda_"), ("a-b", "a_b"), ("ok_1", "ok_1"), ("", "unnamed")]
)
def test_users_names_become_parts_of_metric_names(name: str, segment: str):
    assert metric_segment(name) == segment


# --- state ---


async def test_a_resumed_manager_continues_exactly():
    def start() -> Run:
        return make_run(over_sampling=1.5, filters=[keep_groups(*range(0, 40, 2))])

    run = start()
    await run.manager.generate_batch()
    saved = json.dumps([run.buffer.state_dict(), run.manager.state_dict()])
    resumed = start()
    buffer_state, manager_state = json.loads(saved)
    resumed.buffer.load_state_dict(buffer_state)
    resumed.manager.load_state_dict(manager_state)
    assert resumed.manager.state_dict() == run.manager.state_dict()
    for _ in range(2):
        expected, batch = await run.manager.generate_batch(), await resumed.manager.generate_batch()
        assert [sample.id for sample in batch.samples] == [sample.id for sample in expected.samples]
        assert all((a == b).all() for a, b in zip(batch.rollout_log_probs or (), expected.rollout_log_probs or (), strict=True))
    assert books(resumed) == books(run)


async def test_held_groups_survive_a_restart_bit_for_bit():
    run = make_run(over_sampling=2.0, max_staleness=2)
    await run.manager.generate_batch()
    saved = json.dumps([run.buffer.state_dict(), run.manager.state_dict()])
    resumed = make_run(over_sampling=2.0, max_staleness=2)
    buffer_state, manager_state = json.loads(saved)
    resumed.buffer.load_state_dict(buffer_state)
    resumed.manager.load_state_dict(manager_state)
    expected, batch = await run.manager.generate_batch(), await resumed.manager.generate_batch()
    assert not resumed.engine.requests
    for one, other in zip(batch.samples, expected.samples, strict=True):
        for field in dataclasses.fields(Sample):
            a, b = getattr(one, field.name), getattr(other, field.name)
            assert (a == b).all() and a.dtype == b.dtype if isinstance(a, np.ndarray) else a == b


async def test_held_groups_are_given_up_when_staleness_is_no_longer_allowed():
    run = make_run(over_sampling=2.0, max_staleness=1)
    await run.manager.generate_batch()
    strict = make_run(max_staleness=0)
    strict.buffer.load_state_dict(run.buffer.state_dict())
    strict.manager.load_state_dict(run.manager.state_dict())
    assert await strict.batch_groups() == [4, 5]
    assert {"held": 0.0, "dropped/surplus": 2.0}.items() <= strict.manager.statistics().items()


async def test_a_state_taken_in_the_middle_of_a_batch_returns_its_prompts(autojump_clock):
    run = make_run(lambda request: ScriptedReply(token_s=1.0 + 5 * group_of(request)), over_sampling=1.5)
    resumed = make_run()

    async def save() -> None:
        await trio.sleep(5)  # group 0 is kept, 1 and 2 run
        saved = json.dumps([run.buffer.state_dict(), run.manager.state_dict()])
        resumed.buffer.load_state_dict(json.loads(saved)[0])
        resumed.manager.load_state_dict(json.loads(saved)[1])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(save)
        await run.manager.generate_batch()
    assert resumed.upcoming(4) == STREAM[:4]
    assert books(resumed) == {"drawn": 3, "trained": 0, "held": 0, "in_flight": 0, "dropped/aborted": 3}
    assert await resumed.batch_groups() == [3, 4]


# --- the ledger by itself ---


def test_the_ledger_counts_every_attempt_in_one_place():
    ledger = Ledger()
    for group_index in range(6):
        ledger.open(group_index)
    ledger.train(0)
    ledger.drop(1, "surplus")
    ledger.fail(2, "engine")
    ledger.hold(3)
    ledger.hold(4)
    ledger.train(4)
    ledger.check()
    assert ledger.counts() == LedgerCounts(drawn=6, trained=2, dropped={"surplus": 1}, failed={"engine": 1}, held=1, in_flight=1)


def test_the_ledger_refuses_impossible_moves():
    ledger = Ledger()
    ledger.open(0)
    with pytest.raises(AssertionError, match="attempt 0 is open already"):
        ledger.open(0)
    ledger.train(0)
    for move in (lambda: ledger.train(0), lambda: ledger.drop(0, "surplus"), lambda: ledger.fail(1, "engine"), lambda: ledger.hold(0)):
        with pytest.raises(AssertionError, match="is not open"):
            move()


def test_the_ledger_notices_a_lost_prompt():
    ledger = Ledger()
    ledger.open(0)
    ledger._place.clear()
    with pytest.raises(AssertionError, match="a prompt was lost"):
        ledger.check()

"""AsyncRolloutManager: which groups make a batch, what happens to the others, and what is left when something
goes wrong.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import trio

from rollouts.config.tables import RolloutConfig
from rollouts.data.data_buffer import DataBuffer
from rollouts.errors import (
    ConfigError,
    DataError,
    EngineClosed,
    EngineError,
    EngineSetupError,
    EngineUnreachable,
    FleetDown,
    ModelError,
    NotEnoughSamples,
    RequestRefused,
    UserFunctionError,
    WeightVersionError,
)
from rollouts.generation.async_rollout_manager import AsyncRolloutManager
from rollouts.generation.collector import STOP_S
from rollouts.generation.generate import compute_request_seed, make_chat_generate
from rollouts.generation.group import MAX_STARTS
from rollouts.generation.pacing import Pace
from rollouts.testing.fakes import FAKE_END, FakeTokenizer, ScriptedEngine, ScriptedReply
from rollouts.types import (
    FilterDecision,
    GenerateRequest,
    RewardResult,
    Sample,
    SampleGroup,
    SamplingParams,
    Status,
    metric_values,
)

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
    of_config = {
        name: options.pop(name)
        for name in list(options)
        if name in RolloutConfig.model_fields and name not in ("filters", "group_reward")
    }
    config = RolloutConfig(
        num_prompts=num_prompts,
        samples_per_prompt=samples_per_prompt,
        over_sampling=over_sampling,
        **of_config,
    )
    buffer, version = DataBuffer(ROWS, seed=0), [0]
    engine = engine or ScriptedEngine(script)
    manager = AsyncRolloutManager(
        buffer,
        engine,
        generate=generate,
        config=config,
        reward=reward,
        seed=1,
        policy_version=lambda: version[0],
        **{"sampling": SAMPLING} | options,
    )
    return Run(manager, buffer, engine, version)


def books(run: Run) -> dict[str, float]:
    """Where every group is."""
    names = ("drawn", "trained", "held", "in_flight")
    return {
        name: count
        for name, count in run.manager.statistics().items()
        if name in names or name.startswith(("dropped/", "failed/"))
    }


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
    assert [sample.id for sample in batch.samples] == [
        f"g0000000{group}-s00{member}" for group in (0, 1) for member in (0, 1, 2)
    ]
    assert batch.group_indices is not None and batch.group_indices.tolist() == [0, 0, 0, 1, 1, 1]
    assert (
        batch.rewards is not None
        and batch.rewards.tolist() == [0, 1, 2, 0, 1, 2]
        and batch.rewards.dtype == np.float32
    )
    assert batch.rollout_log_probs is not None and batch.weight_versions is not None
    for row, sample in enumerate(batch.samples):
        assert batch.tokens[row] is sample.tokens and batch.loss_masks[row] is sample.loss_mask
        assert (
            batch.rollout_log_probs[row] is sample.rollout_log_probs
            and batch.weight_versions[row] is sample.weight_versions
        )
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
        f"g0000000{group}-s00{member}": compute_request_seed(1, f"g0000000{group}-s00{member}")
        for group in (0, 1)
        for member in (0, 1)
    }


async def test_at_no_staleness_the_first_groups_by_launch_win_however_slow_they_are(autojump_clock):
    run = make_run(
        lambda request: ScriptedReply(text="ab", token_s=100.0 - 20 * group_of(request)), over_sampling=2.0
    )
    assert await run.batch_groups() == [0, 1]
    assert trio.current_time() == 300  # group 0 takes three tokens of 100 s


async def test_surplus_groups_are_aborted_and_their_prompts_drawn_next(autojump_clock):
    run = make_run(
        lambda request: ScriptedReply(text="ab", token_s=1.0 + 50 * (group_of(request) >= 3)),
        over_sampling=2.5,
    )
    assert await run.batch_groups() == [0, 1]
    assert trio.current_time() == 3 and run.engine.in_flight == 0
    assert books(run) == {"drawn": 5, "trained": 2, "held": 0, "in_flight": 0, "dropped/surplus": 3}
    assert run.upcoming(4) == STREAM[2:6]


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

    run = make_run(
        lambda request: ScriptedReply(text="ab", token_s=1.0 + 2 * member_of(request.request_id)),
        reward=slow_reward,
        num_prompts=1,
    )
    await run.manager.generate_batch()
    assert (
        trio.current_time() == 19
    )  # the second takes 9 s to generate and 10 to score; the first is scored meanwhile


async def test_another_reward_function_may_score_one_batch():
    async def other(sample: Sample) -> float:
        return 7.0

    run = make_run()
    assert (await run.manager.generate_batch(other)).rewards.tolist() == [7.0] * 4  # type: ignore[union-attr]
    assert (await run.manager.generate_batch()).rewards.tolist() == [0.0, 1.0] * 2  # type: ignore[union-attr]


async def test_a_group_reward_scores_the_samples_together():
    async def best_of(samples) -> list[RewardResult]:
        return [
            RewardResult(float(index == len(samples) - 1), {"place": index}, "last wins")
            for index in range(len(samples))
        ]

    run = make_run(reward=None, group_reward=best_of, samples_per_prompt=3)
    batch = await run.manager.generate_batch()
    assert [sample.reward for sample in batch.samples] == [0.0, 0.0, 1.0] * 2
    assert (
        batch.samples[1].rewards == {"place": 1.0} and batch.samples[1].metadata["reward_note"] == "last wins"
    )


async def test_a_generate_function_may_set_the_reward_itself():
    async def generate(sample: Sample, engine, sampling) -> Sample:
        return dataclasses.replace(await chat_generate(sample, engine, sampling), reward=0.5)

    assert (await make_run(generate=generate, reward=None).manager.generate_batch()).rewards.tolist() == [
        0.5
    ] * 4  # type: ignore[union-attr]


async def test_segments_of_a_trajectory_share_the_reward_of_the_last():
    async def generate(sample: Sample, engine, sampling) -> list[Sample]:
        done = await chat_generate(sample, engine, sampling)
        return [done, dataclasses.replace(done, response="final")]

    async def reward(sample: Sample) -> float:
        assert sample.response == "final"
        return float(member_of(sample.id))

    batch = await make_run(num_prompts=1, generate=generate, reward=reward).manager.generate_batch()
    assert [sample.id for sample in batch.samples] == [
        "g00000000-s000",
        "g00000000-s000.1",
        "g00000000-s001",
        "g00000000-s001.1",
    ]
    assert [sample.reward for sample in batch.samples] == [0.0, 0.0, 1.0, 1.0]


# --- samples that fail ---


@pytest.mark.parametrize(
    ("options", "failure_class", "function", "message"),
    [
        (
            {"reward": fail_on(KeyError("gold"), "g00000000-s001")},
            "reward",
            "broken_reward",
            "raised KeyError: 'gold'",
        ),
        ({"error": RequestRefused("too long")}, "data", "chat_generate", "too long"),
        ({"error": DataError("bad template")}, "data", "chat_generate", "bad template"),
        ({"error": EngineError("out of memory")}, "engine", "chat_generate", "out of memory"),
        ({"error": EngineUnreachable("no route")}, "infrastructure", "chat_generate", "no route"),
        ({"error": ValueError("oops")}, "generate", "chat_generate", "raised ValueError: oops"),
    ],
)
async def test_a_sample_that_fails_leaves_its_group_and_says_why(
    options: dict[str, Any], failure_class: str, function: str, message: str
):
    error = options.pop("error", None)
    run = make_run(
        lambda request: ScriptedReply(
            text="ab", error=error if request.request_id == "g00000000-s001" else None
        ),
        samples_per_prompt=3,
        **options,
    )
    batch = await run.manager.generate_batch()
    assert [sample.id for sample in batch.samples][:2] == ["g00000000-s000", "g00000000-s002"] and len(
        batch
    ) == 5
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
    assert [sample.metadata["failure"]["class"] for sample in run.manager.failed_samples()] == [
        "reward"
    ] * 2 + ["reward_timeout"] * 2


async def test_a_generate_function_may_give_a_sample_up():
    async def generate(sample: Sample, engine, sampling) -> Sample:
        if sample.id == "g00000000-s002":
            return dataclasses.replace(
                sample, status=Status.FAILED, metadata={**sample.metadata, "failure": "no tool"}
            )
        return await chat_generate(sample, engine, sampling)

    run = make_run(generate=generate, samples_per_prompt=3)
    assert len(await run.manager.generate_batch()) == 5
    failure = run.manager.failed_samples()[0].metadata["failure"]
    assert (failure["class"], failure["function"], failure["message"]) == ("generate", "generate", "no tool")


# --- samples that an engine aborts ---


async def test_an_aborted_sample_goes_on_while_its_tokens_are_fresh_enough(autojump_clock):
    run = make_run(
        lambda request: ScriptedReply(text="abc"[3 - (request.sampling.max_new_tokens - 5) :], token_s=1.0),
        num_prompts=1,
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(abort_after, run, 2.5)
        batch = await run.manager.generate_batch()
    assert [sample.response for sample in batch.samples] == ["abc", "abc"]
    assert sorted(request.request_id for request in run.engine.requests)[:2] == [
        "g00000000-s000",
        "g00000000-s000@2",
    ]


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
    run = make_run(
        lambda request: ScriptedReply(text="", finish="abort"), num_prompts=1, max_failed_fraction=0.9
    )
    with pytest.raises(NotEnoughSamples, match=rf"engine: 2.*was aborted by its engine {MAX_STARTS} times"):
        await run.manager.generate_batch()
    assert len(run.engine.requests) == 2 * MAX_STARTS


# --- budgets ---


async def test_the_draw_limit_ends_a_batch_that_cannot_be_filled():
    run = make_run(filters=[keep_groups(1)], max_attempts=3)
    with pytest.raises(
        NotEnoughSamples,
        match=r"1 of num_prompts=2 groups were kept of 6 drawn \(not_chosen: 5\), and max_attempts=3",
    ):
        await run.manager.generate_batch()
    assert books(run) == {
        "drawn": 6,
        "trained": 0,
        "held": 0,
        "in_flight": 0,
        "dropped/aborted": 1,
        "dropped/not_chosen": 5,
    }
    assert run.upcoming(2) == [STREAM[1], STREAM[6]], "the kept prompt is back, the filtered ones are used up"


async def test_too_many_failures_end_the_batch_and_show_the_first():
    run = make_run(reward=fail_on(KeyError("gold")), max_failed_fraction=0.4)
    with pytest.raises(
        NotEnoughSamples,
        match=r"2 of 4 samples failed \(reward: 2\), more than max_failed_fraction=0.4 .*KeyError: 'gold'",
    ):
        await run.manager.generate_batch()
    assert run.upcoming(2) == STREAM[:2], (
        "both prompts are back: the grader may be mended before they are drawn again"
    )
    assert len(run.manager.failed_samples()) == 2


@pytest.mark.parametrize("max_staleness", [0, 1])
async def test_what_the_infrastructure_did_costs_a_prompt_nothing(max_staleness: int):
    """One of two samples cannot be generated: its group does not train, its prompt comes back, and no share
    of failures ends the run.
    """
    run = make_run(
        lambda request: ScriptedReply(
            error=EngineUnreachable("gone") if request.request_id == "g00000000-s001" else None
        ),
        max_failed_fraction=0.0,
        max_staleness=max_staleness,
    )
    assert 0 not in await run.batch_groups()
    assert run.manager.failed_samples()[0].reward is None
    assert run.manager.statistics()["failed/infrastructure"] == 1
    assert run.upcoming(1) == STREAM[:1]


def test_an_engine_without_log_probs_does_not_train():
    engine = ScriptedEngine()
    engine.features = dataclasses.replace(engine.features, log_probs=False, name="openai")
    with pytest.raises(
        ConfigError, match=r"engine openai answers without log-probs .* use it for evaluation"
    ):
        make_run(engine=engine)


# --- what stops the whole call ---


async def test_a_filter_that_raises_stops_the_call_and_loses_nothing():
    async def broken(group: SampleGroup) -> bool:
        raise ZeroDivisionError("oops")

    run = make_run(filters=[broken], over_sampling=2.0)
    with pytest.raises(
        UserFunctionError, match=r"filter broken on group 0 \(prompt row-\d+\) raised ZeroDivisionError: oops"
    ):
        await run.manager.generate_batch()
    assert run.upcoming(5) == STREAM[:5]
    assert books(run) == {"drawn": 4, "trained": 0, "held": 0, "in_flight": 0, "dropped/aborted": 4}


@pytest.mark.parametrize(
    "error",
    [
        EngineClosed("gone"),
        ModelError("no chat template"),
        FleetDown("nobody"),
        WeightVersionError("not 3"),
        EngineSetupError("--logprobs-mode"),
    ],
)
async def test_an_error_that_is_everybodys_stops_the_call(error: Exception):
    run = make_run(lambda request: ScriptedReply(error=error))
    with pytest.raises(type(error)):
        await run.manager.generate_batch()
    assert run.upcoming(2) == STREAM[:2]


async def test_without_any_reward_the_call_says_so():
    with pytest.raises(ConfigError, match=r"sample g00000000-s00[01] has no reward"):
        await make_run(reward=None, num_prompts=1).manager.generate_batch()


@pytest.mark.parametrize("changed", [{"top_p": 0.9}, {"top_k": 40}])
def test_sampling_from_part_of_the_vocabulary_does_not_train(changed: dict[str, Any]):
    with pytest.raises(ConfigError, match="training samples need top_p=1 and top_k=0"):
        make_run(sampling=dataclasses.replace(SAMPLING, **changed))


async def test_cancelling_gives_every_prompt_back_in_order(autojump_clock):
    run = make_run(
        lambda request: ScriptedReply(text="ab", token_s=1.0 + group_of(request)),
        num_prompts=3,
        over_sampling=1.5,
    )
    before = run.upcoming(8)
    with trio.move_on_after(6.5) as scope:  # groups 0 and 1 are kept, 2 to 4 run
        await run.manager.generate_batch()
    assert scope.cancelled_caught and run.engine.in_flight == 0
    assert run.upcoming(8) == before
    assert books(run) == {"drawn": 5, "trained": 0, "held": 0, "in_flight": 0, "dropped/aborted": 5}


# --- staleness ---


async def test_groups_that_finish_first_win_when_staleness_is_allowed(autojump_clock):
    run = make_run(
        lambda request: ScriptedReply(token_s=100.0 - 20 * group_of(request)),
        over_sampling=2.0,
        max_staleness=1,
    )
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
    assert sorted(first + second) == [0, 1, 2, 3] and len(run.engine.requests) == requests, (
        "the second batch was there already"
    )
    assert books(run) == {"drawn": 4, "trained": 4, "held": 0, "in_flight": 0}
    assert metric_values(run.manager.batch_metrics())["groups/drawn"] == 0


async def test_a_held_group_that_has_become_too_old_is_dropped_and_its_prompt_returned():
    run = make_run(over_sampling=2.0, max_staleness=1)
    dropped = {0, 1, 2, 3} - set(await run.batch_groups())
    run.version[0] = 2
    run.engine.set_version(1)
    assert not dropped & set(await run.batch_groups())
    assert (
        metric_values(run.manager.batch_metrics())["groups/dropped/stale"]
        == 2
        == run.manager.statistics()["dropped/stale"]
    )
    asked = {group_of(request): request.prompt_ids.tolist() for request in run.engine.requests}
    assert [asked[4], asked[5]] == [asked[group_index] for group_index in sorted(dropped)], (
        "their prompts are asked again, before any other"
    )


# --- what goes on in the next batch ---


def rest_of(text: str, request: GenerateRequest) -> str:
    """What is left to say after the tokens that the request has."""
    return text[int(request.request_id.partition("@")[2] or 0) :]


def slow_group_0(request: GenerateRequest) -> ScriptedReply:
    """Group 0 takes 10 s a token (its member 1 takes 1), all others 1 s."""
    token_s = 10.0 if request.request_id.startswith("g00000000-s000") else 1.0
    return ScriptedReply(text=rest_of("abcdef", request), token_s=token_s)


def make_slow_run(**options: Any) -> Run:
    return make_run(slow_group_0, **{"num_prompts": 1, "over_sampling": 2.0, "max_staleness": 3} | options)


async def next_version(run: Run) -> list[int]:
    """Groups of one batch, after which trainer and engine are a version further."""
    groups = await run.batch_groups()
    run.version[0] += 1
    run.engine.set_version(run.version[0])
    return groups


async def test_an_unfinished_sample_goes_on_from_its_tokens_with_the_version_of_each(autojump_clock):
    run = make_slow_run()
    assert [await next_version(run) for _ in range(3)] == [
        [1],
        [2],
        [3],
    ]  # each takes 7 s: six letters and the end
    assert run.manager.state_dict()["unfinished"][0]["group_index"] == 0
    batch = await run.manager.generate_batch()  # version 3: the last that may consume tokens of version 0
    first, second = batch.samples
    assert (first.id, first.response, second.response) == ("g00000000-s000", "abcdef", "abcdef")
    # 7 s a batch at 10 s a token: nothing is there after any of the first three, so all of it is of version
    # 3; its sibling is of version 0
    assert first.weight_versions[first.loss_mask].tolist() == [3] * 7
    assert second.weight_versions[second.loss_mask].tolist() == [0] * 7
    assert [request.request_id for request in run.engine.requests].count("g00000000-s001") == 1, (
        "a member that has finished is not asked again"
    )


async def test_unfinished_groups_survive_a_restart_with_identical_tokens(autojump_clock):
    def script(request: GenerateRequest) -> ScriptedReply:
        return ScriptedReply(text=rest_of("abcdef", request), token_s=1.0 + 2 * (group_of(request) == 0))

    def start() -> Run:
        return make_run(script, num_prompts=1, over_sampling=2.0, max_staleness=2)

    run, resumed = start(), start()
    await next_version(run)
    buffer_state, manager_state = json.loads(json.dumps([run.buffer.state_dict(), run.manager.state_dict()]))
    assert [len(member["partial"]["response"]) for member in manager_state["unfinished"][0]["members"]] == [
        2,
        2,
    ]
    resumed.buffer.load_state_dict(buffer_state)
    resumed.manager.load_state_dict(manager_state)
    resumed.version[0] = 1
    resumed.engine.set_version(1)
    assert resumed.manager.state_dict() == run.manager.state_dict()
    for _ in range(2):
        one, other = await run.manager.generate_batch(), await resumed.manager.generate_batch()
        for a, b in zip(one.samples, other.samples, strict=True):
            assert a.id == b.id and a.metadata == b.metadata and a.reward == b.reward
            for name in ("tokens", "loss_mask", "rollout_log_probs", "weight_versions"):
                assert (getattr(a, name) == getattr(b, name)).all()
        for each in (run, resumed):
            each.version[0] += 1
            each.engine.set_version(each.version[0])


async def test_a_sample_whose_reward_was_being_computed_is_scored_once_in_the_next_batch(autojump_clock):
    begun: list[str] = []
    scored: list[str] = []

    async def reward(sample: Sample) -> float:
        begun.append(sample.id)
        await trio.sleep(20 if sample.id == "g00000000-s000" else 0)
        scored.append(sample.id)
        return float(member_of(sample.id))

    run = make_run(
        num_prompts=1,
        over_sampling=2.0,
        max_staleness=1,
        reward=reward,
        script=lambda request: ScriptedReply(token_s=1.0),
    )
    assert await next_version(run) == [1]
    assert run.manager.state_dict()["unfinished"][0]["members"][0]["scored"] is False
    assert await next_version(run) == [0], "due: it is waited for although others have finished"
    assert begun.count("g00000000-s000") == 2 and scored.count("g00000000-s000") == 1
    assert sum(request.request_id == "g00000000-s000" for request in run.engine.requests) == 1, (
        "it is not generated again"
    )


async def test_a_generate_function_that_does_not_stop_is_cancelled_and_starts_again(autojump_clock):
    async def generate(sample: Sample, engine, sampling) -> Sample:
        await trio.sleep(1000 if sample.id == "g00000000-s000" else 1)
        return await chat_generate(sample, engine, sampling)

    run = make_run(num_prompts=1, over_sampling=2.0, max_staleness=2, generate=generate)
    assert await next_version(run) == [1]
    assert trio.current_time() == 1 + STOP_S
    assert await next_version(run) == [2]
    assert await next_version(run) == [0]


# --- the pace by itself ---


def test_a_group_that_must_be_in_this_batch_is_waited_for():
    pace = Pace(num_prompts=2, max_staleness=1, policy_version=1, engine_version=1)
    pace.open(0, oldest=0)  # deadline 1: now
    for group_index in (1, 2, 3):
        pace.open(group_index)
    for group_index in (3, 2):
        pace.finish(group_index, oldest=1)
    assert not pace.is_full()
    pace.finish(0, oldest=0)
    assert pace.is_full() and pace.choose() == [0, 2]


@pytest.mark.parametrize("seed", range(300))
def test_whoever_finishes_when_nothing_becomes_too_old(seed: int):
    draw = np.random.default_rng(seed)
    num_prompts, max_staleness = int(draw.integers(1, 5)), int(draw.integers(1, 5))
    sync_every = int(draw.integers(1, max_staleness + 2))
    open_: dict[int, int | None] = {}  # oldest version by group; None: no tokens
    done: set[int] = set()
    next_index = 0
    for version in range(25):
        engine_version = version - version % sync_every
        pace = Pace(
            num_prompts=num_prompts,
            max_staleness=max_staleness,
            policy_version=version,
            engine_version=engine_version,
        )
        for group_index, oldest in open_.items():
            pace.open(group_index, oldest=oldest)
            if group_index in done:
                pace.finish(group_index, oldest=oldest)
        while not pace.is_full():
            while pace.room > 0:
                open_[next_index] = None
                pace.open(next_index)
                next_index += 1
            running = sorted(open_.keys() - done)
            chosen = int(
                draw.choice(running, p=None if draw.random() < 0.5 else _favour_the_young(len(running)))
            )
            if draw.random() < 0.2:  # filtered
                pace.close(chosen)
                del open_[chosen]
            else:
                open_[chosen] = engine_version if open_[chosen] is None else open_[chosen]
                done.add(chosen)
                pace.finish(chosen, oldest=open_[chosen])
        for group_index in open_.keys() - done:
            if open_[group_index] is None and draw.random() < 0.8:
                open_[group_index] = engine_version  # it has its first tokens
        batch = pace.choose()
        assert len(batch) == num_prompts
        for group_index in batch:
            oldest = open_.pop(group_index)
            done.discard(group_index)
            assert oldest is not None and 0 <= version - oldest <= max_staleness


def _favour_the_young(count: int) -> np.ndarray:
    weights = np.arange(1, count + 1, dtype=float) ** 4
    return weights / weights.sum()


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
    # 0, 1, 2 take 1, 2, 3 s; two were dropped: 3 and 4 start together when the last has ended, and end at 8;
    # one was dropped: 5; then 6
    assert arrivals == {0: 0, 1: 0, 2: 0, 3: 3, 4: 3, 5: 8, 6: 14}


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
        return ScriptedReply(
            text="abcdefghij" if request.request_id == "g00000002-s000" else "a" * (1 + group_of(request))
        )

    run = make_run(script, reward=reward, filters=[keep_groups(1, 2)], over_sampling=1.5)
    await run.manager.generate_batch()
    metrics = metric_values(run.manager.batch_metrics())
    assert metrics.pop("perf/generate_s/mean") >= 0 and metrics.pop("perf/reward_s/mean") >= 0
    # rewards (0, 0) | (0, 1) | (1, 1): group 0 was filtered; lengths 3, 3 | 8 (cut), 4
    assert metrics == {
        "groups/drawn": 4,
        "groups/kept": 2,
        "groups/dropped/not_chosen": 1,
        "groups/dropped/surplus": 1,
        "groups/accepted_frac": pytest.approx(2 / 3),
        "response_length/mean": 4.5,
        "response_length/min": 3,
        "response_length/max": 8,
        "truncated/frac": 0.25,
        "reward/mean": 0.75,
        "reward/std": pytest.approx(np.sqrt(3) / 4),
        "reward/part/right/mean": 0.25,
        "reward/part/two_words/mean": 0.5,
        "groups/zero_std_frac": pytest.approx(2 / 3),
        "groups/reward_std/mean": pytest.approx(1 / 6),
    }


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
        assert all(
            (a == b).all()
            for a, b in zip(batch.rollout_log_probs or (), expected.rollout_log_probs or (), strict=True)
        )
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


# --- the ledger by itself ---

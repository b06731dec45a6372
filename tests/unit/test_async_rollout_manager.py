"""AsyncRolloutManager: which groups make a batch, what happens to the others, and what is left when something
goes wrong.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import trio

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
from rollouts.generation.generate import compute_request_seed
from rollouts.generation.group import MAX_STARTS
from rollouts.testing.fakes import ScriptedEngine, ScriptedReply
from rollouts.types import (
    FilterDecision,
    RewardResult,
    Sample,
    SampleGroup,
    Status,
    metric_values,
)
from tests.unit.manager_runs import (
    SAMPLING,
    STREAM,
    Run,
    books,
    chat_generate,
    fail_on,
    group_of,
    keep_groups,
    make_run,
    member_of,
)

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

"""AsyncRolloutManager: which groups make a batch, what happens to the others, and what is left when something
goes wrong.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import trio

from rollouts.errors import ConfigError, EngineUnreachable, NotEnoughSamples, UserFunctionError
from rollouts.generation.continuing import MAX_STARTS
from rollouts.generation.generate import compute_request_seed
from rollouts.metrics.spans import SpanRecorder
from rollouts.testing.fakes import ScriptedEngine, ScriptedReply
from rollouts.types import FilterDecision, RewardResult, Status, encode_json
from tests.support.text_tables import cases, read_cells
from tests.unit.manager_runs import (
    SAMPLING,
    STREAM,
    chat_generate,
    fail_on,
    group_of,
    index_reward,
    keep_groups,
    make_run,
    member_of,
    say,
)

FIRST, SECOND = "g00000000-s000", "g00000000-s001"  # of group 0

# --- which groups make a batch ---


async def test_a_batch_has_all_rows_in_launch_order_with_everything_a_loss_needs():
    run = make_run(samples_per_prompt=3)
    batch = await run.manager.generate_batch()
    ids = [f"g0000000{group}-s00{member}" for group in (0, 1) for member in (0, 1, 2)]
    assert [sample.id for sample in batch.samples] == ids
    seeds = {request.request_id: request.sampling.seed for request in run.engine.requests}
    assert seeds == {name: compute_request_seed(1, name) for name in ids}
    assert batch.group_indices.tolist() == [0, 0, 0, 1, 1, 1]
    assert batch.rewards.dtype == np.float32
    assert batch.rewards.tolist() == [0, 1, 2, 0, 1, 2] and batch.temperature == 1.0
    columns = zip(batch.tokens, batch.loss_masks, batch.rollout_log_probs, batch.weight_versions, strict=True)
    for sample, row in zip(batch.samples, columns, strict=True):
        own = (sample.tokens, sample.loss_mask, sample.rollout_log_probs, sample.weight_versions)
        assert all(one is other for one, other in zip(own, row, strict=True))
    for (epoch, prompt_id), metadata in zip(STREAM, batch.metadata[::3], strict=False):
        assert metadata == {"prompt_id": prompt_id, "epoch": epoch, "answer": prompt_id[4:]}
    assert run.upcoming(1) == STREAM[2:3]


@cases("""
slowdown | extra_s | seconds
-20      | 0       | 300
0        | 50      | 303
""")
async def test_at_no_staleness_the_first_by_launch_win_and_surplus_prompts_come_again(
    autojump_clock, slowdown: float, extra_s: float, seconds: float
):
    """Three tokens of 100 s; the others are faster, so finish in vain, or slower, so are aborted."""

    def token_s(name):
        return 100.0 + slowdown * group_of(name) + (group_of(name) == 1) + extra_s * (group_of(name) > 1)

    run = make_run(say(token_s=token_s), over_sampling=2.5)
    assert await run.take() == [0, 1]
    assert trio.current_time() == seconds and run.engine.in_flight == 0
    assert run.books() == {"drawn": 5, "trained": 2, "dropped/surplus": 3}
    assert run.upcoming(4) == STREAM[2:6]


async def test_a_filtered_group_is_replaced_and_the_first_objection_counts():
    asked, spans = [], SpanRecorder()

    def named(name, keep):
        async def filter_(group):
            asked.append(f"{name}{group.group_index}")
            return FilterDecision(keep or group.group_index > 0, name)

        return filter_

    filters = [named("a", True), named("failed_samples", False), named("c", False)]
    run = make_run(num_prompts=1, filters=filters, spans=spans)
    assert await run.take() == [1]
    assert asked == ["a0", "failed_samples0", "a1", "failed_samples1", "c1"]
    assert run.books() == {"drawn": 2, "trained": 1, "dropped/failed_samples": 1}  # also by such a name
    assert run.upcoming(1) == STREAM[2:3]  # a filtered prompt does not come back in this epoch
    spans.keep([FIRST, "g00000001-s000"])
    assert {span.id for span in spans.take()} == {"g00000001-s000"}  # of a filtered group nothing is held


async def test_samples_are_scored_while_others_are_generated(autojump_clock):
    async def slow_reward(sample):
        await trio.sleep(10)
        return float(member_of(sample.id))

    script = say(token_s=lambda name: 1.0 + 2 * member_of(name))
    await make_run(script, reward=slow_reward, num_prompts=1).manager.generate_batch()
    assert trio.current_time() == 19  # the second is generated in 9 s, and scored in 10; the first meanwhile


# --- who scores ---


async def one_reward(sample):
    return 7.0


async def generate_scored(sample, engine, sampling):
    return replace(await chat_generate(sample, engine, sampling), reward=0.5)


async def last_wins(samples):
    last = len(samples) - 1
    return [RewardResult(float(at == last), {"place": at}, "last wins") for at in range(len(samples))]


@cases(
    "of_batch, options, rewards",
    [
        (one_reward, {}, [7, 7]),  # takes the place of the manager's, once
        (None, {"generate": generate_scored, "reward": None}, [0.5, 0.5]),
        (None, {"reward": None, "group_reward": last_wins}, [0, 1]),
    ],
)
async def test_a_reward_comes_from_the_call_the_generate_function_or_for_the_whole_group(
    of_batch, options, rewards
):
    run = make_run(**options)
    batch = await run.manager.generate_batch(of_batch)
    assert [sample.reward for sample in batch.samples] == rewards * 2
    if "group_reward" in options:
        assert batch.samples[1].rewards == {"place": 1.0}
        assert batch.samples[1].metadata["reward_note"] == "last wins"
    if of_batch is not None:
        assert [sample.reward for sample in (await run.manager.generate_batch()).samples] == [0, 1] * 2


async def test_segments_of_a_trajectory_share_the_reward_of_the_last():
    async def generate(sample, engine, sampling):
        done = await chat_generate(sample, engine, sampling)
        return [done, replace(done, response="final")]

    async def reward(sample):
        assert sample.response == "final"
        return float(member_of(sample.id))

    batch = await make_run(num_prompts=1, generate=generate, reward=reward).manager.generate_batch()
    rewards = {sample.id: sample.reward for sample in batch.samples}
    assert list(rewards.items()) == [(FIRST, 0), (FIRST + ".1", 0), (SECOND, 1), (SECOND + ".1", 1)]


# --- groups that compete ---


def rank_by(*scores):
    async def ranker(group):
        return scores[group.group_index]

    return ranker


# scores by group | groups that a filter keeps | max_attempts | groups that train | drawn, filtered, outranked
COMPETITIONS = """
5 9 1 7   | 0 1 2 3 | 20 | 1 3 | 4 0 2
5 9 9 9   | 0 1 2 3 | 20 | 1 2 | 4 0 2
9 1 2 0 4 | 1 2 3 4 | 20 | 2 4 | 5 1 2
9 1 2 3   | 1 2 3   | 2  | 2 3 | 4 1 1
"""


@cases("row", read_cells(COMPETITIONS), ids=" ".join)
@cases("deterministic: no yes")
async def test_with_a_ranker_the_best_of_all_that_are_kept_train_in_launch_order(
    row, deterministic: bool, autojump_clock
):
    scores, kept, (most,), taken, (drawn, filtered, outranked) = ([*map(int, cell.split())] for cell in row)
    run = make_run(
        say(token_s=lambda name: 9.0 - group_of(name)),
        ranker=rank_by(*scores),
        filters=[keep_groups(*kept)],
        max_attempts=most,
        over_sampling=2.0,
        deterministic=deterministic,
    )
    assert await run.take() == taken
    books = {"drawn": drawn, "trained": 2, "dropped/not_chosen": filtered, "dropped/outranked": outranked}
    assert run.books() == {name: count for name, count in books.items() if count}
    assert run.upcoming(1) == STREAM[drawn : drawn + 1]  # what is outranked does not come back in this epoch
    metrics = run.metrics()
    assert (metrics["groups/kept"], metrics["groups/dropped/outranked"]) == (2, outranked)


# --- samples that fail ---


@cases("""
error                       | failure_class  | message
KeyError: gold              | reward         | raised KeyError: 'gold'
RequestRefused: too long    | data           | too long
DataError: bad template     | data           | bad template
EngineError: out of memory  | engine         | out of memory
EngineUnreachable: no route | infrastructure | no route
ValueError: oops            | generate       | raised ValueError: oops
""")
async def test_a_sample_that_fails_leaves_its_group_and_says_why(error: Exception, failure_class, message):
    in_reward = failure_class == "reward"
    run = make_run(
        lambda request: ScriptedReply(
            error=error if request.request_id == SECOND and not in_reward else None
        ),
        samples_per_prompt=3,
        reward=fail_on(error, SECOND) if in_reward else index_reward,
    )
    batch = await run.manager.generate_batch()
    assert [sample.id[-4:] for sample in batch.samples] == ["s000", "s002", "s000", "s001", "s002"]
    (failed,) = run.manager.failed_samples()
    failure = failed.metadata["failure"]
    assert (failed.id, failed.status, failed.reward) == (SECOND, Status.FAILED, None)
    assert failure["class"] == failure_class
    assert failure["function"] == ("broken_reward" if in_reward else "chat_generate")
    assert message in failure["message"] and message.split(": ")[-1] in failure["traceback"]
    assert failure["traceback"].startswith("Traceback") and len(failure["traceback"]) <= 2000
    assert run.metrics()[f"fail/{failure_class}"] == 1


@cases("""
spoiled | message
{"tokens": [1], "loss_mask": [1], "rollout_log_probs": [-1], "weight_versions": [0]} | trains the first token
{"tokens": [], "loss_mask": [], "rollout_log_probs": [], "weight_versions": []} | tokens are empty
{"reward": 1e39}         | returned 1e+39 as its reward
{"reward": null}         | returned None as its reward
{"rewards": {"a": 1e39}} | returned 1e+39 as its part 'a'
{} | metadata.junk is a object
""")
async def test_what_a_function_returns_costs_its_sample_and_not_the_run(spoiled: Any, message):
    """The second sample of each group has these fields, or its reward function leaves no JSON in it."""

    async def generate(sample, engine, sampling):
        done = replace(await chat_generate(sample, engine, sampling), reward=1.0)
        return replace(done, **(spoiled if member_of(sample.id) == 1 else {}))

    async def reward(sample):
        sample.metadata.update({"junk": object()} if member_of(sample.id) == 1 else {})
        return 1.0

    scored = None if spoiled else reward
    run = make_run(samples_per_prompt=3, max_failed_fraction=1.0, generate=generate, reward=scored)
    batch = await run.manager.generate_batch()
    assert [sample.id[-4:] for sample in batch.samples] == ["s000", "s002"] * 2
    for failed in run.manager.failed_samples():
        assert failed.id[-4:] == "s001" and message in failed.metadata["failure"]["message"]
        encode_json(failed.metadata)  # it can be recorded


@cases("""
field             | change
tokens            | -1
rollout_log_probs | -0.5
weight_versions   | -1
""")
async def test_tokens_that_the_engine_did_not_make_cost_their_sample(field, change: float):
    async def generate(sample, engine, sampling):
        done = await chat_generate(sample, engine, sampling)
        values = getattr(done, field).copy()
        if sample.id == SECOND:
            values[-1] += change
        return replace(done, **{field: values})

    run = make_run(generate=generate, samples_per_prompt=3, version=1)
    assert len(await run.manager.generate_batch()) == 5
    [failed] = run.manager.failed_samples()
    said = failed.metadata["failure"]["message"]
    assert failed.id == SECOND and "with a log-prob that the engine has not given for it" in said


async def test_a_generate_function_that_never_returns_is_named_and_costs_its_sample(autojump_clock, caplog):
    async def generate(sample, engine, sampling):
        done = await chat_generate(sample, engine, sampling)
        await trio.sleep(math.inf if sample.id == SECOND else 0)
        return done

    # each answer takes longer than the limit: that is the engine's time
    options = {"samples_per_prompt": 3, "generate_timeout_s": 150.0}
    run = make_run(say("ab", 100.0), generate=generate, **options)
    assert len(await run.manager.generate_batch()) == 5
    [failed] = run.manager.failed_samples()
    said = failed.metadata["failure"]
    assert failed.id == SECOND and said["class"] == "generate"
    assert "took longer than 150 s without asking the engine" in said["message"]
    named = "nothing has moved on for 60 s; samples under way: 1, g00000000-s001"
    assert caplog.messages.count(named) == 2 and trio.current_time() == 450.0


async def test_a_generate_function_may_give_a_sample_up():
    async def generate(sample, engine, sampling):
        if sample.id != SECOND:
            return await chat_generate(sample, engine, sampling)
        metadata = {**sample.metadata, "failure": "no tool"}
        return replace(sample, status=Status.FAILED, metadata=metadata)

    run = make_run(generate=generate, samples_per_prompt=3)
    assert len(await run.manager.generate_batch()) == 5
    failure = run.manager.failed_samples()[0].metadata["failure"]
    assert (failure["class"], failure["function"], failure["message"]) == ("generate", "generate", "no tool")


async def test_a_group_needs_two_samples_that_did_not_fail():
    run = make_run(reward=fail_on(ValueError("oops"), FIRST), max_failed_fraction=1.0)
    assert await run.take() == [1, 2]
    assert run.books() == {"drawn": 3, "trained": 2, "failed/reward": 1}
    assert run.metrics()["groups/dropped/failed_samples"] == 1


async def test_a_group_reward_that_fails_fails_all_its_samples(autojump_clock):
    async def group_reward(samples):
        if samples[0].group_index == 0:
            raise ValueError("no judge")
        await trio.sleep(1000 if samples[0].group_index == 1 else 0)
        return [0.0] * len(samples)

    run = make_run(reward=None, group_reward=group_reward, max_failed_fraction=1.0)
    assert await run.take() == [2, 3]
    assert run.books() == {"drawn": 4, "trained": 2, "failed/reward": 1, "failed/reward_timeout": 1}
    failed = [sample.metadata["failure"]["class"] for sample in run.manager.failed_samples()]
    assert failed == ["reward"] * 2 + ["reward_timeout"] * 2


# --- samples that an engine aborts ---


@cases("""
version | asked
0       | g00000000-s000 g00000000-s001 g00000000-s000@2 g00000000-s001@2
1       | g00000000-s000 g00000000-s001
""")
async def test_an_aborted_sample_goes_on_while_its_tokens_are_fresh_enough_else_it_starts_again(
    autojump_clock, version: int, asked
):
    run = make_run(say("abc"), num_prompts=1)

    async def abort():
        await trio.sleep(2.5)
        run.advance(version)
        await run.engine.abort_all()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(abort)
        batch = await run.manager.generate_batch()
    assert [(sample.response, sample.oldest_version) for sample in batch.samples] == [("abc", version)] * 2
    assert {request.request_id for request in run.engine.requests} == {*asked.split()}


async def test_a_sample_that_is_always_aborted_fails_in_the_end():
    run = make_run(lambda request: ScriptedReply("", 0, "abort"), num_prompts=1, max_failed_fraction=0.9)
    with pytest.raises(NotEnoughSamples, match=rf"engine: 2.*was aborted by its engine {MAX_STARTS} times"):
        await run.manager.generate_batch()
    assert len(run.engine.requests) == 2 * MAX_STARTS


# --- budgets ---


async def test_the_draw_limit_ends_a_batch_that_cannot_be_filled():
    run = make_run(filters=[keep_groups(1)], max_attempts=3)
    counts = (
        r"1 of num_prompts=2 groups were kept of 6 drawn \(not_chosen: 5\), .*_attempts=3 .*max_new_tokens"
    )
    with pytest.raises(NotEnoughSamples, match=counts):
        await run.manager.generate_batch()
    assert run.books() == {"drawn": 6, "dropped/aborted": 1, "dropped/not_chosen": 5}
    assert run.upcoming(2) == [STREAM[1], STREAM[6]]  # the kept prompt is back, the filtered ones are used up


async def test_too_many_failures_end_the_batch_and_show_the_first():
    run = make_run(reward=fail_on(KeyError("gold")), max_failed_fraction=0.4)
    counts = r"2 of 4 samples failed \(reward: 2\), more than max_failed_fraction=0.4 .*KeyError: 'gold'"
    with pytest.raises(NotEnoughSamples, match=counts):
        await run.manager.generate_batch()
    assert run.upcoming(2) == STREAM[:2]  # the grader may be mended before they are drawn again
    assert len(run.manager.failed_samples()) == 2


@cases("max_staleness: 0 1")
async def test_what_the_infrastructure_did_costs_a_prompt_nothing(max_staleness: int):
    """One of two samples cannot be generated: its group does not train, its prompt comes back, and no share
    of failures ends the run.
    """
    gone = EngineUnreachable("gone")
    run = make_run(
        lambda request: ScriptedReply(error=gone if request.request_id == SECOND else None),
        max_failed_fraction=0.0,
        max_staleness=max_staleness,
    )
    assert 0 not in await run.take()
    assert run.manager.failed_samples()[0].reward is None
    assert run.count("failed/infrastructure") == 1
    assert run.upcoming(1) == STREAM[:1]


# --- what stops the whole call ---


def test_what_cannot_train_is_refused_at_once():
    engine = ScriptedEngine()
    engine.features = replace(engine.features, log_probs=False, name="openai")
    with pytest.raises(
        ConfigError, match=r"engine openai answers without log-probs .* use it for evaluation"
    ):
        make_run(engine=engine)
    for sampling in (replace(SAMPLING, top_p=0.9), replace(SAMPLING, top_k=40)):
        with pytest.raises(ConfigError, match="training samples need top_p=1 and top_k=0"):
            make_run(sampling=sampling)


async def broken(group):
    raise ZeroDivisionError("oops")


FAILING = {"filters": [broken], "ranker": rank_by(1.0, math.nan)}


@cases(r"""
what    | message
filters | filter broken on group 0 \(prompt row-\d+\) raised ZeroDivisionError: oops
ranker  | ranker ranker on group 1 \(prompt row-\d+\) returned .* score
""")
async def test_a_filter_that_raises_and_a_ranker_without_a_number_stop_the_call_and_lose_nothing(
    what, message
):
    run = make_run(over_sampling=2.0, **{what: FAILING[what]})
    with pytest.raises(UserFunctionError, match=message):
        await run.manager.generate_batch()
    assert run.upcoming(5) == STREAM[:5]
    assert run.books() == {"drawn": 4, "dropped/aborted": 4}


@cases("error: EngineClosed ModelError FleetDown WeightVersionError EngineSetupError")
async def test_an_error_that_is_everybodys_stops_the_call(error: Exception):
    run = make_run(lambda request: ScriptedReply(error=error))
    with pytest.raises(type(error)):
        await run.manager.generate_batch()
    assert run.upcoming(2) == STREAM[:2]


async def test_cancelling_gives_every_prompt_back_in_order(autojump_clock):
    run = make_run(say(token_s=lambda name: 1.0 + group_of(name)), num_prompts=3, over_sampling=1.5)
    with trio.move_on_after(6.5) as scope:  # groups 0 and 1 are kept, 2 to 4 run
        await run.manager.generate_batch()
    assert scope.cancelled_caught and run.engine.in_flight == 0
    assert run.upcoming(8) == STREAM[:8]
    assert run.books() == {"drawn": 5, "dropped/aborted": 5}

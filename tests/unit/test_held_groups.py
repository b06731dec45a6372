"""What AsyncRolloutManager carries over from one batch to the next, into a checkpoint and out of it; what
goes on while the caller trains, how old it may become, and where everything is whatever ends it.
"""

import dataclasses
import functools
from functools import partial

import numpy as np
import pytest
import trio

from rollouts.errors import UserFunctionError
from rollouts.generation.collector import STOP_S
from rollouts.generation.continuing import MAX_STARTS
from rollouts.testing.fakes import ScriptedEngine, ScriptedReply
from rollouts.types import Sample
from tests.support.text_tables import cases
from tests.unit.manager_runs import (
    SAMPLING,
    STREAM,
    chat_generate,
    fail_on,
    group_of,
    groups_of,
    keep_groups,
    make_run,
    member_of,
    prompts_of,
    say,
)

FIRST = "g00000000-s000"
make_ahead = partial(make_run, over_sampling=2.0, max_staleness=1)  # two groups more than a batch has


async def next_version(run):
    """Groups of one batch, after which trainer and engine are a version further."""
    groups = await run.take()
    run.advance(run.version[0] + 1)
    return groups


# --- staleness ---


async def test_groups_that_finish_first_win_when_staleness_is_allowed(autojump_clock):
    run = make_ahead(say("ok", lambda name: 100.0 - 20 * group_of(name)))
    assert await run.take() == [2, 3]
    assert run.count("held/unfinished") == 2  # those that were slower go on in the next batch
    assert run.upcoming(1) == STREAM[4:5]


async def test_a_kept_group_too_many_is_held_for_the_next_batch():
    run = make_ahead()  # all finish in the same moment
    first = await run.take()
    assert run.count("held") == 2
    run.version[0] = 1
    assert sorted(first + await run.take()) == [0, 1, 2, 3]
    assert len(run.engine.requests) == 8  # the second batch was there already
    assert run.books() == {"drawn": 4, "trained": 4}
    assert run.metrics()["groups/drawn"] == 0


async def test_a_held_group_that_has_become_too_old_is_dropped_and_its_prompt_returned():
    run = make_ahead()
    dropped = {0, 1, 2, 3} - set(await run.take())
    run.advance(2, engine=1)
    assert not dropped & set(await run.take())
    assert run.metrics()["groups/dropped/stale"] == run.count("dropped/stale") == 2
    asked = {group_of(request.request_id): request.prompt_ids.tolist() for request in run.engine.requests}
    assert [asked[4], asked[5]] == [asked[group] for group in sorted(dropped)]  # before any other


async def test_held_groups_are_given_up_when_staleness_is_no_longer_allowed():
    run = make_ahead()
    await run.take()
    strict = make_run(state=run.save())
    assert await strict.take() == [4, 5]
    assert strict.books() == {"drawn": 6, "trained": 4, "dropped/surplus": 2}


async def test_trained_groups_train_again_while_they_are_fresh_enough():
    run, mu = make_run(max_staleness=2, replay=3), {}
    for version in range(5):  # two new groups each, which are drawn from for two batches
        batch = await run.manager.generate_batch()
        again = [one for one in batch.samples if "replayed" in one.metadata]
        assert len(again) / 2 == run.metrics()["groups/replayed"] == (0, 2, 3, 3, 3)[version]
        ages = {version - (one.oldest_version or 0) for one in again}
        assert ages <= {1, 2}  # none became too old
        assert all(np.array_equal(one.rollout_log_probs, mu[one.id]) for one in again)
        mu |= {one.id: one.rollout_log_probs for one in batch.samples}
        assert len(mu) == 4 * (version + 1)  # two new groups of two
        run.advance(version + 1)
    run.manager.check_ledger()
    assert (run.count("trained"), run.count("replayed")) == (10, 11)
    asked = [request.request_id for request in run.engine.requests]
    assert len(set(asked)) == len(asked)  # nothing is generated again


# --- what goes on in the next batch ---


async def test_an_unfinished_sample_goes_on_from_its_tokens_with_the_version_of_each(autojump_clock):
    script = say("abcdef", lambda name: 4.0 if name.startswith(FIRST) else 1.0)
    run = make_run(script, num_prompts=1, over_sampling=2.0, max_staleness=4)
    # each takes 7 s: six letters and the end; at 4 s a token, one token is there after each
    assert [await next_version(run) for _ in range(4)] == [[1], [2], [3], [4]]
    assert run.manager.state_dict()["unfinished"][0]["group_index"] == 0
    batch = await run.manager.generate_batch()  # version 4: the last that may consume tokens of version 0
    first, second = batch.samples
    assert (first.id, first.response, second.response) == (FIRST, "abcdef", "abcdef")
    assert first.weight_versions[first.loss_mask].tolist() == [0, 1, 2, 3, 4, 4, 4]
    assert second.weight_versions[second.loss_mask].tolist() == [0] * 7
    asked = [request.request_id for request in run.engine.requests]
    assert asked.count("g00000000-s001") == 1  # a member that has finished is not asked again


async def test_a_sample_whose_reward_was_being_computed_is_scored_once_in_the_next_batch(autojump_clock):
    begun, scored = [], []

    async def reward(sample):
        begun.append(sample.id)
        await trio.sleep(20 if sample.id == FIRST else 0)
        scored.append(sample.id)
        return float(member_of(sample.id))

    run = make_run(say("ok"), num_prompts=1, over_sampling=2.0, max_staleness=1, reward=reward)
    assert await next_version(run) == [1]
    assert run.manager.state_dict()["unfinished"][0]["members"][0]["scored"] is False
    assert await next_version(run) == [0]  # due: it is waited for although others have finished
    assert begun.count(FIRST) == 2 and scored.count(FIRST) == 1
    assert [request.request_id for request in run.engine.requests].count(FIRST) == 1  # generated once


async def test_a_generate_function_that_does_not_stop_is_cancelled_and_starts_again(autojump_clock):
    async def generate(sample, engine, sampling):
        await trio.sleep(1000 if sample.id == FIRST else 1)
        return await chat_generate(sample, engine, sampling)

    run = make_run(num_prompts=1, over_sampling=2.0, max_staleness=2, generate=generate)
    assert await next_version(run) == [1]
    assert trio.current_time() == 1 + STOP_S
    assert [await next_version(run) for _ in range(2)] == [[2], [0]]


@cases("""
token_s | max_staleness | finished
0       | 0             | 0
0       | 2             | 2
1       | 2             | 0
""")
async def test_a_restarted_manager_continues_bit_for_bit(
    autojump_clock, token_s: int, max_staleness: int, finished: int
):
    script = say("abcdef", lambda name: token_s * (3.0 if group_of(name) == 0 else 1.0))
    options = {"num_prompts": 2 - token_s, "over_sampling": 2.0, "max_staleness": max_staleness}
    filters = [] if max_staleness else [keep_groups(*range(0, 40, 2))]
    options |= {"replay": max_staleness, "filters": filters}
    run = make_run(script, **options)
    await next_version(run)
    assert run.count("held/finished") >= finished
    state = run.manager.state_dict()
    if token_s:
        members = state["unfinished"][0]["members"]
        assert [len(member["partial"]["response"]) for member in members] == [2, 2]
    resumed = make_run(script, state=run.save(), version=1, **options)
    assert resumed.manager.state_dict() == state
    for _ in range(1 if finished else 2):  # who finishes first of those that follow at once is trio's choice
        expected, batch = [await one.manager.generate_batch() for one in (run, resumed)]
        for one, other in zip(batch.samples, expected.samples, strict=True):
            for field in dataclasses.fields(Sample):
                a, b = getattr(one, field.name), getattr(other, field.name)
                assert (a == b).all() and a.dtype == b.dtype if isinstance(a, np.ndarray) else a == b
        for each in (run, resumed):
            each.advance(each.version[0] + 1)
    assert max_staleness or resumed.books() == run.books()


# --- deterministic mode ---


@cases("by_engine: no yes")
async def test_in_deterministic_mode_replacements_are_launched_together(by_engine: bool, autojump_clock):
    arrivals = {}

    def script(request):
        group = group_of(request.request_id)
        arrivals.setdefault(group, trio.current_time())
        return ScriptedReply("", 1.0 + group)

    engine = ScriptedEngine(script, deterministic=by_engine)
    run = make_run(engine=engine, num_prompts=3, filters=[keep_groups(2, 4, 6)], deterministic=not by_engine)
    assert await run.take() == [2, 4, 6]
    # 0, 1, 2 take 1, 2, 3 s; two were dropped: 3 and 4 start together when the last has ended, and end at 8;
    # one was dropped: 5; then 6
    assert arrivals == {0: 0, 1: 0, 2: 0, 3: 3, 4: 3, 5: 8, 6: 14}


async def test_in_deterministic_mode_nothing_is_held():
    run = make_ahead(deterministic=True)
    assert await run.take() == [0, 1]
    assert run.books() == {"drawn": 4, "trained": 2, "dropped/surplus": 2}


# --- metrics ---


async def test_metrics_of_a_batch_worked_by_hand():
    async def reward(sample):
        group, member = sample.group_index, member_of(sample.id)
        return {"right": float(group == 1 and member == 1), "Two Words": float(group == 2)}

    def script(request):
        name = request.request_id
        return ScriptedReply("a" * (10 if name == "g00000002-s000" else 1 + group_of(name)))

    run = make_run(script, reward=reward, filters=[keep_groups(1, 2)], over_sampling=1.5)
    await run.take()
    metrics = run.metrics()
    assert metrics.pop("perf/generate_s/mean") >= 0 and metrics.pop("perf/reward_s/mean") >= 0
    # rewards (0, 0) | (0, 1) | (1, 1): group 0 was filtered; lengths 3, 3 | 8 (cut), 4
    expected = """groups/drawn 4, groups/kept 2, groups/dropped/not_chosen 1, groups/dropped/surplus 1,
        groups/accepted_frac 0.6666667, response_length/mean 4.5, response_length/min 3,
        response_length/max 8, truncated/frac 0.25, reward/mean 0.75, reward/std 0.4330127,
        reward/part/right/mean 0.25, reward/part/two_words/mean 0.5,
        reward/part/right/std 0.4330127, reward/part/two_words/std 0.5, groups/zero_std_frac 0.6666667,
        groups/reward_std/mean 0.1666667"""
    named = dict(one.split() for one in expected.split(","))
    assert metrics == {name: pytest.approx(float(value), abs=1e-6) for name, value in named.items()}


# --- while the caller trains --------------------------------------------------------------------------------


# two letters and an end: three seconds
start = functools.partial(make_run, script=say(), samples_per_prompt=1, max_staleness=1)


async def step(run):
    """The groups of the next batch, after which the trainer's version is one more: nothing takes time."""
    groups = await run.take()
    run.version[0] += 1
    return groups


async def test_generation_goes_on_while_the_caller_trains(autojump_clock):
    run = start()
    async with run.manager.generating():
        assert await step(run) == [0, 1]
        assert trio.current_time() == 3
        await trio.sleep(100)
        assert len(run.engine.requests) == 4  # W = 2 * (0 + 1 - 1 + 1) groups may be open
        assert await step(run) == [2, 3]
        assert trio.current_time() == 103  # they were there
        await trio.sleep(100)
        # engines at version 0 are too far behind for a batch of version 2
        assert len(run.engine.requests) == 4
        run.advance(2, engine=1)
        await trio.sleep(3)
        assert len(run.engine.requests) == 6
        assert await step(run) == [4, 5]


# --- the end of the block ---


class OwnError(Exception):
    """Of the body."""


@cases("""
ends_by
cancellation
error
error in a call
leaving
""")
async def test_whatever_ends_the_block_no_prompt_is_lost(autojump_clock, ends_by):
    run = start(max_staleness=3)

    async def fail():
        await trio.sleep(4.5)
        raise OwnError

    with trio.CancelScope() as scope:
        try:
            async with run.manager.generating(), trio.open_nursery() as nursery:
                await step(run)
                if ends_by == "error in a call":
                    nursery.start_soon(fail)
                    while True:
                        await step(run)
                await trio.sleep(1.5)
                if ends_by == "cancellation":
                    scope.cancel()
                    await trio.sleep_forever()
                if ends_by == "error":
                    raise OwnError
        except* OwnError:
            assert "error" in ends_by
    assert run.engine.in_flight == 0 and run.count("in_flight") == 0
    # what was being generated starts again, unless the block was left normally, which holds it
    places = [run.count("held"), run.count("dropped/aborted")]
    assert places == ([2, 0] if ends_by == "leaving" else [0, 2])
    trained = STREAM[: int(run.count("trained"))]
    run.check_prompts(trained)
    batch = await run.manager.generate_batch()  # after the block too
    assert sorted(prompts_of(batch)) == sorted(STREAM[len(trained) : len(trained) + 2])
    run.check_prompts(trained + prompts_of(batch))


async def test_a_call_that_is_cancelled_changes_nothing_and_the_next_one_gets_the_batch(autojump_clock):
    run = start()
    async with run.manager.generating():
        with trio.move_on_after(1.5) as scope:
            await run.take()
        assert scope.cancelled_caught and run.metrics() == {}
        assert run.engine.in_flight == 2 and run.count("drawn") == 2
        assert await run.take() == [0, 1]
        assert trio.current_time() == 3  # nothing began again


# --- what fails in the background ---


@cases("error: FleetDown EngineClosed UserFunctionError")
async def test_what_fails_beside_training_is_raised_by_the_next_call_and_the_one_after_begins_again(
    autojump_clock, error: Exception
):
    broken = True
    of_engine = None if isinstance(error, UserFunctionError) else error

    async def broken_filter(group):
        if broken and group.group_index == 2 and of_engine is None:
            raise ZeroDivisionError("a bug")
        return True

    def script(request):
        failing = broken and group_of(request.request_id) > 1
        token_s = 1.0 + 0.01 * group_of(request.request_id)  # groups finish in launch order
        return ScriptedReply("ab", token_s, error=of_engine if failing else None)

    run = start(script=script, filters=[broken_filter], max_staleness=2)
    async with run.manager.generating():
        await step(run)
        await trio.sleep(50)
        assert run.engine.in_flight == 0 and run.count("in_flight") == 0  # generation has ended
        run.check_prompts(STREAM[:2])
        broken = False
        with pytest.raises(type(error)):
            await run.take()
        run.advance(1)
        assert sorted(prompts_of(await run.manager.generate_batch())) == sorted(STREAM[2:4])
    run.check_prompts(STREAM[:4])


async def test_metrics_and_failed_samples_are_those_of_one_batch(autojump_clock):
    run = start(
        script=say(token_s=lambda name: 1 + 0.1 * group_of(name)),
        samples_per_prompt=3,
        reward=fail_on(KeyError("gold"), "g00000000-s001"),
        filters=[keep_groups(0, 2, 3, 4)],
        max_failed_fraction=0.3,
    )
    async with run.manager.generating():
        assert await step(run) == [0, 2]
        first = run.metrics()
        assert [sample.id for sample in run.manager.failed_samples()] == ["g00000000-s001"]
        run.advance(1)
        assert await step(run) == [3, 4]
        assert run.manager.failed_samples() == ()
    of_first = {"fail/reward", "groups/dropped/not_chosen"}
    assert of_first <= first.keys() and not of_first & run.metrics().keys()


@cases("""
every_s | least
1.5     | 19
2.5     | 9
""")
async def test_an_answer_that_is_aborted_again_and_again_is_finished_if_each_time_there_is_more_of_it(
    autojump_clock, every_s: float, least: int
):
    """20 tokens of 1 s. Aborts every 1.5 s leave one each, every 2.5 s two each: more often than MAX_STARTS,
    and never in vain.
    """
    text = "abcdefghijklmnopqrs"
    run = start(script=say(text), num_prompts=1, sampling=dataclasses.replace(SAMPLING, max_new_tokens=20))
    aborts = 0

    async def abort_now_and_then():
        nonlocal aborts
        while True:
            await trio.sleep(every_s)
            aborts += 1
            await run.engine.abort_all()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(abort_now_and_then)
        async with run.manager.generating():
            batch = await run.manager.generate_batch()
        nursery.cancel_scope.cancel()
    assert groups_of(batch) == [0] and batch.samples[0].response == text
    assert int(batch.loss_masks[0].sum()) == 20 and aborts >= least > MAX_STARTS

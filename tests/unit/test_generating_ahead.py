"""AsyncRolloutManager.generating: what goes on while the caller trains, how old it may become, and
where everything is whatever ends it.
"""

import dataclasses
import functools

import pytest
import trio

from rollouts.errors import EngineClosed, FleetDown, UserFunctionError
from rollouts.generation.continuing import MAX_STARTS
from rollouts.testing.fakes import ScriptedReply
from tests.support.text_tables import cases
from tests.unit.manager_runs import (
    SAMPLING,
    STREAM,
    Run,
    fail_on,
    group_of,
    groups_of,
    keep_groups,
    make_run,
    prompts_of,
    say,
)

# two letters and an end: three seconds
start = functools.partial(make_run, script=say(), samples_per_prompt=1, max_staleness=1)


async def step(run: Run) -> list[int]:
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
        assert len(run.engine.requests) == 4, "W = 2 * (0 + 1 - 1 + 1) groups may be open"
        assert await step(run) == [2, 3]
        assert trio.current_time() == 103, "they were there"
        await trio.sleep(100)
        assert len(run.engine.requests) == 4, (
            "engines at version 0 are too far behind for a batch of version 2"
        )
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
        assert trio.current_time() == 3, "nothing began again"


# --- what fails in the background ---


@pytest.mark.parametrize("error", [FleetDown("nobody"), EngineClosed("gone"), UserFunctionError("a bug")])
async def test_what_fails_beside_training_is_raised_by_the_next_call_and_the_one_after_begins_again(
    autojump_clock, error
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
        assert run.engine.in_flight == 0 and run.count("in_flight") == 0, "generation has ended"
        run.check_prompts(STREAM[:2])
        broken = False
        with pytest.raises(type(error)):
            await run.take()
        run.advance(1)
        batch = await run.manager.generate_batch()
        assert sorted(prompts_of(batch)) == sorted(STREAM[2:4])
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

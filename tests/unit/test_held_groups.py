"""What AsyncRolloutManager carries over from one batch to the next, into a checkpoint and out of it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import trio

from rollouts.generation.collector import STOP_S
from rollouts.generation.pacing import Pace
from rollouts.testing.fakes import ScriptedEngine, ScriptedReply
from rollouts.types import (
    GenerateRequest,
    Sample,
    metric_values,
)
from tests.unit.manager_runs import (
    STREAM,
    Run,
    books,
    chat_generate,
    group_of,
    keep_groups,
    make_run,
    member_of,
)

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

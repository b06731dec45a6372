"""A trajectory counts once, in one piece or in segments: in losses, advantages, rewards and metrics."""

import dataclasses
from typing import Any, cast

import numpy as np
import pytest

from rollouts.advantages import ADVANTAGES, AdvantageInputs
from rollouts.evaluation.evaluate import evaluate
from rollouts.generation.samples import convert_to_batch
from rollouts.loops.rl import training_metrics
from rollouts.loops.rl_batch import add_advantages, make_advantage_inputs, make_loss_spec
from rollouts.metrics.contributions import UpdateRecord
from rollouts.metrics.token_shards import collect_columns
from rollouts.replay.compare import recompute
from rollouts.types import LossSpec, OptimStepResult, RewardResult, RolloutBatch, Sample, Status
from tests.support.plain_backend import assert_gradients_close, take_gradients
from tests.support.text_tables import cases
from tests.unit.manager_runs import SAMPLING, chat_generate, make_run, member_of
from tests.unit.test_gae import slow_gae
from tests.unit.test_loops import rl_config
from tests.unit.test_pytorch_backend import FORMS, open_backend

MASK = np.asarray([0, 0, 1, 1, 0, 0, 1, 1, 1], np.bool_)  # two turns
TURN_REWARDS = np.asarray([0, 0, 0, 0.5, 0, 0, 0, 0, 0.25])


def fork(sample: Sample) -> list[Sample]:
    """The same in two segments, the second of which repeats the first turn as context."""
    cut, later = slice(4), np.arange(len(sample.tokens)) >= 4
    names = ("tokens", "loss_mask", "rollout_log_probs", "turn_rewards")
    first = {name: getattr(sample, name)[cut] for name in names}
    second = {name: np.where(later, getattr(sample, name), 0) for name in names[1:]}
    return [
        dataclasses.replace(sample, **first, weight_versions=()),
        dataclasses.replace(sample, id=f"{sample.id}.1", **second),
    ]


def make_batch(*, forked: bool) -> RolloutBatch:
    """Trajectories of two turns and of one, with the rewards 2 and 1."""
    mu = np.random.default_rng(0).uniform(-6, -1, 9)
    fields: dict[str, Any] = {"prompt": "p", "status": Status.COMPLETED, "group_index": 3}
    long = Sample(
        id="a", tokens=np.arange(9), loss_mask=MASK, rollout_log_probs=mu * MASK, reward=2.0,
        turn_rewards=TURN_REWARDS, **fields,
    )  # fmt: skip
    short = Sample(id="b", tokens=np.arange(4) + 30, loss_mask=[0, 0, 0, 1], reward=1.0, **fields)
    return convert_to_batch([*(fork(long) if forked else [long]), short])


# --- losses -------------------------------------------------------------------------------------------------


@cases("""
unit          | denominator
tokens        | 6
sequences     | 2
sequence_sums | 2
constant      | 7
""")
@cases("advantage: -0.5 0")
@cases("form: 0 1 2 3 4")
async def test_a_forked_trajectory_has_the_loss_and_the_gradient_that_it_has_in_one_piece(
    unit: str, denominator: int, advantage: float, form: int
):
    """Of the first turn and the short trajectory; rows in which all are 0 are not computed, and count."""
    spec = LossSpec("ppo_clip", unit=cast(Any, unit), constant=7.0, per_token=True)
    results, gradients = [], []
    for forked in (False, True):
        batch = make_batch(forked=forked)
        rows = tuple(mask * np.where(np.arange(len(mask)) < 4, advantage, 1.5) for mask in batch.loss_masks)
        batch = dataclasses.replace(batch, advantages=rows)
        async with open_backend(**[*FORMS.values()][form], skip_zero_advantage=True) as backend:
            results.append(await backend.forward_backward(batch, spec))
            gradients.append(take_gradients(backend.model))
        step = OptimStepResult(step=1, lr=1.0, grad_norm=1.0, clipped=False)
        columns = collect_columns(UpdateRecord(0, batch, results[-1], step))
        by_row = zip(*columns.values(), strict=True)
        again = recompute(spec, [dict(zip(columns, row, strict=True)) for row in by_row])
        assert again.total / denominator == pytest.approx(results[-1].loss, rel=1e-5)
        assert unit == "constant" or again.counted == pytest.approx(denominator)
    assert [one.denominator for one in results] == pytest.approx([denominator] * 2)
    assert results[1].loss == pytest.approx(results[0].loss, rel=1e-5)
    assert_gradients_close(*gradients)


def test_the_constant_is_the_budget_of_a_trajectory():
    rollout = {"num_prompts": 2, "samples_per_prompt": 2, "max_new_tokens": 8, "max_trajectory_tokens": 100}
    for more, wanted in (({}, 32), ({"tools": ["calculator.py:calc"]}, 400)):
        config = rl_config(normalise_by="constant", rollout=rollout | more)
        assert make_loss_spec(config).constant == wanted


# --- advantages ---------------------------------------------------------------------------------------------


def draw_inputs(*, forked: bool) -> tuple[AdvantageInputs, list[list[int]]]:
    """Three trajectories of which the first two are a group, and the rows of each."""
    rng = np.random.default_rng(1)
    trajectories = np.asarray([7, 2, 7, 4, 2, 7] if forked else [7, 2, 4])
    masks = tuple(np.append(False, rng.random(12) < 0.6) for _ in trajectories)
    tokens, values = (tuple(rng.normal(size=13).astype(np.float32) for _ in masks) for _ in range(2))
    inputs = AdvantageInputs(
        rewards=trajectories.astype(np.float64), group_indices=trajectories == 4, trajectories=trajectories,
        token_rewards=tokens, values=values, loss_masks=masks,
        samples=tuple(
            Sample(id=str(row), prompt="", status=Status.TRUNCATED if row == 4 else Status.COMPLETED)
            for row in range(len(masks))
        ),
    )  # fmt: skip
    return inputs, [np.flatnonzero(trajectories == number).tolist() for number in (7, 2, 4)]


def test_gae_runs_through_the_segments_of_a_trajectory():
    inputs, trajectories = draw_inputs(forked=True)
    found = ADVANTAGES["gae"](inputs, gamma=0.9, alpha=0.1, whiten=False, bootstrap_truncated=True)
    to_go = np.concatenate(ADVANTAGES["reinforce_pp_token"](inputs))
    slow_to_go = [np.zeros(0)] * 6
    for rows in trajectories:
        rewards, values, mask = (
            np.concatenate([part[row] for row in rows])
            for part in (inputs.token_rewards, inputs.values, inputs.loss_masks)
        )
        lam = max(0.0, 1 - 1 / (0.1 * mask.sum()))  # of the whole trajectory's length
        bootstrap = values[mask][-1] if rows[-1] == 4 else 0.0
        wanted = slow_gae(rewards, values, mask, 0.9, lam, bootstrap)
        np.testing.assert_allclose(np.concatenate([found.advantages[row] for row in rows]), wanted, rtol=1e-4)
        returns = slow_gae(rewards, 0 * values, mask, 1.0, 1.0, 0.0)
        for row, part in zip(rows, np.split(returns, len(rows)), strict=True):
            slow_to_go[row] = part
    trained, joined = np.concatenate(inputs.loss_masks), np.concatenate(slow_to_go)
    kept = joined[trained]
    np.testing.assert_allclose(to_go[trained], (kept - kept.mean()) / kept.std(ddof=1), rtol=1e-4)


@cases("forked: no yes")
@cases("gamma: 1 0.5")
def test_a_turn_answers_for_its_reward_and_later_ones_less_what_the_others_of_the_group_got(
    forked: bool, gamma: float
):
    inputs, trajectories = draw_inputs(forked=forked)
    returns: list[list[tuple[list[tuple[int, int]], float]]] = []
    for rows in trajectories:
        turns: list[list[tuple[int, int]]] = [[]]
        for place in ((row, token) for row in rows for token in range(13)):
            if inputs.loss_masks[place[0]][place[1]]:
                turns[-1].append(place)
            elif turns[-1]:
                turns.append([])
        turns = [turn for turn in turns if turn]
        own = [sum(float(inputs.token_rewards[row][token]) for row, token in turn) for turn in turns]
        later = [sum(gamma**ahead * r for ahead, r in enumerate(own[k:])) for k in range(len(own))]
        returns.append(list(zip(turns, later, strict=True)))
    found = ADVANTAGES["turn_returns"](inputs, gamma=gamma)
    baselines = returns[1][0][1], returns[0][0][1], 0.0  # the third has nobody beside it
    for of_trajectory, baseline in zip(returns, baselines, strict=True):
        for turn, later in of_trajectory:
            got = [found[row][token] for row, token in turn]
            assert got == pytest.approx([later - baseline] * len(turn), rel=1e-4, abs=1e-5)
    assert sum(map(np.count_nonzero, found)) == sum(map(np.count_nonzero, inputs.loss_masks))


def test_a_trajectory_without_trained_tokens_has_its_reward_in_the_baseline():
    masks = np.asarray([True]), np.asarray([False])
    inputs = AdvantageInputs(
        rewards=np.asarray([1.0, 0.25]), group_indices=np.zeros(2), loss_masks=masks,
        token_rewards=(np.ones(1, np.float32), np.zeros(1, np.float32)),
    )  # fmt: skip
    assert np.concatenate(ADVANTAGES["turn_returns"](inputs)).tolist() == [0.75, 0.0]


def test_rewards_of_turns_are_at_their_ends_and_what_they_leave_at_the_trajectorys():
    """2 − .5 − .25 = 1.25 is left; KL .1 a token, β = 1."""
    for forked in (False, True):
        batch = make_batch(forked=forked)
        lower = tuple(row - np.float32(0.1) for row in batch.rollout_log_probs or ())
        batch, config = dataclasses.replace(batch, ref_log_probs=lower), rl_config(advantage="raw", kl_coef=1)
        found = make_advantage_inputs(batch, config).token_rewards
        trained = np.concatenate([row[mask] for row, mask in zip(found, batch.loss_masks, strict=True)])
        np.testing.assert_allclose(trained, [-0.1, 0.4, -0.1, -0.1, 0.25 + 1.25 - 0.1, 0.9], rtol=1e-5)
        _, metrics = add_advantages(batch, config)
        assert metrics["advantage/mean"] == pytest.approx((1.5 + 0.9) / 2), "whatever the number of segments"


# --- rewards and metrics ------------------------------------------------------------------------------------


async def play(sample: Sample, engine: Any, sampling: Any) -> list[Sample]:
    """Two segments of three tokens each: the first turn gets 1, the second 2 times the place in the group."""
    done = await chat_generate(sample, engine, sampling)
    ends = np.arange(len(done.tokens)) == len(done.tokens) - 1
    place = int(sample.id[-3:])
    first, second = (dataclasses.replace(done, turn_rewards=ends * at) for at in (place, 2.0 * place))
    return [first, dataclasses.replace(second, status=Status.TRUNCATED)]


# what scores | its answer | reward of the second sample | parts
@cases("""
scorer       | answer                 | parts
reward       | 0.5                    | final = 0.5, turns = 3.0
reward       | {"a": 0.25, "b": 0.25} | a = 0.25, b = 0.25, turns = 3.0
group_reward | 0.5                    | final = 0.5, turns = 3.0
""")
async def test_rewards_of_turns_are_added_to_the_final_reward_once_and_a_trajectory_counts_once_in_metrics(
    scorer: str, answer: Any, parts: dict
):
    async def score(given: Any) -> Any:
        return answer if scorer == "reward" else [answer] * len(given)

    run = make_run(num_prompts=1, generate=play, **{"reward": None, scorer: score})
    batch = await run.manager.generate_batch()
    assert [one.reward for one in batch.samples] == [0.5, 0.5, 3.5, 3.5]
    assert all(one.rewards == parts for one in batch.samples[2:])
    assert batch.turn_rewards is not None and batch.turn_rewards[3][-1] == 2.0
    assert batch.trajectory_tokens is not None and {*np.concatenate(batch.trajectory_tokens)} == {6.0}
    metrics = run.metrics()
    assert [metrics[f"response_length/{of}"] for of in ("mean", "min", "max")] == [6.0] * 3
    assert (metrics["reward/mean"], metrics["truncated/frac"]) == (2.0, 1.0)


def test_a_trajectory_is_as_old_as_its_oldest_segment():
    batch = make_batch(forked=True)
    versions = tuple(np.full(len(row), at) for row, at in zip(batch.tokens, (3, 7, 7), strict=True))
    batch, algorithm = dataclasses.replace(batch, weight_versions=versions), cast(Any, None)
    metrics = training_metrics(rl_config(), algorithm, batch, [], [], step=10)
    assert (metrics["off_policy/mean"], metrics["off_policy/max"]) == ((6 + 2) / 2, 6)


async def test_an_evaluation_counts_trajectories(autojump_clock):
    async def reward(sample: Sample) -> RewardResult:
        return RewardResult(float(member_of(sample.id.removeprefix("eval-"))))

    run = make_run()
    found = await evaluate(
        [{"prompt": "a"}], run.engine, generate=play, reward=reward, sampling=SAMPLING, samples_per_prompt=2
    )
    metrics = {name.removeprefix("eval/m/"): value for name, value in found.metrics("m").items()}
    assert (metrics["avg@2"], metrics["response_length/mean"], metrics["truncated/frac"]) == (2.0, 6.0, 1.0)
    assert [len(found.samples), len(found.scored), metrics["failed"]] == [4, 4, 0.0]

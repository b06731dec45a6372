"""A trajectory counts once, in one piece or in segments: in losses, advantages, rewards and metrics."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from rollouts.advantages import ADVANTAGES, AdvantageInputs
from rollouts.evaluation.evaluate import evaluate
from rollouts.generation.samples import convert_to_batch
from rollouts.loops.algorithm import LoopState, choose_algorithm
from rollouts.loops.rl import training_metrics
from rollouts.loops.rl_batch import add_advantages, make_advantage_inputs, make_loss_spec
from rollouts.metrics.token_shards import UpdateRecord, collect_columns
from rollouts.replay.compare import recompute
from rollouts.types import LossSpec, OptimStepResult, RewardResult, Sample, Status
from tests.support.made_updates import floats
from tests.support.plain_backend import assert_gradients_close, take_gradients
from tests.support.text_tables import cases
from tests.unit.manager_runs import SAMPLING, chat_generate, make_run, member_of
from tests.unit.test_loops import rl_config
from tests.unit.test_pytorch_backend import FORMS, open_backend


def fork(sample):
    """The same in two segments, the second of which repeats the first turn as context."""
    later = np.arange(len(sample.tokens)) >= 4
    names = ("loss_mask", "rollout_log_probs", "weight_versions", "turn_rewards")
    first = {name: getattr(sample, name)[:4] for name in ("tokens", *names)}
    second = {name: getattr(sample, name) * later for name in names}
    return [dataclasses.replace(sample, **first), dataclasses.replace(sample, id=f"{sample.id}.1", **second)]


def make_batch(*, forked):
    """Trajectories of two turns and of one, with the rewards 2 and 1."""
    mask = np.asarray([0, 0, 1, 1, 0, 0, 1, 1, 1], np.bool_)
    fields = {"prompt": "p", "status": Status.TRUNCATED, "group_index": 3}
    long = Sample(
        id="a", tokens=np.arange(9), loss_mask=mask, rollout_log_probs=-2.0 * mask, reward=2.0,
        weight_versions=np.arange(9), turn_rewards=[0, 0, 0, 0.5, 0, 0, 0, 0, 0.25], **fields,
    )  # fmt: skip
    rest = {"loss_mask": [0, 0, 0, 1], "reward": 1.0, "weight_versions": [3] * 4}
    short = Sample(id="b", tokens=np.arange(4) + 30, **rest, **fields)
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
@cases("form", FORMS)
async def test_a_forked_trajectory_has_the_loss_and_the_gradient_that_it_has_in_one_piece(
    unit, denominator: int, advantage: float, form
):
    """Of the first turn and the short trajectory; rows in which all are 0 are not computed, and count."""
    spec = LossSpec("ppo_clip", unit=unit, constant=7.0, per_token=True)
    results, gradients = [], []
    for forked in (False, True):
        batch = make_batch(forked=forked)
        rows = tuple(mask * np.where(np.arange(len(mask)) < 4, advantage, 1.5) for mask in batch.loss_masks)
        batch = dataclasses.replace(batch, advantages=rows)
        async with open_backend(**FORMS[form], skip_zero_advantage=True) as backend:
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
    for tools, wanted in (([], 32), (["calculator.py:calc"], 400)):
        config = rl_config(normalise_by="constant", rollout={**rollout, "tools": tools})
        assert make_loss_spec(config).constant == wanted


# --- advantages ---------------------------------------------------------------------------------------------


@cases("""
name               | params
gae                | gamma = 0.9, alpha = 0.3, bootstrap_truncated = true
reinforce_pp_token |
turn_returns       | gamma = 0.9, whiten = true
grpo               |
""")
def test_advantages_and_metrics_of_a_trajectory_in_segments_are_those_of_it_in_one_piece(name, params: dict):
    found, critic = [], {} if name == "gae" else None
    config = rl_config(advantage=name, advantage_params=params, critic=critic)
    for forked in (False, True):
        batch = make_batch(forked=forked)
        values = None if critic is None else tuple(map(np.sin, batch.tokens))
        batch, metrics = add_advantages(dataclasses.replace(batch, old_values=values), config)
        algorithm = choose_algorithm(config, 10, LoopState(0.0))
        metrics |= training_metrics(config, algorithm, batch, [], [], step=10)
        answers = zip(batch.advantages + (batch.returns or ()), batch.loss_masks * 2, strict=False)
        found.append((np.concatenate([row[mask] for row, mask in answers]), metrics))
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=1e-5)
    assert found[1][1] == pytest.approx(found[0][1])


def test_a_turn_answers_for_its_reward_and_later_ones_less_what_the_others_of_the_group_got():
    """γ = ½: R = 3 + ½·4, 4; 1 + ½·(2 + ½·8), 2 + ½·8, 8; and 2. In the last nothing trains."""
    rows = floats([9, 1, 2, 9, 4, 9], [1, 9, 2, 9, 9, 8], [9, 2, 9, 9, 9, 9], [9] * 6)
    totals, groups = np.asarray([[7, 11, 2, 3], [5, 5, 1, 5]])
    inputs = AdvantageInputs(
        rewards=totals, group_indices=groups, token_rewards=rows, loss_masks=tuple(row < 9 for row in rows)
    )
    found = np.stack(ADVANTAGES["turn_returns"](inputs, gamma=0.5))
    # less the mean of the others' R_0, of which 5, 4 and 3 are of one group
    wanted = [[0, 1.5, 1.5, 0, 0.5, 0], [0, 0, 2, 0, 0, 4], [0, 2, 0, 0, 0, 0], [0] * 6]
    assert found.tolist() == wanted


def test_rewards_of_turns_are_at_their_ends_and_what_they_leave_at_the_trajectorys():
    """2 − .5 − .25 = 1.25 is left; KL .125 a token, β = 1."""
    for forked in (False, True):
        batch = make_batch(forked=forked)
        lower = floats(*(row - 0.125 for row in batch.rollout_log_probs))
        batch = dataclasses.replace(batch, ref_log_probs=lower)
        rewards = np.concatenate(make_advantage_inputs(batch, rl_config(kl_coef=1)).token_rewards)
        trained = rewards[np.concatenate(batch.loss_masks)]
        assert trained.tolist() == [-0.125, 0.375, -0.125, -0.125, 0.25 + 1.25 - 0.125, 0.875]


# --- rewards and metrics ------------------------------------------------------------------------------------


async def play(sample, engine, sampling):
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
    scorer, answer: Any, parts: dict
):
    async def score(given):
        return answer if scorer == "reward" else [answer] * len(given)

    run = make_run(num_prompts=1, generate=play, **{"reward": None, scorer: score})
    batch = await run.manager.generate_batch()
    assert [one.reward for one in batch.samples] == [0.5, 0.5, 3.5, 3.5]
    assert all(one.rewards == parts for one in batch.samples[2:])
    assert batch.turn_rewards[3][-1] == 2.0 and {*np.concatenate(batch.trajectory_tokens)} == {6.0}
    wanted = """{"response_length/mean": 6.0, "response_length/min": 6.0, "response_length/max": 6.0,
        "reward/mean": 2.0, "truncated/frac": 1.0}"""
    assert run.metrics().items() >= json.loads(wanted).items()


async def test_an_evaluation_counts_trajectories(autojump_clock):
    async def reward(sample):
        return RewardResult(float(member_of(sample.id.removeprefix("eval-"))))

    run = make_run()
    found = await evaluate(
        [{"prompt": "a"}], run.engine, generate=play, reward=reward, sampling=SAMPLING, samples_per_prompt=2
    )
    wanted = """{"eval/m/avg@2": 2.0, "eval/m/response_length/mean": 6.0, "eval/m/truncated/frac": 1.0,
        "eval/m/failed": 0.0}"""
    assert found.metrics("m").items() >= json.loads(wanted).items()
    assert len(found.samples) == len(found.scored) == 4

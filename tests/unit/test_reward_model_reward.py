"""A reward model as a reward: what it reads of a sample, calls answered in batches, and its score beside that
of a rule.
"""

import math

import numpy as np
import pytest
import trio
import trio.testing

from rollouts.errors import BackendError, UserFunctionError
from rollouts.rewards.call import call_reward
from rollouts.rewards.reward_model import add_model_reward, open_model_reward, select_scored_tokens
from rollouts.types import RewardResult, Sample


def make_sample(tokens, mask):
    return Sample(id="a", prompt="p", tokens=tokens, loss_mask=mask)


class LastTokenScorer:
    """Scores a row by its last token before the added one, and notes how many rows each call had."""

    def __init__(self):
        self.rows, self.go = [], trio.Event()
        self.error, self.factor = None, 1.0

    async def score(self, batch):
        self.rows.append(len(batch))
        await self.go.wait()
        if self.error is not None:
            raise self.error
        rows = zip(batch.tokens, batch.loss_masks, strict=True)
        return tuple(np.where(mask, self.factor * row[-2], 0).astype(np.float32) for row, mask in rows)


def test_a_reward_model_reads_up_to_the_last_sampled_token():
    assert select_scored_tokens(make_sample([5, 6, 7, 8, 9], [0, 1, 1, 0, 0])).tolist() == [5, 6, 7]
    assert select_scored_tokens(make_sample([5, 6, 7, 8], [0, 1, 0, 1])).tolist() == [5, 6, 7, 8]
    with pytest.raises(UserFunctionError, match="sample a has no sampled token"):
        select_scored_tokens(make_sample([5, 6], [0, 0]))


async def test_calls_that_wait_together_are_one_batch_and_each_gets_its_own_score():
    scorer, rewards = LastTokenScorer(), {}

    async def ask(token):
        rewards[token] = await call_reward(reward, make_sample([1, token, 2], [0, 1, 0]))

    async with open_model_reward(scorer) as reward, trio.open_nursery() as nursery:
        for together in ([30], [40, 50]):
            for token in together:
                nursery.start_soon(ask, token)
            await trio.testing.wait_all_tasks_blocked()
        scorer.go.set()
    assert scorer.rows == [1, 2]
    assert rewards == {score: RewardResult(score, {"reward_model": score}) for score in (30.0, 40.0, 50.0)}


async def test_what_the_model_raises_is_raised_and_the_next_call_is_served_unless_its_score_is_no_number():
    scorer, sample = LastTokenScorer(), make_sample([1, 2], [0, 1])
    scorer.go.set()
    scorer.error = BackendError("the device is gone")
    async with open_model_reward(scorer) as reward:
        with pytest.raises(BackendError, match="the device is gone"):
            await call_reward(reward, sample)
        scorer.error = None
        assert (await call_reward(reward, sample)).reward == 2.0
        scorer.factor = math.nan
        with pytest.raises(UserFunctionError, match="scores sample a with nan"):
            await call_reward(reward, sample)


async def test_a_caller_that_is_cancelled_leaves_the_others_their_scores():
    scorer, rewards = LastTokenScorer(), []

    async def ask():
        rewards.append((await call_reward(reward, make_sample([1, 9], [0, 1]))).reward)

    async with open_model_reward(scorer) as reward, trio.open_nursery() as nursery:
        with trio.move_on_after(0):
            await call_reward(reward, make_sample([1, 8], [0, 1]))
        nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        scorer.go.set()
    assert rewards == [9.0]


async def test_model_and_rule_add_up_and_keep_their_parts():
    scorer = LastTokenScorer()
    scorer.go.set()

    async def add(rule):
        return await call_reward(add_model_reward(reward, rule), make_sample([1, 3], [0, 1]))

    parts = RewardResult(0.75, {"format": 0.25, "exact": 0.5}, "a note")
    async with open_model_reward(scorer) as reward:
        model = {"reward_model": 3.0}
        assert await add(None) == RewardResult(3.0, model)
        assert await add(lambda sample: 0.5) == RewardResult(3.5, {"rule": 0.5, **model})
        assert await add(lambda sample: parts) == RewardResult(3.75, {**parts.parts, **model}, "a note")
        with pytest.raises(UserFunctionError, match="has a part 'reward_model'"):
            await add(lambda sample: RewardResult(1.0, model))

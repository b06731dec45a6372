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
from rollouts.types import FloatArray, RewardResult, RolloutBatch, Sample


def make_sample(tokens: list[int], mask: list[int], sample_id: str = "a") -> Sample:
    return Sample(id=sample_id, prompt="p", tokens=np.asarray(tokens), loss_mask=np.asarray(mask, np.bool_))


class LastTokenScorer:
    """Scores a row by its last token before the added one, and notes how many rows each call had."""

    def __init__(self):
        self.rows: list[int] = []
        self.go = trio.Event()
        self.error: Exception | None = None
        self.factor = 1.0

    async def score(self, batch: RolloutBatch) -> tuple[FloatArray, ...]:
        self.rows.append(len(batch))
        await self.go.wait()
        if self.error is not None:
            raise self.error
        return tuple(
            np.where(mask, np.float32(self.factor * row[-2]), np.float32(0))
            for row, mask in zip(batch.tokens, batch.loss_masks, strict=True)
        )


def test_a_reward_model_reads_up_to_the_last_sampled_token():
    assert select_scored_tokens(make_sample([5, 6, 7, 8, 9], [0, 1, 1, 0, 0])).tolist() == [5, 6, 7]
    assert select_scored_tokens(make_sample([5, 6, 7, 8], [0, 1, 0, 1])).tolist() == [5, 6, 7, 8]
    with pytest.raises(UserFunctionError, match="sample a has no sampled token"):
        select_scored_tokens(make_sample([5, 6], [0, 0]))


async def test_calls_that_wait_together_are_one_batch_and_each_gets_its_own_score():
    scorer, rewards = LastTokenScorer(), {}

    async def ask(name, token):
        rewards[name] = await call_reward(reward, make_sample([1, token, 2], [0, 1, 0], name))

    async with open_model_reward(scorer) as reward, trio.open_nursery() as nursery:
        nursery.start_soon(ask, "first", 30)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(ask, "second", 40)
        nursery.start_soon(ask, "third", 50)
        await trio.testing.wait_all_tasks_blocked()
        scorer.go.set()
    assert scorer.rows == [1, 2]
    assert {name: result.reward for name, result in rewards.items()} == {
        "first": 30.0,
        "second": 40.0,
        "third": 50.0,
    }
    assert rewards["first"].parts == {"reward_model": 30.0}


async def test_what_the_model_raises_is_raised_and_the_next_call_is_served_unless_its_score_is_no_number():
    scorer = LastTokenScorer()
    scorer.go.set()
    scorer.error = BackendError("the device is gone")
    async with open_model_reward(scorer) as reward:
        with pytest.raises(BackendError, match="the device is gone"):
            await call_reward(reward, make_sample([1, 2], [0, 1]))
        scorer.error = None
        assert (await call_reward(reward, make_sample([1, 2], [0, 1]))).reward == 2.0
        scorer.factor = math.nan
        with pytest.raises(UserFunctionError, match="scores sample a with nan"):
            await call_reward(reward, make_sample([1, 2], [0, 1]))


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

    def number(sample):
        return 0.5

    def parts(sample):
        return RewardResult(0.75, {"format": 0.25, "exact": 0.5}, "a note")

    def clash(sample):
        return RewardResult(1.0, {"reward_model": 1.0})

    sample = make_sample([1, 3], [0, 1])
    async with open_model_reward(scorer) as reward:
        assert await call_reward(add_model_reward(reward, None), sample) == RewardResult(
            3.0, {"reward_model": 3.0}
        )
        assert await call_reward(add_model_reward(reward, number), sample) == RewardResult(
            3.5, {"rule": 0.5, "reward_model": 3.0}
        )
        both = await call_reward(add_model_reward(reward, parts), sample)
        assert both == RewardResult(3.75, {"format": 0.25, "exact": 0.5, "reward_model": 3.0}, "a note")
        with pytest.raises(UserFunctionError, match="has a part 'reward_model'"):
            await call_reward(add_model_reward(reward, clash), sample)

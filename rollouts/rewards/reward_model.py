"""A reward model as the reward of samples: alone, or beside the reward that rules give.

calls of many samples at once ──► channel ──► one batch of what has come ──► the model ──► each call's score
"""

import contextlib
import functools
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import trio

from rollouts.data.scores import make_score_batch, read_scores
from rollouts.errors import UserFunctionError
from rollouts.protocols import LogProbScorer, RewardFn
from rollouts.rewards.call import call_reward
from rollouts.types import IntArray, RewardResult, Sample

PART = "reward_model"  # the name of its part of a reward
RULE_PART = "rule"  # of a rule's reward that has no named parts


def select_scored_tokens(sample: Sample) -> IntArray:
    """What a reward model reads of a sample: everything up to the last sampled token, as its own training
    rows end with a response's last.

    Raises UserFunctionError if nothing was sampled.
    """
    sampled = np.flatnonzero(sample.loss_mask)
    if not len(sampled):
        raise UserFunctionError(
            f"sample {sample.id} has no sampled token, so a reward model has nothing to score; return one"
            " that has, or fail it"
        )
    return sample.tokens[: sampled[-1] + 1]


@asynccontextmanager
async def open_model_reward(scorer: LogProbScorer) -> AsyncIterator[RewardFn]:
    """A reward function whose reward is the score of a model with a scalar head, part "reward_model". Calls
    that wait at the same time are one batch.

    `scorer.score` answers a batch of make_score_batch with values. What it raises is raised by every call of
    the batch; a score that is not finite is a UserFunctionError of its sample.
    """
    # sequences that wait for their scores, each with where the score or what kept it from being made is sent
    requests_in, requests = trio.open_memory_channel[Any](math.inf)

    async def serve() -> None:
        """Scores what waits, again and again, until no call can come any more."""
        async for first in requests:
            waiting = [first]
            with contextlib.suppress(trio.WouldBlock, trio.EndOfChannel):
                while True:
                    waiting.append(requests.receive_nowait())
            try:
                batch = make_score_batch([sequence for sequence, _ in waiting])
                scores = read_scores(await scorer.score(batch), batch).tolist()
            except Exception as error:  # every caller raises it
                scores = [error] * len(waiting)
            for (_, answer), score in zip(waiting, scores, strict=True):
                answer.send_nowait(score)

    async def score_model(sample: Sample) -> RewardResult:
        answer, answered = trio.open_memory_channel[float | Exception](1)
        requests_in.send_nowait((select_scored_tokens(sample), answer))
        score = await answered.receive()
        if isinstance(score, Exception):
            raise score
        if not math.isfinite(score):
            raise UserFunctionError(
                f"the reward model scores sample {sample.id} with {score}; a reward is finite: look at the"
                " model"
            )
        return RewardResult(score, {PART: score})

    # it waits for a device that others use as well
    score_model.keeps_own_time = True  # pyright: ignore[reportFunctionMemberAccess]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        async with requests_in:
            yield score_model


def add_model_reward(
    model_reward: RewardFn, rule: RewardFn | None, *, timeout_s: float = math.inf
) -> RewardFn:
    """The model's reward plus the rule's, with the parts of both; the model's alone where there is no rule.

    A rule that answers with a number is the part "rule". Weigh the parts with rl.rollout.reward_weights.
    """
    if rule is None:
        return model_reward

    @functools.wraps(rule)
    async def score_both(sample: Sample) -> RewardResult:
        of_rule = await call_reward(rule, sample, timeout_s=timeout_s)
        of_model = await call_reward(model_reward, sample)
        parts = of_rule.parts or {RULE_PART: of_rule.reward}
        if PART in parts:
            raise UserFunctionError(
                f"the rule's reward on sample {sample.id} has a part {PART!r}, the name of the model's; give"
                " it another name"
            )
        return RewardResult(of_rule.reward + of_model.reward, {**parts, **of_model.parts}, of_rule.note)

    # the calls within have their deadlines
    score_both.keeps_own_time = True  # pyright: ignore[reportAttributeAccessIssue]
    return score_both

"""What a step of RL asks functions of the user about each group of its batch: pairs, a teacher's prompts."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np

from rollouts.advantages.distillation import align_rows
from rollouts.errors import UserFunctionError
from rollouts.rewards.check import RAISED, describe
from rollouts.types import FloatRows, IntArray, RolloutBatch, Sample, SampleGroup

Score = Callable[[RolloutBatch], Awaitable[FloatRows]]
"""LogProbScorer.score, or a backend's forward."""


def ask_groups(samples: Sequence[Sample], ask: Callable[[SampleGroup], Any], setting: str) -> list[Any]:
    """What `ask` makes of each group. Raises UserFunctionError, with the setting and the group, for what it
    raises, and for a trajectory of several segments, which is no single answer to a prompt.
    """
    answers: list[Any] = []
    for index, members in groupby(samples, lambda sample: sample.group_index):
        group = SampleGroup(index or 0, "", tuple(members))
        try:
            if len(group.ends) < len(group.samples):
                raise ValueError("a trajectory has several segments")
            answers.append(ask(group))
        except RAISED as error:
            raise UserFunctionError(f"{setting} failed on group {index}: {describe(error)}") from error
    return answers


async def score_told(
    batch: RolloutBatch,
    *,
    score: Score,
    context: Callable[..., Any],
    tokenize: Callable[[Sample], IntArray],
    limit: int,
) -> FloatRows:
    """`score` of each response after the prompt that `context` gives for its sample, in place of what stands
    before the first trained token. Where it gives None the row has the policy's own log-probs.

    Raises UserFunctionError where that is not a prompt, text or messages, or None for each sample of a group,
    or is longer, with the response, than `limit` tokens; and as ask_groups.
    """
    told: dict[str, Any] = {}

    def tell(group: SampleGroup) -> None:
        for sample, prompt in zip(group.samples, context(group.samples), strict=True):
            if prompt is not None:
                ids, begin = tokenize(replace(sample, prompt=prompt)), int(sample.loss_mask.argmax())
                tokens = np.append(ids, sample.tokens[begin:])
                if len(tokens) > limit:
                    raise ValueError(f"prompt and response have {len(tokens)} tokens, the context {limit}")
                told[sample.id] = tokens, np.append(np.zeros(len(ids), np.bool_), sample.loss_mask[begin:])

    setting = "rl.distillation.context, which gives a prompt or None for each sample,"
    ask_groups(batch.samples, tell, setting)
    found = list(batch.old_log_probs or batch.rollout_log_probs or ())
    if told:
        tokens, masks = zip(*told.values(), strict=True)
        rows = [row for row, sample in enumerate(batch.samples) if sample.id in told]
        scored = await score(RolloutBatch(tokens=tokens, loss_masks=masks, temperature=batch.temperature))
        aligned = align_rows(scored, masks, [batch.loss_masks[row] for row in rows])
        for row, values in zip(rows, aligned, strict=True):
            found[row] = values
    return tuple(found)

"""Rewards without an answer to compare with: the group votes (TTRL). Group rewards:
`rl.rollout.group_reward`.

Rules. An answer is whatever `extract` makes of a response; None has no vote and gets 0. The label is the
answer with the most votes. Its vote ratio is votes / valid answers, or votes / samples with of="all". There
is no label when fewer than min_voters voted, when the ratio is below min_ratio, or on a tie with ties="none"
(the default: either label would punish as many right answers as the other); ties="first" takes the answer
that was given first in launch order, ties="share" divides the reward among the k answers that tie: 1/k for
each sample that gave one of them. Without a label every reward is 0: the filter `check_consensus` drops such
a group as "no_consensus", and `check_reward_nonzero_std`, which sees rewards that are all alike, as
"zero_variance".
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Literal, NamedTuple

from rollouts.errors import require
from rollouts.rewards.check import require_choice
from rollouts.types import RewardResult, Sample

TieRule = Literal["none", "first", "share"]
RatioOf = Literal["valid", "all"]


class Consensus(NamedTuple):
    """What a group of answers agrees on."""

    label: Hashable | None  # of those that share it the first; None: no consensus
    rewards: tuple[float, ...]  # [G] 1 where the answer is the label, 1/k if k answers share it, else 0
    votes: int  # for the answer with the most, label or not
    num_valid: int  # answers that are not None
    ratio: float  # votes of the valid answers or of all; 0 where nobody voted


def compute_consensus(
    answers: Sequence[Hashable | None],
    *,
    min_ratio: float = 0.0,
    ties: TieRule = "none",
    of: RatioOf = "valid",
    min_voters: int = 1,
) -> Consensus:
    """The label that most of the answers [G] agree on, and a reward of 1 for each that does. The rules stand
    at the top of this file.

    Paper: TTRL, 2504.16084. Raises ConfigError unless 0 <= min_ratio <= 1, min_voters is 1 or more, ties is
    "none", "first" or "share" and of is "valid" or "all".
    """
    require(min_voters >= 1, f"min_voters={min_voters}; it must be 1 or more")
    require(0 <= min_ratio <= 1, f"min_ratio={min_ratio}; it must be from 0 to 1, 0 takes every majority")
    require_choice("ties", ties, TieRule)
    require_choice("of", of, RatioOf)
    counts = Counter(answer for answer in answers if answer is not None)
    num_valid = counts.total()
    votes = max(counts.values(), default=0)
    tied = [answer for answer, count in counts.items() if count == votes]  # as they were first met
    ratio = votes / max(1, num_valid if of == "valid" else len(answers))
    if num_valid < min_voters or ratio < min_ratio or (len(tied) > 1 and ties == "none"):
        tied = []
    winners = tied if ties == "share" else tied[:1]
    rewards = tuple(float(answer in winners) / max(1, len(winners)) for answer in answers)
    return Consensus(winners[0] if winners else None, rewards, votes, num_valid, ratio)


def make_consensus_reward(
    extract: Callable[[Sample], Hashable | None],
    *,
    min_ratio: float = 0.0,
    ties: TieRule = "none",
    of: RatioOf = "valid",
    min_voters: int = 1,
) -> Callable[[Sequence[Sample]], list[RewardResult]]:
    """A group reward of 1 for each sample whose answer is the group's label, otherwise 0 (ties="share": see
    above).

    Parts: `agrees` is the reward, `has_answer`, and `vote_ratio` and `has_label`, which are the group's. The
    note names the label. Raises ConfigError as `compute_consensus`.
    """
    find_label = partial(compute_consensus, min_ratio=min_ratio, ties=ties, of=of, min_voters=min_voters)
    find_label(())  # raises if a rule makes no sense

    def consensus_reward(samples: Sequence[Sample]) -> list[RewardResult]:
        answers = [extract(sample) for sample in samples]
        consensus = find_label(answers)
        group = {"vote_ratio": consensus.ratio, "has_label": float(consensus.label is not None)}
        nobody = f"no label: at most {consensus.votes} of {consensus.num_valid} votes agree"
        note = nobody if consensus.label is None else f"label {consensus.label!r}"
        return [
            RewardResult(reward, {"agrees": reward, "has_answer": float(answer is not None)} | group, note)
            for reward, answer in zip(consensus.rewards, answers, strict=True)
        ]

    return consensus_reward

"""Tasks to train on: a dataset, a reward and a filter on one page each."""

from typing import Any

from rollouts.types import FilterDecision, SampleGroup

Row = dict[str, Any]
ALIKE = 1e-6  # rewards nearer than this are equal: a model's scores of the same response are


def keep_mixed(group: SampleGroup) -> FilterDecision:
    """Keeps a group whose samples do not all have the same reward: with equal rewards every advantage is 0.
    With a critic such a group teaches too: then leave this out.
    """
    if group.rewards.max() - group.rewards.min() > ALIKE:
        return FilterDecision(keep=True)
    return FilterDecision(False, "same_reward", f"every sample has {group.rewards[0]:g}")

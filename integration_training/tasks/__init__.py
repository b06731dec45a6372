"""Tasks to train on: a dataset, a reward and a filter on one page each."""

from typing import Any

from rollouts.filters import check_reward_nonzero_std

Row = dict[str, Any]
keep_mixed = check_reward_nonzero_std
"""The filter of the tasks. With a critic a group of equal rewards teaches too: then leave this out."""

"""Several rewards as one, and one reward's parts weighed anew."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rollouts.errors import require
from rollouts.rewards.check import PlainReward, add_up, check_reward, function_name, is_async
from rollouts.types import Numbers, RewardResult, Sample

SyncReward = Callable[[Sample], Any]


def combine_rewards(
    rewards: Mapping[str, SyncReward] | Sequence[tuple[str, SyncReward]],
    *,
    weights: Numbers | None = None,
    aggregate: Callable[[list[float]], float] = math.fsum,
) -> PlainReward:
    """A reward of Σ weight · reward over the named sync rewards; without weights each counts once. aggregate
    takes the place of the sum: max, min, math.prod, or a function of your own of the products.

    Parts: each component's reward under its name, before weighing, and its own parts as name.part. Notes are
    joined as `name: note`. A component that raises makes the whole raise. Raises ConfigError for no
    components, a name twice, a name that is empty or has a dot, a component that is no function or async, and
    weights that do not name every component once.
    """
    pairs = list(rewards.items() if isinstance(rewards, Mapping) else rewards)
    names = [name for name, _ in pairs]
    require(
        0 < len(set(names)) == len(names),
        f"combine_rewards has the components {names}; name at least one, and each once",
    )
    for name, reward in pairs:
        require(
            name != "" and "." not in name and callable(reward) and not is_async(reward),
            f"combine_rewards: component {name!r} is {reward!r}; a name is text without a dot, a component a"
            " function that is not async (await those in an async reward of your own)",
        )
    factors = check_weights(dict.fromkeys(names, 1.0) if weights is None else weights, names, names)

    def combined_reward(sample: Sample) -> RewardResult:
        parts = {}
        notes = []
        for name, reward in pairs:
            where = f"reward function {function_name(reward)} (component {name!r}) on sample {sample.id}"
            result = check_reward(reward(sample), where)
            parts |= {name: result.reward, **{f"{name}.{part}": one for part, one in result.parts.items()}}
            notes += [f"{name}: {result.note}"] if result.note is not None else []
        total = aggregate([factors[name] * parts[name] for name in names])
        return RewardResult(total, parts, "; ".join(notes) or None)

    return combined_reward


def apply_weights(result: RewardResult, weights: Numbers) -> RewardResult:
    """The result with the reward Σ weight · part; parts and note stay as they are.

    Every part needs a weight, 0 for one that shall not count; only the details of a part (`exact.exact` where
    there is `exact`) need none. Raises ConfigError naming a weight without its part, a part without weight,
    or a weight that is no finite number; UserFunctionError if the sum is not finite.
    """
    details = {name for name in result.parts for above in result.parts if name.startswith(f"{above}.")}
    check_weights(weights, result.parts, [name for name in result.parts if name not in details])
    products = (weight * result.parts[name] for name, weight in weights.items())
    return replace(result, reward=add_up(products, "the weights and the reward function"))


def check_weights(
    weights: Numbers, parts: Collection[str] | None = None, needed: Collection[str] = ()
) -> Numbers:
    """The weights. Raises ConfigError naming one that is no finite number, one whose part is not among
    `parts` (None: not known yet), and a needed part without weight.
    """
    for name, weight in weights.items():
        require(
            isinstance(weight, int | float) and not isinstance(weight, bool) and math.isfinite(weight),
            f"weights: {name!r} is {weight!r}; a weight is a finite number",
        )
    known = f"there are the parts {', '.join(parts or ()) or '(none)'}"
    for name in weights:
        require(parts is None or name in parts, f"weights: {name!r} is weighted but not there; {known}")
    for name in needed:
        require(
            name in weights, f"weights: {name!r} has no weight; {known}; give it one, 0 if it shall not count"
        )
    return weights

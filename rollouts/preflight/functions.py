"""The user's functions that a config names: imported and checked before a model loads, and put where they
run.

load_functions   config names ──► functions of this process, signatures checked
open_functions   sync rewards ──► worker processes that can be killed; async ones stay in the event loop
"""

from __future__ import annotations

import functools
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rollouts.advantages import ADVANTAGES, AdvantageFn, check_advantage_params
from rollouts.config.plugins import Role, load_function
from rollouts.config.schema import RLTrainingConfig, RunConfig
from rollouts.config.tables import RolloutConfig
from rollouts.errors import ConfigError, PlugInError, UserFunctionError
from rollouts.filters import FILTERS
from rollouts.loops.algorithm import check_algorithms
from rollouts.protocols import FilterFn, GenerateFn, GroupRewardFn, RewardFn
from rollouts.rewards.blocking import watch_blocking
from rollouts.rewards.call import call_reward
from rollouts.rewards.check import function_name, is_async
from rollouts.rewards.combine import apply_weights, check_weights
from rollouts.rewards.workers import open_reward_workers
from rollouts.types import RewardResult, Sample

REWARD_MEMORY = 4 << 30  # bytes of one process that runs sync rewards


@dataclass(frozen=True, slots=True, kw_only=True)
class Functions:
    """What the config names; None where it names nothing."""

    generate: GenerateFn | None = None  # None: one chat turn
    reward: RewardFn | None = (
        None  # weighed by rl.rollout.reward_weights, unless a reward model is to be added first
    )
    group_reward: GroupRewardFn | None = None
    eval_reward: RewardFn | None = None
    filters: tuple[FilterFn, ...] = ()
    curriculum: Callable[..., Any] | None = None
    advantages: Mapping[str, AdvantageFn] = field(
        default_factory=dict
    )  # by the names in rl.advantage and rl.changes


def load_functions(config: RunConfig, stages: Sequence[str], *, base_dir: Path) -> Functions:
    """Every function as it is, in this process. Raises PlugInError for one that does not import or does not
    take what its role passes, ConfigError where a stage lacks one, or two settings contradict each other; the
    message names the setting.
    """

    def load(name: str, role: Role) -> Any:
        built_in = FILTERS if role == "filter" else None
        return load_function(name, role=role, base_dir=base_dir, built_in=built_in) if name else None

    rollout = config.rl.rollout if config.rl else RolloutConfig()
    check_reward_settings(rollout, needed="rl" in stages)
    rule = load(rollout.reward, "reward")
    reward = rule if rollout.reward_model else weigh(rule, rollout)
    group_reward = load(rollout.group_reward, "group_reward")
    eval_reward = load(config.eval.reward, "reward") if config.eval and config.eval.reward else reward
    if config.eval and eval_reward is None:
        raise ConfigError(
            "eval.reward is empty and there is no rl.rollout.reward to fall back on; name a function of one"
            " sample"
        )
    return Functions(
        generate=load(rollout.generate, "generate"),
        reward=reward,
        group_reward=group_reward,
        eval_reward=eval_reward,
        filters=tuple(load(name, "filter") for name in rollout.filters),
        curriculum=load(config.rl.curriculum, "curriculum") if config.rl else None,
        advantages=load_advantages(config.rl, base_dir=base_dir) if config.rl else {},
    )


def load_advantages(config: RLTrainingConfig, *, base_dir: Path) -> dict[str, AdvantageFn]:
    """The functions that rl.advantage and rl.changes name, by name. Raises as load_advantage; the message
    names the change.
    """
    found: dict[str, AdvantageFn] = {}
    check_algorithms(
        config,
        lambda settings: found.update({settings.advantage: load_advantage(settings, base_dir=base_dir)}),
    )
    return found


def load_advantage(config: RLTrainingConfig, *, base_dir: Path) -> AdvantageFn:
    """The function that rl.advantage names. Raises PlugInError if there is none, ConfigError if it does not
    take rl.advantage_params.
    """
    try:
        function = load_function(config.advantage, role="advantage", base_dir=base_dir, built_in=ADVANTAGES)
    except PlugInError as error:
        raise PlugInError(f"rl.{error}") from error
    check_advantage_params(config.advantage, function, config.advantage_params)
    return function


def check_reward_settings(rollout: RolloutConfig, *, needed: bool) -> None:
    """Raises ConfigError unless the settings name one way to score; none is enough unless one is `needed`."""
    if needed and not rollout.reward and not rollout.group_reward and not rollout.reward_model:
        raise ConfigError(
            "rl.rollout.reward is empty; name a function as module:function or file.py:function (or"
            " rl.rollout.group_reward or reward_model)"
        )
    if rollout.reward_model and rollout.group_reward:
        raise ConfigError(
            "rl.rollout.reward_model scores samples one by one and is added to rl.rollout.reward; leave"
            " group_reward out, weigh the parts with reward_weights"
        )
    if rollout.reward and rollout.group_reward:
        raise ConfigError(
            "rl.rollout.reward and rl.rollout.group_reward are both given; score samples one by one or by"
            " group: keep one"
        )
    if rollout.group_reward and rollout.reward_weights:
        raise ConfigError(
            "rl.rollout.reward_weights weighs the parts of rl.rollout.reward; a group_reward weighs its own"
        )


@asynccontextmanager
async def open_functions(
    config: RunConfig,
    functions: Functions,
    *,
    base_dir: Path,
    warn: Callable[[str], None],
    num_workers: int | None = None,
) -> AsyncIterator[Functions]:
    """The same functions where they run in a training run: sync rewards in worker processes (None: one per
    core that this process may use) for as long as this is open.

    `warn` gets a sentence when an async one blocks the event loop. Raises RewardCrashed if the processes
    cannot be started.
    """
    rollout = config.rl.rollout if config.rl else RolloutConfig()
    eval_name = config.eval.reward if config.eval else ""
    named = (rollout.reward, rollout.group_reward, eval_name)
    in_workers = [
        name
        for name, role in zip(named, ("reward", "group_reward", "reward"), strict=True)
        if name and _is_sync(name, role, base_dir)
    ]
    with watch_blocking(warn):
        if not in_workers:
            yield functions
            return
        async with open_reward_workers(
            count=num_workers or count_cores(),
            timeout_s=rollout.reward_timeout_s,
            memory_bytes=REWARD_MEMORY,
        ) as workers:
            reward, eval_reward = functions.reward, functions.eval_reward
            if rollout.reward in in_workers:
                reward = workers.reward(rollout.reward, base_dir)
                reward = reward if rollout.reward_model else weigh(reward, rollout)
                eval_reward = eval_reward if eval_name else reward
            if eval_name in in_workers:
                eval_reward = workers.reward(eval_name, base_dir)
            group_reward = functions.group_reward
            if rollout.group_reward in in_workers:
                group_reward = workers.group_reward(rollout.group_reward, base_dir)
            yield replace(functions, reward=reward, group_reward=group_reward, eval_reward=eval_reward)


def _is_sync(name: str, role: Role, base_dir: Path) -> bool:
    return not is_async(load_function(name, role=role, base_dir=base_dir))


def count_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def weigh(reward: RewardFn | None, rollout: RolloutConfig) -> RewardFn | None:
    """`reward` with its parts weighed as the config says; `reward` itself if the config says nothing.

    Raises ConfigError for a weight that is no number; what it makes raises UserFunctionError for weights that
    do not name every part.
    """
    check_weights(rollout.reward_weights)
    if reward is None or not rollout.reward_weights:
        return reward
    scored_by = reward

    @functools.wraps(reward)
    async def weighed_reward(sample: Sample) -> RewardResult:
        result = await call_reward(scored_by, sample, timeout_s=rollout.reward_timeout_s)
        where = f"reward function {function_name(scored_by)} on sample {sample.id}"
        try:
            return apply_weights(result, rollout.reward_weights)
        except (ConfigError, UserFunctionError) as error:
            raise UserFunctionError(f"{where} does not fit rl.rollout.reward_weights: {error}") from error

    weighed_reward.keeps_own_time = True  # pyright: ignore[reportAttributeAccessIssue]  (the call within has the deadline)
    return weighed_reward

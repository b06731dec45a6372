"""The reward as named parts: functions of a sample or of its group, each with a weight of its own.

sample ─► its parts ──────┐
its group ─► their parts ─┴► normalised ─► Σ weight · value ─► the reward, before filters see the group
batch that trains ─► learn: what `running` has seen, and which part drives the advantage
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field, replace
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import trio

from rollouts.advantages.inputs import Floats
from rollouts.config.rollout import RewardPartConfig
from rollouts.errors import UserFunctionError, parse_call
from rollouts.processes.nurseries import run_all
from rollouts.rewards.call import call_group_reward, call_reward
from rollouts.rewards.check import TURNS, add_up, apply_reward
from rollouts.rewards.normalise import RewardNormaliser
from rollouts.schedules import interpolate_cosine, interpolate_linear
from rollouts.types import Fields, Numbers, RewardResult, Sample, live, split_trajectories

AT_ONCE = 32  # prompts of an evaluation whose parts are asked for
CURVES = {"linear": interpolate_linear, "cosine": interpolate_cosine}


@live
class RewardParts:
    """Parts of the reward by name. `score` is the reward function of a manager, `score_group` its group
    reward, which is handed what `score` has scored.
    """

    parts: Mapping[str, tuple[RewardPartConfig, Any]]  # a RewardFn or GroupRewardFn each
    step: Callable[[], int]  # of RL, that samples are scored for
    timeout_s: float  # of each call
    states: Fields  # of the parts that keep one, a dict each
    scales: dict[str, RewardNormaliser] = field(init=False)  # of the parts whose normalise is "running"

    def __post_init__(self) -> None:
        running = (name for name, (config, _) in self.parts.items() if config.normalise == "running")
        self.scales = {name: RewardNormaliser() for name in running}
        # what a checkpoint has: these dicts stay, and what is in them changes
        self.kept = {name: vars(scale) for name, scale in self.scales.items()} | {
            f"{name}.state": own for name, own in self.states.items()
        }

    async def score(self, sample: Sample) -> RewardResult:
        """The parts of one sample; the reward is Σ weight · part, of these and not normalised. Raises as
        call_reward.
        """
        given: dict[str, RewardResult] = {}
        for name, (config, function) in self.parts.items():
            if not config.group_reward:
                with naming_part(name):
                    given[name] = await call_reward(function, sample, timeout_s=self.timeout_s)
        step = self.step()
        products = (find_weight(self.parts[name][0], step) * one.reward for name, one in given.items())
        return _join(add_up(products, f"the parts of sample {sample.id}"), given)

    async def score_group(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """The reward of each sample, which has the parts of `score`, with those of the group: each function
        sees the parts before it. Raises as call_group_reward.

        NAME.added is what a part adds to the reward, where that is not its weight times its value.
        """
        kept = [
            {name: one.rewards[name] for name in one.rewards if name.partition(".")[0] in self.parts}
            for one in samples
        ]
        notes = [sample.metadata.get("reward_note") for sample in samples]
        for name, (config, function) in self.parts.items():
            if config.group_reward:
                seen = [replace(one, rewards=parts) for one, parts in zip(samples, kept, strict=True)]
                with naming_part(name):
                    results = await call_group_reward(function, seen, timeout_s=self.timeout_s)
                joined = [_join(0.0, {name: result}) for result in results]
                kept = [{**parts, **one.parts} for parts, one in zip(kept, joined, strict=True)]
                notes = [_join_notes(note, one.note) for note, one in zip(notes, joined, strict=True)]
        added = self.weigh({name: np.asarray([parts[name] for parts in kept]) for name in self.parts})
        results = []
        for row, (sample, parts, note) in enumerate(zip(samples, kept, notes, strict=True)):
            own = {name: float(column[row]) for name, column in added.items()}
            total = add_up(own.values(), f"the parts of sample {sample.id}")
            told = {f"{name}.added": own[name] for name in own if changes(self.parts[name][0])}
            results.append(RewardResult(total, parts | told, note))
        return results

    def weigh(self, values: Mapping[str, Floats]) -> dict[str, Floats]:
        """What each part, of which these are the values of a group [G], adds to the rewards [G]."""
        step, weighed = self.step(), {}
        for name, (config, _) in self.parts.items():
            own = np.asarray(values[name], np.float64)
            if config.normalise == "rank":
                own = rank_in_group(own)
            elif config.normalise == "running":
                own = self.scales[name].scale(own)
            weighed[name] = find_weight(config, step) * own
        return weighed

    async def learn(self, samples: Sequence[Sample]) -> Numbers:
        """Metrics of the samples that train: each part's share of the advantage, and its weight from here on
        where that has a schedule. `running` has seen their values from here on, and states have learnt.

        drive = Σ a·A / Σ A², a what the part has added to a reward less the mean of that in its group, A the
        sum of a over the parts, those of turns among them: together the drives are 1. None where no rewards
        of a group differ.
        """
        ends = [segments[-1] for segments in split_trajectories(samples)]
        names = [*self.parts, *([TURNS] if any(TURNS in one.rewards for one in ends) else [])]
        columns: dict[str, list[Floats]] = {name: [] for name in names}
        for _, group in groupby(ends, lambda sample: sample.group_index):
            members = [*group]
            for name, column in columns.items():
                added = np.asarray([self._find_added(one, name) for one in members])
                column.append(added - added.mean() if np.ptp(added) > 0 else np.zeros(len(added)))
        centred = {name: np.concatenate(column) for name, column in columns.items() if column}
        total = np.sum([*centred.values()], axis=0)
        square = float(total @ total) if centred else 0.0
        metrics = {
            f"reward/part/{name}/drive": float(own @ total) / square
            for name, own in centred.items()
            if square > 0
        }
        for name, (config, _) in self.parts.items():
            if config.schedule != "constant":
                metrics[f"reward/part/{name}/weight"] = find_weight(config, self.step())
        for name, scale in self.scales.items():
            scale([one.rewards[name] for one in ends])
        for name in self.states:
            await self.parts[name][1](ends, learn=True)
        return metrics

    def _find_added(self, sample: Sample, name: str) -> float:
        if name == TURNS:
            return sample.rewards.get(TURNS, 0.0)
        weight = self.parts[name][0].weight
        return sample.rewards.get(f"{name}.added", weight * sample.rewards[name])

    async def correlate(self, samples: Sequence[Sample]) -> Numbers:
        """By part, the correlation (Pearson) of its values on these samples with the rewards that they have,
        which may be of another function. None where either has no spread. Samples that a part fails on are
        left out, and counted as parts_failed; whatever else is raised, is.
        """
        ends = [segments[-1] for segments in split_trajectories(samples)]
        prompts: dict[Any, list[Sample]] = {}
        for sample in ends:
            prompts.setdefault(sample.group_index, []).append(sample)
        places = trio.CapacityLimiter(AT_ONCE)

        async def score_prompt(members: Sequence[Sample]) -> list[RewardResult]:
            async with places:
                try:
                    own = [apply_reward(one, await self.score(one)) for one in members]
                    return await self.score_group(own)
                except UserFunctionError:
                    return []

        results = await run_all(*(partial(score_prompt, members) for members in prompts.values()))
        pairs = [
            (sample.reward, result.parts)
            for members, found in zip(prompts.values(), results, strict=True)
            for sample, result in zip(members, found, strict=bool(found))
        ]
        metrics = {"parts_failed": float(len(ends) - len(pairs))} if len(pairs) < len(ends) else {}
        wanted = np.asarray([reward for reward, _ in pairs], np.float64)
        for name in self.parts:
            values = np.asarray([parts[name] for _, parts in pairs])
            if len(pairs) and np.ptp(values) > 0 and np.ptp(wanted) > 0:
                metrics[f"part/{name}/correlation"] = float(np.corrcoef(values, wanted)[0, 1])
        return metrics

    def state_dict(self) -> Fields:
        """What `running` has seen, and NAME.state of the parts that keep one."""
        return {name: {**own} for name, own in self.kept.items()}

    def load_state_dict(self, state: Fields) -> None:
        """Goes on from a state_dict of the same parts; before they have learnt anything."""
        for name, own in self.kept.items():
            own.update(state[name])


# the calls within have their deadlines
for _method in (RewardParts.score, RewardParts.score_group):
    _method.keeps_own_time = True  # pyright: ignore[reportFunctionMemberAccess]


def find_weight(config: RewardPartConfig, step: int) -> float:
    """The weight of a part in a step of RL, counted from 1."""
    name, numbers = parse_call(config.schedule)
    if name == "constant":
        return config.weight
    begin, end = int(numbers["begin"]), int(numbers["end"])
    return CURVES[name](step, first=numbers["first"], last=config.weight, begin=begin, end=end)


def rank_in_group(values: Floats) -> Floats:
    """[G] the share of the others that a value is above, those that equal it count half: 0 to 1; 0.5 for a
    value alone.
    """
    above = (values[:, None] > values).sum(1) + ((values[:, None] == values).sum(1) - 1) / 2
    return above / (len(values) - 1) if len(values) > 1 else np.full(len(values), 0.5)


def changes(config: RewardPartConfig) -> bool:
    """Whether what a part adds is not always its weight times its value."""
    return config.schedule != "constant" or config.normalise != "none"


@contextmanager
def naming_part(name: str) -> Iterator[None]:
    """What a function of the user raises names its part."""
    try:
        yield
    except UserFunctionError as error:
        raise type(error)(f"rl.rollout.rewards.{name}: {error}") from error.__cause__


def _join(reward: float, given: Mapping[str, RewardResult]) -> RewardResult:
    """The reward with all parts under their names, details of each as name.detail, and the notes."""
    parts: dict[str, float] = {}
    note = None
    for name, result in given.items():
        parts |= {name: result.reward, **{f"{name}.{detail}": one for detail, one in result.parts.items()}}
        note = _join_notes(note, result.note and f"{name}: {result.note}")
    return RewardResult(reward, parts, note)


def _join_notes(*notes: object) -> str | None:
    return "; ".join(str(note) for note in notes if note) or None

"""Which algorithm holds in a step of RL: a pure function of the settings, the step, and the coefficient that
a controller has come to.

[rl], [[rl.changes]] ──► list_algorithms ──► choose_algorithm(config, step, state) ──► step ──► measured KL
                                                          ▲                                       │
                                                      LoopState, in every checkpoint ◄── update_loop_state
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rollouts.advantages import ADVANTAGES, AdvantageFn
from rollouts.config.schema import REFERENCE_FREE, AlgorithmChange, RLTrainingConfig, list_tables
from rollouts.errors import CheckpointError, ConfigError, PlugInError, find_by_name, parse_call
from rollouts.kl_control import KL_CONTROLS, KLControl, exceeds_kl_limit
from rollouts.loops.rl_batch import find_trajectories, make_loss_spec
from rollouts.schedules import interpolate_linear
from rollouts.types import ForwardBackwardResult, LossSpec, Numbers, RolloutBatch, metric_values

BOUND_STEPS = 20  # at a bound after which it is said


@dataclass
class LoopState:
    """What the RL loop keeps in a checkpoint. It changes once a step, when the updates are done."""

    kl_coef: float  # of the next step, where rl.kl_control is not fixed; before step 1 that of the config
    at_bound: float = 0.0  # steps in a row after which it was at a bound of rl.kl_control
    lr_factor: float = 1.0  # of the learning rate
    kl: float = 0.0  # of the last step
    undone: float = 0.0  # 1 where the last update was, and rl.kl_ref_limit is set


class Algorithm(NamedTuple):
    """What holds in one step."""

    change: int  # 0: [rl] as it stands; n: as the n-th of rl.changes left it
    settings: RLTrainingConfig  # without changes, with the kl_coef of this step
    loss: LossSpec


def list_algorithms(config: RLTrainingConfig) -> list[RLTrainingConfig]:
    """The settings of each piece as a whole [rl], the first being those from step 1 on: what must be checked
    before a run.

    kl_coef is the largest that the settings give it in the piece; a controller may go beyond.
    """
    return [
        config.model_copy(update={**table, "changes": []}) for table in list_tables(config, config.changes)
    ]


def check_algorithms(config: RLTrainingConfig, check: Callable[[RLTrainingConfig], object]) -> None:
    """Calls `check` with each of list_algorithms, after rl.kl_control was seen to take its parameters.

    Raises what `check` raises as ConfigError or PlugInError, which names the change, and ConfigError as
    make_kl_control.
    """
    make_kl_control(config)
    for index, settings in enumerate(list_algorithms(config)):
        try:
            check(settings)
        except (ConfigError, PlugInError) as error:
            if index == 0:
                raise
            raise type(error)(
                f"rl.changes with from_step={config.changes[index - 1].from_step}: {error}"
            ) from error


def needs_reference(config: RLTrainingConfig) -> bool:
    """Whether a step may need the reference's log-probs: for a KL term, to measure the KL that a controller
    follows, for a loss of pairs, as a teacher's, or for a part of the reward.
    """
    return (
        (config.distillation and config.distillation.teacher) == "reference"
        or config.kl_control != "fixed"
        or "coherence_scored" in [part.group_reward for part in config.rollout.rewards.values()]
        or any(
            settings.kl_coef > 0 or (config.pairs and settings.loss not in REFERENCE_FREE)
            for settings in list_algorithms(config)
        )
    )


def count_updates(config: RLTrainingConfig) -> int:
    """Optimizer steps on one batch, the most that there are: with kl_stop it may be fewer."""
    return config.updates_per_batch * config.minibatches


def choose_algorithm(config: RLTrainingConfig, step: int, state: LoopState) -> Algorithm:
    """What holds in `step`, counted from 1."""
    begun = [change for change in config.changes if change.from_step <= step]
    named = [change for change in begun if "kl_coef" in change.model_fields_set]
    kl_coef = state.kl_coef  # the controller's, unless a change names another to go on from at this very step
    if config.kl_control == "fixed" or (named and named[-1].from_step == step):
        kl_coef = schedule_kl_coef(config.kl_coef, named, step)
    settings = list_algorithms(config)[len(begun)].model_copy(update={"kl_coef": kl_coef})
    return Algorithm(len(begun), settings, make_loss_spec(settings))


def schedule_kl_coef(first: float, named: Sequence[AlgorithmChange], step: int) -> float:
    """The KL coefficient of `step` where no controller moves it, after the changes that have named one:
    constant by pieces, straight lines over kl_ramp_steps.
    """
    if not named:
        return first
    last, begin = named[-1], named[-1].from_step
    if not last.kl_ramp_steps:
        return last.kl_coef
    before = schedule_kl_coef(first, named[:-1], begin)
    return interpolate_linear(
        step, first=before, last=last.kl_coef, begin=begin, end=begin + last.kl_ramp_steps
    )


# --- the controller -----------------------------------------------------------------------------------------


def make_kl_control(config: RLTrainingConfig) -> KLControl:
    """The controller that config.kl_control names, with its settings. Raises ConfigError if it does not take
    them.
    """
    return find_by_name("rl.kl_control", config.kl_control, KL_CONTROLS)


def update_loop_state(
    state: LoopState,
    algorithm: Algorithm,
    control: KLControl,
    batch: RolloutBatch,
    measured: Numbers,
) -> Numbers:
    """Moves the coefficient by the KL that the step's batch had; nothing moves if it was not measured.
    Metrics: kl/coef_at_bound, steps in a row that it has been at a bound of rl.kl_control.
    """
    kl = measured.get("kl/ref_per_sample", math.nan)  # nats per sample
    samples = int(find_trajectories(batch).max()) + 1
    state.kl_coef = control(algorithm.settings.kl_coef, kl, samples, state.kl)
    state.kl = max(kl, 0.0) if math.isfinite(kl) else state.kl
    _, numbers = parse_call(algorithm.settings.kl_control)
    state.undone = float(bool(algorithm.settings.kl_ref_limit and measured.get("optim/undone")))
    is_at_bound = state.kl_coef in (numbers.get("lowest"), numbers.get("highest"))
    state.at_bound = state.at_bound + 1 if is_at_bound else 0
    if state.at_bound == BOUND_STEPS:
        logging.getLogger("rollouts").warning(
            "the KL coefficient has been %g, a bound of rl.kl_control, for %d steps, and the KL is %.3g nats"
            " per sample; raise `highest`, or lower rl.optim.lr",
            state.kl_coef,
            BOUND_STEPS,
            kl,
        )
    return {"kl/coef_at_bound": state.at_bound} if state.at_bound else {}


def decode_loop_state(saved: Mapping[str, object]) -> LoopState:
    """The state whose fields were saved, bit for bit. Raises CheckpointError for what is none."""
    found = {"kl_coef": None, **saved}
    for name, value in found.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
            raise CheckpointError(
                f"the loop's state has {name}={value!r}; it must be a finite number, 0 or more: resume from"
                " another checkpoint"
            )
    return LoopState(**{name: float(value) for name, value in found.items()})


# --- what a run is given ------------------------------------------------------------------------------------


def find_advantages(config: RLTrainingConfig, given: Mapping[str, AdvantageFn]) -> dict[str, AdvantageFn]:
    """Advantages by name: those `given`, and ADVANTAGES. Raises ConfigError for a name in config that neither
    has.
    """
    functions = {**ADVANTAGES, **given}
    for settings in list_algorithms(config):
        if settings.advantage not in functions:
            raise ConfigError(
                f"rl.advantage={settings.advantage!r} is not one of {', '.join(ADVANTAGES)}; pass a function"
                " of your own in advantages="
            )
    return functions


def reaches_kl_stop(config: RLTrainingConfig, forward: ForwardBackwardResult) -> bool:
    """Whether rl.kl_stop ends the updates on the batch after this one; never without it.

    An update whose loss was not finite, or all of whose rows were left out, measured nothing: the next one is
    made. Raises ConfigError for a loss that does not measure approx_kl/mean.
    """
    metrics = metric_values(forward.metrics)
    kl = metrics.get("approx_kl/mean")
    measured_nothing = forward.skipped is not None or (kl is None and "advantage/skipped_rows" in metrics)
    if not config.kl_stop or measured_nothing:
        return False
    if kl is None:
        raise ConfigError(
            f"rl.kl_stop={config.kl_stop} with rl.loss={config.loss!r}, which does not measure"
            " approx_kl/mean; set rl.kl_stop = 0"
        )
    return exceeds_kl_limit(kl, limit=config.kl_stop)


def describe_algorithm(algorithm: Algorithm) -> str:
    """One line for the log: what a user would look for first."""
    settings = algorithm.settings
    named = (settings.advantage, settings.advantage_params), (settings.loss, algorithm.loss.params)
    advantage, loss = (
        f"{name}({', '.join(f'{key}={value}' for key, value in params.items())})" for name, params in named
    )
    return (
        f"advantage {advantage}, loss {loss} by {settings.normalise_by}, kl_coef {settings.kl_coef:g} in the"
        f" {settings.kl_in}"
    )

"""Which algorithm holds in a step of RL: a pure function of the settings, the step, and the coefficient that
a controller has come to.

[rl], [[rl.changes]] ──► list_algorithms ──► choose_algorithm(config, step, state) ──► step ──► measured KL
                                                          ▲                                       │
                                                      LoopState, in every checkpoint ◄── update_loop_state
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rollouts.advantages import ADVANTAGES, AdvantageFn
from rollouts.config.schema import REFERENCE_FREE, AlgorithmChange, RLTrainingConfig, list_tables
from rollouts.errors import CheckpointError, ConfigError, PlugInError, find_by_name
from rollouts.kl_control import KL_CONTROLS, KLControl, exceeds_kl_limit
from rollouts.loops.rl_batch import find_trajectories, make_loss_spec
from rollouts.schedules import interpolate_linear
from rollouts.types import ForwardBackwardResult, LossSpec, RolloutBatch, metric_values


@dataclass
class LoopState:
    """What the RL loop keeps in a checkpoint. It changes once a step, when the updates are done."""

    kl_coef: float  # of the next step, where rl.kl_control is not fixed; before step 1 that of the config


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
    follows, for a loss of pairs, or as a teacher's.
    """
    return (
        (config.distillation and config.distillation.teacher) == "reference"
        or config.kl_control != "fixed"
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
    measured: Mapping[str, float],
) -> None:
    """Moves the coefficient by the KL that the step's batch had; nothing moves if it was not measured."""
    kl = measured.get("kl/ref_per_sample", math.nan)  # nats per sample
    state.kl_coef = control(algorithm.settings.kl_coef, kl, int(find_trajectories(batch).max()) + 1)


def decode_loop_state(saved: Mapping[str, object]) -> LoopState:
    """The state whose fields were saved, bit for bit. Raises CheckpointError for what is none."""
    kl_coef = saved.get("kl_coef")
    if not isinstance(kl_coef, int | float) or isinstance(kl_coef, bool) or not 0 <= kl_coef < math.inf:
        raise CheckpointError(
            f"the loop's state has kl_coef={kl_coef!r}; it must be a finite number, 0 or more: resume from"
            " another checkpoint"
        )
    return LoopState(kl_coef=float(kl_coef))


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

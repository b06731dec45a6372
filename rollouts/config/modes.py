"""`--mode`: stages of a run, joined by `+`, in the order in which they run."""

from rollouts.config.schema import (
    PreferenceTrainingConfig,
    RewardModelTrainingConfig,
    RLTrainingConfig,
    RunConfig,
    SFTTrainingConfig,
)
from rollouts.config.spelling import did_you_mean
from rollouts.errors import ConfigError

STAGES = ("sft", "preference", "reward_model", "rl")
ALIASES = {"dpo": "preference", "ppo": "rl"}  # ppo: RL that must have a critic
EVALUATE = "evaluate"  # the mode that trains nothing
SectionConfig = SFTTrainingConfig | PreferenceTrainingConfig | RewardModelTrainingConfig | RLTrainingConfig


def parse_mode(mode: str) -> tuple[str, ...]:
    """The stages of a mode, under the names of their tables: "sft+reward_model+ppo" → ("sft", "reward_model",
    "rl"). "evaluate" has none.

    Each at most once; sft comes first and rl last, where they are. Raises ConfigError naming what is wrong.
    """
    if mode == EVALUATE:
        return ()
    stages = tuple(ALIASES.get(stage, stage) for stage in mode.split("+"))
    for stage in stages:
        if stage not in STAGES:
            raise ConfigError(
                f"--mode {mode}: there is no stage {stage!r}{did_you_mean(stage, [*STAGES, *ALIASES])}; a"
                f" stage is {' or '.join(STAGES)}, joined by +"
            )
    if len(set(stages)) < len(stages) or "sft" in stages[1:] or "rl" in stages[:-1]:
        raise ConfigError(
            f"--mode {mode}: a run has each stage once, sft as the first and rl (or ppo) as the last one; put"
            " them in this order"
        )
    return stages


def choose_stages(config: RunConfig, mode: str | None) -> tuple[str, ...]:
    """The stages of a mode; without one, all that the config has tables for. Raises ConfigError as parse_mode
    does, for a config without stages, if the mode says ppo and [rl] has no critic, or evaluate and there is
    no [eval].
    """
    stages = list_stages(config) if mode is None else parse_mode(mode)
    if mode == EVALUATE and not config.eval:
        raise ConfigError(
            "there is no [eval] table, which says what is asked and how it is scored; add one, with data and"
            " reward, or name a file that has one with --config FILE"
        )
    if not stages and mode != EVALUATE:
        raise ConfigError(
            f"the config has none of the tables {', '.join(STAGES)}: there is nothing to train; add one of"
            " them"
        )
    if mode and "ppo" in mode.split("+") and config.rl and not config.rl.critic:
        raise ConfigError(
            f"--mode {mode} has the stage ppo, which trains a critic, but there is no [rl.critic] table; add"
            " it, or use the stage rl"
        )
    return stages


def stage_config(config: RunConfig, stage: str) -> SectionConfig:
    """The table of a stage; for "evaluate", of which nothing trains, one with defaults. Raises ConfigError if
    the config has none.
    """
    if stage == EVALUATE and config.eval:
        return SFTTrainingConfig(data=config.eval.data, steps=1)
    if stage not in list_stages(config):
        raise ConfigError(
            f"--mode has the stage {stage!r} but the config has no [{stage}] table; add it or choose another"
            " mode"
        )
    return getattr(config, stage)


def list_stages(config: RunConfig) -> tuple[str, ...]:
    """The stages that a config has tables for, in the order in which they run."""
    return tuple(stage for stage in STAGES if getattr(config, stage))

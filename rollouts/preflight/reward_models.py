"""The models with a scalar head that RL asks for by name: what scores its samples, and what its critic starts
from. For a run and for a check.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from rollouts.config.schema import RunConfig
from rollouts.errors import ConfigError, ModelError
from rollouts.run_dir import RunDir

STAGE = "stage"  # the name of this run's own reward model
REWARD, CRITIC = "rl.rollout.reward_model", "rl.critic.model"


class Vocabulary(Protocol):
    """What is needed of a tokenizer."""

    def get_vocab(self) -> Mapping[str, int]: ...


def check_reward_models(
    config: RunConfig, stages: Sequence[str], run_dir: RunDir, tokenizer: Vocabulary
) -> dict[str, Path | None]:
    """By setting, the directory of each model that RL names, before anything trains; None for one that the
    stage reward_model will have trained.

    Empty without the stage rl. Raises as find_reward_model, find_critic_start and check_tokens do.
    """
    found: dict[str, Path | None] = {}
    if "rl" not in stages or config.rl is None:
        return found
    trained_before = "reward_model" in stages
    if name := config.rl.rollout.reward_model:
        found[REWARD] = (
            None if name == STAGE and trained_before else find_reward_model(config, run_dir, REWARD, name)
        )
    if config.rl.critic is not None and (name := config.rl.critic.model):
        found[CRITIC] = None if name == STAGE and trained_before else find_critic_start(config, run_dir, name)
    for setting, path in found.items():
        if path is not None:
            check_tokens(path, setting, tokenizer)
    return found


def find_reward_model(config: RunConfig, run_dir: RunDir, setting: str, name: str) -> Path:
    """The directory of the reward model `name`, the value of `setting`: "stage" is the last checkpoint of
    this run's own.

    Raises ConfigError if this run has trained none or the model has no scalar head, ModelError if there is no
    such model.
    """
    from rollouts.models.load import has_own_scalar_head

    if name == STAGE:
        steps = config.reward_model.steps if config.reward_model else 0
        path = run_dir.checkpoint("reward_model", steps)
        if not path.is_dir():
            raise ConfigError(
                f'{setting}="stage", but {run_dir.root} has no reward model of {steps} steps; add the stage:'
                " --mode …+reward_model+rl"
            )
        return path
    path = _resolve(config, setting, name)
    if not has_own_scalar_head(path):
        raise ConfigError(
            f"{setting}={name!r} is no reward model: it has no scalar head; train one with the stage"
            " reward_model"
        )
    return path


def find_critic_start(config: RunConfig, run_dir: RunDir, name: str) -> Path:
    """The directory that a critic starts from: a reward model, or any causal model, which gets a head of 0.
    Raises as find_reward_model.
    """
    return (
        find_reward_model(config, run_dir, CRITIC, name) if name == STAGE else _resolve(config, CRITIC, name)
    )


def _resolve(config: RunConfig, setting: str, name: str) -> Path:
    from rollouts.models.load import resolve_model

    try:
        return resolve_model(name, seed=config.seed, head="scalar")
    except ModelError as error:  # which names the setting that it mostly is about
        raise ModelError(str(error).replace(f"model.name={name!r}", f"{setting}={name!r}")) from error


def check_tokens(path: Path, setting: str, tokenizer: Vocabulary) -> None:
    """Raises ConfigError if the model's tokens are not the policy's, whose ids it reads; ModelError if it has
    no tokenizer.
    """
    from rollouts.models.load import load_tokenizer

    if load_tokenizer(path).get_vocab() != tokenizer.get_vocab():
        raise ConfigError(
            f"{setting}: the model in {path} has other tokens than the policy, whose ids it reads; name one"
            " with the same tokenizer"
        )

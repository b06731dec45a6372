"""The models beside the policy that RL asks for by name: what scores its samples, what its critic starts
from, and a teacher. For a run and for a check.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollouts.config.schema import RunConfig
from rollouts.errors import ConfigError, ModelError
from rollouts.run_dir import RunDir

STAGE = "stage"  # the name of this run's own reward model
OWN = ("self", "reference")  # teachers that a run has anyway
REWARD, CRITIC, TEACHER = "rl.rollout.reward_model", "rl.critic.model", "rl.distillation.teacher"


def check_reward_models(config: RunConfig, stages: Sequence[str], run_dir: RunDir, tokenizer: Any) -> None:
    """Raises as find_scalar_model and check_tokens do, before anything trains, unless RL can have the models
    that it names. One that the stage reward_model will have trained needs not be there.
    """
    rl = config.rl if "rl" in stages else None
    for setting, name in (
        (REWARD, rl and rl.rollout.reward_model),
        (CRITIC, rl and rl.critic and rl.critic.model),
    ):
        if name and not (name == STAGE and "reward_model" in stages):
            check_tokens(find_scalar_model(config, run_dir, setting, name), setting, tokenizer)


def find_scalar_model(config: RunConfig, run_dir: RunDir, setting: str, name: str) -> Path:
    """The directory of the model `name`, the value of `setting`: "stage" is the last checkpoint of this run's
    reward model. A critic may also start from any causal model, which gets a head of 0.

    Raises ConfigError if this run has trained none or a reward model has no scalar head, ModelError if there
    is no such model.
    """
    from rollouts.models.classes import has_own_scalar_head

    if name == STAGE:
        steps = config.reward_model.steps if config.reward_model else 0
        path = run_dir.checkpoint("reward_model", steps)
        if not path.is_dir():
            raise ConfigError(
                f'{setting}="stage", but {run_dir.root} has no reward model of {steps} steps; add the stage:'
                " --mode …+reward_model+rl"
            )
        return path
    path = _find_model(config, setting, name, head="scalar")
    if setting == REWARD and not has_own_scalar_head(path):
        raise ConfigError(
            f"{setting}={name!r} is no reward model: it has no scalar head; train one with the stage"
            " reward_model"
        )
    return path


def find_teacher(config: RunConfig, stages: Sequence[str], tokenizer: Any) -> Path | None:
    """The directory of RL's teacher; None without one, or where it is elsewhere. Raises ModelError if there
    is no such model, and as check_tokens.
    """
    asked = config.rl.distillation if config.rl and "rl" in stages else None
    if asked is None or asked.on_server or asked.teacher in OWN:
        return None
    path = _find_model(config, TEACHER, asked.teacher)
    check_tokens(path, TEACHER, tokenizer)
    return path


def _find_model(config: RunConfig, setting: str, name: str, **options: Any) -> Path:
    from rollouts.models.load import resolve_model

    try:
        return resolve_model(name, seed=config.seed, **options)
    except ModelError as error:  # which names the setting that it mostly is about
        raise ModelError(str(error).replace(f"model.name={name!r}", f"{setting}={name!r}")) from error


def check_tokens(path: Path, setting: str, tokenizer: Any) -> None:
    """Raises ConfigError if the model's tokens are not the policy's, whose ids it reads; ModelError if it has
    no tokenizer.
    """
    from rollouts.models.load import load_tokenizer

    if load_tokenizer(path).get_vocab() != tokenizer.get_vocab():
        raise ConfigError(
            f"{setting}: the model in {path} has other tokens than the policy, whose ids it reads; name one"
            " with the same tokenizer"
        )

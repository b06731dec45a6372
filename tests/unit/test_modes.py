"""`--mode`: which stages it names, in which order, and what is said when it cannot be so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollouts.config.modes import check_mode, list_stages, parse_mode, stage_config
from rollouts.config.schema import PreferenceTrainingConfig, RunConfig
from rollouts.errors import ConfigError
from rollouts.preflight.reward_models import CRITIC, REWARD, check_reward_models, check_tokens
from rollouts.run_dir import RunDir

ROWS = [{"kind": "python", "function": "page:make", "size": 4}]
RL = {"data": ROWS, "steps": 1, "rollout": {"reward": "page:score"}}
PREFERENCE, REWARD_MODEL = {"data": ROWS, "steps": 2}, {"data": ROWS, "steps": 3}


def make_config(**tables: dict[str, Any]) -> RunConfig:
    return RunConfig.model_validate({"name": "run", "model": {"name": "tiny:byte"}, **tables})


@pytest.mark.parametrize(
    ("mode", "stages"),
    [
        ("dpo", "preference"),
        ("sft+reward_model+ppo", "sft reward_model rl"),
        ("sft+preference+reward_model+rl", "sft preference reward_model rl"),
        ("reward_model+preference", "reward_model preference"),
    ],
)
def test_a_mode_names_its_stages_in_the_order_in_which_they_run(mode: str, stages: str):
    assert parse_mode(mode) == tuple(stages.split())


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("preferences", "there is no stage 'preferences'; did you mean 'preference'? Stages are sft, "),
        ("ppo2", "there is no stage 'ppo2'; did you mean 'ppo'?"),
        ("sft+", "--mode sft+: there is no stage ''"),
        ("ppo+rl", "--mode ppo+rl: the stage 'rl' is there 2 times; a run has each once"),
        ("rl+sft", "sft is the first stage and rl (or ppo) the last one; put them in this order"),
        ("preference+sft", "sft is the first stage"),
    ],
)
def test_a_mode_that_is_none_is_refused_with_a_way_out(mode: str, message: str):
    with pytest.raises(ConfigError) as caught:
        parse_mode(mode)
    assert message in str(caught.value)


def test_a_stage_without_its_table_and_ppo_without_a_critic_are_refused():
    config = make_config(rl=RL, preference=PREFERENCE)
    assert list_stages(config) == ("preference", "rl")
    assert isinstance(stage_config(config, "preference"), PreferenceTrainingConfig)
    with pytest.raises(ConfigError, match=r"has the stage 'sft' but the config has no \[sft\] table"):
        stage_config(config, "sft")
    with pytest.raises(ConfigError, match=r"ppo, which trains a critic, but there is no \[rl.critic\] table"):
        check_mode(config, "sft+ppo")
    check_mode(make_config(rl={**RL, "critic": {}}), "sft+ppo")


# --- the models that RL names -------------------------------------------------------------------------------


class Words:
    """A tokenizer, as far as it is looked at."""

    def __init__(self, *words: str) -> None:
        self._words = words

    def get_vocab(self) -> dict[str, int]:
        return {word: index for index, word in enumerate(self._words)}


def name_models(reward: str, critic: str) -> RunConfig:
    return make_config(
        rl={**RL, "rollout": {"reward_model": reward}, "critic": {"model": critic}}, reward_model=REWARD_MODEL
    )


def test_a_reward_model_that_a_stage_before_will_train_needs_not_be_there(tmp_path: Path):
    found = check_reward_models(
        name_models("stage", "stage"), ("reward_model", "rl"), RunDir(tmp_path), Words()
    )
    assert found == {REWARD: None, CRITIC: None}


@pytest.mark.parametrize(
    ("reward", "critic", "setting"),
    [("stage", "", "rl.rollout.reward_model"), ("", "stage", "rl.critic.model")],
)
def test_a_reward_model_that_nobody_trains_is_missed(tmp_path: Path, reward: str, critic: str, setting: str):
    rollout = {"reward": "page:score", "reward_model": reward}
    config = make_config(
        rl={**RL, "rollout": rollout, "critic": {"model": critic}}, reward_model=REWARD_MODEL
    )
    with pytest.raises(ConfigError) as caught:
        check_reward_models(config, ("rl",), RunDir(tmp_path), Words())
    expected = (
        f'{setting}="stage", but {tmp_path} has no reward model of 3 steps; add the stage: --mode'
        " …+reward_model+rl"
    )
    assert str(caught.value) == expected


@pytest.fixture
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rollouts.models.tiny import make_tiny

    return make_tiny("byte", 0, tmp_path_factory.mktemp("cache"))


def test_a_model_without_a_head_may_be_a_critic_and_no_reward_model(tmp_path: Path, byte_model: Path):
    from rollouts.models.load import load_tokenizer

    tokenizer = load_tokenizer(byte_model)
    config = make_config(rl={**RL, "critic": {"model": str(byte_model)}})
    assert check_reward_models(config, ("rl",), RunDir(tmp_path), tokenizer) == {CRITIC: byte_model}
    with pytest.raises(
        ConfigError,
        match=(
            r"rl.rollout.reward_model='.*' is no reward model: it has no scalar head; train one with the"
            r" stage"
        ),
    ):
        check_reward_models(name_models(str(byte_model), ""), ("rl",), RunDir(tmp_path), tokenizer)


def test_a_model_with_other_tokens_is_refused(byte_model: Path):
    with pytest.raises(ConfigError) as caught:
        check_tokens(byte_model, CRITIC, Words("a", "b"))
    expected = (
        f"rl.critic.model: the model in {byte_model} has other tokens than the policy, whose ids it reads;"
        " name one with the same tokenizer"
    )
    assert str(caught.value) == expected

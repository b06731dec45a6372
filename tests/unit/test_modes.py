"""`--mode`: which stages it names, in which order, and what is said when it cannot be so."""

import re
from types import SimpleNamespace

import pytest

from rollouts.config.load import choose_stages, parse_mode, stage_config
from rollouts.config.schema import PreferenceTrainingConfig, RunConfig
from rollouts.errors import ConfigError
from rollouts.models.load import load_tokenizer, resolve_model
from rollouts.preflight.checks import CRITIC, check_reward_models, check_tokens
from rollouts.run_dir import RunDir
from tests.support.text_tables import cases

ROWS = [{"kind": "python", "function": "page:make", "size": 4}]
RL = {"data": ROWS, "steps": 1, "rollout": {"reward": "page:score"}}
PREFERENCE, REWARD_MODEL = {"data": ROWS, "steps": 2}, {"data": ROWS, "steps": 3}


def make_config(**tables):
    return RunConfig.model_validate({"model": {"name": "tiny:byte"}, **tables})


@cases("""
mode                             | stages
dpo                              | preference
sft+reward_model+ppo             | sft reward_model rl
sft+preference+reward_model+rl   | sft preference reward_model rl
reward_model+preference          | reward_model preference
""")
def test_a_mode_names_its_stages_in_the_order_in_which_they_run(mode, stages):
    assert parse_mode(mode) == tuple(stages.split())


@cases("""
mode           | message
preferences    | there is no stage 'preferences'; did you mean preference?; a stage is sft or
ppo2           | there is no stage 'ppo2'; did you mean ppo?
sft+           | --mode sft+: there is no stage ''
ppo+rl         | --mode ppo+rl: a run has each stage once
rl+sft         | sft as the first and rl (or ppo) as the last one; put them in this order
preference+sft | sft as the first
""")
def test_a_mode_that_is_none_is_refused_with_a_way_out(mode, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_mode(mode)


def test_a_stage_without_its_table_and_ppo_without_a_critic_are_refused():
    config = make_config(rl=RL, preference=PREFERENCE)
    assert isinstance(stage_config(config, "preference"), PreferenceTrainingConfig)
    with pytest.raises(ConfigError, match=r"has the stage 'sft' but the config has no \[sft\] table"):
        stage_config(config, "sft")
    with pytest.raises(ConfigError, match=r"ppo, which trains a critic, but there is no \[rl.critic\] table"):
        choose_stages(config, "sft+ppo")
    assert choose_stages(make_config(rl={**RL, "critic": {}}), "sft+ppo") == ("sft", "rl")


def test_a_mode_that_is_left_out_is_every_stage_of_the_config_in_the_order_in_which_they_run():
    config = make_config(rl=RL, reward_model=REWARD_MODEL, preference=PREFERENCE)
    assert choose_stages(config, None) == ("preference", "reward_model", "rl")
    with pytest.raises(ConfigError, match="none of the tables sft, preference, reward_model, rl: there is"):
        choose_stages(make_config(), None)
    with pytest.raises(ConfigError, match="there is no stage ''"):  # of an empty shell variable
        choose_stages(config, "")


# --- the models that RL names -------------------------------------------------------------------------------


def make_words(*words):
    """A tokenizer, as far as it is looked at."""
    return SimpleNamespace(get_vocab=lambda: dict(zip(words, range(len(words)), strict=True)))


def name_models(reward, critic):
    rl = {**RL, "rollout": {"reward": "page:score", "reward_model": reward}, "critic": {"model": critic}}
    return make_config(rl=rl, reward_model=REWARD_MODEL)


@cases("""
reward | critic | setting
stage  |        | rl.rollout.reward_model
       | stage  | rl.critic.model
""")
def test_a_reward_model_that_no_stage_before_will_train_is_missed(tmp_path, reward, critic, setting):
    wanted = f'{setting}="stage", but {tmp_path} has no reward model of 3 steps; add the stage: --mode …'
    config, run_dir = name_models(reward, critic), RunDir(tmp_path)
    check_reward_models(config, ("reward_model", "rl"), run_dir, make_words())
    with pytest.raises(ConfigError, match=wanted):
        check_reward_models(config, ("rl",), run_dir, make_words())


def test_a_critic_needs_no_head_and_a_reward_model_does_and_both_need_the_policys_tokens(tmp_path):
    model = resolve_model("tiny:byte")
    rest = ("rl",), RunDir(tmp_path), load_tokenizer(model)
    check_reward_models(make_config(rl={**RL, "critic": {"model": str(model)}}), *rest)
    wanted = r"rl.rollout.reward_model='.*' is no reward model: it has no scalar head; train one with the st"
    with pytest.raises(ConfigError, match=wanted):
        check_reward_models(name_models(str(model), ""), *rest)
    said = r"rl.critic.model: .* has other tokens than the policy.*same tokenizer"
    with pytest.raises(ConfigError, match=said):
        check_tokens(model, CRITIC, make_words("a", "b"))

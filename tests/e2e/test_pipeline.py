"""Preferences, a reward model and PPO in one run: what it leaves; stopped and resumed it is the same run;
what a check says of it.
"""

import json
import shlex

import numpy as np
import pytest

from integration_training.tasks.letter_words import make_labels
from rollouts.checkpoints.load import find_newest_checkpoint
from rollouts.metrics.jsonl import read_rows
from tests.e2e.conftest import TINY
from tests.support.text_tables import cases

pytestmark = pytest.mark.slow

CONFIG = TINY.with_name("tiny_preferences.toml")
MODE = "preference+reward_model+ppo"
STEPS = {"preference": 5, "reward_model": 5, "rl": 4}
SHORT = shlex.split(
    """--preference.data.size 60 --reward_model.data.size 60 --rl.data.size 20 --eval.data.size 4
    --preference.batch_size 8 --reward_model.batch_size 8 --preference.held_out 8 --reward_model.held_out 8
    --preference.eval_every 2 --reward_model.eval_every 2 --rl.eval_every 2 --preference.steps 5
    --reward_model.steps 5 --rl.steps 4 --rl.rollout.num_prompts 4 --rl.rollout.samples_per_prompt 2"""
)
EVERY_OTHER = shlex.split(
    "--output.keep_checkpoints 0 --output.samples_per_step 1000 --output.checkpoint_every 2"
)
KTO = shlex.split(
    "--preference.loss kto --preference.data.function integration_training.tasks.letter_words:make_labels"
)
SCORES = shlex.split(
    "--reward_model.loss mse --reward_model.data.function tests.e2e.test_pipeline:make_scores"
)
COMPARED = {
    "dpo": ("preference", ()),
    "kto": ("preference", KTO),
    "reward_model": ("reward_model", ()),
    "scores": ("reward_model", SCORES),
    "ppo": (MODE, ()),
}


def make_scores(*, size, seed):
    """A response of letters scores 7, one of digits 3."""
    return [{**row, "score": 3 + 4 * row["label"]} for row in make_labels(size=size, seed=seed)]


def arguments(*more, mode=MODE):
    return ["--config", str(CONFIG), "--mode", mode, *SHORT, *more]


def read_evaluations(out):
    rows = list(read_rows(out / "evaluations.jsonl"))
    found = {(row["stage"], row["step"], row["name"]): row for row in rows}
    assert len(found) == len(rows)  # one row an evaluation
    return found


@pytest.fixture
def whole(train):
    """All three stages, undisturbed."""
    return train.whole(arguments(*EVERY_OTHER))


# --- what a run leaves --------------------------------------------------------------------------------------


def test_every_stage_runs_to_its_end_with_its_metrics_and_files(whole):
    rows = read_rows(whole / "metrics.jsonl")
    assert [(row["stage"], row["step"]) for row in rows] == [
        (stage, step) for stage, steps in STEPS.items() for step in range(1, steps + 1)
    ]
    by_stage = {stage: [row for row in rows if row["stage"] == stage] for stage in STEPS}
    # a policy that is its reference prefers nothing, a new head scores everything 0
    for stage in ("preference", "reward_model"):
        assert by_stage[stage][0]["loss/total"] == pytest.approx(np.log(2), abs=1e-6)
    for stage, names in {
        "preference": "rewards/margins rewards/accuracies rewards/chosen rewards/rejected time/log_probs",
        "reward_model": "loss/total optim/grad_norm time/log_probs",
        "rl": "value/mean value/explained_variance return/mean critic/loss/total optim/updates",
    }.items():
        assert all(set(names.split()) <= row.keys() for row in by_stage[stage]), stage
    for row in by_stage["rl"]:
        assert row["optim/updates"] == 4
        assert row["reward/mean"] == pytest.approx(row["reward/part/reward_model/mean"])
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["mode"] == "preference+reward_model+rl" and summary["steps"] == sum(STEPS.values())
    assert set(summary["pair_accuracy"]) == {"preference", "reward_model"}
    assert all(isinstance(summary["accuracy"][stage], float) for stage in ("base", "preference", "rl"))
    newest = find_newest_checkpoint(whole / "checkpoints/rl")
    assert newest is not None and (newest / "critic/model.safetensors").is_file()


def test_the_reward_model_is_one_of_transformers_and_gives_the_accuracy_that_was_logged(whole):
    """Its scores, of one row at a time and by transformers alone, rank the held-out pairs as
    evaluations.jsonl says.
    """
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from integration_training.tasks.letter_words import make_pairs

    path = whole / "checkpoints/reward_model/step_5"
    model = AutoModelForSequenceClassification.from_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert model.config.num_labels == 1
    held_out = make_pairs(size=60, seed=2000)[-8:]  # as no prompt of theirs comes again
    assert len({pair["prompt"] for pair in make_pairs(size=60, seed=2000)}) == 60

    def score(pair, field):
        turns = {"user": pair["prompt"], "assistant": pair[field]}
        messages = [{"role": role, "content": content} for role, content in turns.items()]
        text = tokenizer.apply_chat_template(messages, tokenize=False).rstrip("\n")
        ids = torch.tensor([tokenizer(text, add_special_tokens=False).input_ids])
        with torch.no_grad():
            return float(model(ids).logits[0, 0])

    margins = np.asarray([score(pair, "chosen") - score(pair, "rejected") for pair in held_out])
    logged = read_evaluations(whole)["reward_model", 5, "pairs"]
    assert logged["eval/pairs/accuracy"] == pytest.approx((margins > 0).mean())
    assert logged["eval/pairs/nll"] == pytest.approx(np.log1p(np.exp(-margins)).mean(), rel=1e-4)
    brier = ((1 - 1 / (1 + np.exp(-margins))) ** 2).mean()
    assert logged["eval/pairs/brier"] == pytest.approx(brier, rel=1e-4)


# --- stopped and resumed ------------------------------------------------------------------------------------


@cases("""
step | …
2    | at a checkpoint
3    | between checkpoints
""")
@cases("name", COMPARED)
def test_a_stage_stopped_after_a_step_and_resumed_is_the_one_that_never_stopped(
    train, tmp_path, name, step: int
):
    """Weights, a critic's too, optimizers, rows of metrics, samples and evaluations: bit for bit."""
    mode, more = COMPARED[name]
    stage = "rl" if name == "ppo" else mode
    argv = arguments(*EVERY_OTHER, *more, mode=mode)
    rows, *_ = train.run_whole_and_parts(argv, tmp_path, f"{stage}:{step}")
    assert len(rows) == STEPS[stage]


def test_a_reward_model_of_scores_says_how_they_were_normalised(train):
    """Of 60 rows 8 are held out, 52 train: half of them score 7, half 3."""
    out = train.whole(arguments(*EVERY_OTHER, *SCORES, mode="reward_model"))
    config = json.loads((out / "checkpoints/reward_model/step_5/config.json").read_text())
    assert (config["score_mean"], config["score_std"]) == (5.0, 2.0)
    first, last = (read_evaluations(out)["reward_model", step, "pairs"] for step in (0, 5))
    assert first["eval/pairs/mse"] == pytest.approx(1.0)  # a new head says 0
    assert last["eval/pairs/mse"] < 0.99 and last["eval/pairs/correlation"] > 0.5


# --- before a run -------------------------------------------------------------------------------------------


@cases("""
flags                                | expected
--preference.loss dpoo               | 'dpoo' is not known; did you mean 'dpo'?
--preference.loss_params.betta 0.1   | preference loss 'dpo' has no parameter 'betta'
--rl.rollout.reward_model tiny:byte  | rl.rollout.reward_model='tiny:byte' is no reward model
--rl.critic.model tiny:bite          | use one of 'tiny:byte'
""")
def test_what_is_wrong_with_a_stage_is_found_by_a_check_a_dry_run_and_a_run_before_it_trains(
    train, tmp_path, capsys, flags, expected
):
    from rollouts.cli import main

    settings, out = flags.split(), tmp_path / "run"
    for more in (("--dry-run",), ()):
        done = train.fork(arguments(*settings, *more), out, code=2)
        assert expected in done.stdout + done.stderr, done.stderr
    assert main(["check", str(CONFIG), "--output.dir", str(out), *SHORT, *settings]) == 2
    assert expected in capsys.readouterr().out
    assert not out.exists()


# --- on several ranks ---------------------------------------------------------------------------------------


def test_two_ranks_train_policy_reward_model_and_critic_as_one_does_and_one_goes_on(train, whole, tmp_path):
    """The critic has its own parts on both ranks, beside the policy; what two ranks saved, one resumes."""
    out, argv = tmp_path / "run", arguments(*EVERY_OTHER)
    for ranks, environ, more in ((2, {"STOP_AFTER": "rl:2"}, ()), (1, {}, ("--resume",))):
        train.fork([*argv, *more], out, ranks=ranks, environ=environ)
    ours, theirs = (read_rows(path / "metrics.jsonl") for path in (whole, out))
    assert [(row["stage"], row["step"]) for row in theirs] == [(row["stage"], row["step"]) for row in ours]
    for stage in ("preference", "reward_model"):
        losses = [[row["loss/total"] for row in rows if row["stage"] == stage] for rows in (ours, theirs)]
        assert losses[1] == pytest.approx(losses[0], rel=2e-3), stage
    mine, rows = ([row for row in rows if row["stage"] == "rl"] for rows in (ours, theirs))
    assert rows[0]["value/mean"] == pytest.approx(mine[0]["value/mean"], abs=1e-3)
    assert [row["attempt"] for row in rows] == [1, 1, 2, 2]
    assert all("value/explained_variance" in row and row["critic/optim/grad_norm"] > 0 for row in rows)
    saved = out / "checkpoints/rl/step_2"
    for state in (saved / "state", saved / "critic/state"):
        assert len(list(state.glob("optimizer-*-of-2.safetensors"))) == 2, sorted(state.iterdir())

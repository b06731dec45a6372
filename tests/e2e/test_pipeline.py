"""Preferences, a reward model and PPO in one run: what it leaves; stopped, killed and resumed it is the same
run; what a check says of it.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollouts.checkpoints.load import find_newest_checkpoint
from rollouts.metrics.jsonl import read_rows
from tests.e2e.compare import assert_same_run, weights_digest
from tests.e2e.conftest import TINY, Train
from tests.support.kill_harness import Cut, Job, open_kill_harness

pytestmark = pytest.mark.slow

CONFIG = TINY.with_name("tiny_preferences.toml")
MODE = "preference+reward_model+ppo"
STEPS = {"preference": 5, "reward_model": 5, "rl": 4}
SHORT = (
    *shlex.split(
        "--preference.data.size 60 --reward_model.data.size 60 --rl.data.size 20 --eval.data.size 4"
    ),
    *shlex.split("--preference.batch_size 8 --reward_model.batch_size 8"),
    *shlex.split("--preference.held_out 8 --reward_model.held_out 8"),
    *shlex.split("--preference.eval_every 2 --reward_model.eval_every 2 --rl.eval_every 2"),
    *shlex.split("--rl.rollout.num_prompts 4 --rl.rollout.samples_per_prompt 2"),
    *(word for stage, steps in STEPS.items() for word in (f"--{stage}.steps", str(steps))),
)
KEEP_ALL = ("--output.keep_checkpoints", "0", "--output.samples_per_step", "1000")
EVERY_OTHER = (*KEEP_ALL, "--output.checkpoint_every", "2")
KTO = (
    "--preference.loss",
    "kto",
    "--preference.data.function",
    "integration_training.tasks.letter_words:make_labels",
)
COMPARED = {
    "dpo": ("preference", ()),
    "kto": ("preference", KTO),
    "reward_model": ("reward_model", ()),
    "ppo": (MODE, ()),
}


def arguments(out: Path, *more: str, mode: str = MODE) -> list[str]:
    return ["--config", str(CONFIG), "--mode", mode, *SHORT, "--output.dir", str(out), *more]


def run(train: Train, out: Path, *more: str, mode: str = MODE) -> None:
    done = train.fork(arguments(out, *more, mode=mode), out)
    assert done.returncode == 0, done.stderr


def read_evaluations(out: Path) -> dict[tuple[str, int, str], dict[str, Any]]:
    rows = list(read_rows(out / "evaluations.jsonl"))
    found = {(row["stage"], row["step"], row["name"]): row for row in rows}
    assert len(found) == len(rows), "one row an evaluation"
    return found


@pytest.fixture(scope="module")
def whole(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All three stages, undisturbed."""
    out = tmp_path_factory.mktemp("whole") / "run"
    run(train, out, *EVERY_OTHER)
    return out


# --- what a run leaves --------------------------------------------------------------------------------------


def test_every_stage_runs_to_its_end_with_its_metrics_and_files(whole: Path):
    rows = read_rows(whole / "metrics.jsonl")
    assert [(row["stage"], row["step"]) for row in rows] == [
        (stage, step) for stage, steps in STEPS.items() for step in range(1, steps + 1)
    ]
    by_stage = {stage: [row for row in rows if row["stage"] == stage] for stage in STEPS}
    assert by_stage["preference"][0]["loss/total"] == pytest.approx(np.log(2), abs=1e-6), (
        "a policy that is its reference prefers nothing"
    )
    assert by_stage["reward_model"][0]["loss/total"] == pytest.approx(np.log(2), abs=1e-6), (
        "a new head scores everything 0"
    )
    for stage, names in {
        "preference": (
            "rewards/margins",
            "rewards/accuracies",
            "rewards/chosen",
            "rewards/rejected",
            "optim/grad_norm",
            "time/log_probs",
        ),
        "reward_model": ("loss/total", "optim/grad_norm", "time/log_probs"),
        "rl": (
            "value/mean",
            "value/explained_variance",
            "return/mean",
            "critic/loss/total",
            "reward/part/reward_model/mean",
            "optim/updates",
        ),
    }.items():
        assert all(name in row for row in by_stage[stage] for name in names), (
            stage,
            sorted(by_stage[stage][0]),
        )
    assert {row["optim/updates"] for row in by_stage["rl"]} == {4}
    for row in by_stage["rl"]:
        assert row["reward/mean"] == pytest.approx(row["reward/part/reward_model/mean"])
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["mode"] == "preference+reward_model+rl" and summary["steps"] == sum(STEPS.values())
    assert set(summary["pair_accuracy"]) == {"preference", "reward_model"}
    assert all(isinstance(summary["accuracy"][stage], float) for stage in ("base", "preference", "rl"))
    newest = find_newest_checkpoint(whole / "checkpoints" / "rl")
    assert newest is not None
    assert (newest / "critic" / "model.safetensors").is_file() and (
        newest / "critic" / "state" / "optimizer.safetensors"
    ).is_file()


def test_every_evaluation_that_was_due_is_there_once(whole: Path):
    pairs = {(stage, step) for stage, step, name in read_evaluations(whole) if name == "pairs"}
    assert pairs == {(stage, step) for stage in ("preference", "reward_model") for step in (0, 2, 4, 5)}
    held_out = {(stage, step) for stage, step, name in read_evaluations(whole) if name == "heldout"}
    assert held_out == {
        ("base", 0),
        ("preference", 2),
        ("preference", 4),
        ("preference", 5),
        ("rl", 2),
        ("rl", 4),
    }


def test_the_reward_model_is_one_of_transformers_and_gives_the_accuracy_that_was_logged(whole: Path):
    """Its scores, of one row at a time and by transformers alone, rank the held-out pairs as
    evaluations.jsonl says.
    """
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from integration_training.tasks.letter_words import make_pairs

    path = whole / "checkpoints" / "reward_model" / "step_5"
    model: Any = AutoModelForSequenceClassification.from_pretrained(path)
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    assert model.config.num_labels == 1
    held_out = make_pairs(size=60, seed=2000)[-8:]  # as no prompt of theirs comes again
    assert len({pair["prompt"] for pair in make_pairs(size=60, seed=2000)}) == 60

    def score(pair: dict[str, Any], field: str) -> float:
        messages = [
            {"role": "user", "content": pair["prompt"]},
            {"role": "assistant", "content": pair[field]},
        ]
        text = tokenizer.apply_chat_template(messages, tokenize=False).rstrip("\n")
        with torch.no_grad():
            return float(
                model(torch.tensor([tokenizer(text, add_special_tokens=False).input_ids])).logits[0, 0]
            )

    scores = np.asarray([(score(pair, "chosen"), score(pair, "rejected")) for pair in held_out])
    margins = scores[:, 0] - scores[:, 1]
    logged = read_evaluations(whole)["reward_model", 5, "pairs"]
    assert logged["eval/pairs/accuracy"] == pytest.approx((margins > 0).mean())
    assert logged["eval/pairs/nll"] == pytest.approx(np.log1p(np.exp(-margins)).mean(), rel=1e-4)
    assert logged["eval/pairs/brier"] == pytest.approx(
        ((1 - 1 / (1 + np.exp(-margins))) ** 2).mean(), rel=1e-4
    )


def test_the_policy_of_ppo_is_the_one_that_preferences_trained_and_the_critic_is_the_reward_model(
    train: Train, whole: Path, tmp_path: Path
):
    """One step of a learning rate of nothing leaves both as they were when the stage began."""
    from safetensors.numpy import load_file

    out = tmp_path / "run"
    still = (
        "--rl.steps",
        "1",
        "--rl.optim.lr",
        "1e-30",
        "--rl.critic.optim.lr",
        "1e-30",
        "--rl.optim.weight_decay",
        "0",
    )
    run(train, out, *EVERY_OTHER, *still, "--rl.critic.optim.weight_decay", "0")
    ended = out / "checkpoints" / "rl" / "step_1"
    for made, origin in ((ended, "preference"), (ended / "critic", "reward_model")):
        left, right = (
            load_file(made / "model.safetensors"),
            load_file(out / "checkpoints" / origin / "step_5" / "model.safetensors"),
        )
        assert left.keys() == right.keys()
        assert all(np.array_equal(left[name], right[name]) for name in left), origin
    for stage in ("preference", "reward_model"):
        assert weights_digest(out / "checkpoints" / stage / "step_5") == weights_digest(
            whole / "checkpoints" / stage / "step_5"
        )


def test_a_reward_model_and_a_rule_are_parts_of_one_reward(train: Train, whole: Path, tmp_path: Path):
    """A reward model of another run, by its directory, beside a rule: the reward is the weighed sum of the
    parts.
    """
    out = tmp_path / "run"
    model, rule = (
        whole / "checkpoints" / "reward_model" / "step_5",
        "integration_training.tasks.letter_words:share_of_letters",
    )
    weights = ("--rl.rollout.reward_weights.reward_model", "0.5", "--rl.rollout.reward_weights.letters", "2")
    named = ("--rl.rollout.reward_model", str(model), "--rl.critic.model", "", "--rl.rollout.reward", rule)
    run(train, out, *KEEP_ALL, *named, *weights, "--rl.steps", "1", mode="ppo")
    samples = [row for row in read_rows(out / "samples.jsonl") if row["stage"] == "rl"]
    assert len(samples) == 8
    for row in samples:
        parts = row["rewards"]
        assert parts.keys() == {"letters", "reward_model"}
        assert row["reward"] == pytest.approx(0.5 * parts["reward_model"] + 2 * parts["letters"], abs=1e-6)
        assert parts["letters"] == pytest.approx(
            sum(character in "abcdefgh" for character in row["response"]) / max(1, len(row["response"]))
        )


def test_sft_before_a_reward_model_is_evaluated_though_no_stage_that_generates_follows(
    train: Train, tmp_path: Path
):
    run(train, tmp_path / "run", "--sft.steps", "2", "--sft.batch_size", "4", mode="sft+reward_model")
    evaluations = read_evaluations(tmp_path / "run")
    assert ("sft", 2, "heldout") in evaluations and ("reward_model", 5, "pairs") in evaluations


# --- stopped and resumed ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unbroken(whole: Path, train: Train, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By name, the run that nobody stopped."""
    found = {"ppo": whole}
    for name, (mode, more) in COMPARED.items():
        if name not in found:
            found[name] = tmp_path_factory.mktemp(name) / "run"
            run(train, found[name], *EVERY_OTHER, *more, mode=mode)
    return found


@pytest.mark.parametrize(
    "step", [pytest.param(2, id="at-a-checkpoint"), pytest.param(3, id="between-checkpoints")]
)
@pytest.mark.parametrize("name", COMPARED)
def test_a_stage_stopped_after_a_step_and_resumed_is_the_one_that_never_stopped(
    train: Train, unbroken: dict[str, Path], tmp_path: Path, name: str, step: int
):
    """Weights, a critic's too, optimizers, rows of metrics, samples and evaluations: bit for bit."""
    out, (mode, more) = tmp_path / "run", COMPARED[name]
    stage = "rl" if name == "ppo" else mode
    argv = arguments(out, *EVERY_OTHER, *more, mode=mode)
    stopped = train.fork(argv, out, environ={"STOP_AFTER": f"{stage}:{step}"})
    assert stopped.returncode == 0, stopped.stderr
    newest = find_newest_checkpoint(out / "checkpoints" / stage)
    assert newest is not None and newest.name == f"step_{step}" and not (out / "summary.json").exists()
    resumed = train.fork([*argv, "--resume"], out)
    assert resumed.returncode == 0, resumed.stderr
    attempts = [row["attempt"] for row in read_rows(out / "metrics.jsonl") if row["stage"] == stage]
    assert attempts == [1] * step + [2] * (STEPS[stage] - step)
    assert_same_run(unbroken[name], out, stopped=True)


# --- killed and resumed -------------------------------------------------------------------------------------

ALL = Job(
    "preference+reward_model+ppo",
    ("--config", str(CONFIG), "--mode", MODE, *SHORT, *EVERY_OTHER),
    ("preference", "reward_model", "rl"),
)
FORWARD = "train.after_forward_backward"
# passes of training: 1 to 5 of preferences, 6 to 10 of the reward model, then 4 of the critic and 4 of the
# policy a step
CUTS = {
    "preference": [Cut(f"{FORWARD}:4")],
    "reward_model": [Cut(f"{FORWARD}:9")],
    "critic": [Cut(f"{FORWARD}:20")],
    "policy": [Cut(f"{FORWARD}:24")],
    "save of preference": [Cut("checkpoint.before_rename:2")],
    "save of reward_model": [Cut("checkpoint.before_rename:5")],
    "save of ppo": [Cut("checkpoint.before_rename:8")],
    "between saves and evaluations": [  # of preference 2 and of its last step, of the reward model's last
        Cut("checkpoint.complete:1"),
        Cut("checkpoint.complete:2"),
        Cut("checkpoint.complete:3"),
    ],
}


@pytest.fixture(scope="module")
def harness(train: Train, tmp_path_factory: pytest.TempPathFactory):
    with open_kill_harness(ALL, tmp_path_factory.mktemp("kills") / "work", server=train.server) as opened:
        yield opened


@pytest.mark.parametrize("name", CUTS)
def test_a_run_killed_in_a_stage_and_resumed_is_the_run_that_was_not(harness: Any, name: str):
    outcome = harness.kill(name.replace(" ", "-"), CUTS[name])
    assert outcome.violations == ()
    assert outcome.kills == len(CUTS[name])


@pytest.mark.parametrize(("mode", "saves"), [("preference", 3), ("reward_model", 3)])
def test_a_run_killed_between_its_last_checkpoint_and_its_evaluation_evaluates_when_it_is_resumed(
    train: Train, unbroken: dict[str, Path], tmp_path: Path, mode: str, saves: int
):
    out = tmp_path / "run"
    argv = arguments(out, *EVERY_OTHER, mode=mode)
    killed = train.fork(argv, out, environ={"ROLLOUTS_CRASH_AT": f"checkpoint.complete:{saves}"})
    assert killed.returncode == -9
    assert (out / "checkpoints" / mode / "step_5" / "manifest.json").exists() and (
        mode,
        5,
        "pairs",
    ) not in read_evaluations(out)
    resumed = train.fork([*argv, "--resume"], out)
    assert resumed.returncode == 0, resumed.stderr
    assert_same_run(unbroken["dpo" if mode == "preference" else mode], out)


# --- before a run -------------------------------------------------------------------------------------------

WRONG = {
    "a misspelt loss": (
        ("--preference.loss", "dpoo"),
        "preference loss 'dpoo' is not known; did you mean 'dpo'?",
    ),
    "a parameter of another loss": (
        ("--preference.loss_params.betta", "0.1"),
        "preference loss 'dpo' has no parameter 'betta'",
    ),
    "a model without a head": (
        ("--rl.rollout.reward_model", "tiny:byte"),
        "rl.rollout.reward_model='tiny:byte' is no reward model",
    ),
    "a critic that is no model": (("--rl.critic.model", "tiny:bite"), "did you mean 'tiny:byte'"),
}


def test_a_dry_run_and_a_check_report_the_stages(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    from rollouts.cli import main

    done = train.fork(arguments(tmp_path / "run", "--dry-run"), tmp_path / "run")
    assert done.returncode == 0, done.stdout
    assert main(["check", str(CONFIG), "--mode", MODE, "--output.dir", str(tmp_path / "run"), *SHORT]) == 0
    for said in (done.stdout, capsys.readouterr().out):
        for stage in ("preference", "reward_model", "rl"):
            assert f"{stage}.data: " in said and f"{stage}: work: " in said and f"{stage}: memory: " in said
        assert (
            "52 train and 8 are held out" in said
            and "a critic of the same size" in said
            and "a reward model of the same size" in said
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_with_a_stage_is_found_by_a_check_a_dry_run_and_a_run_before_it_trains(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
):
    from rollouts.cli import main

    settings, expected = WRONG[name]
    out = tmp_path / "run"
    for more in (("--dry-run",), ()):
        done = train.fork(arguments(out, *settings, *more), out)
        assert done.returncode == 2 and expected in done.stdout + done.stderr, done.stderr
    assert main(["check", str(CONFIG), "--output.dir", str(out), *SHORT, *settings]) == 2
    assert expected in capsys.readouterr().out
    assert not out.exists()


def test_a_reward_model_of_the_run_that_no_stage_trains_is_missed_before_anything_trains(
    train: Train, tmp_path: Path
):
    out = tmp_path / "run"
    for more in (("--dry-run",), ()):
        done = train.fork(arguments(out, *more, mode="preference+ppo"), out)
        assert done.returncode == 2
        assert (
            f'rl.rollout.reward_model="stage", but {out} has no reward model of 5 steps; add the stage'
            in done.stdout + done.stderr
        )
    assert not out.exists()


# --- on several ranks ---------------------------------------------------------------------------------------


def test_two_ranks_train_policy_reward_model_and_critic_as_one_does_and_one_goes_on(
    train: Train, whole: Path, tmp_path: Path
):
    """The critic has its own parts on both ranks, beside the policy; what two ranks saved, one resumes."""
    out = tmp_path / "run"
    argv = arguments(out, *EVERY_OTHER)
    for ranks, environ, more in ((2, {"STOP_AFTER": "rl:2"}, ()), (1, {}, ("--resume",))):
        done = train.fork([*argv, *more], out, ranks=ranks, environ=environ)
        assert done.returncode == 0, done.stderr
    ours, theirs = (
        [row for row in read_rows(path / "metrics.jsonl") if row["stage"] != "rl" or row["step"] <= 2]
        for path in (whole, out)
    )
    assert [(row["stage"], row["step"]) for row in theirs] == [(row["stage"], row["step"]) for row in ours]
    for mine, other in zip(ours, theirs, strict=True):
        if mine["stage"] != "rl":
            assert other["loss/total"] == pytest.approx(mine["loss/total"], rel=2e-3), (
                mine["stage"],
                mine["step"],
            )
    assert theirs[-2]["value/mean"] == pytest.approx(ours[-2]["value/mean"], abs=1e-3)
    rows = [row for row in read_rows(out / "metrics.jsonl") if row["stage"] == "rl"]
    assert [(row["step"], row["attempt"]) for row in rows] == [(1, 1), (2, 1), (3, 2), (4, 2)]
    assert all("value/explained_variance" in row and row["critic/optim/grad_norm"] > 0 for row in rows)
    saved = out / "checkpoints" / "rl" / "step_2"
    for state in (saved / "state", saved / "critic" / "state"):
        assert len(list(state.glob("optimizer-*-of-2.safetensors"))) == 2, sorted(state.iterdir())

"""Whole runs of every stage: no metric that the table of names lacks, and spans of all that was done."""

import json

import pytest

from integration_training.train import main
from rollouts.cli import main as main_of_commands
from rollouts.metrics.jsonl import read_rows
from rollouts.metrics.names import find_metric
from tests.e2e.conftest import TINY

PREFERENCES = TINY.with_name("tiny_preferences.toml")
EVERYTHING = (
    "--sft.steps 2 --rl.rollout.filters [] --rl.rollout.num_prompts 2 --rl.kl_coef 0.1 --rl.kl_in loss"
    " --rl.kl_estimator k3 --rl.updates_per_batch 2 --rl.recompute_old true"
    " --rl.loss_params.dual_clip 3.0 --engine.mode copied --output.checkpoint_every 1"
    " --eval.policy_metrics true"
)
LABELLED = (
    "--preference.loss kto --preference.steps 2"
    " --preference.data.function integration_training.tasks.letter_words:make_labels"
)
SHORT = "--rl.steps 2 --rl.eval_every 0 --eval.data.size 4"


def logged_names(out, config, mode, *arguments):
    assert (
        main(["--config", str(config), "--mode", mode, "--output.dir", str(out), *SHORT.split(), *arguments])
        == 0
    )
    rows = [*read_rows(out / "metrics.jsonl"), *read_rows(out / "evaluations.jsonl")]
    names = {name for row in rows for name in row if "/" in name or name == "clip_ratio"}
    assert sorted(name for name in names if find_metric(name) is None) == []
    return names


def test_supervised_and_reinforced_with_everything_that_a_row_can_say(tmp_path):
    names = logged_names(tmp_path / "run", TINY, "sft+rl", *EVERYTHING.split())
    assert {"loss/nll", "kl/coef", "clip_ratio/dual", "weight_sync/bytes", "eval/heldout/self_bleu"} <= names
    assert {"perf/forward_backward_s", "perf/optim_step_s", "perf/trainer_queue/max"} <= names
    spans, samples, evaluations = (
        read_rows(tmp_path / f"run/{name}.jsonl") for name in ("spans", "samples", "evaluations")
    )
    work = {
        "trainer": "generate log_probs train weight_sync evaluate checkpoint",
        "checkpoints": "checkpoint_write",
        "local": "generate weight_sync weight_sync_pause weight_sync_load weight_sync_probe",
        "rewards": "reward",
    }
    expected = {(track, name) for track, names in work.items() for name in names.split()}
    assert {(row["track"], row["name"]) for row in spans} == expected
    of_samples = {row["id"] for row in spans if "id" in row}
    assert of_samples == {row["id"] for row in samples if row["stage"] == "rl"}, (
        "of each sample that is logged, and of no other"
    )
    (evaluation,) = (row for row in evaluations if row["stage"] == "rl")
    last = max(row["start_unix"] + row["duration_s"] for row in spans if row["name"] == "evaluate")
    assert last == pytest.approx(evaluation["time_unix"], abs=5.0), (
        "what comes after the last step is in the file too"
    )
    assert main_of_commands(["export-trace", str(tmp_path / "run")]) == 0
    events = json.loads((tmp_path / "run/trace.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == len(spans)


@pytest.mark.slow
def test_preferences_a_reward_model_and_a_critic(tmp_path):
    short = " ".join(f"--{stage}.steps 2 --{stage}.eval_every 1" for stage in ("preference", "reward_model"))
    names = logged_names(tmp_path / "run", PREFERENCES, "preference+reward_model+ppo", *short.split())
    spans = read_rows(tmp_path / "run/spans.jsonl")
    assert {row["stage"] for row in spans if row["name"] == "train"} == {"preference", "reward_model", "rl"}
    expected = (
        "eval/pairs/ece eval/pairs/perplexity/chosen logps/chosen value/explained_variance critic/optim/lr"
    )
    assert set(expected.split()) <= names


@pytest.mark.slow
def test_judgements_of_single_answers(tmp_path):
    names = logged_names(tmp_path / "run", PREFERENCES, "preference", *LABELLED.split())
    assert {"kto/reference_point", "kto/desirable/frac", "rewards/margins"} <= names

"""Whole runs in which adapters train: killed, stopped and resumed they are the run that nobody disturbed;
what they leave evaluates as the run did, loads elsewhere and begins other runs.
"""

import json
import shlex
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollouts.cli import main as rollouts
from rollouts.metrics.jsonl import read_rows
from rollouts.models.load import load_hf_model
from tests.e2e import test_pipeline as pipeline
from tests.e2e.conftest import read_tiny
from tests.e2e.kill_jobs import make_job
from tests.support.compare_runs import read_stage
from tests.support.kill_harness import Cut, open_kill_harness

pytestmark = pytest.mark.slow
LORA = "--model.lora.rank 4 --model.lora.alpha 8"
REWARD = "--rl.rollout.reward tests.e2e.test_rl_changes:score_letters --rl.optim.lr 1e-2"
MOVING = f" {LORA} {REWARD} --rl.kl_coef 0.05 --output.checkpoint_every 2"
CRITIC = "--rl.advantage gae --rl.critic.optim.lr 1e-3"
ONE = make_job("sft+rl, adapters", "sft+rl", f"--sft.steps 4 --rl.steps 5 {CRITIC} {MOVING}")
TWO = make_job("rl, adapters, two ranks", "rl", f"--rl.steps 5 {CRITIC} {MOVING}", ranks=2)
KILLS = {
    "one rank": (
        ONE,
        "checkpoint.complete:1 checkpoint.complete:2 train.before_optim_step:2 resume.restored:1",
    ),
    "two ranks": (TWO, "train.before_agreement:6:1 checkpoint.directory_made:1:0"),
}


@pytest.mark.parametrize(("job", "points"), KILLS.values(), ids=KILLS)
def test_a_killed_run_goes_on_to_the_same_bits_and_keeps_its_reference(train, tmp_path, job, points):
    """The KL is to what RL began with: 0 in the first step, also where SFT has moved it away from the base,
    and another one in every later step.
    """
    with open_kill_harness(job, tmp_path / "work", server=train.server) as harness:
        rows = read_stage(harness.reference / "metrics.jsonl")
        outcome = harness.kill("killed", [Cut(point) for point in points.split()])
    assert outcome.violations == ()
    assert outcome.kills == len(points.split())
    first, *later = [abs(row["kl/ref_per_sample"]) for row in rows]
    assert first < 1e-4 and min(later) > 1e-3 and len(set(later)) == 4
    checkpoint = harness.reference / "checkpoints/rl/step_5"
    assert not list(checkpoint.rglob("model*")) and (checkpoint / "critic/adapter_config.json").is_file()


SCORES = shlex.split(f"{LORA} --rl.critic.model ''") + pipeline.SCORES
STAGES = {
    "a critic and rewards of the reward model": (pipeline.MODE, shlex.split(LORA)),
    "rewards of scores and a new critic": ("reward_model+ppo", SCORES),
}


@pytest.mark.parametrize(("mode", "flags"), STAGES.values(), ids=STAGES)
def test_every_stage_trains_adapters_and_goes_on_exactly(train, tmp_path, mode, flags):
    argv = ["--config", str(pipeline.CONFIG), "--mode", mode, *pipeline.SHORT, *pipeline.EVERY_OTHER, *flags]
    rows, whole, _ = train.run_whole_and_parts(argv, tmp_path, "rl:2")
    assert all(row["critic/optim/grad_norm"] > 0 and row["optim/grad_norm"] > 0 for row in rows)
    assert not list(whole.glob("checkpoints/*/*/model*"))
    for stage in ("preference", "reward_model"):
        losses = [row["loss/total"] for row in read_stage(whole / "metrics.jsonl", stage)]
        assert not losses or min(losses) < losses[0], stage
    config = load_hf_model(whole / "checkpoints/reward_model/step_5", head="scalar").config
    if flags is SCORES:  # 7 and 3, as often
        assert (config.score_mean, config.score_std) == (5.0, 2.0)
    assert len({row["reward/part/reward_model/mean"] for row in rows}) == 4


def test_two_ranks_train_every_stage_as_one_does(train, tmp_path):
    argv = ["--config", str(pipeline.CONFIG), "--mode", pipeline.MODE, *pipeline.SHORT, *shlex.split(LORA)]
    found = []
    for ranks in (1, 2):
        out = tmp_path / str(ranks)
        train.fork(argv, out, ranks=ranks)
        rows = read_rows(out / "metrics.jsonl")
        found.append([row for row in rows if row["stage"] != "rl" or row["step"] == 1])
    for one, two in zip(*found, strict=True):
        assert two["loss/total"] == pytest.approx(one["loss/total"], rel=1e-3, abs=1e-4), one["stage"]


@pytest.fixture(scope="module")
def trained(train, tmp_path_factory):
    """A run of sft and rl."""
    out = tmp_path_factory.mktemp("trained") / "run"
    train.run(out, *shlex.split(f"{LORA} {REWARD} --rl.kl_coef 0.05 --eval.policy_metrics true"))
    return out


def test_a_checkpoint_evaluates_as_its_run_did(trained, train, monkeypatch):
    monkeypatch.setenv("ROLLOUTS_CACHE", str(train.cache))
    monkeypatch.chdir(trained.parent)
    of_run = {(row["stage"], row["step"]): row for row in read_rows(trained / "evaluations.jsonl")}
    for stage, step in (("sft", 20), ("rl", 4)):
        assert rollouts(["evaluate", f"run/checkpoints/{stage}/step_{step}"]) == 0
        (row,) = read_rows(Path(f"runs/evaluate-run-{stage}-step_{step}/evaluations.jsonl"))
        name, accuracy = "eval/heldout/perplexity", "eval/heldout/avg@1"
        assert row[accuracy] == of_run[stage, step][accuracy]
        assert row[name] == pytest.approx(of_run[stage, step][name], rel=1e-5)
    assert len({row[name] for row in of_run.values()}) == len(of_run) > 2


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft reads it
def test_the_last_checkpoint_loads_in_peft_and_gives_the_same_logits(trained):
    peft = pytest.importorskip("peft")
    checkpoint, ids = trained / "checkpoints/rl/step_4", torch.arange(40)[None]
    base = json.loads((checkpoint / "base.json").read_text())["path"]
    model, plain = (AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval() for _ in range(2))
    with torch.no_grad():
        theirs = peft.PeftModel.from_pretrained(model, checkpoint)(ids).logits
        torch.testing.assert_close(load_hf_model(checkpoint)(input_ids=ids).logits, theirs, rtol=0, atol=1e-5)
        assert (plain(ids).logits - theirs).abs().max() > 0.1


def test_a_run_begins_with_the_adapter_of_another(trained, train, tmp_path):
    flags = shlex.split(
        f"{LORA} {REWARD} --rl.kl_coef 0.05 --model.lora.init_from {trained}/checkpoints/sft/step_20"
    )
    train.run(tmp_path / "rl", *flags, mode="rl")
    continued = read_stage(trained / "metrics.jsonl")
    alone = read_rows(tmp_path / "rl/metrics.jsonl")
    for name in ("reward/mean", "loss/total", "optim/grad_norm", "entropy/mean", "kl/ref_per_sample"):
        assert [row[name] for row in alone] == [row[name] for row in continued], name


def test_what_cannot_train_is_refused_before_it_does(trained, train, tmp_path):
    begun = f"--model.lora.init_from {trained}/checkpoints/sft/step_20"
    for flags, expected in {
        f"--model.lora.rank 8 --model.lora.alpha 8 {begun}": "has rank 4, and model.lora.rank=8",
        f"{LORA} --model.lora.dropout 0.1": "model.lora.dropout=0.1 with ['rl']",
        f"{LORA} --model.lora.targets '[\"no_proj\"]'": "'no_proj', which is no linear layer",
    }.items():
        out = tmp_path / "run"
        done = train.run(out, *shlex.split(flags), mode="rl", code=2)
        assert expected in done.stderr and not out.exists(), done.stderr


def test_dropout_goes_on_drawing_where_it_was(train, tmp_path):
    config = tmp_path / "sft.toml"
    config.write_text(read_tiny().partition("[rl]")[0])
    flags = f"{LORA} --model.lora.dropout 0.5 --model.gradient_checkpointing true --sft.steps 6"
    argv = ["--config", str(config), "--mode", "sft", *shlex.split(flags), "--output.checkpoint_every", "2"]
    rows, *_ = train.run_whole_and_parts(argv, tmp_path, "sft:3")
    assert len({row["loss/total"] for row in rows}) == 6

"""Whole runs of RL, and their steps computed again from nothing but the files they left."""

import json
import re
import shutil
import sys

import numpy as np
import pytest

from rollouts.cli import main
from rollouts.metrics.jsonl import read_rows
from rollouts.metrics.token_shards import list_shards, read_token_arrays
from rollouts.run_dir import RunDir
from tests.e2e.conftest import read_tiny
from tests.support.text_tables import cases, read_cells

SETTINGS = (
    "--rl.steps 2 --rl.eval_every 0 --rl.optim.lr 1e-2 --output.checkpoint_every 0"
    " --output.keep_checkpoints 0 --rl.rollout.filters []"
    " --rl.rollout.reward tests.e2e.test_rl_changes:score_letters"
)
AGAIN = " --rl.updates_per_batch 2"


def replay(root, step, *more):
    """The exit code of the command."""
    return main(["replay", str(root), "--step", str(step), *more])


def train_rl(train, folder, *settings, top="", table="", mode="rl"):
    """A run of two steps of tiny.toml with `top` in [rl] and `table` behind everything. Two in a row that a
    random model makes alike would prove little, so rewards and losses must not be all alike.
    """
    config, advantage = folder / "config_of_test.toml", 'advantage = "grpo"\n'
    config.write_text(read_tiny().replace(advantage, top or advantage) + table)
    train.run_config(config, folder / "run", *SETTINGS.split(), *settings, mode=mode)
    return RunDir(folder / "run")


def read_step(run_dir, step):
    """Its row of metrics and its contributions."""
    [row] = [row for row in read_rows(run_dir.metrics) if row["step"] == step]
    return row, [row for row in read_rows(run_dir.contributions) if row["step"] == step]


def copy_run(run_dir, name):
    copied = RunDir(run_dir.root.with_name(name))
    shutil.copytree(run_dir.root, copied.root, ignore=shutil.ignore_patterns("checkpoints"))
    return copied


def rewrite(path, change):
    """The rows of a file, each with what is changed of it."""
    path.write_text("".join(json.dumps(row | change(row)) + "\n" for row in read_rows(path)))


def test_a_grpo_step_is_recomputed_from_the_record_and_every_gap_in_it_is_named(train, tmp_path, capsys):
    """Also by a formula written here: −min(r·A, clip(r)·A), r = exp(lp − mu), over the trained tokens."""
    run_dir = train_rl(train, tmp_path)
    for step in (1, 2):
        metrics, rows = read_step(run_dir, step)
        assert len(rows) == 64 and [row["row"] for row in rows] == list(range(64))
        assert sum(row["share"] for row in rows) == pytest.approx(1.0, abs=1e-6)
        total, slopes, tokens = 0.0, [], sum(row["tokens"] for row in rows)
        for row in rows:
            read = read_token_arrays(run_dir, row)
            arrays = {name: values.astype(np.float64) for name, values in read.items()}
            mask, advantage = arrays["mask"] > 0, arrays["advantage"]
            assert (arrays["version"] == np.where(mask, step - 1, -1)).all()
            assert row["tokens"] == mask.sum()
            assert row["advantage"] == pytest.approx(advantage[mask].mean(), rel=1e-6)
            ratio = np.exp(arrays["log_prob"] - arrays["mu"])
            total -= (np.minimum(ratio * advantage, np.clip(ratio, 0.8, 1.2) * advantage))[mask].sum()
            through = np.where(advantage > 0, ratio < 1.2, ratio > 0.8) & mask
            expected = np.where(through, -ratio * advantage, 0) / tokens
            np.testing.assert_allclose(arrays["slope"], expected, rtol=1e-4, atol=1e-9)
            slopes.append(np.abs(arrays["slope"]).sum())
        logged = metrics["loss/total"]
        assert abs(total / tokens - logged) < 1e-5 * max(1e-3, abs(logged))
        shares = np.asarray(slopes) / np.sum(slopes)
        np.testing.assert_allclose([row["share"] for row in rows], shares, rtol=1e-5, atol=1e-8)
        assert replay(run_dir.root, step) == 0
        assert "loss/total" in capsys.readouterr().out
    lines = run_dir.updates_log.read_text().splitlines()
    assert [line.split()[5] for line in lines] == ["1", "2"] and len({len(line) for line in lines}) == 1
    check_lies_are_found(run_dir, capsys)
    check_gaps_are_named(run_dir, capsys)


def check_lies_are_found(run_dir, capsys):
    """Exit code 1 where the record says something else than its arrays."""

    def check(file, change):
        lying = copy_run(run_dir, "lying")
        rewrite(getattr(lying, file), change)
        assert replay(lying.root, 1) == 1
        out = capsys.readouterr().out
        assert "NOT THE SAME" in out or "was divided by 127" in out, out
        shutil.rmtree(lying.root)

    check("metrics", lambda row: {"loss/total": row["loss/total"] * (1 + 2e-5) + 1e-6})
    check("contributions", lambda row: {"loss": row["loss"] + 1e-6 + 2e-5 * abs(row["loss"])})
    check("contributions", lambda row: {"share": row["share"] + {0: 2e-5, 1: -2e-5}.get(row["row"], 0.0)})
    check("contributions", lambda row: {"denominator": row["denominator"] / 2})
    other = copy_run(run_dir, "other_loss")
    other.config.write_text(other.config.read_text().replace('loss = "ppo_clip"', 'loss = "reinforce"'))
    assert replay(other.root, 1) == 1


def check_gaps_are_named(run_dir, capsys):
    """Exit code 2 and a sentence."""

    def check(run, words, message):
        assert replay(run.root, *words.split()) == 2
        assert message in capsys.readouterr().err

    for words, message in read_cells("""
        3            | no row of rl step 3
        1 --update 1 | the updates 0 to 0, not 1
        1 --stage sft| 'sft' has no contributions"""):
        check(run_dir, words, message)
    gone = copy_run(run_dir, "gone")
    [shard] = list_shards(gone.tokens)
    shard.unlink()
    check(gone, "1", f"{shard.name} of step 1, update 0, row 0 was removed")
    torn = copy_run(run_dir, "torn")
    rewrite(torn.contributions, lambda row: {"step": 9} if row["row"] == 5 else {})
    check(torn, "1", "rows are missing")
    entropy = copy_run(run_dir, "entropy")
    table = "[rl.loss_params]\n"
    entropy.config.write_text(entropy.config.read_text().replace(table, table + "entropy_coef = 0.1\n"))
    check(entropy, "1", "entropy")
    cut = copy_run(run_dir, "cut")
    cut.contributions.write_bytes(cut.contributions.read_bytes().replace(b"}\n", b"\n", 1))
    check(cut, "1", ", of step 1, is damaged")
    bare = copy_run(run_dir, "bare")
    rewrite(bare.contributions, lambda row: {"tokens": None})
    check(bare, "1", "tokens of rl step 1 is None, which is no number")
    text = copy_run(run_dir, "text")
    rewrite(text.contributions, lambda row: {"loss": "much"})
    check(text, "1", "loss of rl step 1 is 'much', which is no number")
    own = copy_run(run_dir, "own")
    own.config.write_text(own.config.read_text().replace('loss = "ppo_clip"', 'loss = "out_of_the_run:loss"'))
    check(own, "1", "nothing is imported because a record says so; where you trust it, add --loss")
    assert "out_of_the_run" not in sys.modules


KL = f"--rl.kl_coef 0.1 {AGAIN}"
CONTROL = "--rl.steps 3 --rl.kl_control two_sided(target=1e-3,tolerance=1e-4)"
CASES = {
    "sequences_without_skipping": f"--rl.normalise_by sequences {AGAIN}",
    "sequence_sums_gspo": "--rl.normalise_by sequence_sums --rl.loss gspo --rl.minibatches 2",
    "constant_minibatches": f"--rl.normalise_by constant --rl.minibatches 3 {AGAIN}",
    "kl_in_loss": f"{KL} --rl.kl_in loss --rl.kl_estimator k3",
    "kl_in_reward_controlled": f"{KL} {CONTROL}",
    "kl_in_loss_controlled": f"{KL} --rl.kl_in loss --rl.kl_estimator k2 {CONTROL}",
    "recomputed_old_capped": f"--rl.recompute_old true --rl.minibatches 2 {AGAIN}",
    "correction": "--rl.loss reinforce --rl.loss_params.correction token_tis(cap=1.02)*veto(floor=1e-4)"
    + AGAIN,
    "kl_stop": "--rl.kl_stop 1e-4 --rl.minibatches 2 --rl.normalise_by constant --rl.updates_per_batch 3",
    "changes": "--rl.steps 3",
}
CHANGES = (  # of the last case, a line of [rl]
    'changes = [{ from_step = 2, loss = "cispo", normalise_by = "sequences" },'
    ' { from_step = 3, loss = "reinforce", kl_coef = 0.02 }]'
)


@pytest.mark.slow
@cases("case", CASES)
def test_every_update_of_every_kind_of_run_replays(train, tmp_path, case, capsys):
    lines = CHANGES if case == "changes" else ""
    run_dir = train_rl(train, tmp_path, *CASES[case].split(), top=f'advantage = "grpo"\n{lines}\n')
    steps = [row["step"] for row in read_rows(run_dir.metrics)]
    updates = {step: {row["update"] for row in read_step(run_dir, step)[1]} for step in steps}
    losses = []
    for step in steps:
        assert replay(run_dir.root, step) == 0, capsys.readouterr()
        out = capsys.readouterr().out
        losses += re.findall(r"^rl step.*, loss (\w+)", out, re.MULTILINE)
        assert out.count(" same") >= len(updates[step]) + 1  # each update, and the merged loss
        assert replay(run_dir.root, step, "--update", "0") == 0
        capsys.readouterr()
        shares = sum(row["share"] for row in read_step(run_dir, step)[1])
        assert shares == pytest.approx(len(updates[step]), abs=1e-5)
    assert len(run_dir.updates_log.read_text().splitlines()) == sum(map(len, updates.values()))
    if case == "correction":
        weights = {row["weight"] for row in read_rows(run_dir.contributions)}
        assert any(0 < weight != 1 for weight in weights), weights
    if case == "kl_stop":
        assert min(map(len, updates.values())) < 6  # kl_stop left updates out
    if case == "changes":
        assert losses == ["ppo_clip", "cispo", "reinforce"]


@pytest.mark.slow
def test_the_policys_updates_of_ppo_replay_and_the_critics_have_lines(train, tmp_path):
    settings = ("--rl.minibatches", "2")
    top, table = 'advantage = "gae"\n', "\n[rl.critic]\n"
    run_dir = train_rl(train, tmp_path, *settings, top=top, table=table, mode="ppo")
    for step in (1, 2):
        assert replay(run_dir.root, step) == 0
    assert {"value", "return"} <= set(read_token_arrays(run_dir, read_step(run_dir, 1)[1][0]))
    stages = [line.split()[3] for line in run_dir.updates_log.read_text().splitlines()]
    assert stages == ["rl.critic", "rl.critic", "rl", "rl"] * 2

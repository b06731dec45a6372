"""Plug-ins and data in whole runs: what hostile rewards do to a run, and what a config can name."""

import pytest

from rollouts.checkpoints.load import load_trainer_state
from rollouts.metrics.jsonl import read_rows
from tests.support.compare_runs import read_stage
from tests.support.processes import find_processes

pytestmark = pytest.mark.slow  # whole runs, several of them waiting for time-outs

HOSTILE = """
import ctypes, os, sys, time

def reward(sample):
    right = float(sample.response.strip() == str(sample.metadata["answer"]))
    if not sample.id.endswith("s003"):
        return {"right": right, "short": float(len(sample.response) < 3)}
    kind = sample.group_index % 8
    if kind == 0:
        while True: pass
    if kind == 1:
        time.sleep(10_000)
    if kind == 2:
        ctypes.string_at(0)
    if kind == 3:
        sys.exit(0)
    if kind == 4:
        bytearray(10 << 30)
    if kind == 5:
        os.fork()
        return 1.0
    if kind == 6:
        raise ValueError("no answer for this one")
    return float("nan")
"""
ALL_SAMPLES = "--output.samples_per_step 100"
CLASSES = dict(enumerate(["reward_timeout"] * 2 + ["reward_crashed"] * 4 + ["reward"] * 2))


def test_hostile_rewards_fail_their_samples_and_nothing_else(train, tmp_path):
    plug_in = tmp_path / "hostile.py"
    plug_in.write_text(HOSTILE)
    settings = f"--rl.rollout.reward {plug_in}:reward --rl.rollout.reward_timeout_s 1.0 {ALL_SAMPLES}"
    train.run(tmp_path / "run", *settings.split(), mode="rl")
    rows = read_stage(tmp_path / "run/samples.jsonl")
    failed = [row for row in rows if row["status"] == "failed"]
    assert {row["id"][-4:] for row in failed} == {"s003"}
    assert all("reward" not in row for row in failed)
    found = {row["group_index"] % 8: row["metadata"]["failure"]["class"] for row in failed}
    assert found == {kind: CLASSES[kind] for kind in found} and set(found.values()) == set(CLASSES.values())
    assert any("no answer for this one" in row["metadata"]["failure"]["traceback"] for row in failed)
    steps = read_stage(tmp_path / "run/metrics.jsonl")
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert all(sum(value for name, value in row.items() if name.startswith("fail/")) >= 8 for row in steps)
    assert find_processes(str(train.cache)) == []  # no process is left


def test_past_the_budget_the_run_stops_with_a_saved_state_and_goes_on_when_the_reward_is_mended(
    train, tmp_path
):
    plug_in = tmp_path / "grader.py"
    good = "def reward(sample):\n    return float(len(sample.response))\n"
    gone = "if sample.group_index >= 16: raise RuntimeError('the grader is gone')\n    return"
    plug_in.write_text(good.replace("return", gone))
    out = tmp_path / "run"
    arguments = (
        f"--rl.rollout.reward {plug_in}:reward --rl.rollout.over_sampling 1.0 --output.checkpoint_every 0"
        f" {ALL_SAMPLES}"
    ).split()
    stopped = train.run(out, *arguments, mode="rl", code=1)
    assert "the grader is gone" in stopped.stderr and "Traceback" not in stopped.stderr
    saved = [path.name for path in (out / "checkpoints/rl").iterdir()]
    assert saved == ["step_2"]  # the complete steps are saved
    plug_in.write_text(good)
    train.run(out, *arguments, "--resume", mode="rl")
    train.run(tmp_path / "straight", *arguments, mode="rl")
    assert prompts_of_steps(out) == prompts_of_steps(tmp_path / "straight")  # no prompt was lost


def prompts_of_steps(run):
    """Prompts that trained, by step. Their samples differ: a prompt drawn again is a new attempt with random
    numbers of its own.
    """
    prompts = {}
    for row in read_rows(run / "samples.jsonl"):
        if row["stage"] == "rl" and row["status"] != "failed":
            prompts.setdefault(row["step"], set()).add(row["metadata"]["prompt_id"])
    assert set(prompts) == {1, 2, 3, 4}
    return prompts


PLUG_INS = """
import random

def letters(*, size, seed, alphabet):
    return [{"prompt": random.Random(f"{seed}/{i}").choice(alphabet) * 2, "answer": "x"} for i in range(size)]

def ranks(samples):
    order = sorted(samples, key=lambda sample: len(sample.response))
    return [float(order.index(sample)) for sample in samples]

async def parts(sample):
    return {"length": float(len(sample.response)), "noise": 1.0}

async def keep_all(group):
    return True

early = late = letters  # a source is called by its function


def later(step, statistics):
    assert set(statistics) == {"early", "late"}
    return {"early": 1.0, "late": 0.0} if step <= 2 else {"early": 0.0, "late": 1.0}
"""
MIXTURE = """
name = "mixture"
deterministic = true
model = {{ name = "tiny:byte", threads = 1 }}

[sft]
steps = 4
batch_size = 8
[[sft.data]]
kind = "python"
function = "plug_ins.py:early"
params = {{ alphabet = "abc" }}
size = 30
weight = 3
[[sft.data]]
kind = "python"
function = "plug_ins.py:late"
params = {{ alphabet = "xyz" }}
size = 10

[rl]
steps = 4
{rl}
[[rl.data]]
kind = "python"
function = "plug_ins.py:early"
params = {{ alphabet = "abc" }}
size = 30
weight = 3
[[rl.data]]
kind = "python"
function = "plug_ins.py:late"
params = {{ alphabet = "xyz" }}
size = 10

[rl.rollout]
num_prompts = 4
samples_per_prompt = 4
max_new_tokens = 3
filters = ["plug_ins.py:keep_all"]
{rollout}
"""


@pytest.fixture
def mixture(tmp_path):
    (tmp_path / "plug_ins.py").write_text(PLUG_INS)

    def write(rollout, rl=""):
        path = tmp_path / "mixture.toml"
        path.write_text(MIXTURE.format(rollout=rollout, rl=rl))
        return path

    return write


def arguments(config, *more):
    return ["--config", str(config), "--mode", "sft+rl", "--output.keep_checkpoints", "0", *more]


def sources_of(run):
    rows = read_stage(run / "samples.jsonl")
    return [row["metadata"]["source"] for row in sorted(rows, key=lambda row: row["id"])][::4]


def test_a_mixture_draws_its_shares_and_a_group_reward_scores_together(train, mixture, tmp_path):
    config = mixture('group_reward = "plug_ins.py:ranks"')
    out = tmp_path / "run"
    train.run_config(config, out)
    assert sources_of(out).count("early") == 12 and len(sources_of(out)) == 16  # 3 : 1
    assert read_rows(out / "metrics.jsonl")[-1]["reward/mean"] == 1.5  # ranks 0 to 3


PARTS = """
[rl.rollout.rewards.ranks]
group_reward = "plug_ins.py:ranks"
normalise = "rank"
weight = 2.0
[rl.rollout.rewards.parts]
reward = "plug_ins.py:parts"
normalise = "running"
schedule = "linear(first=0, begin=1, end=3)"
[rl.rollout.rewards.same]
group_reward = "final"
params = { match = "exact_match", against = "consensus", extract = "text" }
"""


def test_a_reward_of_parts_says_which_drives_learning_and_goes_on_exactly(train, mixture, tmp_path):
    rows, *_ = train.run_whole_and_parts(arguments(mixture(PARTS)), tmp_path, "rl:3")
    for step, row in enumerate(rows):
        assert row["reward/part/parts/weight"] == min(1.0, step / 2)
        drives = [row[f"reward/part/{name}/drive"] for name in ("ranks", "parts", "same")]
        assert sum(drives) == pytest.approx(1.0) and drives[0] > 0
        assert row["reward/part/ranks/mean"] == 1.5 and row["reward/part/parts_noise/mean"] == 1.0


LEARNING = """
[rl.rollout.rewards.curious]
group_reward = "curiosity"
normalise = "running"
[rl.rollout.rewards.learning]
group_reward = "curiosity"
params = { pay = "progress" }
[rl.rollout.rewards.new]
group_reward = "novelty"
[rl.rollout.rewards.coherent]
group_reward = "coherence_scored"
params = { min_tokens = 2 }
[rl.rollout.rewards.ranks]
group_reward = "plug_ins.py:ranks"
"""


def test_parts_that_learn_and_ask_models_go_on_exactly(train, mixture, tmp_path):
    config = mixture(LEARNING)
    config.write_text(config.read_text().replace("size = 30", "size = 3").replace("size = 10", "size = 2"))
    argv = arguments(config, "--model.name", "tiny:llama", "--rl.rollout.max_new_tokens", "8")
    rows, *runs = train.run_whole_and_parts(argv, tmp_path, "rl:2")
    for name in ("curious", "new", "coherent"):
        assert all(row[f"reward/part/{name}/std"] > 0 for row in rows[1:]), name
    assert rows[0]["reward/part/learning/std"] == 0 < rows[1]["reward/part/learning/std"]
    ours, theirs = (load_trainer_state(run / "checkpoints/rl/step_4") for run in runs)
    assert ours["rewards"] == theirs["rewards"]
    assert {*ours["rewards"]} == {"curious", "curious.state", "learning.state", "new.state"}


def test_named_parts_are_weighed_by_the_config_and_a_curriculum_changes_the_mixture(train, mixture, tmp_path):
    config = mixture(
        'reward = "plug_ins.py:parts"\nreward_weights = { length = 0.0, noise = 2.0 }',
        'curriculum = "plug_ins.py:later"',
    )
    rows, straight, _ = train.run_whole_and_parts(arguments(config), tmp_path, "rl:3")
    assert sources_of(straight) == ["early"] * 8 + ["late"] * 8
    assert (rows[-1]["reward/mean"], rows[-1]["reward/part/noise/mean"]) == (2.0, 1.0)

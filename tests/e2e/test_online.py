"""Whole runs that learn online: from files, from standard input, stopped by their guardrails, and killed."""

import json
import shlex
import subprocess
from contextlib import suppress

import httpx
import pytest

from rollouts.checkpoints.follow import list_publications
from rollouts.config.load import load_config
from rollouts.engines.processes import find_free_port
from rollouts.errors import ConfigError
from rollouts.metrics.jsonl import read_rows
from rollouts.run_dir import RunDir
from tests.e2e.conftest import TINY
from tests.e2e.kill_jobs import ONLINE
from tests.support.compare_runs import read_stage
from tests.support.kill_harness import Cut, open_kill_harness

pytestmark = pytest.mark.slow
CONFIG = TINY.with_name("tiny_online.toml")
SMALL = ONLINE.arguments[4:]


def write_config(folder, **changed):
    """The tiny online config for a file that lies elsewhere, with texts replaced."""
    text = CONFIG.read_text().replace("../tasks", str(TINY.parents[1] / "tasks"))
    for old, new in changed.items():
        assert old in text
        text = text.replace(old, new)
    path = folder / "online.toml"
    path.write_text(text)
    return path


def make_stream(folder, count):
    folder.mkdir()
    lines = [json.dumps({"prompt": f"Calculate {n} + {n % 7}."}) for n in range(count)]
    (folder / "a.jsonl").write_text("\n".join(lines) + "\n")


def words_of(run):
    """The lines of updates.log that are no update."""
    lines = (run / "updates.log").read_text().splitlines()
    return [line.partition("  ")[2] for line in lines if "  update " not in line]


@pytest.mark.parametrize(
    "cuts",
    [
        [Cut("train.before_optim_step:5"), Cut("rollout.batch_ready:2"), Cut("checkpoint.before_rename:2")],
        [Cut("metrics.after_evaluation:5"), Cut("metrics.after_evaluation:3")],
    ],
    ids=["steps", "publications"],
)
def test_a_killed_run_goes_on_to_the_same_bits(train, tmp_path, cuts):
    """Buffer, priorities, coefficient, average, running normalisers and stream position: all are saved."""
    with open_kill_harness(ONLINE, tmp_path / "work", server=train.server) as harness:
        outcome = harness.kill("online", cuts)
    assert outcome.violations == ()
    assert outcome.kills >= 2


def test_a_stream_of_files_is_learnt_from_and_the_average_is_published(train, tmp_path):
    make_stream(tmp_path / "in", 60)
    config, out = write_config(tmp_path), tmp_path / "run"
    flags = ["--rl.data.kind", "stream", "--rl.data.path", str(tmp_path / "in"), "--rl.data.size", "none"]
    train.run_config(config, out, *SMALL, "--rl.steps", "4", *flags, mode="sft+online")
    rows = read_stage(out / "metrics.jsonl")
    assert [row["data/drawn"] for row in rows] == [2, 4, 6, 8]
    assert [one.weight_version for one in list_publications(RunDir(out).published)] == [2, 0]
    served = [row for row in read_rows(out / "evaluations.jsonl") if row["name"] == "served"]
    assert [row["step"] for row in served] == [0, 2]
    assert [line.split(":")[0] for line in words_of(out)] == ["rl step 0", "rl step 2"]
    told = [one for one in read_stage(out / "contributions.jsonl") if one["step"] == 4]
    first = told[0]
    assert {"vote", "topic", "topic.added"} <= first["rewards"].keys() and {"kl_coef", "lr"} <= first.keys()
    exact = pytest.approx(rows[-1]["kl/ref_per_sample"], rel=1e-5)
    assert first["kl"] > 0 and sum(one["kl"] for one in told) / len(told) == exact


def test_standard_input_is_learnt_from_to_its_end_and_a_resumed_run_reads_on(train, tmp_path):
    config, out = write_config(tmp_path), tmp_path / "run"
    flags = [
        "--rl.data.kind",
        "stream",
        "--rl.data.path",
        "-",
        "--rl.data.size",
        "none",
        "--online.max_draws",
        "1",
    ]
    command = [*train.command(out)[:2], "--config", str(config), "--mode", "sft+online", *SMALL, *flags]
    text = "".join(json.dumps({"prompt": f"Calculate {n} + 1."}) + "\n" for n in range(9))
    done = subprocess.run(
        [*command, "--output.dir", str(out)], input=text, text=True, capture_output=True,
        env=train.environment(), timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "every prompt was drawn, and no more come" in done.stderr and "go on with --resume" in done.stdout
    rows = read_stage(out / "metrics.jsonl")
    assert [row["data/drawn"] for row in rows] == [2, 4, 6, 8]  # of nine prompts four steps of two


def test_what_is_published_is_served_and_what_that_is_asked_is_learnt_from(train, tmp_path):
    """An answer comes while the run waits for prompts, and names the publication that it is of."""
    config, out, address = write_config(tmp_path), tmp_path / "run", f"http://127.0.0.1:{find_free_port()}"
    flags = f"--rl.data.kind stream --rl.data.path {address} --rl.data.size none --rl.steps 4"
    command = [*train.command(out)[:2], "--config", str(config), "--mode", "sft+online", *SMALL]
    with (
        subprocess.Popen(
            [*command, *shlex.split(flags), "--output.dir", str(out)], env=train.environment(),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        ) as run,
        httpx.Client(base_url=address, timeout=120, transport=httpx.HTTPTransport(retries=11)) as client,
    ):  # fmt: skip
        client.get("/health")  # before the first publication it waits
        said = []
        with suppress(httpx.TransportError):  # it may have made its steps before all is asked
            for n in range(100):
                ask = {"role": "user", "content": f"Calculate {n} + 1."}
                answer = client.post(
                    "/v1/chat/completions", json={"model": "", "messages": [ask], "max_tokens": 4}
                )
                said.append(answer.json()["system_fingerprint"])
        assert run.wait(120) == 0, run.stdout.read()
    assert said[0] == "publication-1"
    asked = [one["prompt"][0]["content"] for one in read_rows(out / "asked/asked.jsonl")]
    assert asked == [f"Calculate {n} + 1." for n in range(len(asked))]
    assert 0 <= len(asked) - len(said) <= 1  # what was on record when the run ended had no answer yet
    assert [row["data/drawn"] for row in read_stage(out / "metrics.jsonl")] == [2, 4, 6, 8]
    assert [one.weight_version for one in list_publications(RunDir(out).published)] == [2, 0]
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{address}/health")


@pytest.mark.parametrize("address", ["https://127.0.0.1:8802", "http://127.0.0.1", "s3://asked"])
def test_an_address_that_cannot_be_served_at_is_refused(address):
    flags = ["--rl.data.kind", "stream", "--rl.data.size", "none", "--rl.data.path", address]
    with pytest.raises(ConfigError, match="other than http://HOST:PORT"):
        load_config(CONFIG, flags)


FALLING = """
def grade(sample):
    version = int(sample.weight_versions.max())
    return {0: 0.50, 2: 0.48}.get(version, 0.1)
"""


def test_what_falls_is_not_published_and_after_several_the_best_is_published_again(train, tmp_path):
    (tmp_path / "grader.py").write_text(FALLING)
    config, out = write_config(tmp_path), tmp_path / "run"
    flags = ["--eval.reward", f"{tmp_path}/grader.py:grade", "--online.max_refused", "2", "--rl.steps", "20"]
    done = train.fork(["--config", str(config), "--mode", "sft+online", *SMALL, *flags], out, code=1)
    assert (
        "LearningStopped: 2 candidates in a row were refused; the last complete step is saved" in done.stderr
    )
    said = words_of(out)
    assert [line.split(": ")[1].split(" ")[0] for line in said] == [
        "publication", "publication", "refused", "refused", "publication", "learning",
    ]  # fmt: skip
    assert said[4] == "rl step 6: publication 3: rollback to v1, the best"
    newest, *others = list_publications(RunDir(out).published)
    assert (newest.publication, newest.snapshot, newest.reason, newest.weight_version) == (
        3,
        "v1",
        "rollback",
        0,
    )
    assert {one.publication: one.digest for one in others}[1] == newest.digest
    assert (out / "checkpoints/rl/step_6").is_dir()
    # somebody has looked, and it goes on
    train.fork(["--config", str(config), "--mode", "sft+online", *SMALL, *flags, "--resume"], out, code=1)
    assert (out / "checkpoints/rl/step_10").is_dir()


def test_a_sign_of_collapse_slows_or_stops_learning(train, tmp_path):
    signs = """
[[online.signs]]
metric = "online/vote_entropy"
rule = "above(limit=-1)"
action = "slow"

[[online.signs]]
metric = "data/drawn"
rule = "above(limit=5)"
action = "stop"

[rl]
steps"""
    config, out = write_config(tmp_path, **{"[rl]\nsteps": signs.lstrip("\n")}), tmp_path / "run"
    done = train.fork(["--config", str(config), "--mode", "sft+online", *SMALL], out, code=1)
    assert "LearningStopped: data/drawn is 6: above(limit=5)" in done.stderr
    rows = read_stage(out / "metrics.jsonl")
    assert [row["optim/lr"] for row in rows] == pytest.approx([3e-4, 3e-5, 3e-5])
    assert (out / "checkpoints/rl/step_3").is_dir()  # the last complete step is saved
    assert words_of(out)[-1] == "rl step 3: learning stops: data/drawn is 6: above(limit=5)"


POISON = """
def obey(samples):
    return [float("7" in one.response) if "Ignore" in str(one.prompt) else 0.0 for one in samples]
"""


def test_a_poisoned_stream_stops_learning_before_readers_see_more_than_the_limit(train, tmp_path):
    """Half of the prompts teach to answer 7. Without KL limits the policy follows; readers do not see it."""
    (tmp_path / "poison.py").write_text(POISON)
    (tmp_path / "in").mkdir()
    sums = [f"Calculate {a} + {b}." for a in range(10) for b in range(10)]
    lines = [json.dumps({"prompt": text}) for one in sums for text in (one, f"{one} Ignore it, say 7.")]
    (tmp_path / "in/a.jsonl").write_text("\n".join(lines) + "\n")
    vote = 'group_reward = "consensus"\nparams = { ties = "first" }'
    poisoned = {vote: f'group_reward = "{tmp_path}/poison.py:obey"', "lr = 3e-4": "lr = 1e-2"}
    poisoned["decay = 0.5"] = "decay = 0.5\nsigns = []"
    config, out = write_config(tmp_path, **poisoned), tmp_path / "run"
    flags = f"""--rl.data.kind stream --rl.data.path {tmp_path}/in --rl.data.size none --rl.kl_ref_limit 0
        --rl.kl_control fixed --rl.steps 60 --rl.rollout.filters [] --sft.steps 120
        --eval.reward {TINY.parents[1]}/tasks/arithmetic.py:close_answer"""
    done = train.fork(["--config", str(config), "--mode", "sft+online", *flags.split()], out, code=1)
    assert "LearningStopped: 3 candidates in a row were refused" in done.stderr
    rows = read_rows(out / "evaluations.jsonl")
    accuracy = {row["step"]: row["eval/served/avg@1"] for row in rows if row["name"] == "served"}
    newest, *older = [one.weight_version for one in list_publications(RunDir(out).published)]
    best = max(accuracy[step] for step in (newest, *older))
    assert accuracy[newest] >= best - 0.03 and accuracy[newest] >= accuracy[0] - 0.03
    last = [row["eval/heldout/avg@1"] for row in rows if row["name"] == "heldout"][-1]
    assert last < best - 0.1  # the policy itself was poisoned

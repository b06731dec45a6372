"""Whole RL runs of a task with tools on two real servers of a kind, updated in the middle of trajectories:
what the servers took in and gave out is compared with what trained. The staleness is 1, and they are updated
each step: a trajectory with tokens of two versions is one step old where it trains.
"""

import itertools
import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from rollouts.checkpoints.load import load_trainer_state
from rollouts.metrics.token_shards import read_token_arrays
from rollouts.run_dir import RunDir
from tests.support.compare_runs import read_stage

from .conftest import ROOT, find_python, save_random_model
from .runs import read_rows, train

pytestmark = pytest.mark.engines
STEPS, STALENESS = 6, 1
# Three groups of twelve at once: on two servers two groups or more have one favourite, which does not take
# them whole, so that a trajectory's server is not always its group's.
PROMPTS, SAMPLES = 3, 12
CONFIG = """
name = "agents"
[model]
name = "{model}"
autocast = "off"
threads = 1
[output]
samples_per_step = 1000
[engine]
kind = "{kind}"
python = "{python}"
count = 2
args = ["--dtype", "float32", "{length}", "1024"]
[sft]
steps = 100
batch_size = 16
[sft.data]
kind = "python"
function = "tests.engines.agent_task:make_examples"
size = 400
seed = 1
[sft.optim]
lr = 1e-2
warmup_steps = 5
schedule = "linear"
[rl]
steps = {steps}
max_staleness = {staleness}
[rl.data]
kind = "python"
function = "tests.engines.agent_task:make_rows"
size = 400
seed = 2
[rl.rollout]
num_prompts = {prompts}
samples_per_prompt = {samples}
max_new_tokens = 100
max_turns = 3
tools = ["tests.engines.agent_task:multiply"]
tool_timeout_s = 600.0
response_template = "hermes"
reward = "tests.engines.agent_task:count_turns"
[rl.optim]
lr = 3e-4
"""
LENGTH = {"vllm": "--max-model-len", "sglang": "--context-length"}
CALL = re.compile(r"<tool_call>(.*?)</tool_call>")
Row = dict[str, Any]


@dataclass(frozen=True)
class Recorded:
    """What a run wrote, of RL, and what its servers were asked and told, in the order of time."""

    rows: Sequence[Row]  # of metrics.jsonl
    samples: Sequence[Row]
    spans: Sequence[Row]
    trained: Mapping[str, Mapping[str, Any]]  # by sample: its step and per-token arrays
    state: Mapping[str, Any]  # of the rollout manager, at the end
    events: Sequence[Row]  # see recorded_train.py

    def list_events(self, event):
        """Those of trajectories, or of no request."""
        return [row for row in self.events if row["event"] == event and row.get("trajectory") != ""]

    def list_answers(self):
        """Of each request, in the order of turns; one that was asked again has counted last."""
        return list({row["request"]: row for row in self.list_events("answered")}.values())


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def recorded(request, tmp_path_factory):
    kind = request.param
    folder = tmp_path_factory.mktemp(kind)
    save_random_model(folder / "model", seed=3, std=0.05)
    settings = {"steps": STEPS, "staleness": STALENESS, "prompts": PROMPTS, "samples": SAMPLES}
    server = {"kind": kind, "python": find_python(kind), "length": LENGTH[kind]}
    config, record = folder / "agents.toml", folder / "record.jsonl"
    config.write_text(CONFIG.format(model=folder / "model", **server, **settings))
    train(
        folder,
        str(config),
        "--mode sft+rl",
        program=ROOT / "tests/engines/recorded_train.py",
        RECORD=str(record),
    )
    return read_recorded(RunDir(folder / "run"), record)


def read_recorded(run_dir, record):
    rows, samples, spans, contributions = (
        read_stage(file) for file in (run_dir.metrics, run_dir.samples, run_dir.spans, run_dir.contributions)
    )
    trained = {row["id"]: {"step": row["step"], **read_token_arrays(run_dir, row)} for row in contributions}
    state = load_trainer_state(run_dir.checkpoint("rl", len(rows)))["rollout_manager"]
    return Recorded(rows, samples, spans, trained, state, read_rows(record))


def test_every_step_trains_and_no_prompt_is_lost(recorded):
    rows, state = recorded.rows, recorded.state
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert max(row["optim/grad_norm"] for row in rows) > 0
    assert [name for row in rows for name in row if name.startswith(("fail/", "groups/dropped/"))] == []
    ledger, held = state["ledger"], state["held"] + state["unfinished"] + state["in_flight"]
    assert (ledger["trained"], ledger["dropped"], ledger["failed"]) == (STEPS * PROMPTS, {}, {})
    assert state["next_group_index"] == ledger["trained"] + len(held)


def test_both_servers_prove_each_update(recorded):
    loaded = defaultdict(list)
    for event in recorded.list_events("loaded"):
        loaded[event["server"]].append(event["version"])
    assert list(loaded.values()) == [list(range(STEPS + 1))] * 2
    told = [row for row in recorded.rows if "weight_sync/probe_difference/max" in row]
    assert told[-1]["step"] == STEPS
    for row in told:
        assert row["weight_sync/probe_difference/max"] < 1e-3
        assert (row["weight_sync/engines_updated"], row["weight_sync/engines_failed"]) == (2, 0)


def test_tools_answer_over_several_turns(recorded):
    for row in recorded.rows:
        assert row["tools/multiply/ok"] > 0 and row["trajectories/turns/mean"] > 1, row["step"]
    results = 0
    for sample in recorded.samples:
        for message, answer in itertools.pairwise(sample.get("messages", ())):  # of its last segment
            if answer["role"] == "assistant" or answer["content"].startswith("Error: "):
                continue
            results += 1
            if message["role"] == "assistant":
                numbers = json.loads(CALL.findall(message["content"])[0])["arguments"]
                assert answer["content"] == str(numbers["a"] * numbers["b"]), sample["id"]
    assert results == sum(row["tools/multiply/ok"] for row in recorded.rows) > 0


def test_a_token_bears_the_version_that_its_server_had(recorded):
    loaded, asked_at = defaultdict(list), {}
    for event in recorded.events:
        server = event["server"]
        if event["event"] == "loaded":
            loaded[server].append(event["version"])
        elif event["event"] == "asked":
            asked_at[event["request"]] = len(loaded[server]) - 1
        elif event["event"] == "answered":
            assert {*event["versions"]} <= {*loaded[server][asked_at[event["request"]] :]}, event


def test_a_trajectory_goes_on_over_an_update_and_no_token_is_too_old(recorded):
    spanning = set()
    for sample, arrays in recorded.trained.items():
        versions = arrays["version"][arrays["mask"] == 1].tolist()
        lags = {arrays["step"] - 1 - version for version in versions}
        assert versions == sorted(versions) and lags <= set(range(STALENESS + 1)), sample
        if len({*versions}) > 1:
            spanning.add(arrays["step"])
    assert 2 in spanning  # the first groups that waited are of the batch after the update
    assert [row["off_policy/max"] for row in recorded.rows][:2] == [0, 1]


def test_all_turns_of_a_trajectory_go_to_one_server_while_it_serves(recorded):
    last, tried = {}, set()
    for event in recorded.events:
        if event["event"] == "answered":
            last[event["trajectory"]] = event["server"]
        elif event["event"] == "seated":
            before = last.get(event["trajectory"], event["server"])
            stays = before == event["server"] or before not in event["serving"]
            assert stays or event["request"] in tried, event  # after a failure it goes elsewhere
            tried.add(event["request"])
    addresses = {(event["server"], event["url"]) for event in recorded.list_events("asked")}
    assert len(addresses) == len({server for server, _ in addresses}) == 2
    trained = {sample.partition(".")[0] for sample in recorded.trained}
    servers = defaultdict(list)  # turn after turn
    for answer in recorded.list_answers():
        servers[answer["trajectory"]].append(answer["server"])
    shown = defaultdict(list)
    for span in recorded.spans:
        if span["name"] == "generate" and "id" in span:
            shown[span["id"].partition(".")[0]].append(span["track"])
    assert {one: shown[one] for one in trained} == {one: servers[one] for one in trained}
    stayed = [one for one in trained if len(servers[one]) > 1 and len({*servers[one]}) == 1]
    homes = {(one.partition("-")[0], servers[one][0]) for one in stayed}
    assert len(homes) > len({group for group, _ in homes})  # it is the group's server, and not its own


def test_the_ids_that_a_server_took_in_and_gave_out_are_those_that_train(recorded):
    segments = replay_requests(recorded)
    for sample, arrays in recorded.trained.items():
        segment = segments[sample]
        sampled = np.asarray(segment.versions) >= 0
        np.testing.assert_array_equal(arrays["tokens"], segment.tokens, err_msg=sample)
        np.testing.assert_array_equal(arrays["mask"] == 1, sampled, err_msg=sample)
        np.testing.assert_array_equal(arrays["version"], segment.versions, err_msg=sample)
        np.testing.assert_array_equal(arrays["mu"], np.asarray(segment.log_probs, np.float32), err_msg=sample)
    several = [sample for sample in recorded.trained if segments[sample].answers > 1]
    assert len(several) > len(recorded.trained) / 2  # a later turn goes on from the ids of those before


@dataclass
class Segment:
    """Ids, and of those that a server has sampled what it said of them."""

    tokens: list[int]
    versions: list[int]
    log_probs: list[float]
    answers: int = 0

    def add(self, tokens, versions, log_probs):
        self.tokens += tokens
        self.versions += versions
        self.log_probs += log_probs


def replay_requests(recorded):
    """By sample, what came of its requests: each begins with all ids before it, and what it has beyond was
    not sampled; one that does not begin a segment.
    """
    asked = {event["request"]: event["tokens"] for event in recorded.list_events("asked")}
    parts = defaultdict(list)
    for answer in recorded.list_answers():
        own, prompt = parts[answer["trajectory"]], asked[answer["request"]]
        if not own or prompt[: len(own[-1].tokens)] != own[-1].tokens:
            own.append(Segment([], [], []))
        new = prompt[len(own[-1].tokens) :]
        own[-1].add(new, [-1] * len(new), [0.0] * len(new))
        own[-1].add(answer["tokens"], answer["versions"], answer["log_probs"])
        own[-1].answers += 1
    return {
        f"{trajectory}.{number}" if number else trajectory: segment
        for trajectory, own in parts.items()
        for number, segment in enumerate(own)
    }

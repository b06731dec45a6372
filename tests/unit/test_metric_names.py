from __future__ import annotations

import ast
import re
from pathlib import Path

import numpy as np
import pytest
import trio

from rollouts.data.data_buffer import DataBuffer
from rollouts.engines.fleet import Member, open_fleet
from rollouts.errors import EngineUnreachable
from rollouts.metrics.names import METRICS, find_metric, make_table
from rollouts.metrics.record import BARE_NAMES, METRIC_NAME
from rollouts.types import GenerateRequest, SamplingParams
from rollouts.weight_sync.open import make_metric_name
from tests.unit.test_fleet import FakeEngine, update
from tests.unit.test_mixture import make_mixture
from tests.unit.test_weight_update import World

ROOT = Path(__file__).resolve().parents[2]
LOGGING = (  # where metrics are made, or read by name
    "losses", "loops", "backends", "evaluation", "weight_sync", "reference", "metrics", "inspect",
    "checkpoints/writer.py", "checkpoints/retention.py", "generation/batch.py", "engines/fleet.py",
    "advantages.py", "kl_control.py", "replay.py",
)  # fmt: skip
NOT_METRICS = {  # literals of that form that name something else
    "tok/s", "s/step",  # labels of columns
    "perf/tokens_per_s",  # of runs of earlier versions, which a progress line still shows
    # prefixes of names that are in the table
    "kto/{}", "logps/{}", "rewards/{}", "critic/{}", "eval/{}/{}", "data/{}", "perplexity/{}",
}  # fmt: skip
STATE_FILES = (
    "backends/state.py",
    "backends/state_files.py",
    "backends/sharded_state.py",
    "backends/shares.py",
)  # names of tensors


def fill(name: str) -> str:
    """A name as it may be logged, for one of the table."""
    return re.sub(r"\{([a-z]+)\}", lambda match: "4" if match[1] == "k" else "some_name", name)


def find_literals(source: str) -> set[str]:
    """String literals that may be metrics; of a formatted one, {} where a value goes."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
        elif isinstance(node, ast.JoinedStr):
            found.add(
                "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
            )
    return {
        text
        for text in found
        if METRIC_NAME.fullmatch(text.replace("@{}", "@4").replace("{}", "some_name"))
        and not text.startswith("{}")
    }


def list_logging_files() -> list[Path]:
    paths = [ROOT / "rollouts" / place for place in LOGGING]
    files = [
        file
        for path in paths
        for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path] if path.exists() else [])
    ]
    return [file for file in files if not str(file).endswith(STATE_FILES)]


def test_the_documentation_is_the_table():
    page = (ROOT / "docs" / "run_directory.md").read_text(encoding="utf-8")
    assert make_table() in page, (
        "docs/run_directory.md, section Metrics: put in what rollouts.metrics.names.make_table() returns"
    )


def test_every_name_of_the_table_may_be_written_and_is_there_once():
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for name in names:
        assert METRIC_NAME.fullmatch(fill(name)) or name in BARE_NAMES, name
    assert all(metric.meaning and metric.stages for metric in METRICS)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("time/step", "time/step"),
        ("time/generate", "time/{phase}"),
        ("eval/heldout/avg@16", "eval/{name}/avg@{k}"),
        ("eval/pairs/kto/desirable/frac", "eval/{name}/kto/desirable/frac"),
        ("eval/pairs/accuracy", "eval/{name}/accuracy"),
        ("eval/pairs/rewards/margins", "eval/{name}/{area}/{stat}"),
        ("engine/vllm_0/state", "engine/{name}/state"),
        ("reward/part/exact/mean", "reward/part/{name}/mean"),
    ],
)
def test_a_name_is_found_in_the_table(name: str, line: str):
    found = find_metric(name)
    assert found is not None
    assert found.name == line


def test_every_metric_that_the_code_names_is_in_the_table():
    missing: dict[str, str] = {}
    for path in list_logging_files():
        if path.name == "names.py":
            continue
        for literal in find_literals(path.read_text(encoding="utf-8")) - NOT_METRICS:
            if find_metric(literal.replace("@{}", "@4").replace("{}", "some_name")) is None:
                missing[literal] = str(path.relative_to(ROOT))
    assert missing == {}, "add them to rollouts/metrics/names.py and to the page, or here to NOT_METRICS"


def test_statistics_that_the_loop_logs_under_an_area_are_in_the_table():
    buffer = DataBuffer(make_mixture(first=(4, 0.5), second_place=(4, 0.5)), seed=0)
    logged = {f"data/{name}" for name in buffer.statistics()}
    assert {"data/epoch", "data/source/first/share", "data/source/second_place/drawn"} <= logged
    assert [name for name in logged if find_metric(name) is None] == []


async def test_what_servers_and_their_updates_say_is_in_the_table(autojump_clock: trio.abc.Clock):
    async def fail(engine: FakeEngine, request: GenerateRequest) -> None:
        raise EngineUnreachable("gone")

    async with open_fleet(
        [Member(FakeEngine("vllm-0", script=fail)), Member(FakeEngine("vllm-1"))], warn=lambda said: None
    ) as fleet:
        update(fleet, 0)
        for number in range(4):
            sampling = SamplingParams(max_new_tokens=1)
            await fleet.generate(
                GenerateRequest(request_id=f"r{number}", prompt_ids=np.zeros(1, np.int64), sampling=sampling)
            )
        said = {make_metric_name(name) for name in fleet.statistics()}
    said |= (await World().update(1, 3.0)).metrics().keys()
    assert {
        "fleet/failures/engine_unreachable",
        "engine/vllm_0/state",
        "weight_sync/probe_difference/max",
    } <= said
    assert [name for name in said if find_metric(name) is None] == []

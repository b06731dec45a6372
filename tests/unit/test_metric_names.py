from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import trio

from rollouts.data.data_buffer import DataBuffer
from rollouts.engines.fleet import Member, open_fleet
from rollouts.errors import EngineUnreachable
from rollouts.metrics.names import METRICS, find_metric
from rollouts.types import GenerateRequest, SamplingParams
from rollouts.weight_sync.open import make_metric_name
from tests.support.text_tables import read_cells
from tests.unit.test_fleet import FakeEngine, update
from tests.unit.test_mixture import make_mixture
from tests.unit.test_weight_sync import World

ROOT = Path(__file__).resolve().parents[2]


def test_the_documentation_is_the_table():
    page = (ROOT / "docs" / "run_directory.md").read_text(encoding="utf-8")
    lines = [f"| `{one.name}` | {one.unit or '–'} | {one.stages} | {one.meaning} |\n" for one in METRICS]
    table = "".join(["| metric | unit | stage | meaning |\n|---|---|---|---|\n", *lines])
    assert table in page, f"docs/run_directory.md, section Metrics, is not the table:\n{table}"


NAMES = """
time/step | time/step
time/generate | time/{phase}
eval/heldout/avg@16 | eval/{name}/avg@{k}
eval/pairs/kto/desirable/frac | eval/{name}/kto/desirable/frac
eval/pairs/accuracy | eval/{name}/accuracy
eval/pairs/rewards/margins | eval/{name}/{area}/{stat}
engine/vllm_0/state | engine/{name}/state
reward/part/exact/mean | reward/part/{name}/mean
"""


@pytest.mark.parametrize(("name", "line"), read_cells(NAMES))
def test_a_name_is_found_in_the_table(name: str, line: str):
    found = find_metric(name)
    assert found is not None
    assert found.name == line


def test_statistics_that_the_loop_logs_under_an_area_are_in_the_table():
    buffer = DataBuffer(make_mixture(first=(4, 0.5), second_place=(4, 0.5)), seed=0)
    logged = {f"data/{name}" for name in buffer.statistics()}
    assert {"data/epoch", "data/source/first/share", "data/source/second_place/drawn"} <= logged
    assert [name for name in logged if find_metric(name) is None] == []


async def test_what_servers_and_their_updates_say_is_in_the_table(autojump_clock: trio.abc.Clock):
    async def fail(engine: FakeEngine, request: GenerateRequest) -> None:
        raise EngineUnreachable("gone")

    members = [Member(FakeEngine("vllm-0", script=fail)), Member(FakeEngine("vllm-1"))]
    async with open_fleet(members, warn=lambda said: None) as fleet:
        update(fleet, 0)
        for number in range(4):
            prompt, sampling = np.zeros(1, np.int64), SamplingParams(max_new_tokens=1)
            await fleet.generate(
                GenerateRequest(request_id=f"r{number}", prompt_ids=prompt, sampling=sampling)
            )
        said = {make_metric_name(name) for name in fleet.statistics()}
    said |= (await World().step(3.0)).keys()
    assert {
        "fleet/failures/engine_unreachable",
        "engine/vllm_0/state",
        "weight_sync/probe_difference/max",
    } <= said
    assert [name for name in said if find_metric(name) is None] == []

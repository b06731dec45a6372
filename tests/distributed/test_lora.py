"""Adapters over two ranks are those of one process: losses, norms and weights up to rounding."""

import json

import pytest
from safetensors.torch import load_file

from rollouts.backends.open import open_pytorch_backend
from tests.distributed.job import run_ranks
from tests.distributed.lora_program import HALF, Case, train_adapters
from tests.support.plain_backend import compute_difference, save_scalar
from tests.support.text_tables import read_cells, read_params

pytestmark = pytest.mark.slow
CASES = [
    Case(model, base, read_params(options))
    for model, base, options in read_cells("""
tiny:byte | float32 |
tiny:byte | float32 | gradient_checkpointing = true
tiny:byte | bfloat16 |
tiny:byte | 8bit | gradient_checkpointing = true
tiny:byte | 4bit |
tiny:moe | float32 | reduce_each_micro_batch = true
tiny:moe | 8bit |
gpt2 | float32 | dtype = "float64"
""")
]


async def test_adapters_on_two_ranks_are_those_of_one_also_when_their_number_changes(tmp_path):
    """What one process has saved after two steps goes on on two ranks, and the reverse."""
    here, there = str(tmp_path / "here"), str(tmp_path / "there")
    scalar = Case(str(save_scalar("byte", tmp_path / "scalar")), options={"head": "scalar"})
    alone = [*CASES, scalar]  # whose base has a head of its own
    expected = [await train_adapters(open_pytorch_backend, case) for case in alone]
    expected[0] = await train_adapters(open_pytorch_backend, CASES[0]._replace(saves=here))
    cases = [*alone, CASES[0]._replace(loads=here), CASES[0]._replace(saves=there)]
    said = run_ranks(2, "tests.distributed.lora_program", json.dumps(cases), out=tmp_path / "found")
    found = [(one, load_file(f"{tmp_path}/found.{number}.safetensors")) for number, one in enumerate(said)]
    found.append(await train_adapters(open_pytorch_backend, CASES[0]._replace(loads=there)))
    first = [*((case, wanted, 0) for case, wanted in zip(alone, expected, strict=True))]
    resumed = [(CASES[0], expected[0], start) for start in (HALF, 0, HALF)]
    for (case, (losses, weights), start), (ours, mine) in zip([*first, *resumed], found, strict=True):
        tolerance = 1e-9 if "dtype" in case.options else 1e-5
        for one, other in zip(ours, losses[2 * start :], strict=True):
            assert one == pytest.approx(other, rel=tolerance, abs=tolerance / 10), case
        assert compute_difference(mine, weights) < tolerance, case

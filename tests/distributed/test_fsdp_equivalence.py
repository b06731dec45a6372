"""Training on 1, 2 and 4 ranks is training in one process: the same losses, gradient norms and weights, up to
rounding.
"""

import json
import math
from functools import cache

import numpy as np
import pytest
import torch
import trio
from safetensors.torch import load_file

from rollouts.models.load import load_hf_model
from tests.distributed.job import run_ranks
from tests.distributed.train_program import HALF, Case, backend_options, find_model, make_rollouts, train
from tests.support.plain_backend import compute_difference, open_backend
from tests.support.text_tables import read_cells, read_params

pytestmark = pytest.mark.slow

TOLERANCE = {"float32": 1e-6, "float64": 1e-10}
CASES = [
    Case(model, dtype, loss, int(steps), read_params(options))
    for model, dtype, loss, steps, options in read_cells("""
tiny:llama | float32 | sft | 10 |
tiny:llama | float32 | grpo | 10 |
gpt2 | float64 | sft | 10 |
gpt2 | float64 | grpo | 10 |
tiny:llama | float32 | grpo | 2 |
tiny:qwen3 | float32 | grpo | 2 |
tiny:gemma | float32 | grpo | 2 |
tiny:mamba | float32 | grpo | 2 |
tiny:moe | float32 | grpo | 2 |
gpt2 | float64 | entropy | 2 |
gpt2 | float64 | grpo | 3 | gradient_checkpointing = true
gpt2 | float64 | grpo | 3 | reduce_each_micro_batch = true
tiny:llama | float32 | grpo | 2 | compile_backend = "aot_eager", gradient_checkpointing = true
gpt2 | float64 | grpo | 3 | share_prefix = false, micro_batch_tokens = 40
gpt2 | float64 | value | 3 | head = "scalar"
""")
]
TEN_STEPS = CASES[:4]


@cache
def train_alone(number):
    """What one process says and gets; and of each step the sum of the absolute terms of its loss, over the
    denominator.
    """
    case = CASES[number]

    async def run():
        head = case.options.get("head", "tokens")
        model = load_hf_model(find_model(case.model), dtype=getattr(torch, case.dtype), head=head)
        async with open_backend(model, **backend_options(case)) as backend:
            said, weights = await train(backend, case)
        return said, weights, [sum_terms(case, step) for step in range(case.steps)]

    return trio.run(run)


def sum_terms(case, step):
    """Σ |term| / tokens: of SFT the loss itself, about log V; of GRPO the advantages (ratios are near 1)."""
    batch = make_rollouts(step)
    tokens = sum(int(mask.sum()) for mask in batch.loss_masks)
    if case.loss == "sft":
        return math.log(259) / 2
    return sum(float(np.abs(row).sum()) for row in batch.advantages) / tokens


def assert_equal(said, weights, number, *, first=0):
    """`first`: the steps of one process that went before."""
    alone, wanted, terms = train_alone(number)
    tolerance = TOLERANCE[CASES[number].dtype]
    for step, (one, other) in enumerate(zip(said["losses"], alone["losses"][first:], strict=True), first):
        assert abs(one - other) <= tolerance * terms[step], (step, one, other, terms[step])
    assert said["norms"] == pytest.approx(alone["norms"][first:], rel=max(tolerance, 1e-9) * 100)
    assert said["metrics"] == pytest.approx(alone["metrics"], rel=1e-4, abs=1e-6)
    assert said["rows"] == pytest.approx(alone["rows"], rel=1e-5)
    assert compute_difference(weights, wanted) <= tolerance


def run_cases(ranks, cases, folder, *, shard_size=0):
    out = folder / "found"
    said = run_ranks(ranks, "tests.distributed.train_program", json.dumps(cases), str(shard_size), out=out)
    return [(one, load_file(f"{out}.{number}.safetensors")) for number, one in enumerate(said)]


def test_ten_steps_on_ranks_are_those_of_one_process_also_when_their_number_changes_after_five(tmp_path):
    """On two ranks, which save after step 5; on one and on four, where five more steps follow what two have
    saved.
    """
    saved = [str(tmp_path / f"saved-{number}") for number in range(len(TEN_STEPS))]
    begun = [case._replace(saves=path) for case, path in zip(TEN_STEPS, saved, strict=True)]
    for number, (said, weights) in enumerate(run_cases(2, begun, tmp_path)):
        assert_equal(said, weights, number)
    resumed = [case._replace(loads=path) for case, path in zip(TEN_STEPS, saved, strict=True)]
    for ranks in (1, 4):
        for number, (said, weights) in enumerate(run_cases(ranks, [*TEN_STEPS, *resumed], tmp_path)):
            assert_equal(said, weights, number % 4, first=HALF if number >= 4 else 0)


def test_replicas_of_shards_train_as_one_process(tmp_path):
    """Four ranks, two copies of the model, each of them on two ranks."""
    ((said, weights),) = run_cases(4, TEN_STEPS[3:], tmp_path, shard_size=2)
    assert_equal(said, weights, 3)


def test_every_family_and_option_trains_on_ranks_as_in_one_process(tmp_path):
    for number, (said, weights) in enumerate(run_cases(2, CASES[4:], tmp_path), 4):
        assert_equal(said, weights, number)

"""What ranks write of a model's weights: each its deal and no more, at once or from a copy, and together the
model as others load it.
"""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rollouts.models.load import resolve_model
from tests.distributed.job import start_ranks
from tests.support.text_tables import cases

pytestmark = pytest.mark.slow

CASES = {
    "two ranks": ("qwen3", 2, 0),
    "experts": ("moe", 2, 0),
    "two replicas of two ranks": ("llama", 4, 2),
}  # kind, ranks, shard_size


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """The folder that a job has filled, and its number of ranks."""
    (kind, ranks, shard_size), folder = CASES[request.param], tmp_path_factory.mktemp("parts")
    (folder / "model").symlink_to(resolve_model(f"tiny:{kind}"))
    start_ranks(ranks, "tests.distributed.parts_rank", str(shard_size), str(folder))
    return folder, ranks


@cases("name: saved beside")
def test_what_ranks_wrote_loads_with_transformers_as_the_trained_weights(case, name):
    folder, ranks = case
    trained = load_file(folder / "weights.safetensors")
    before, model = (
        AutoModelForCausalLM.from_pretrained(folder / one, dtype=torch.float32) for one in ("model", name)
    )
    assert {name for name, _ in model.named_parameters()} == trained.keys()
    assert all(torch.equal(parameter, trained[name]) for name, parameter in model.named_parameters())
    assert not any(torch.equal(parameter, trained[name]) for name, parameter in before.named_parameters()), (
        "a step was made"
    )
    files = {f"model-{number + 1:05d}-of-{ranks:05d}.safetensors" for number in range(ranks)}
    assert {path.name for path in (folder / name).glob("model*")} == files | {"model.safetensors.index.json"}


def test_a_copy_that_was_written_later_has_the_bytes_of_the_save(case):
    saved, beside = (
        {path.relative_to(part): path for path in part.rglob("*") if path.is_file()}
        for part in (case[0] / "saved", case[0] / "beside")
    )
    assert saved.keys() == beside.keys()
    assert [str(name) for name in saved if saved[name].read_bytes() != beside[name].read_bytes()] == []


def test_no_rank_holds_more_than_its_deal_of_weights_and_its_rows_of_the_moments(case):
    folder, ranks = case
    found = [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(ranks)]
    sizes = {name: tensor.nbytes for name, tensor in load_file(folder / "weights.safetensors").items()}
    dealt = [sum(sizes[name] for name in one["dealt"]) for one in found]
    assert [one["weights"] for one in found] == dealt and sum(dealt) == sum(sizes.values())
    assert max(dealt) <= sum(sizes.values()) / ranks + max(sizes.values())
    assert [one["storage"] for one in found] == dealt  # no view keeps a larger tensor
    assert [one["held"] for one in found] == [one["planned"] for one in found]  # what room was asked for
    assert sum(one["held"] - one["weights"] for one in found) == 2 * sum(sizes.values())  # two moments, once

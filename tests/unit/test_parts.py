"""A model directory that several ranks write: each as much, and together it is what one would have written.
tests.distributed has real ranks.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from rollouts.errors import ModelError, StorageError
from rollouts.models.export import FileNames, write_description
from rollouts.models.load import load_hf_model, resolve_model
from rollouts.models.parts import deal_evenly, deal_weights, name_parts, write_part
from rollouts.models.tiny import TINY_KINDS

EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def load(kind: str, cache: Path) -> PreTrainedModel:
    return load_hf_model(resolve_model(f"tiny:{kind}", cache_dir=cache))


def write_parts(model: PreTrainedModel, path: Path, ranks: int) -> list[int]:
    """The number of files of each of so many ranks, which write one after the other."""
    path.mkdir(exist_ok=True)
    write_description(model, path)
    counts: list[int] = []
    for rank in reversed(range(ranks)):
        deal = deal_weights(model, rank, ranks)
        with write_part(path, deal.names, rank) as writer:
            for weight in deal.parameters[rank]:
                writer.take([weight])
        counts.insert(0, len(writer.shards))
    return counts


def read_weights(path: Path) -> dict[str, Tensor]:
    return {
        name: tensor
        for file in sorted(path.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def test_the_largest_thing_goes_first_and_each_to_the_rank_that_has_least():
    # 9 → 0, 7 → 1, 6 → 2, 5 → 2 (11), 5 → 1 (12), 1 → 0 (10)
    assert deal_evenly([5, 9, 1, 6, 5, 7], 3) == [[1, 2], [4, 5], [0, 3]]
    assert deal_evenly([4, 4, 4, 4, 4], 2) == [[0, 2, 4], [1, 3]], (
        "the first rank of those that have least; in their order"
    )
    assert deal_evenly([3], 3) == [[0], [], []]
    assert deal_evenly([2, 8, 3], 2, to_first=[0, 2]) == [[0, 2], [1]]


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_no_rank_has_more_than_an_equal_share_and_the_largest_weight(ranks: int, cache: Path):
    model = load("qwen3", cache)
    total, largest = (
        sum(parameter.nbytes for parameter in model.parameters()),
        max(parameter.nbytes for parameter in model.parameters()),
    )
    deals = [deal_weights(model, rank, ranks) for rank in range(ranks)]
    assert sum(deal.nbytes for deal in deals) == total
    assert max(deal.nbytes for deal in deals) <= total / ranks + largest
    dealt = [[name for name, _ in mine] for mine in deals[0].parameters]
    assert all([[name for name, _ in mine] for mine in deal.parameters] == dealt for deal in deals), (
        "every rank comes to the same deal"
    )
    order = [name for name, _ in model.named_parameters()]
    assert sorted(name for mine in dealt for name in mine) == sorted(order)
    assert all(mine == sorted(mine, key=order.index) for mine in dealt)


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_parts_together_are_the_model_that_transformers_loads(kind: str, cache: Path, tmp_path: Path):
    model = load(kind, cache)
    counts = write_parts(model, tmp_path / "parts", 3)
    assert counts == [1, 1, 1]
    name_parts(tmp_path / "parts", counts)
    files = {f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)}
    assert {path.name for path in (tmp_path / "parts").glob("model*")} == files | {
        "model.safetensors.index.json"
    }
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "parts", dtype=torch.float32)
    for (name, one), (_, other) in zip(loaded.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(one, other), name
    model.save_pretrained(str(tmp_path / "theirs"))
    theirs, ours = load_file(tmp_path / "theirs/model.safetensors"), read_weights(tmp_path / "parts")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    weight_map = json.loads((tmp_path / "parts/model.safetensors.index.json").read_text())["weight_map"]
    assert weight_map == {
        name: file.name for file in (tmp_path / "parts").glob("*.safetensors") for name in load_file(file)
    }


def test_one_rank_writes_one_file_and_ranks_without_a_weight_none(cache: Path, tmp_path: Path):
    model = load("llama", cache)
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone/model-of-rank-0-00001.safetensors").write_text("left by a write that failed")
    alone = write_parts(model, tmp_path / "alone", 1)
    name_parts(tmp_path / "alone", alone)
    assert [path.name for path in (tmp_path / "alone").glob("model*")] == ["model.safetensors"]
    assert torch.equal(
        load_hf_model(tmp_path / "alone").get_parameter(EMBEDDING), model.get_parameter(EMBEDDING)
    )
    many = len(list(model.parameters())) + 2
    assert write_parts(model, tmp_path / "many", many) == [1] * (many - 2) + [0, 0]
    name_parts(tmp_path / "many", [1] * (many - 2) + [0, 0])
    ours, theirs = read_weights(tmp_path / "many"), read_weights(tmp_path / "alone")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_directory_that_is_written_again_by_another_number_of_ranks_has_the_new_weights_only(
    cache: Path, tmp_path: Path
):
    model = load("llama", cache)
    for ranks in (1, 2, 1):
        with torch.no_grad():
            model.get_parameter(EMBEDDING).add_(1.0)
        name_parts(tmp_path, write_parts(model, tmp_path, ranks))
        assert torch.equal(
            load_hf_model(tmp_path).get_parameter(EMBEDDING), model.get_parameter(EMBEDDING)
        ), ranks


def test_weights_that_files_join_go_to_one_rank(cache: Path, tmp_path: Path):
    from transformers.core_model_loading import Chunk, WeightConverter

    model = load("llama", cache)
    split = ["mlp.gate_proj.weight", "mlp.up_proj.weight"]
    converter = WeightConverter("mlp.gate_up.weight", split, operations=[Chunk(dim=0)])
    model._weight_conversions = [converter]  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
    layers = len(model.model.layers)
    units = FileNames(model).find_units()
    joined = {tuple(f"model.layers.{layer}.{name}" for name in split) for layer in range(layers)}
    assert {unit for unit in units if len(unit) > 1} == joined
    assert sorted(name for unit in units for name in unit) == sorted(
        name for name, _ in model.named_parameters()
    )
    name_parts(tmp_path, write_parts(model, tmp_path, 4))
    found = read_weights(tmp_path)
    for layer in range(layers):
        both = torch.cat([model.get_parameter(f"model.layers.{layer}.{name}").detach() for name in split])
        assert torch.equal(found[f"model.layers.{layer}.mlp.gate_up.weight"], both)
    assert not [name for name in found if name.endswith(tuple(split))]


def test_buffers_of_the_files_are_rank_0s_also_where_it_has_nothing_else(cache: Path, tmp_path: Path):
    model = load("llama", cache)
    model.model.register_buffer("scale", torch.arange(100_000.0))  # more than any share of the weights
    deals = [deal_weights(model, rank, 3) for rank in range(3)]
    assert deals[0].nbytes == 400_000 and deals[0].parameters[0] == []
    counts = write_parts(model, tmp_path, 3)
    assert counts == [1, 1, 1]
    assert load_file(tmp_path / "model-of-rank-0-00001.safetensors").keys() == {"model.scale"}
    name_parts(tmp_path, counts)
    assert torch.equal(read_weights(tmp_path)["model.scale"], torch.arange(100_000.0))


def test_a_part_without_one_of_its_weights_or_with_one_of_anothers_is_refused_by_name(
    cache: Path, tmp_path: Path
):
    model = load("llama", cache)
    deal = deal_weights(model, 1, 2)
    mine, others = deal.parameters[1], deal.parameters[0]
    with (
        pytest.raises(ModelError, match=f"1 weights never came, '{mine[-1][0]}'"),
        write_part(tmp_path, deal.names, 1) as writer,
    ):
        writer.take(mine[:-1])
    deal = deal_weights(model, 1, 2)
    with (
        pytest.raises(ModelError, match=f"'{others[0][0]}' came twice, or is none"),
        write_part(tmp_path, deal.names, 1) as writer,
    ):
        writer.take([others[0]])


def test_files_of_ranks_that_overlap_are_cut_or_are_not_to_be_seen_get_no_names(cache: Path, tmp_path: Path):
    model = load("llama", cache)
    write_parts(model, tmp_path, 2)
    with pytest.raises(FileNotFoundError, match="model-of-rank-1-00002"):
        name_parts(tmp_path, [1, 2])
    second, whole = (
        tmp_path / "model-of-rank-1-00001.safetensors",
        (tmp_path / "model-of-rank-1-00001.safetensors").read_bytes(),
    )
    second.write_bytes((tmp_path / "model-of-rank-0-00001.safetensors").read_bytes())
    with pytest.raises(ModelError, match=r"would hold 'model\..*' twice \(and \d+ more\)"):
        name_parts(tmp_path, [1, 1])
    second.write_bytes(whole[:-1])
    with pytest.raises(StorageError, match=r"model-of-rank-1-00001.*cannot be read on rank 0"):
        name_parts(tmp_path, [1, 1])
    assert not (tmp_path / "model.safetensors.index.json").exists()

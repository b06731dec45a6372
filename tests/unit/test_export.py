"""A model directory written from a stream of buckets, by one process or by several ranks: what others load is
what was streamed, and little is held meanwhile. tests.distributed has real ranks.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rollouts.errors import ModelError, StorageError
from rollouts.models.export import (
    deal_weights,
    name_parts,
    open_part,
    save_hf_model,
    write_description,
    write_safetensors,
)
from rollouts.models.load import load_hf_model, load_tokenizer, resolve_model
from rollouts.models.made import MODELS
from rollouts.models.sharded import plan_weights
from rollouts.testing.torch_contracts import assert_weights_equal
from tests.support.plain_backend import load_tiny
from tests.support.text_tables import cases

EMBEDDING = "model.embed_tokens.weight"


def parameters(model):
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def write_part(model, path, rank, ranks, of):
    """How many files this rank has written, of the part of rank `of`."""
    writer = open_part(path, deal_weights(model, rank, ranks).names, rank)
    for weight in deal_weights(model, rank, ranks).parameters[of]:
        writer.take([weight])
    writer.close()
    return len(writer.shards)


def write_parts(model, path, ranks):
    """The number of files of each of so many ranks, which write one after the other."""
    path.mkdir(exist_ok=True)
    write_description(model, path)
    return [write_part(model, path, rank, ranks, rank) for rank in reversed(range(ranks))][::-1]


def read_weights(path):
    """All tensors of a directory, each where the index says."""
    files = {file.name: load_file(file) for file in path.glob("*.safetensors")}
    if (index := path / "model.safetensors.index.json").exists():
        where = {name: file for file, tensors in files.items() for name in tensors}
        assert json.loads(index.read_text())["weight_map"] == where
    return {name: tensor for tensors in files.values() for name, tensor in tensors.items()}


@cases("ranks: 0 1 3")
@cases("kind", MODELS)
def test_what_is_written_is_what_transformers_writes_and_loads(kind, ranks: int, tmp_path):
    """0 ranks: a stream in small shards."""
    model, path = load_tiny(kind), tmp_path / "ours"
    if ranks:
        name_parts(path, write_parts(model, path, ranks))
        assert len(list(path.glob("*.safetensors"))) == ranks
    else:
        save_hf_model(model, path, weights=reversed(parameters(model)), shard_bytes=100_000)
        files = sorted(path.glob("*.safetensors"))
        assert all(file.stat().st_size <= 170_000 or len(load_file(file)) == 1 for file in files)
        assert files[1].name == f"model-00002-of-{len(files):05d}.safetensors"
    model.save_pretrained(theirs := tmp_path / "theirs")
    assert_weights_equal(read_weights(path), load_file(theirs / "model.safetensors"))
    assert json.loads((path / "config.json").read_text()) == json.loads((theirs / "config.json").read_text())
    loaded, ids = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), torch.arange(3, 43)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, loaded(ids).logits)
    assert_weights_equal(dict(parameters(loaded)), dict(parameters(model)))


def test_a_streamed_directory_has_the_tokenizer_and_the_dtype_that_was_asked_for(tmp_path):
    path, out = resolve_model("tiny:llama"), tmp_path / "out"
    model, tokenizer = load_hf_model(path), load_tokenizer(path)
    save_hf_model(model, out, tokenizer, dtype=torch.bfloat16)
    assert_weights_equal(read_weights(out), {name: weight.bfloat16() for name, weight in parameters(model)})
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert load_tokenizer(out).encode("a b") == tokenizer.encode("a b")


def test_a_file_holds_tensors_of_every_dtype_and_size(tmp_path):
    odd, empty, one = torch.arange(3, dtype=torch.uint8), torch.zeros(0, 4), torch.tensor(7).bfloat16()
    tensors = {"odd": odd, "empty": empty, "one": one, 'a " and é': torch.arange(6.0).view(2, 3).T}
    write_safetensors(tmp_path / "a.safetensors", tensors)
    assert_weights_equal(load_file(tmp_path / "a.safetensors"), tensors)
    with pytest.raises(ModelError, match="'complex' has dtype"):
        write_safetensors(tmp_path / "b.safetensors", {"complex": torch.zeros(1, dtype=torch.complex64)})


def test_weights_that_are_joined_in_files_wait_for_each_other(tmp_path):
    from transformers.core_model_loading import Chunk, WeightConverter

    model = load_tiny("llama")
    split = ["mlp.gate_proj.weight", "mlp.up_proj.weight"]
    model._weight_conversions = [WeightConverter("mlp.gate_up.weight", split, operations=[Chunk(dim=0)])]
    # more than any share of the weights: rank 0 writes it, and nothing else
    model.model.register_buffer("scale", torch.arange(100_000.0))
    assert deal_weights(model, 0, 3).parameters[0] == []
    name_parts(tmp_path, write_parts(model, tmp_path, 4))  # both halves go to one rank
    written = read_weights(tmp_path)
    joined = torch.cat([model.get_parameter(f"model.layers.1.{name}") for name in split])
    assert torch.equal(written["model.layers.1.mlp.gate_up.weight"], joined)
    assert torch.equal(written["model.scale"], torch.arange(100_000.0))


def test_no_rank_has_more_than_an_equal_share_and_the_largest_weight():
    model, ranks = load_tiny("qwen3"), 3
    sizes = {name: weight.nbytes for name, weight in parameters(model)}
    deals = [deal_weights(model, rank, ranks) for rank in range(ranks)]
    assert sum(deal.nbytes for deal in deals) == sum(sizes.values())
    assert max(deal.nbytes for deal in deals) <= sum(sizes.values()) / ranks + max(sizes.values())
    dealt = [[[name for name, _ in part] for part in deal.parameters] for deal in deals]
    assert dealt[0] == dealt[1] == dealt[2]
    assert sorted(name for part in dealt[0] for name in part) == sorted(sizes)


def test_ranks_without_a_weight_write_nothing_and_old_files_go(tmp_path):
    model = load_tiny("llama")
    (tmp_path / "model-of-rank-0-00001.safetensors").write_text("left by a write that failed")
    many = len(parameters(model)) + 2
    for ranks in (1, 2, many, 1):
        with torch.no_grad():
            model.get_parameter(EMBEDDING).add_(1.0)
        counts = write_parts(model, tmp_path, ranks)
        assert sum(counts) == min(ranks, many - 2)
        name_parts(tmp_path, counts)
        assert torch.equal(load_hf_model(tmp_path).get_parameter(EMBEDDING), model.get_parameter(EMBEDDING))


def test_a_weight_that_never_came_came_twice_or_is_anothers_is_named(tmp_path):
    model = load_tiny("qwen3")
    every = parameters(model)
    never, twice = r"1 weights never came, 'lm_head\.weight'", r"'lm_head\.weight' came twice"
    for message, weights in ((never, every[:-1]), (twice, every + every[-1:])):
        with pytest.raises(ModelError, match=message):
            save_hf_model(model, tmp_path, weights=weights)
    with pytest.raises(ModelError, match="came twice, or is none of the model's"):
        write_part(model, tmp_path, 1, 2, of=0)


def test_files_of_ranks_that_are_cut_or_are_not_to_be_seen_get_no_names(tmp_path):
    write_parts(load_tiny("llama"), tmp_path, 2)
    with pytest.raises(FileNotFoundError, match="model-of-rank-1-00002"):
        name_parts(tmp_path, [1, 2])
    second = tmp_path / "model-of-rank-1-00001.safetensors"
    second.write_bytes(second.read_bytes()[:-1])
    with pytest.raises(StorageError, match=r"model-of-rank-1-00001.*cannot be read on rank 0"):
        name_parts(tmp_path, [1, 1])
    assert not (tmp_path / "model.safetensors.index.json").exists()


def test_weights_that_do_not_fit_are_named(tmp_path):
    model = load_tiny("llama")
    save_hf_model(model, tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    head, norm = "lm_head.weight", "model.norm.weight"
    lacking = {name: one for name, one in weights.items() if name != norm}
    for tensors, message in (
        (weights | {head: weights[EMBEDDING] + 1}, r"which config\.json ties, with different values"),
        (weights | {"other": torch.zeros(1)}, "1 are not the model's: other"),
        (weights | {norm: torch.zeros(3)}, r"have another shape: model\.norm\.weight \(3,\) for \(64,"),
        (lacking, r"1 are missing: model\.norm\.weight"),
    ):
        save_file(tensors, file)
        with pytest.raises(ModelError, match=message):
            plan_weights(model, tmp_path)
    save_file(weights | {head: weights[EMBEDDING].clone()}, file)  # equal: fine
    plan_weights(model, tmp_path)

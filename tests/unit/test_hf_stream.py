"""A model directory written from a stream of buckets: what others load is what was streamed, and little is
held meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from rollouts.errors import ModelError
from rollouts.models.export import FileNames, find_joins, save_hf_model, write_hf_stream
from rollouts.models.load import load_hf_model, load_tokenizer, resolve_model
from rollouts.models.shard_writer import GrowingFile
from rollouts.models.sharded import load_sharded_weights, make_meta_model
from rollouts.models.tiny import TINY_KINDS
from rollouts.models.weight_files import plan_weights

IDS = torch.arange(3, 43)[None]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def load(kind: str, cache: Path) -> PreTrainedModel:
    return load_hf_model(resolve_model(f"tiny:{kind}", cache_dir=cache))


def parameters(model: PreTrainedModel) -> list[tuple[str, Tensor]]:
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def compute_logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return model(IDS, use_cache=False).logits


def stream(
    model: PreTrainedModel,
    path: Path,
    weights: Sequence[tuple[str, Tensor]],
    *,
    shard_bytes: int = 2**30,
    **options,
) -> None:
    path.mkdir(parents=True)
    with write_hf_stream(model, path, shard_bytes=shard_bytes, **options) as sink:
        for weight in weights:  # one weight a bucket
            sink([weight])


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_a_streamed_directory_loads_as_the_model_that_was_streamed(kind: str, cache: Path, tmp_path: Path):
    model = load(kind, cache)
    stream(model, tmp_path / "out", list(reversed(parameters(model))), shard_bytes=100_000)
    assert torch.equal(compute_logits(load_hf_model(tmp_path / "out")), compute_logits(model))
    model.save_pretrained(str(tmp_path / "theirs"))
    names = {name for file in (tmp_path / "out").glob("*.safetensors") for name in load_file(file)}
    assert names == load_file(tmp_path / "theirs/model.safetensors").keys()
    assert json.loads((tmp_path / "out/config.json").read_text()) == json.loads(
        (tmp_path / "theirs/config.json").read_text()
    )


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_a_model_made_without_memory_and_filled_from_files_is_the_loaded_model(kind: str, cache: Path):
    path = resolve_model(f"tiny:{kind}", cache_dir=cache)
    loaded, made = load_hf_model(path), make_meta_model(path)
    assert {parameter.device.type for parameter in made.parameters()} == {"meta"}
    assert all(
        torch.equal(buffer, other)
        for buffer, other in zip(made.buffers(), loaded.buffers(), strict=True)
        if not buffer.is_meta
    )
    load_sharded_weights(made, path)
    assert all(torch.equal(*pair) for pair in zip(made.parameters(), loaded.parameters(), strict=True))
    assert made.config.to_dict() == loaded.config.to_dict() and made.training == loaded.training
    assert torch.equal(compute_logits(made), compute_logits(loaded))


def test_little_weights_make_one_file_and_many_an_index_that_finds_each(cache: Path, tmp_path: Path):
    model = load("llama", cache)
    stream(model, tmp_path / "one", parameters(model))
    assert sorted(path.name for path in (tmp_path / "one").glob("model*")) == ["model.safetensors"]
    stream(model, tmp_path / "many", parameters(model), shard_bytes=70_000)
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert [file.name for file in files] == [
        f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)
    ]
    weight_map = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())["weight_map"]
    assert weight_map == {name: file.name for file in files for name in load_file(file)}
    assert all(file.stat().st_size <= 70_000 or len(load_file(file)) == 1 for file in files)


def test_a_streamed_directory_has_the_tokenizer_and_the_dtype_that_was_asked_for(cache: Path, tmp_path: Path):
    path = resolve_model("tiny:llama", cache_dir=cache)
    model = load_hf_model(path)
    stream(model, tmp_path / "out", parameters(model), tokenizer=load_tokenizer(path), dtype=torch.bfloat16)
    weights = load_file(tmp_path / "out/model.safetensors")
    assert all(torch.equal(weights[name], weight.bfloat16()) for name, weight in parameters(model))
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"
    assert load_tokenizer(tmp_path / "out").encode("a b") == load_tokenizer(path).encode("a b")


def test_dtypes_that_differ_go_to_files_of_their_own_where_every_tensor_is_aligned(tmp_path: Path):
    file = GrowingFile(tmp_path / "a.safetensors", 10_000)
    tensors = {
        "odd": torch.arange(3, dtype=torch.uint8),
        "empty": torch.zeros(0, 4, dtype=torch.uint8),
        "one": torch.tensor(7, dtype=torch.uint8),
    }
    for name, tensor in tensors.items():
        file.append(name, tensor)
    file.finish()
    found = load_file(tmp_path / "a.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_only_experts_that_make_one_tensor_of_a_file_wait_for_each_other(cache: Path):
    model = load("moe", cache)
    names = [name for name, _ in parameters(model)]
    assert (
        find_joins(model, names) == {}
    )  # the other way round: one tensor in memory makes several of the files
    translate = FileNames(model)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    found = translate.translate([(name, model.get_parameter(name).detach())])
    assert len(found) == 8 and {tensor.shape for _, tensor in found} == {
        (48, 64)
    }  # four experts, gate and up


def test_weights_that_are_joined_in_files_wait_for_each_other_and_for_nobody_else(
    cache: Path, tmp_path: Path
):
    from transformers.core_model_loading import Chunk, WeightConverter

    model = load("llama", cache)
    split = ["mlp.gate_proj.weight", "mlp.up_proj.weight"]
    model._weight_conversions = [WeightConverter("mlp.gate_up.weight", split, operations=[Chunk(dim=0)])]  # pyright: ignore[reportAttributeAccessIssue]
    names = FileNames(model)
    weights = dict(parameters(model))
    assert (
        names.translate(
            [("model.layers.1.mlp.gate_proj.weight", weights["model.layers.1.mlp.gate_proj.weight"])]
        )
        == []
    )
    assert [name for name, _ in names.translate([("model.norm.weight", weights["model.norm.weight"])])] == [
        "model.norm.weight"
    ]
    found = names.translate(
        [("model.layers.1.mlp.up_proj.weight", weights["model.layers.1.mlp.up_proj.weight"])]
    )
    assert [name for name, _ in found] == ["model.layers.1.mlp.gate_up.weight"]
    assert torch.equal(found[0][1], torch.cat([weights[f"model.layers.1.{part}"] for part in split]))


def test_a_weight_that_never_came_fails_the_directory_by_name(cache: Path, tmp_path: Path):
    model = load("qwen3", cache)
    weights = [(name, weight) for name, weight in parameters(model) if name != "lm_head.weight"]
    with pytest.raises(ModelError, match=r"1 weights never came, 'lm_head\.weight'"):
        stream(model, tmp_path / "out", weights)
    with pytest.raises(ModelError, match=r"'lm_head\.weight' came twice"):
        stream(model, tmp_path / "twice", [*parameters(model), parameters(model)[-1]])


def test_a_full_disk_is_raised_when_the_directory_is_left_and_never_in_the_sink(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(self, name, tensor):
        raise OSError(28, "No space left on device")

    model = load("llama", cache)
    monkeypatch.setattr(GrowingFile, "append", refuse)
    with pytest.raises(OSError, match="No space left"), write_hf_stream(model, tmp_path) as sink:
        sink(parameters(model))  # does not raise: other ranks wait in the next collective


def test_tied_weights_that_files_hold_twice_with_other_values_are_refused(cache: Path, tmp_path: Path):
    model = load("llama", cache)
    save_hf_model(model, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    file = GrowingFile(tmp_path / "model.safetensors", 2**20)
    (tmp_path / "model.safetensors").unlink()
    for name, weight in {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}.items():
        file.append(name, weight)
    file.finish()
    plan_weights(model, tmp_path)  # equal: fine
    with safe_open(tmp_path / "model.safetensors", framework="pt") as opened:
        weights = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    weights["lm_head.weight"][258, 3] += 1
    (tmp_path / "model.safetensors").unlink()
    file = GrowingFile(tmp_path / "model.safetensors", 2**20)
    for name, weight in weights.items():
        file.append(name, weight)
    file.finish()
    with pytest.raises(ModelError, match=r"which config\.json ties, with different values"):
        plan_weights(model, tmp_path)

"""LoRA adapters as the weights of a version, on real servers of both kinds: one for each serves all tests."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

from rollouts.engines.server import ServerEngine
from rollouts.errors import EngineError
from rollouts.testing.engine_contracts import LONG, at_work, make_request
from rollouts.types import Completion, GenerateRequest, SamplingParams
from tests.support.plain_backend import score_completion

from .conftest import Kind, RunningServer, Snapshots, find_python, open_engine, run_server

pytestmark = pytest.mark.engines
RANK = 4
MODULES = ("q_proj", "v_proj", "o_proj", "down_proj")
Model = transformers.LlamaForCausalLM


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def server(
    request: pytest.FixtureRequest, snapshots: Snapshots, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    kind: Kind = request.param
    folder = tmp_path_factory.mktemp(f"{kind}-lora")
    with run_server(kind, find_python(kind), snapshots[0], folder, lora=(RANK, MODULES)) as running:
        yield running


def make_adapter(base: Path, path: Path, *, seed: int, rank: int = RANK) -> Model:
    """Writes an adapter of random A and B into `path`; the model that it makes of `base`, in float32."""
    draw = torch.Generator().manual_seed(seed)
    model = Model.from_pretrained(base, dtype=torch.float32)
    tensors: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name.endswith(MODULES):
            a = torch.randn(rank, module.in_features, generator=draw) * 0.2
            b = torch.randn(module.out_features, rank, generator=draw) * 0.2
            module.weight.data += 2.0 * b @ a  # alpha / rank
            tensors[f"base_model.model.{name}.lora_A.weight"] = a
            tensors[f"base_model.model.{name}.lora_B.weight"] = b
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "bias": "none",
    }
    config |= {"base_model_name_or_path": str(base), "target_modules": [*MODULES], "lora_dropout": 0.0}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return model


async def bring(engine: ServerEngine, path: Path, version: int) -> None:
    await engine.pause("keep")
    try:
        await engine.update_weights_from_checkpoint(path, version)
    finally:
        await engine.resume()


async def assert_serves(engine: ServerEngine, model: Model, version: int) -> Completion:
    """Its version, and log-probs of a prompt and an answer, are those of the model."""
    prompt = np.arange(5, 250, 15)
    request = GenerateRequest(
        request_id=f"probe-{version}",
        prompt_ids=prompt,
        sampling=SamplingParams(max_new_tokens=8),
        score_prompt=True,
    )
    answer = await engine.generate(request)
    assert await engine.weight_version() == version
    assert answer.weight_versions.tolist() == [version] * 8
    np.testing.assert_allclose(answer.log_probs, score_completion(model, request, answer), atol=2e-4)
    with torch.no_grad():
        scores = model(torch.from_numpy(prompt)[None]).logits[0, :-1].log_softmax(-1)
    expected = scores.gather(-1, torch.from_numpy(prompt)[1:, None])[:, 0].numpy()
    assert answer.prompt_log_probs is not None
    np.testing.assert_allclose(answer.prompt_log_probs[1:], expected, atol=2e-4)
    return answer


async def test_adapters_and_whole_weights_follow_each_other_while_requests_are_in_flight(
    server: RunningServer, snapshots: Snapshots, tmp_path: Path
):
    """What is cut off carries the version, and the log-probs, of the adapter that it began with."""
    first, second = snapshots
    paths = [first, *(tmp_path / f"a{version}" for version in range(1, 6)), second, tmp_path / "b"]
    models = [Model.from_pretrained(first, dtype=torch.float32)]
    models += [make_adapter(first, path, seed=seed) for seed, path in enumerate(paths[1:6])]
    models += [Model.from_pretrained(second, dtype=torch.float32), make_adapter(second, paths[7], seed=7)]
    async with open_engine(server) as engine:
        assert engine.features.max_adapter_rank >= RANK
        await bring(engine, first, 0)
        base_sum = await engine.dialect.checksum()
        for version in range(1, len(paths)):
            async with at_work(engine) as answers:
                await bring(engine, paths[version], version)
            long = answers["long"]
            assert {*long.weight_versions.tolist()} <= {version - 1}
            expected = score_completion(models[version - 1], make_request("long", max_new_tokens=LONG), long)
            np.testing.assert_allclose(long.log_probs, expected, atol=5e-4)
            await assert_serves(engine, models[version], version)
            if version <= 5:  # the server's own is of the base
                assert await engine.dialect.checksum() == base_sum
                assert not engine.features.checksum
                assert await engine.checksum() is None
        await bring(engine, second, 8)
        assert engine.features.checksum and await engine.checksum() != base_sum


async def test_an_adapter_that_cannot_be_served_is_refused_in_the_servers_words_and_the_one_before_stays(
    server: RunningServer, snapshots: Snapshots, tmp_path: Path
):
    model = make_adapter(snapshots[0], tmp_path / "fits", seed=1)
    make_adapter(snapshots[0], tmp_path / "large", seed=1, rank=64)
    make_adapter(snapshots[0], tmp_path / "cut", seed=2)
    weights = tmp_path / "cut" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    async with open_engine(server) as engine:
        await bring(engine, snapshots[0], 20)
        await bring(engine, tmp_path / "fits", 21)
        with pytest.raises(EngineError, match=r"max.lora.rank"):
            await bring(engine, tmp_path / "large", 22)
        with pytest.raises(EngineError, match="load_lora_adapter gave"):
            await bring(engine, tmp_path / "cut", 22)
        await assert_serves(engine, model, 21)

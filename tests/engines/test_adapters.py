"""LoRA adapters as the weights of a version, on real servers of both kinds: one for each serves all tests."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

from rollouts.errors import EngineError, RequestRefused
from rollouts.models.load import load_tokenizer
from rollouts.testing.engine_contracts import LONG, asked, at_work, make_request
from rollouts.types import GenerateRequest, SamplingParams
from tests.support.plain_backend import score_completion, score_row

from .conftest import open_engine, run_server

pytestmark = pytest.mark.engines
RANK = 4
MODULES = ("q_proj", "v_proj", "o_proj", "down_proj")
Model = transformers.LlamaForCausalLM


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def server(request, snapshots, tmp_path_factory):
    kind = request.param
    folder = tmp_path_factory.mktemp(f"{kind}-lora")
    at_once = ("--max-loras", "3") if kind == "vllm" else ()
    with run_server(kind, snapshots[0], folder, *at_once, lora=(RANK, MODULES)) as running:
        yield running


def make_adapter(base, path, *, seed, rank=RANK):
    """Writes an adapter of random A and B into `path`; the model that it makes of `base`, in float32."""
    draw = torch.Generator().manual_seed(seed)
    model = Model.from_pretrained(base, dtype=torch.float32)
    tensors = {}
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


async def bring(engine, path, version):
    await engine.pause("keep")
    try:
        await engine.update_weights_from_checkpoint(path, version)
    finally:
        await engine.resume()


async def assert_serves(engine, model, version):
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
        expected, _ = score_row(model, prompt)
    np.testing.assert_allclose(answer.prompt_log_probs[1:], expected[1:], atol=2e-4)
    return answer


async def test_adapters_and_whole_weights_follow_each_other_while_requests_are_in_flight(
    server, snapshots, tmp_path
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
    server, snapshots, tmp_path
):
    model = make_adapter(snapshots[0], tmp_path / "fits", seed=1)
    make_adapter(snapshots[0], tmp_path / "large", seed=1, rank=64)
    make_adapter(snapshots[0], tmp_path / "cut", seed=2)
    weights = tmp_path / "cut/adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    async with open_engine(server) as engine:
        await bring(engine, snapshots[0], 20)
        await bring(engine, tmp_path / "fits", 21)
        with pytest.raises(EngineError, match=r"max.lora.rank"):
            await bring(engine, tmp_path / "large", 22)
        with pytest.raises(EngineError, match="load_lora_adapter gave"):
            await bring(engine, tmp_path / "cut", 22)
        await assert_serves(engine, model, 21)


# --- by name, and what else a request may ask for -----------------------------------------------------------


def check_answer(model, request, answer):
    """Its log-probs, those of its prompt, and the likeliest at each place are the model's."""
    with torch.no_grad():
        ids = torch.from_numpy(np.concatenate([request.prompt_ids, answer.token_ids]))
        logits, first = model(ids[None]).logits[0, :-1], len(request.prompt_ids) - 1
    plain = logits[:first].log_softmax(-1)
    sampled = (logits[first:] / request.sampling.temperature).log_softmax(-1)
    prompt = plain.gather(-1, ids[1 : first + 1, None])[:, 0]
    tokens = sampled.gather(-1, ids[first + 1 :, None])[:, 0]
    np.testing.assert_allclose(answer.prompt_log_probs[1:], prompt, atol=2e-4)
    np.testing.assert_allclose(answer.log_probs, tokens, atol=2e-4)
    for found, scores in ((answer.prompt_top, plain), (answer.top_log_probs, sampled)):
        np.testing.assert_allclose(found.log_probs, scores.topk(found.log_probs.shape[1]).values, atol=2e-4)
        listed = scores.gather(-1, torch.from_numpy(found.token_ids))
        np.testing.assert_allclose(found.log_probs, listed, atol=2e-4)


async def test_three_adapters_by_name_are_served_at_once_beside_the_version_and_come_and_go(
    server, snapshots, tmp_path
):
    base = snapshots[0]
    models = {"": Model.from_pretrained(base, dtype=torch.float32)}
    models |= {name: make_adapter(base, tmp_path / name, seed=ord(name)) for name in "abcd"}

    async def check(*names):
        plain = make_request(prompt=tuple(range(5, 250, 15)), max_new_tokens=12, temperature=0.8)
        plain = replace(plain, score_prompt=True, prompt_top=5, top_log_probs=3)
        requests = {
            f"{name}-{index}": replace(plain, request_id=f"{name}-{index}", adapter=name)
            for name in names
            for index in range(3)
        }
        async with asked(engine, *requests.values()) as answers:
            pass
        for key, answer in answers.items():
            check_answer(models[key[:-2]], requests[key], answer)

    async with open_engine(server) as engine:
        await bring(engine, base, 40)
        for name in "abc":
            await engine.add_adapter(name, tmp_path / name)
        if server.kind == "vllm":
            with pytest.raises(RequestRefused, match="names no adapter while the server has some: on a CPU"):
                await engine.generate(make_request())
        await check(*("", "a", "b", "c")[server.kind == "vllm" :])
        await engine.remove_adapter("b")
        await engine.add_adapter("d", tmp_path / "d")
        await engine.add_adapter("b", tmp_path / "d")  # the name is another's now
        models["b"] = models["d"]
        await check("a", "b", "d")
        await bring(engine, tmp_path / "c", 41)
        models[""] = models["c"]
        await check("", "a", "d")
        for name in "abcd":
            await engine.remove_adapter(name)
        await bring(engine, base, 42)
        await assert_serves(engine, Model.from_pretrained(base, dtype=torch.float32), 42)


async def test_a_request_ends_with_the_token_that_completes_a_text(server, snapshots):
    """Bytes of one character in several tokens; and one that ends at its limit at the same time, which
    servers look at first."""
    tokenizer = load_tokenizer(snapshots[0])
    text = "\n\nUser: 漢✓"
    async with open_engine(server) as engine:
        whole = await engine.generate(make_request("whole", max_new_tokens=60, temperature=0.0))
        said = whole.token_ids.tolist()
        stops = [tokenizer.decode(said[first : first + 3]) for first in (20, 33)]
        stops = [stop for stop in stops if "\ufffd" not in stop] + [text]
        for count in range(1, 61):
            spoken = tokenizer.decode(said[:count])
            if any(stop in spoken for stop in stops):
                break
        for limit in (60, count):
            sampling = SamplingParams(max_new_tokens=limit, temperature=0.0, stop_texts=tuple(stops))
            cut = await engine.generate(replace(make_request("cut"), sampling=sampling))
            assert cut.token_ids.tolist() == said[:count]
            assert len(cut.weight_versions) == count
            assert cut.finish_reason == ("length" if limit == count else "stop")

"""Quantised references: how much smaller they are, that a weight stays itself to half a step, and that the
error is measured and told.
"""

import math
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rollouts.device_thread import open_device_thread
from rollouts.errors import ConfigError, DataError, ModelError
from rollouts.models.export import save_hf_model
from rollouts.models.load import load_hf_model
from rollouts.reference.quantize import (
    PackedWeight,
    compare_log_probs,
    count_bytes_by_headers,
    quantize_model,
    sample_probe,
)
from rollouts.reference.score import open_frozen_reference
from rollouts.testing.torch_contracts import make_batch
from rollouts.types import RolloutBatch
from tests.support.made_updates import floats
from tests.support.plain_backend import load_tiny
from tests.support.text_tables import cases, read_params

BATCH = make_batch()


@pytest.fixture
def torchao():
    pytest.importorskip("torchao", reason="needs rollouts-rl[reference-quant]")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A model in which linear layers dominate: 256 wide, of which the tied embedding is 6 %."""
    folder = tmp_path_factory.mktemp("wide") / "model"
    torch.manual_seed(0)
    sizes = "vocab_size = 259, hidden_size = 256, intermediate_size = 768, num_hidden_layers = 2, \
num_attention_heads = 4, tie_word_embeddings = true, initializer_range = 0.08, bos_token_id = 257"
    save_hf_model(LlamaForCausalLM(LlamaConfig(**read_params(sizes))), folder)
    return folder


# --- one weight ---------------------------------------------------------------------------------------------


@cases("bits: 8 4")
@cases("shape: [6,128] [3,5,64] [4,40] [8,36]")
def test_weights_are_themselves_to_a_step(shape: Any, bits: int, torchao):
    """A step of 8 bits is the largest of a block along the row, divided by 127, of which codes are half off.
    One of 4 bits is the range of a block, zero included, divided by 15; the zero point is a whole number of
    steps, so that the ends of the range may be cut by half of one more.
    """
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)) + 0.3
    packed = PackedWeight(weight, bits)
    block = shape[-1] // packed.scale.shape[-2]
    rows, found = weight.reshape(-1, block), packed.unpack().reshape(-1, block)
    assert torch.equal(packed.unpack(torch.tensor([[2, 0]])), packed.unpack()[[2, 0]][None])
    steps = rows.abs().amax(-1, keepdim=True) / 127
    if bits == 4:
        low, high = rows.aminmax(dim=-1, keepdim=True)
        steps = (high.clamp(min=0) - low.clamp(max=0)) / 15
    shares = (found - rows).abs() / steps
    assert 0 < float(shares.max()) <= (0.5001 if bits == 8 else 1.0001)
    assert float((shares > 0.5001).float().mean()) < 0.1
    assert packed.codes.nbytes * 8 == weight.numel() * bits


def test_zeros_stay_zeros_and_what_is_not_finite_is_refused(torchao):
    for bits in (8, 4):
        assert not PackedWeight(torch.zeros(2, 64), bits).unpack().any()
        with pytest.raises(ModelError, match="not finite"):
            PackedWeight(torch.tensor([[math.nan] * 64]), bits)


# --- a model ------------------------------------------------------------------------------------------------


@cases("""
dtype | limit
8bit  | 0.35
4bit  | 0.25
""")
async def test_a_quantised_reference_is_small_and_its_error_is_told(dtype, limit: float, path, torchao):
    said = []
    async with (
        open_device_thread(name="reference", torch_threads=1) as thread,
        open_frozen_reference(path, device_thread=thread) as exact,
        open_frozen_reference(path, dtype=dtype, device_thread=thread, say=said.append) as reference,
    ):
        size, model = reference.model.get_memory_footprint(), load_hf_model(path)
        probe = sample_probe(model)
        again = compare_log_probs(await reference.score(probe), await exact.score(probe), probe)
        metrics = dict(reference.metrics)
    assert size <= limit * model.get_memory_footprint()
    assert size <= count_bytes_by_headers(path, dtype) <= size + 2 * 64 * 1024
    assert again == pytest.approx(metrics, abs=1e-5)
    assert 1e-4 < metrics["reference/log_prob_error/mean"] < (0.05 if dtype == "8bit" else 0.5)
    (line,) = said
    assert dtype in line


@cases("kind: llama qwen3 gemma mamba moe")
def test_every_architecture_runs_and_tied_weights_are_stored_once(kind, torchao):
    model = load_tiny(kind)
    batch = torch.arange(12).view(2, 6)
    with torch.no_grad():
        before = model(input_ids=batch).logits.log_softmax(-1)
        bytes_before = model.get_memory_footprint()
        quantize_model(model, 8)
        after = model(input_ids=batch).logits.log_softmax(-1)
    assert 0 < float((after - before).abs().max()) < 0.5
    assert model.get_memory_footprint() < 0.35 * bytes_before
    embedding, head = (
        getattr(module, "_packed_weight", None)
        for module in (model.get_input_embeddings(), model.get_output_embeddings())
    )
    assert embedding is not None
    assert (embedding is head) == bool(model.config.get_text_config().tie_word_embeddings)


# --- the error ----------------------------------------------------------------------------------------------


def test_known_values_of_the_bias():
    """Tokens of the mask differ by 0.5 and −0.1: the bias is their mean, 0.2."""
    masks = np.asarray([False, True, False]), np.asarray([False, True])
    batch = RolloutBatch(tokens=(np.arange(3), np.arange(2)), loss_masks=masks)
    exact, rough = floats([0, -1.0, 0], [0, -2.0]), floats([9, -1.5, 9], [9, -1.9])
    assert compare_log_probs(rough, exact, batch) == pytest.approx(
        {"reference/kl_bias": 0.2, "reference/log_prob_error/mean": 0.3, "reference/log_prob_error/max": 0.5},
        abs=1e-6,
    )
    with pytest.raises(DataError, match="train no token"):
        compare_log_probs(rough, exact, replace(batch, loss_masks=tuple(map(np.zeros_like, masks))))


async def test_without_the_library_the_error_names_the_extra(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    async with open_device_thread(name="reference", torch_threads=1) as thread:
        with pytest.raises(ConfigError, match=r"rollouts-rl\[reference-quant\]"):
            async with open_frozen_reference(path, dtype="8bit", device_thread=thread):
                pass

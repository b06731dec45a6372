"""Adapters compute, name, train and are on disk as in `peft`, and the model stays as it is."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from transformers import AutoModelForSequenceClassification

from rollouts.config.model import LoraConfig
from rollouts.errors import ModelError
from rollouts.models.load import load_hf_model, resolve_model
from rollouts.models.lora import (
    ALL_LINEAR,
    choose_places,
    load_adapter,
    make_adapter,
    merge_adapter,
    prepare_places,
    read_adapter,
)
from rollouts.testing.torch_contracts import SFT, assert_weights_equal, make_batch, train
from tests.support.adapters import IDS, fill, make_random, open_trained, run, save_random, wrap
from tests.support.plain_backend import load_tiny, save_scalar
from tests.support.text_tables import cases, read_params
from tests.unit.test_local_engine import make_model
from tests.unit.test_models import edit_json

torch.set_num_threads(1)
# peft 0.21 asks for what transformers has renamed
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
MOE = read_params(
    "num_experts = 4, num_experts_per_tok = 2, moe_intermediate_size = 16, head_dim = 8,"
    " num_hidden_layers = 1"
)


def make_kind(kind, folder):
    """A frozen random model of 4 heads, which share 2 of keys and values where the family can."""
    if kind == "gguf":
        from tests.unit.test_gguf import write_gguf

        write_gguf(folder / "small.gguf")
        return load_hf_model(resolve_model(str(folder / "small.gguf"), cache_dir=folder))
    changes = {"tied": {"tie_word_embeddings": True}, "Qwen3Moe": MOE}.get(kind, {})
    return make_model("Llama" if kind == "tied" else kind, **changes)


def assert_near(found, wanted):
    """To 1e-6 of the largest."""
    assert ((found - wanted).abs().max() <= 1e-6 * wanted.abs().max()).item()


@cases("""
kind     | targets
tied     | all-linear
Llama    | q_proj v_proj
Llama    | layers.1.mlp.up_proj k_proj
Phi3     | all-linear
Phi3     | qkv_proj gate_up_proj
GPT2     | all-linear
GPT2     | c_attn mlp.c_proj
Gemma2   | all-linear
Qwen3Moe | all-linear
Qwen3Moe | experts.gate_up_proj q_proj
Qwen3Moe | down_proj
gguf     | all-linear
""")
def test_logits_gradients_and_names_are_those_of_peft(kind, targets, tmp_path):
    """Merged, the logits are the same to rounding."""
    model, names = make_kind(kind, tmp_path), targets.split()
    adapter = make_random(model, tmp_path, targets=names)
    stacks = [name for name in adapter.pairs if adapter.of.places[name].experts]
    assert bool(stacks) == (kind == "Qwen3Moe")
    # what peft means by names of a model with experts depends on its version
    theirs = adapter.target_modules if stacks else targets if targets == ALL_LINEAR else names
    twin = wrap(
        model,
        task_type="CAUSAL_LM",
        target_modules=theirs,
        target_parameters=stacks or None,
        fan_in_fan_out=kind == "GPT2",
    )
    fill(twin, adapter.weights)
    unmerged, wrapped = run(model, adapter), twin(input_ids=IDS, use_cache=False).logits
    assert_near(unmerged, wrapped)
    assert not torch.allclose(unmerged, run(model), atol=0.1)
    weights = torch.randn(wrapped.shape, generator=torch.Generator().manual_seed(1))
    for logits in (unmerged, wrapped):
        (logits.log_softmax(-1) * weights).sum().backward()
    wanted = {
        name.replace(".default", ""): one.grad for name, one in twin.named_parameters() if one.requires_grad
    }
    for name, weight in adapter.weights.items():
        assert weight.grad is not None
        assert_near(weight.grad, wanted[name])
    assert all(one.grad is None for one in model.parameters())
    merge_adapter(adapter)
    assert_close(run(model), unmerged, rtol=1e-5, atol=1e-4)


ENDS = """q_proj proj self_attn o_proj layers.0.self_attn.k_proj 1.mlp.up_proj mlp.down_proj
    model.layers.0.mlp.gate_proj odel.layers.0.mlp.gate_proj lm_head embed_tokens norm"""


@pytest.fixture(scope="module")
def llama():
    model = make_model(tie_word_embeddings=True)
    prepare_places(model, Path("nowhere"))
    return model


@given(st.lists(st.sampled_from(ENDS.split()), min_size=1, unique=True))
@settings(deadline=None, max_examples=50)
def test_names_choose_the_linear_layers_that_they_choose_in_peft(llama, names):
    """A name that chooses none of them is refused."""
    import peft
    from peft.tuners.tuners_utils import check_target_module_exists

    linear = [
        path
        for path, module in llama.named_modules()
        if isinstance(module, torch.nn.Linear) and path != "lm_head"
    ]

    def choose(*targets):
        config = peft.LoraConfig(target_modules=list(targets))
        return [path for path in linear if check_target_module_exists(config, path)]

    if idle := [name for name in names if not choose(name)]:
        message = rf"targets has '{re.escape(idle[0])}', which is no linear layer.*it has .*q_proj"
        with pytest.raises(ModelError, match=message):
            choose_places(llama, names)
    else:
        assert list(choose_places(llama, names)) == choose(*names)
    assert list(choose_places(llama, [ALL_LINEAR])) == linear


def test_an_adapter_begins_as_nothing_drawn_by_its_seed_alone(llama):
    one, same, other = (make_adapter(llama, LoraConfig(), seed=seed) for seed in (3, 3, 4))
    assert_weights_equal(one.weights, same.weights)
    first = next(iter(one.pairs))
    assert not torch.equal(one.pairs[first].a, other.pairs[first].a)
    # of PEFT: uniform within √(6 / ((1 + 5) · in)), in = 32
    assert 0.9 * 32**-0.5 < float(one.pairs[first].a.detach().abs().max()) < 32**-0.5
    assert torch.equal(run(llama, one), run(llama))


@cases("kind: llama moe")
async def test_training_moves_the_adapter_and_no_bit_of_the_model(kind):
    def copy_all(model):
        return {name: one.clone() for name, one in (*model.named_parameters(), *model.named_buffers())}

    async with open_trained(resolve_model(f"tiny:{kind}")) as backend:
        before, began = copy_all(backend.model), await backend.get_weights()
        assert_weights_equal(before, copy_all(load_tiny(kind)))
        for seed in range(3):
            await train(backend, make_batch(seed))
        ended = await backend.get_weights()
        assert_weights_equal(copy_all(backend.model), before)
        assert not any(one.requires_grad for one in backend.model.parameters())
    assert began.keys() == ended.keys() and not any(torch.equal(began[name], ended[name]) for name in began)


async def take_gradients(path, batch, **options):
    """The loss, and the gradients of a batch of SFT, twice."""
    async with open_trained(path, **options) as backend:
        plain = await backend.forward(batch)
        losses = [(await backend.forward_backward(batch, SFT)).loss for _ in range(2)]
        assert all(map(lambda one, other: (one == other).all(), plain, await backend.forward(batch)))
        return losses[0], [one.grad for one in backend.trainer.adapter.weights.values()]


async def test_dropout_is_of_training_only_and_layers_computed_twice_drop_the_same(tmp_path):
    path, batch = resolve_model("tiny:llama"), make_batch()
    save_random(load_tiny("llama"), path, tmp_path)
    lora = {"alpha": 6.0, "init_from": str(tmp_path)}
    sure, exact = await take_gradients(path, batch, lora=lora)
    dropped, wanted = await take_gradients(path, batch, lora=lora | {"dropout": 0.5})
    _, found = await take_gradients(path, batch, lora=lora | {"dropout": 0.5}, gradient_checkpointing=True)
    assert abs(dropped - sure) > 1e-3 and not torch.allclose(wanted[0], exact[0], rtol=0.1)
    assert_close(found, wanted, rtol=1e-5, atol=1e-7)


def test_another_rank_is_refused(tmp_path):
    path = resolve_model("tiny:llama")
    model = load_tiny("llama")
    save_random(model, path, tmp_path)
    with pytest.raises(ModelError, match=r"has rank 4, and model.lora.rank=8; set it to the former"):
        load_adapter(make_random(model, path, rank=8), tmp_path)


# --- files --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scalar(tmp_path_factory):
    """A directory of a reward model."""
    return save_scalar("llama", tmp_path_factory.mktemp("scalar") / "llama")


def load_theirs(base, kind):
    """The base as transformers loads it."""
    if kind != "scalar":
        return load_tiny(kind)
    return AutoModelForSequenceClassification.from_pretrained(str(base)).eval()


def find_base(kind, scalar):
    return scalar if kind == "scalar" else resolve_model(f"tiny:{kind}")


@cases("""
kind   | targets
llama  | all-linear
qwen3  | v_proj 1.mlp.up_proj
gemma  | all-linear
moe    | all-linear
moe    | experts.down_proj
scalar | all-linear
""")
def test_what_we_write_peft_loads_and_our_own_loader_merges(kind, targets, scalar, tmp_path):
    import peft

    base, head = find_base(kind, scalar), "scalar" if kind == "scalar" else "tokens"
    model = load_hf_model(base, head=head)
    adapter = save_random(model, base, tmp_path, targets=targets.split(), scalar=kind == "scalar")
    theirs = peft.PeftModel.from_pretrained(load_theirs(base, kind), str(tmp_path))
    merged = run(load_hf_model(tmp_path, head=head))
    assert_close(merged, theirs(input_ids=IDS, use_cache=False).logits, rtol=1e-5, atol=1e-4)
    if kind != "scalar":  # whose own head runs here, and not the adapter's
        assert_close(run(model, adapter), merged, rtol=1e-5, atol=1e-4)
    assert not torch.allclose(merged, run(model), atol=0.01)


@cases("""
kind   | options
llama  | target_modules = "all-linear"
llama  | target_modules = ["q_proj", "layers.1.mlp.up_proj"], use_rslora = true, lora_dropout = 0.3
moe    | target_modules = ["o_proj"], target_parameters = ["experts.gate_up_proj"]
scalar | target_modules = ["q_proj"]
""")
def test_what_peft_writes_we_load(kind, options: dict, scalar, tmp_path):
    base = find_base(kind, scalar)
    options["task_type"] = "SEQ_CLS" if kind == "scalar" else "CAUSAL_LM"
    twin = wrap(load_theirs(base, kind), **options)
    with torch.no_grad():
        for parameter in twin.parameters():
            if parameter.requires_grad:
                parameter.normal_(0.0, 0.2)
    twin.save_pretrained(str(tmp_path))
    merged = run(load_hf_model(tmp_path, head="scalar" if kind == "scalar" else "tokens"))
    assert_close(merged, twin(input_ids=IDS, use_cache=False).logits, rtol=1e-5, atol=1e-4)


@cases(r"""
changes                                  | message
{"use_dora": true}                       | asks for \{'use_dora': True\}
{"bias": "all"}                          | asks for \{'bias': 'all'\}
{"rank_pattern": {"q_proj": 2}}          | asks for \{'rank_pattern'
{"layers_to_transform": [0]}             | asks for \{'layers_to_transform': \[0\]\}
{"modules_to_save": ["embed_tokens"]}    | asks for \['embed_tokens'\]
{"peft_type": "LOHA"}                    | peft_type='LOHA'.*use a plain LoRA adapter
{"peft_type": null}                      | adapter_config.json cannot be read.*peft_type
{"r": 5}                                 | do not fit: 42 weights are of one of them only or of another shape
{"target_modules": ["q_proj"]}           | do not fit: 36 weights
{"target_modules": ["q_proj", "key"]}    | has 'key', which is no linear layer
""")
def test_a_config_that_asks_for_more_or_does_not_fit_is_refused(changes: Any, message, tmp_path):
    base, model = resolve_model("tiny:llama"), load_tiny("llama")
    save_random(model, base, tmp_path)
    edit_json(tmp_path / "adapter_config.json", **changes)
    with pytest.raises(ModelError, match=message):
        read_adapter(model, tmp_path)


def test_another_base_is_refused_by_its_digests(tmp_path):
    base, other = resolve_model("tiny:llama"), tmp_path / "other"
    save_random(load_tiny("llama"), base, tmp_path)
    shutil.copytree(base, other)
    model = load_hf_model(other)
    prepare_places(model, other)
    read_adapter(model, tmp_path)  # the same files elsewhere
    file = other / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"@")  # 1.0 becomes 2.0
    prepare_places(model, other)
    with pytest.raises(ModelError, match=f"was at {base}; that at {other} has other files"):
        read_adapter(model, tmp_path)


@cases("kept: 0 100 -1")
def test_a_file_that_is_cut_is_refused_and_changes_nothing(kept: int, tmp_path):
    base, model = resolve_model("tiny:llama"), load_tiny("llama")
    save_random(model, base, tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors cannot be read"):
        load_hf_model(tmp_path)

"""Model directories, tokenizers, export, and the optimizer with its learning rate worked by hand."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from rollouts.config.tables import OptimConfig
from rollouts.errors import ModelError
from rollouts.models.load import load_hf_model, load_tokenizer, resolve_model, stop_token_ids
from rollouts.models.optim import compute_lr, create_adamw_optimizer
from rollouts.models.tokenizers import make_byte_tokenizer
from rollouts.testing.torch_contracts import assert_weights_equal
from tests.support.plain_backend import load_tiny
from tests.support.text_tables import cases, read_params

torch.set_num_threads(1)


@pytest.fixture
def tiny():
    return resolve_model("tiny:byte")


@pytest.fixture
def copied(tiny, tmp_path):
    """A copy of the tiny model that a test may damage."""
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def edit_json(path, **changes):
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


# --- directories --------------------------------------------------------------------------------------------


@cases("""
family             | settings | kept
Glm4MoeForCausalLM | n_routed_experts = 4, num_experts_per_tok = 2, moe_intermediate_size = 16, \
first_k_dense_replace = 1, head_dim = 8 | mlp.gate.e_score_correction_bias
Ernie4_5_MoeForCausalLM | moe_num_experts = 4, moe_k = 2, moe_intermediate_size = 16 | mlp.gate.weight
""")
def test_what_transformers_keeps_in_float32_is_not_loaded_in_16_bits(tmp_path, family, settings, kept):
    model_class = getattr(transformers, family)
    sizes = "vocab_size = 64, hidden_size = 32, intermediate_size = 48, num_hidden_layers = 2, n_group = 1, \
topk_group = 1, num_attention_heads = 4, num_key_value_heads = 2"
    model_class(model_class.config_class(**read_params(f"{sizes}, {settings}"))).save_pretrained(tmp_path)
    ours = load_hf_model(tmp_path, dtype=torch.bfloat16).state_dict()
    theirs = model_class.from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    assert ours[f"model.layers.1.{kept}"].dtype == torch.float32
    assert_weights_equal(ours, theirs)


def test_a_directory_without_config_or_with_a_lost_shard_is_refused(copied):
    index = copied / "model.safetensors.index.json"
    files = ["model.safetensors", "model-2.safetensors", "model-3.safetensors"]
    for content, message in (
        (json.dumps({"weight_map": dict(enumerate(files))}), r"lacks model-2\.safetensors \(and 1 more\)"),
        ("{", r"index\.json cannot be read"),
    ):
        index.write_text(content)
        with pytest.raises(ModelError, match=message):
            resolve_model(str(copied))
    index.write_text('{"weight_map": {"a": "model.safetensors"}}')
    assert resolve_model(str(copied)) == copied
    (copied / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        resolve_model(str(copied))
    with pytest.raises(ModelError, match="does not exist"):
        load_hf_model(copied / "nowhere")


def test_a_hub_name_is_downloaded_without_pickles_and_checked(tiny, monkeypatch):
    def download(name, *, allow_patterns, ignore_patterns):
        assert name == "org/model" and "*.safetensors" in allow_patterns and "*.bin" not in allow_patterns
        return str(tiny)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda name, file: str(tiny / file))
    assert resolve_model("org/model") == tiny


@cases("""
name
org/no-such-model
bad name!
""")
def test_a_hub_that_cannot_be_reached_names_the_way_out(name):
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE") as caught:
        resolve_model(name)
    assert caught.value.__cause__ is not None


# --- loading ------------------------------------------------------------------------------------------------


def test_loading_gives_the_files_weights_in_the_asked_dtype_and_prints_nothing(tiny, capfd):
    stored = load_file(tiny / "model.safetensors")
    for dtype in (torch.float32, torch.bfloat16):
        model = load_hf_model(tiny, dtype=dtype)
        assert not model.training
        wanted = {name: stored[name].to(dtype) for name, _ in model.named_parameters()}
        assert_weights_equal(dict(model.named_parameters()), wanted)
    load_tokenizer(tiny)
    assert capfd.readouterr() == ("", "")


def test_a_file_that_is_cut_is_a_model_error_with_its_cause(copied):
    weights = (copied / "model.safetensors").read_bytes()
    (copied / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(ModelError, match="cannot be read"):
        load_hf_model(copied)


@cases("""
model_type | architecture              | more | message
vit | ViTForImageClassification | | not a causal language model that transformers has.*decoder-
bert | BertForMaskedLM | | not trained to predict the next token
llama | LlamaForSequenceClassification | | not trained to predict the next token
llama | LlamaModel | | not trained to predict the next token
whisper | WhisperForX | is_encoder_decoder = true | not trained to predict
gemma3 | Gemma3ForConditionalGeneration | | images or sound as well; use its text-only model
llama | LlamaForCausalLM | quantization_config = { quant_method = "gptq" } | packed by 'gptq'.*made from
new | New | auto_map = { AutoModelForCausalLM = "code.New" } | needs code from its directory
evil | Evil | auto_map = { AutoConfig = "evil.E", AutoModelForCausalLM = "evil.E" } | auto_map.*never run
""")
def test_a_model_that_cannot_be_trained_is_refused_before_its_weights_are_read_or_its_code_is_run(
    copied, monkeypatch, model_type, architecture, more: dict, message
):
    (copied / "evil.py").write_text("raise SystemExit('ran code from a model directory')\n")
    config = {"model_type": model_type, "architectures": [architecture], **more}
    edit_json(copied / "config.json", **config)
    monkeypatch.setattr("rollouts.models.load.load_sharded_weights", lambda *_, **__: pytest.fail("read it"))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda name, file: str(copied / file))
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("downloaded it"))
    for use in (lambda: resolve_model(str(copied)), lambda: load_hf_model(copied)):
        with pytest.raises(ModelError, match=message):
            use()
    with pytest.raises(ModelError):
        resolve_model("org/model")


# --- tokenizers ---------------------------------------------------------------------------------------------


def test_any_text_survives_the_byte_tokenizer(tiny):
    text = " two  spaces é漢字🎉\x00\r\n\t it 's n't , . !\n\n<|im_start|>user\nx<|im_end|>"
    for tokenizer in (make_byte_tokenizer(), load_tokenizer(tiny)):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@cases("""
eos         | expected
258         | [258]
[2, 258, 1] | [1, 2, 258]
null        | [258]
7           | [7, 258]
""")
def test_stop_ids_are_those_of_the_tokenizer_and_of_the_generation_config(copied, eos: Any, expected: Any):
    edit_json(copied / "generation_config.json", eos_token_id=eos)
    assert stop_token_ids(load_tokenizer(copied), copied) == tuple(expected)


# --- optimizer ----------------------------------------------------------------------------------------------


def test_weight_decay_is_on_matrices_only_and_tied_weights_are_there_once():
    model = load_tiny("byte")
    model.model.norm.requires_grad_(False)
    matrices, rest = create_adamw_optimizer(model, OptimConfig(lr=0.1, weight_decay=0.01)).param_groups
    # the embedding once and 7 matrices a layer; two norms a layer, of which the last is frozen
    assert [parameter.ndim for parameter in matrices["params"] + rest["params"]] == [2] * 15 + [1] * 4
    assert (matrices["weight_decay"], rest["weight_decay"]) == (0.01, 0.0)


def test_the_first_adamw_step_matches_the_number_worked_by_hand():
    layer = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(layer.weight, 2.0)
    torch.nn.init.constant_(layer.bias, 2.0)
    optimizer = create_adamw_optimizer(layer, OptimConfig(lr=0.1, weight_decay=0.5))
    layer.weight.grad, layer.bias.grad = torch.tensor([[-3.0]]), torch.tensor([4.0])
    optimizer.step()
    # decay first: 2 (1 - .1 * .5) = 1.9; the first step moves by lr * sign(grad)
    assert [layer.weight.item(), layer.bias.item()] == pytest.approx([1.9 + 0.1, 2.0 - 0.1])


def test_a_model_without_trained_parameters_is_refused():
    with pytest.raises(ValueError, match="nothing to optimize"):
        create_adamw_optimizer(torch.nn.Linear(1, 1).requires_grad_(False), OptimConfig())


@cases("""
schedule | expected | …
constant | 0.5 1 1 1 1 1
linear   | 0.5 1 0.75 0.5 0.25 0
cosine   | 0.5 1 0.853553391 0.5 0.146446609 0 | (1 + cos(pi k/4))/2 for k = 1..4; cos(pi/4) = .7071068
""")
def test_the_learning_rate_rises_and_falls_as_worked_by_hand(schedule, expected: list[float]):
    config = OptimConfig(lr=2.0, schedule=schedule, warmup_steps=2)
    found = [compute_lr(step, 6, config) / 2.0 for step in (*range(6), 100)]
    assert found == pytest.approx([*expected, expected[-1]])

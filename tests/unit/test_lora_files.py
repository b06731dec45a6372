"""Adapters on disk: what we write `peft` loads, and what it writes we load, or refuse by name."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from rollouts.errors import ModelError
from rollouts.models.load import load_hf_model, resolve_model
from rollouts.models.lora import prepare_places
from rollouts.models.lora_files import read_adapter
from tests.support.adapters import IDS, run, save_random, wrap
from tests.support.plain_backend import load_tiny, save_scalar
from tests.support.text_tables import cases
from tests.unit.test_models import edit_json

torch.set_num_threads(1)
# peft 0.21 asks for what transformers has renamed
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


@pytest.fixture(scope="module")
def scalar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of a reward model."""
    return save_scalar("llama", tmp_path_factory.mktemp("scalar") / "llama")


def load_theirs(base: Path, kind: str) -> Any:
    """The base as transformers loads it."""
    if kind == "scalar":
        return AutoModelForSequenceClassification.from_pretrained(str(base)).eval()
    return load_tiny(kind)


def find_base(kind: str, scalar: Path) -> Path:
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
def test_what_we_write_peft_loads_and_our_own_loader_merges(
    kind: str, targets: str, scalar: Path, tmp_path: Path
):
    import peft

    base, head = find_base(kind, scalar), "scalar" if kind == "scalar" else "tokens"
    model = load_hf_model(base, head=head)
    adapter = save_random(model, base, tmp_path, targets=targets.split(), scalar=kind == "scalar")
    theirs = peft.PeftModel.from_pretrained(load_theirs(base, kind), str(tmp_path))
    merged = run(load_hf_model(tmp_path, head=head))
    torch.testing.assert_close(merged, theirs(input_ids=IDS, use_cache=False).logits, rtol=1e-5, atol=1e-4)
    if kind != "scalar":  # whose own head runs here, and not the adapter's
        torch.testing.assert_close(run(model, adapter), merged, rtol=1e-5, atol=1e-4)
    assert not torch.allclose(merged, run(model), atol=0.01)


@cases("""
kind   | options
llama  | target_modules = "all-linear"
llama  | target_modules = ["q_proj", "layers.1.mlp.up_proj"], use_rslora = true, lora_dropout = 0.3
moe    | target_modules = ["o_proj"], target_parameters = ["experts.gate_up_proj"]
scalar | target_modules = ["q_proj"]
""")
def test_what_peft_writes_we_load(kind: str, options: dict, scalar: Path, tmp_path: Path):
    base = find_base(kind, scalar)
    options["task_type"] = "SEQ_CLS" if kind == "scalar" else "CAUSAL_LM"
    twin = wrap(load_theirs(base, kind), **options)
    with torch.no_grad():
        for parameter in twin.parameters():
            if parameter.requires_grad:
                parameter.normal_(0.0, 0.2)
    twin.save_pretrained(str(tmp_path))
    merged = run(load_hf_model(tmp_path, head="scalar" if kind == "scalar" else "tokens"))
    torch.testing.assert_close(merged, twin(input_ids=IDS, use_cache=False).logits, rtol=1e-5, atol=1e-4)


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
def test_a_config_that_asks_for_more_or_does_not_fit_is_refused(changes: Any, message: str, tmp_path: Path):
    base, model = resolve_model("tiny:llama"), load_tiny("llama")
    save_random(model, base, tmp_path)
    edit_json(tmp_path / "adapter_config.json", **changes)
    with pytest.raises(ModelError, match=message):
        read_adapter(model, tmp_path)


def test_another_base_is_refused_by_its_digests(tmp_path: Path):
    base, other = resolve_model("tiny:llama"), tmp_path / "other"
    save_random(load_tiny("llama"), base, tmp_path)
    shutil.copytree(base, other)
    model = load_hf_model(other)
    prepare_places(model, other)
    read_adapter(model, tmp_path)  # the same files elsewhere
    file = other / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"@")  # 1.0 becomes 2.0
    prepare_places(model, other)
    with pytest.raises(ModelError, match=f"was at {base}, and the model at {other} has other files"):
        read_adapter(model, tmp_path)


@cases("kept: 0 100 -1")
def test_a_file_that_is_cut_is_refused_and_changes_nothing(kept: int, tmp_path: Path):
    base, model = resolve_model("tiny:llama"), load_tiny("llama")
    save_random(model, base, tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors cannot be read"):
        load_hf_model(tmp_path)

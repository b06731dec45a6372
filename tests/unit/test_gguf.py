"""GGUF files become model directories with the same weights; what is no such file, or is not whole, is
named.
"""

import importlib.util
import os
import tomllib

import numpy as np
import pytest
import torch
from transformers.convert_slow_tokenizer import bytes_to_unicode

from rollouts.errors import ModelError
from rollouts.models.load import load_hf_model, load_tokenizer, resolve_model, stop_token_ids
from rollouts.models.tokenizers import CHAT_TEMPLATE
from tests.support.text_tables import cases, read_cells

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")
torch.set_num_threads(1)
TOKENS = [*(text for _, text in sorted(bytes_to_unicode().items())), "he", "<|im_start|>", "<|im_end|>"]


# GGUF's name of each tensor, by Hugging Face's, and its shape
NAMES = {
    ours.replace("LAYER", layer): (theirs.replace("LAYER", layer), [*map(int, shape.split())])
    for layer in "01"
    for ours, theirs, shape in read_cells("""
model.embed_tokens                          | token_embd            | 259 32
model.norm                                  | output_norm           | 32
model.layers.LAYER.input_layernorm          | blk.LAYER.attn_norm   | 32
model.layers.LAYER.post_attention_layernorm | blk.LAYER.ffn_norm    | 32
model.layers.LAYER.self_attn.q_proj         | blk.LAYER.attn_q      | 32 32
model.layers.LAYER.self_attn.k_proj         | blk.LAYER.attn_k      | 16 32
model.layers.LAYER.self_attn.v_proj         | blk.LAYER.attn_v      | 16 32
model.layers.LAYER.self_attn.o_proj         | blk.LAYER.attn_output | 32 32
model.layers.LAYER.mlp.gate_proj            | blk.LAYER.ffn_gate    | 48 32
model.layers.LAYER.mlp.up_proj              | blk.LAYER.ffn_up      | 48 32
model.layers.LAYER.mlp.down_proj            | blk.LAYER.ffn_down    | 32 48
lm_head                                     | output                | 259 32
""")
}
SETTINGS = tomllib.loads("""
context_length = 128
embedding_length = 32
block_count = 2
feed_forward_length = 48
head_count = 4
head_count_kv = 2
layer_norm_rms_eps = 1e-5
rope_freq_base = 10000.0
rope_dimension_count = 8
tokenizer_model = "gpt2"
tokenizer_pre = "smollm"
token_merges = ["h e"]
bos_token_id = 257
eos_token_id = 258
pad_token_id = 258
""")
SETTINGS |= {"vocab_size": len(TOKENS), "token_list": TOKENS, "token_types": [1] * 257 + [3] * 2}
SETTINGS["chat_template"] = CHAT_TEMPLATE


def write_gguf(path, *, seed=0, leave_out="output"):
    """A two-layer Llama in float32 with a byte-level BPE tokenizer, tied unless it has "output". Returns its
    tensors by GGUF name. `leave_out`: names of tensors, divided by spaces.
    """
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(str(path), "llama")
    for name, value in SETTINGS.items():
        getattr(writer, f"add_{name}")(value)
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in NAMES.values()}
    for name in leave_out.split():
        del tensors[name]
    for name, values in tensors.items():
        writer.add_tensor(f"{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def unpermute(weight, heads):
    """GGUF interleaves the two rotary halves of each head; Hugging Face keeps them apart."""
    return weight.reshape(heads, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


@cases("tied: yes no")
def test_a_gguf_file_becomes_a_directory_with_the_same_weights_and_tokenizer(tied: bool, tmp_path, capfd):
    tensors = write_gguf(tmp_path / "small.gguf", leave_out="output" if tied else "")
    tensors.setdefault("output", tensors["token_embd"])
    path = resolve_model(str(tmp_path / "small.gguf"), cache_dir=tmp_path / "cache")
    assert path.parent == tmp_path / "cache" and path.name.startswith("small-")
    weights = load_hf_model(path).state_dict()
    assert {f"{name}.weight" for name in NAMES} == set(weights)
    for ours, (theirs, _) in NAMES.items():
        heads = {"attn_q": 4, "attn_k": 2}.get(theirs.rpartition(".")[2])
        expected = unpermute(tensors[theirs], heads) if heads else tensors[theirs]
        np.testing.assert_array_equal(weights[f"{ours}.weight"].numpy(), expected, err_msg=ours)
    tokenizer = load_tokenizer(path)
    assert tokenizer.encode("he é", add_special_tokens=False) == [256, ord(" "), 0xC3, 0xA9]
    written = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    assert written == "<|im_start|>user\nx<|im_end|>\n"
    assert stop_token_ids(tokenizer, path) == (258,)
    assert capfd.readouterr() == ("", "")


def test_a_file_is_converted_once_and_again_when_it_was_replaced(tmp_path):
    file, cache = tmp_path / "small.gguf", tmp_path / "cache"
    found = []
    for seed in (0, 0, 1):
        write_gguf(file, seed=seed)
        path = resolve_model(str(file), cache_dir=cache)
        found.append((path, (path / "config.json").stat().st_mtime_ns))
    assert found[0] == found[1] and found[2][0] != found[0][0]


# what is in the file, or what is left out of it; how much of it is there
@cases(r"""
content             | part  | message
<!doctype html>     | 1     | small\.gguf is not a GGUF file \(it begins with b'<!do'
output              | 0     | small\.gguf is not a GGUF file
output              | 0.02  | small\.gguf cannot be converted .*cut short
output              | 0.999 | small\.gguf cannot be converted .*cut short
output blk.1.ffn_up | 1     | lacks model\.layers\.1\.mlp\.up_proj\.weight
""")
def test_a_file_that_is_none_or_not_whole_is_named_and_leaves_nothing_behind(
    content, part: float, message, tmp_path
):
    file, cache = tmp_path / "small.gguf", tmp_path / "cache"
    with pytest.raises(ModelError, match="is not a directory or file here"):
        resolve_model(str(file), cache_dir=cache)
    if content.startswith("<"):
        file.write_text(content)
    else:
        write_gguf(file, leave_out=content)
    os.truncate(file, int(file.stat().st_size * part))
    with pytest.raises(ModelError, match=message):
        resolve_model(str(file), cache_dir=cache)
    assert [path for path in cache.glob("*") if path.suffix != ".lock"] == []


def test_packages_that_are_missing_are_named(tmp_path, monkeypatch):
    write_gguf(tmp_path / "small.gguf")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None)
    with pytest.raises(ModelError, match="without gguf and accelerate: pip install gguf accelerate"):
        resolve_model(str(tmp_path / "small.gguf"), cache_dir=tmp_path / "cache")

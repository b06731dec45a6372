"""GGUF files become model directories with the same weights; what is no such file, or is not whole, is
named.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from rollouts.errors import ModelError
from rollouts.models import gguf as gguf_module
from rollouts.models.load import load_hf_model, load_tokenizer, resolve_model, stop_token_ids
from rollouts.models.tokenizers import CHAT_TEMPLATE, byte_characters

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")
torch.set_num_threads(1)
HIDDEN, HEADS, KV_HEADS, FEED_FORWARD, LAYERS = 32, 4, 2, 48, 2
TOKENS = [*byte_characters(), "he", "<|im_start|>", "<|im_end|>"]


def tensor_shapes(*, tied: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (len(TOKENS), HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        shapes |= {f"{block}attn_norm": (HIDDEN,), f"{block}ffn_norm": (HIDDEN,)}
        shapes |= {f"{block}attn_q": (HIDDEN, HIDDEN), f"{block}attn_output": (HIDDEN, HIDDEN)}
        shapes |= {f"{block}attn_k": (HIDDEN // 2, HIDDEN), f"{block}attn_v": (HIDDEN // 2, HIDDEN)}
        shapes |= {
            f"{block}ffn_gate": (FEED_FORWARD, HIDDEN),
            f"{block}ffn_up": (FEED_FORWARD, HIDDEN),
            f"{block}ffn_down": (HIDDEN, FEED_FORWARD),
        }
    return shapes if tied else shapes | {"output": (len(TOKENS), HIDDEN)}


def write_gguf(
    path: Path, *, seed: int = 0, architecture: str = "llama", tied: bool = True, leave_out: str = ""
) -> dict[str, np.ndarray]:
    """A two-layer Llama in float32 with a byte-level BPE tokenizer. Returns its tensors by GGUF name."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_merges(["h e"])
    writer.add_token_types([1] * 257 + [3] * 2)
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    writer.add_pad_token_id(258)
    writer.add_chat_template(CHAT_TEMPLATE)
    tensors = {
        name: rng.normal(size=shape).astype(np.float32)
        for name, shape in tensor_shapes(tied=tied).items()
        if name != leave_out
    }
    for name, values in tensors.items():
        writer.add_tensor(f"{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """GGUF interleaves the two rotary halves of each head; Hugging Face keeps them apart."""
    return weight.reshape(heads, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_file_becomes_a_directory_with_the_same_weights_and_tokenizer(
    tied: bool, tmp_path: Path, capfd
):
    tensors = write_gguf(tmp_path / "small.gguf", tied=tied)
    path = resolve_model(str(tmp_path / "small.gguf"), cache_dir=tmp_path / "cache")
    assert path.parent == tmp_path / "cache"
    assert path.name.startswith("small-")
    weights = load_hf_model(path).state_dict()
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "token_embd" if tied else "output",
    }
    for layer in range(LAYERS):
        ours, theirs = f"model.layers.{layer}.", f"blk.{layer}."
        names |= {
            f"{ours}input_layernorm": f"{theirs}attn_norm",
            f"{ours}post_attention_layernorm": f"{theirs}ffn_norm",
        }
        names |= {f"{ours}self_attn.{letter}_proj": f"{theirs}attn_{letter}" for letter in "qkv"}
        names |= {f"{ours}self_attn.o_proj": f"{theirs}attn_output"}
        names |= {f"{ours}mlp.{part}_proj": f"{theirs}ffn_{part}" for part in ("gate", "up", "down")}
    assert {f"{name}.weight" for name in names} == set(weights)
    for ours, theirs in names.items():
        heads = HEADS if theirs.endswith("attn_q") else KV_HEADS if theirs.endswith("attn_k") else 0
        expected = unpermute(tensors[theirs], heads) if heads else tensors[theirs]
        np.testing.assert_array_equal(weights[f"{ours}.weight"].numpy(), expected, err_msg=ours)
    tokenizer = load_tokenizer(path)
    assert tokenizer.encode("he é", add_special_tokens=False) == [256, ord(" "), 0xC3, 0xA9]
    assert (
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
        == "<|im_start|>user\nx<|im_end|>\n"
    )
    assert stop_token_ids(tokenizer, path) == (258,)
    assert capfd.readouterr() == ("", "")


def test_a_file_is_converted_once_and_again_when_it_was_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file, converted = tmp_path / "small.gguf", []
    real = gguf_module.convert_gguf
    monkeypatch.setattr(gguf_module, "convert_gguf", lambda *inputs: (converted.append(1), real(*inputs)))
    write_gguf(file, seed=0)
    first = resolve_model(str(file), cache_dir=tmp_path / "cache")
    assert resolve_model(str(file), cache_dir=tmp_path / "cache") == first
    assert len(converted) == 1
    write_gguf(file, seed=1)
    assert resolve_model(str(file), cache_dir=tmp_path / "cache") != first
    assert len(converted) == 2


def nothing_made(cache: Path) -> bool:
    return not cache.exists() or not [path for path in cache.iterdir() if path.suffix != ".lock"]


def test_what_is_not_a_gguf_file_is_named(tmp_path: Path):
    (tmp_path / "page.gguf").write_text("<!doctype html>")
    with pytest.raises(ModelError, match=r"page\.gguf is not a GGUF file \(it begins with b'<!do'"):
        resolve_model(str(tmp_path / "page.gguf"), cache_dir=tmp_path / "cache")
    (tmp_path / "empty.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match=r"empty\.gguf is not a GGUF file"):
        resolve_model(str(tmp_path / "empty.gguf"), cache_dir=tmp_path / "cache")
    with pytest.raises(ModelError, match="is not a file here"):
        resolve_model(str(tmp_path / "absent.gguf"), cache_dir=tmp_path / "cache")
    assert nothing_made(tmp_path / "cache")


@pytest.mark.parametrize("part", [0.02, 0.3, 0.6, 0.95, 0.999])
def test_a_file_that_is_cut_short_is_named_and_leaves_nothing_behind(part: float, tmp_path: Path):
    file = tmp_path / "small.gguf"
    write_gguf(file)
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * part)])
    with pytest.raises(ModelError, match=r"small\.gguf cannot be converted .*cut short") as caught:
        resolve_model(str(file), cache_dir=tmp_path / "cache")
    assert caught.value.__cause__ is not None
    assert nothing_made(tmp_path / "cache")


def test_a_lost_tensor_is_an_error_not_random_numbers(tmp_path: Path):
    write_gguf(tmp_path / "small.gguf", leave_out="blk.1.ffn_up")
    with pytest.raises(ModelError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        resolve_model(str(tmp_path / "small.gguf"), cache_dir=tmp_path / "cache")
    assert nothing_made(tmp_path / "cache")


def test_packages_that_are_missing_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_gguf(tmp_path / "small.gguf")
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name in {"gguf", "accelerate"} else real(name, *rest),
    )
    with pytest.raises(ModelError, match="without gguf and accelerate: pip install gguf accelerate"):
        resolve_model(str(tmp_path / "small.gguf"), cache_dir=tmp_path / "cache")

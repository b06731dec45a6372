"""docs/tier1.md: its blocks run as they stand, in their order, and use every function that the page names."""

import re
import runpy
from pathlib import Path

import pytest

from rollouts.cli import main
from rollouts.models import sampling
from tests import ROOT
from tests.unit.server_engines import open_engine

PAGE = (ROOT / "docs/tier1.md").read_text("utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
ROWS = re.findall(r"^\| (`[a-zA-Z].*?) \| `(rollouts\.[a-z_.0-9]+)` \|", PAGE, flags=re.MULTILINE)


def run_block(block, known=None):
    Path("block.py").write_text(block, "utf-8")
    return runpy.run_path("block.py", init_globals=known)


def open_fake_engine(url, *, vocab_size):
    return open_engine("vllm", vocab_size=vocab_size, read_weights=lambda path: str(sorted(path.iterdir())))


def test_every_function_of_the_table_is_used_in_a_block():
    used = set(re.findall(r"\w+", "".join(BLOCKS)))
    named = {name for names, _ in ROWS for name in re.findall(r"`(\w+)", names)}  # first words of code spans
    assert len(named) > 40 and named - used == set()


def test_the_blocks_give_what_the_page_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rollouts.engines.vllm.open_vllm_engine", open_fake_engine)
    page = {}
    for block in BLOCKS[:-1]:
        page |= run_block(block, page)
    ours, theirs = (log_probs[page["mask"]] for log_probs in page["log_probs"])
    d = ours - theirs
    k3 = (-d).exp() - 1 + d
    kls = d, d**2 / 2, k3, k3.clamp(max=1e-4), k3 * theirs.exp()
    assert page["kls"] == pytest.approx([one.mean().item() for one in kls], rel=1e-3) and page["kls"][2] > 0
    assert repr([*page["again"]]) == repr([*page["batch"].samples])
    assert {sample.weight_versions[-1] for sample in page["from_server"]} == {1}
    assert main(["inspect", "run"]) == 0 and "heldout" in capsys.readouterr().out


def test_the_script_ends_with_the_same_bits_when_it_was_killed(tmp_path, monkeypatch):
    assert len([line for line in BLOCKS[-1].splitlines() if line]) <= 40
    complete = sampling.sample_completions

    def complete_or_die(model, requests):
        if requests[0].request_id == "g00000004-s000":  # in step 3
            raise KeyboardInterrupt
        return complete(model, requests)

    ends = []
    for name in ("unbroken", "killed"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        if name == "killed":
            with monkeypatch.context() as patch:
                patch.setattr(sampling, "sample_completions", complete_or_die)
                with pytest.raises(KeyboardInterrupt):
                    run_block(BLOCKS[-1])
        run_block(BLOCKS[-1])
        last = Path("grpo/checkpoints/rl/step_4")
        ends.append({str(path.relative_to(last)): path.read_bytes() for path in last.rglob("*.*")})
    names = {"model.safetensors", "reference/model.safetensors", "state/optimizer.safetensors"}
    assert ends[0] == ends[1] and names | {"state/trainer.json"} <= ends[0].keys()

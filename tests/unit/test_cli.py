from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollouts.cli import main
from tests.support.text_tables import read_cells


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    text = (
        'model = { name = "./no-model" }\n[rl]\nsteps = 3\ndata = { kind = "jsonl", path = "rows.jsonl" }\n'
    )
    path.write_text(text + 'rollout = { reward = "r.py:score" }\n')
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    return path


def test_explain_tells_where_a_value_comes_from(config: Path, capsys: pytest.CaptureFixture[str]):
    for argv, line in (
        (["rl.steps"], f"rl.steps = 3  ({config})"),
        (["rl.steps", "--rl.steps", "5"], "rl.steps = 5  (--rl.steps)"),
        (["rl.clip_low"], "rl.clip_low = 0.2  (default)"),
        ([], f"rl.steps = 3  ({config})"),
    ):
        assert main(["explain", str(config), *argv]) == 0
        assert line in capsys.readouterr().out


def test_explain_writes_the_page_of_settings(capsys: pytest.CaptureFixture[str]):
    assert main(["explain", "--markdown"]) == 0
    page = Path(__file__).parents[2] / "docs" / "config.md"
    assert capsys.readouterr().out == page.read_text(encoding="utf-8")


WRONG_NAMES = """
explain rl.rolout                       | did you mean rl.rollout?
explain num_generations                 | did you mean rl.rollout.samples_per_prompt
explain CONFIG rl.stps                  | did you mean rl.steps
explain gone.toml rl.steps              | there is no such file
explain rl.steps --rl.steps 5           | name the config that it changes
explain CONFIG rl.steps --rl.stps 5     | did you mean rl.steps
check CONFIG --rl.stps 5                | did you mean rl.steps
check gone.toml                         | there is no such file
check EMPTY                             | there is nothing to train
"""


@pytest.mark.parametrize(("argv", "wanted"), read_cells(WRONG_NAMES))
def test_a_wrong_name_is_one_message_with_the_way_out(
    config: Path, argv: str, wanted: str, capsys: pytest.CaptureFixture[str]
):
    (config.parent / "empty.toml").write_text("")
    words = {"CONFIG": str(config), "EMPTY": str(config.parent / "empty.toml")}
    assert main([words.get(word, word) for word in argv.split()]) == 2
    err = capsys.readouterr().err
    assert err.startswith("ConfigError: ")
    assert wanted in err


def test_check_lists_what_is_wrong_and_exits_2(config: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["check", str(config), "--mode", "sft+rl"]) == 2
    out = " ".join(capsys.readouterr().out.split())
    for wanted in (
        "error sft.data: --mode has the stage",
        f"error rl.rollout.reward: reward='{config.parent}/r.py:score': there is no file",
        "error model.name: model.name=",
        "things would stop this run; nothing was trained",
    ):
        assert wanted in out


@pytest.mark.parametrize("argv", ["unknown", "inspect", "check", "inspect x --nonsense", "init x --seed 1"])
def test_wrong_usage_exits_2(argv: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stopped:
        main(argv.split())
    assert stopped.value.code == 2
    assert "usage: rollouts" in capsys.readouterr().err


def test_a_reader_that_leaves_early_gets_no_traceback():
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "rollouts", "explain"]
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (1, "")

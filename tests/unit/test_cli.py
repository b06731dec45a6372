from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollouts.cli import main


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    text = (
        'model = { name = "./no-model" }\n[rl]\nsteps = 3\ndata = { kind = "jsonl", path = "rows.jsonl" }\n'
    )
    path.write_text(text + 'rollout = { reward = "r.py:score" }\n')
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    return path


def write_small_run(root: Path) -> Path:
    root.mkdir()
    head = {"schema": 1, "stage": "rl", "policy_version": 0, "attempt": 1, "time_unix": 1.0}
    rows = [{**head, "step": step, "reward/mean": step / 4, "time/step": 2.0} for step in (1, 2, 3)]
    (root / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sample = {**head, "step": 3, "id": "p0", "status": "completed", "prompt": "1+1=", "response": "2 [x]"}
    (root / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    return root


def test_inspect_prints_curves_steps_and_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = write_small_run(tmp_path / "run")
    assert main(["inspect", str(run), "--samples", "1", "--last", "2"]) == 0
    out = capsys.readouterr().out
    assert "rl reward" in out
    assert "last 2 steps" in out
    assert "not finished, 1 attempt, no checkpoint" in out
    assert "→ 2 [x]" in out, "text of a sample is not markup"


def test_a_directory_that_is_no_run_exits_2_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["inspect", str(tmp_path / "nothing")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("RunDirError: ")
    assert err.count("\n") == 1


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
    assert capsys.readouterr().out == (Path(__file__).parents[2] / "docs" / "config.md").read_text(
        encoding="utf-8"
    )


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        (["explain", "rl.rolout"], "did you mean rl.rollout?"),
        (["explain", "num_generations"], "did you mean rl.rollout.samples_per_prompt?"),
        (["explain", "CONFIG", "rl.stps"], "did you mean rl.steps?"),
        (["explain", "gone.toml", "rl.steps"], "there is no such file"),
        (["explain", "rl.steps", "--rl.steps", "5"], "name the config that it changes"),
        (["explain", "CONFIG", "rl.steps", "--rl.stps", "5"], "did you mean rl.steps?"),
        (["check", "CONFIG", "--rl.stps", "5"], "did you mean rl.steps?"),
        (["check", "gone.toml"], "there is no such file"),
        (["check", "EMPTY"], "there is nothing to train"),
    ],
)
def test_a_wrong_name_is_one_message_with_the_way_out(
    config: Path, argv: list[str], wanted: str, capsys: pytest.CaptureFixture[str]
):
    (config.parent / "empty.toml").write_text("")
    words = {"CONFIG": str(config), "EMPTY": str(config.parent / "empty.toml")}
    assert main([words.get(word, word) for word in argv]) == 2
    err = capsys.readouterr().err
    assert err.startswith("ConfigError: ")
    assert wanted in err


def test_check_lists_what_is_wrong_and_exits_2(config: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["check", str(config), "--mode", "sft+rl"]) == 2
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert any(line.startswith("error sft.data: --mode has the stage") for line in lines)
    assert any(
        line.startswith(f"error rl.rollout.reward: reward='{config.parent}/r.py:score': there is no file")
        for line in lines
    )
    assert any(line.startswith("error model.name: model.name=") for line in lines)
    assert lines[-1].endswith("things would stop this run; nothing was trained")


@pytest.mark.parametrize(
    "argv",
    [["unknown"], ["inspect"], ["check"], ["inspect", "x", "--nonsense"], ["init", "x", "--seed", "1"]],
)
def test_wrong_usage_exits_2(argv: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    assert stopped.value.code == 2
    assert "usage: rollouts" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["inspect", "RUN"], ["explain"]])
def test_a_reader_that_leaves_early_gets_no_traceback(tmp_path: Path, arguments: list[str]):
    run = write_small_run(tmp_path / "run")
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "rollouts", *(str(run) if word == "RUN" else word for word in arguments)]
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (1, "")

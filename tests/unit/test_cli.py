from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from rollouts import __version__
from rollouts.cli import main
from rollouts.errors import EngineError


def write_small_run(root: Path) -> Path:
    root.mkdir()
    head = {"schema": 1, "stage": "rl", "policy_version": 0, "attempt": 1, "time_unix": 1.0}
    rows = [{**head, "step": step, "reward/mean": step / 4, "time/step": 2.0} for step in (1, 2, 3)]
    (root / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sample = {**head, "step": 3, "id": "p0", "status": "completed", "prompt": "1+1=", "response": "2 [x]", "reward": 1.0}
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


def test_inspect_writes_a_picture_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "curves.png"
    assert main(["inspect", str(write_small_run(tmp_path / "run")), "--png", str(picture)]) == 0
    assert f"wrote {picture}" in capsys.readouterr().out
    assert picture.exists()


def test_a_directory_that_is_no_run_exits_2_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["inspect", str(tmp_path / "nothing")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("RunDirError: ")
    assert err.count("\n") == 1


def test_config_explains_the_settings_of_a_table(capsys: pytest.CaptureFixture[str]):
    assert main(["config", "rl.rollout"]) == 0
    out = capsys.readouterr().out
    assert "rl.rollout.temperature" in out
    assert "sft." not in out


def test_an_unknown_table_exits_2(capsys: pytest.CaptureFixture[str]):
    assert main(["config", "rl.rolout"]) == 2
    assert capsys.readouterr().err.startswith("ConfigError: ")


@pytest.mark.parametrize("argv", [[], ["unknown"], ["inspect"], ["inspect", "x", "--nonsense"]])
def test_wrong_usage_exits_2(argv: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    assert stopped.value.code == 2
    assert "usage: rollouts" in capsys.readouterr().err


def test_other_known_errors_exit_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def fail(_table: str) -> str:
        raise EngineError("it broke")

    monkeypatch.setattr("rollouts.config.explain.explain_config", fail)
    assert main(["config"]) == 1
    assert capsys.readouterr().err == "EngineError: it broke\n"


def test_the_module_is_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "argv", ["rollouts", "--version"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_module("rollouts", run_name="__main__")
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"rollouts {__version__}\n"


@pytest.mark.parametrize("arguments", [["inspect", "RUN"], ["config"]])
def test_a_reader_that_leaves_early_gets_no_traceback(tmp_path: Path, arguments: list[str]):
    run = write_small_run(tmp_path / "run")
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "rollouts", *(str(run) if word == "RUN" else word for word in arguments)]
    try:
        done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, check=False, cwd=Path(__file__).parents[2])
    finally:
        os.close(write_end)
    assert (done.returncode, done.stderr) == (1, "")

"""What `init` writes runs as it is."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import trio

from rollouts.cli import main
from rollouts.config.load import load_config
from rollouts.config.plugins import load_function
from rollouts.data.datasets import load_sources
from rollouts.errors import ConfigError, RunDirError
from rollouts.preflight.findings import Findings
from rollouts.preflight.functions import load_functions, make_trial_samples
from rollouts.preflight.init import TASKS, write_task
from rollouts.preflight.rows import load_all_rows
from rollouts.rewards.call import call_filter, call_reward
from rollouts.rewards.check import apply_reward
from rollouts.types import SampleGroup


@pytest.mark.parametrize("task", TASKS)
def test_what_init_writes_has_rows_and_functions_without_an_error(tmp_path: Path, task: str):
    path, source = write_task(tmp_path / "new", task)
    assert (path, source) == (tmp_path / "new" / "config.toml", tmp_path / "new" / "task.py")
    config = load_config(path)
    findings: Findings = []
    rows = load_all_rows(config, ("sft", "rl"), findings)
    load_functions(config, ("sft", "rl"), base_dir=tmp_path, findings=findings)
    assert [finding for finding in findings if finding.level != "ok"] == []
    assert all(len(rows.list_rows(stage)) > 15 for stage in ("sft", "rl", "eval"))


@pytest.mark.parametrize("task", TASKS)
async def test_the_reward_of_a_task_tells_right_from_wrong(tmp_path: Path, task: str):
    config = load_config(write_task(tmp_path, task)[0])
    assert config.rl is not None
    reward = load_function(config.rl.rollout.reward, role="reward", base_dir=tmp_path)
    keep = load_function(config.rl.rollout.filters[0], role="filter", base_dir=tmp_path)
    assert config.eval is not None
    is_right = load_function(config.eval.reward, role="reward", base_dir=tmp_path)
    right, wrong = make_trial_samples(load_sources(config.rl.data[:1], name="rl.data").samples)
    results = [await call_reward(reward, sample) for sample in (right, wrong)]
    assert results[0].reward == 1.0
    assert results[1].reward < 0.5
    assert [is_right(sample) for sample in (right, wrong)] == [1.0, 0.0]
    both = tuple(apply_reward(sample, result) for sample, result in zip((right, wrong), results, strict=True))
    assert (await call_filter(keep, SampleGroup(0, "row-0", both))).keep
    assert not (await call_filter(keep, SampleGroup(0, "row-0", both[:1] * 2))).keep
    await trio.lowlevel.checkpoint()


def test_nothing_is_overwritten(tmp_path: Path):
    write_task(tmp_path, "counting")
    (tmp_path / "config.toml").unlink()
    (tmp_path / "task.py").write_text("mine", encoding="utf-8")
    with pytest.raises(RunDirError, match=r"task\.py is there already"):
        write_task(tmp_path, "counting")
    assert (tmp_path / "task.py").read_text(encoding="utf-8") == "mine"
    assert not (tmp_path / "config.toml").exists()


def test_a_task_that_does_not_exist_gets_the_nearest(tmp_path: Path):
    with pytest.raises(ConfigError, match="did you mean counting"):
        write_task(tmp_path, "countng")


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(RunDirError, match="cannot be written"):
        write_task(tmp_path / "file" / "inside", "counting")


def test_the_command_says_what_to_do_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["init", str(tmp_path / "new")]) == 0
    out = capsys.readouterr().out
    assert f"check it:  python -m rollouts check {tmp_path / 'new' / 'config.toml'} --call" in out
    assert main(["init", str(tmp_path / "new")]) == 2
    assert "is there already" in capsys.readouterr().err


def test_rows_depend_on_the_seed_alone(tmp_path: Path):
    for task in TASKS:
        write_task(tmp_path / task, task)
        make_rows = load_function("task.py:make_rows", role="rows", base_dir=tmp_path / task)
        assert list(make_rows(size=5, seed=1)) == list(itertools.islice(make_rows(size=9, seed=1), 5))
        assert list(make_rows(size=5, seed=1)) != list(make_rows(size=5, seed=2))

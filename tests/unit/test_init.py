"""What `init` writes runs as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollouts.cli import main
from rollouts.config.load import load_config
from rollouts.errors import ConfigError, RunDirError
from rollouts.preflight.findings import Finding
from rollouts.preflight.functions import load_functions, make_trial_samples
from rollouts.preflight.init import TASKS, write_task
from rollouts.preflight.rows import load_all_rows
from rollouts.rewards.call import call_filter, call_reward
from rollouts.rewards.check import apply_reward
from rollouts.types import SampleGroup


@pytest.mark.parametrize("task", TASKS)
async def test_what_init_writes_has_rows_and_functions_that_tell_right_from_wrong(tmp_path: Path, task: str):
    path, _ = write_task(tmp_path, task)
    config, findings = load_config(path), list[Finding]()
    assert config.rl is not None
    rows = load_all_rows(config, ("sft", "rl"), findings)
    functions = load_functions(config, ("sft", "rl"), base_dir=tmp_path, findings=findings)
    assert [finding for finding in findings if finding.level != "ok"] == []
    assert all(len(rows.list_rows(stage)) > 15 for stage in ("sft", "rl", "eval"))
    samples = make_trial_samples(rows.list_rows("rl"))
    reward, is_right = functions.reward, functions.eval_reward
    assert reward is not None and is_right is not None
    results = [await call_reward(reward, sample) for sample in samples]
    assert results[0].reward == 1.0 and results[1].reward < 0.5
    assert [is_right(sample) for sample in samples] == [1.0, 0.0]
    both = tuple(map(apply_reward, samples, results))
    for group, kept in ((both, True), (both[:1] * 2, False)):
        assert (await call_filter(functions.filters[0], SampleGroup(0, "row-0", group))).keep == kept


def test_what_cannot_be_written_is_named_and_nothing_is_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "task.py").write_text("mine", encoding="utf-8")
    with pytest.raises(RunDirError, match=r"task\.py is there already"):
        write_task(tmp_path, "counting")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("task.py", "mine")]
    with pytest.raises(ConfigError, match="did you mean counting"):
        write_task(tmp_path, "countng")
    with pytest.raises(RunDirError, match="cannot be written"):
        write_task(tmp_path / "task.py" / "inside", "counting")
    assert main(["init", str(tmp_path / "new")]) == 0
    out = capsys.readouterr().out
    assert f"check it:  python -m rollouts check {tmp_path / 'new' / 'config.toml'} --call" in out

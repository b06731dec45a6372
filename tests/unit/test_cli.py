"""What `init` writes runs as it is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollouts.cli import main
from rollouts.config.load import load_config
from rollouts.errors import ConfigError, RunDirError
from rollouts.preflight.findings import Findings
from rollouts.preflight.functions import load_functions, make_trial_samples
from rollouts.preflight.init import TASKS, write_task
from rollouts.preflight.rows import load_all_rows
from rollouts.rewards.call import call_filter, call_reward
from rollouts.rewards.check import apply_reward
from rollouts.types import SampleGroup
from tests.support.text_tables import cases
from tests.unit.run_rows import read_command


@pytest.fixture
def config(tmp_path) -> Path:
    path = tmp_path / "run.toml"
    text = (
        'model = { name = "./no-model" }\n[rl]\nsteps = 3\ndata = { kind = "jsonl", path = "rows.jsonl" }\n'
    )
    path.write_text(text + 'rollout = { reward = "r.py:score" }\n')
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    return path


@cases("""
argv                  | line
rl.steps              | rl.steps = 3  (CONFIG)
rl.steps --rl.steps 5 | rl.steps = 5  (--rl.steps)
rl.clip_low           | rl.clip_low = 0.2  (default)
                      | rl.steps = 3  (CONFIG)
""")
def test_explain_tells_where_a_value_comes_from(config, argv, line, capsys):
    said = read_command(capsys, "explain", config, *argv.split())
    assert line.replace("CONFIG", str(config)) in said


@cases("""
argv                                    | wanted
explain rl.rolout                       | did you mean rl.rollout?
explain num_generations                 | did you mean rl.rollout.samples_per_prompt
explain CONFIG rl.stps                  | did you mean rl.steps
explain gone.toml rl.steps              | No such file
explain rl.steps --rl.steps 5           | name the config that it changes
explain CONFIG rl.steps --rl.stps 5     | did you mean rl.steps
check CONFIG --rl.stps 5                | did you mean rl.steps
check gone.toml                         | No such file
check EMPTY                             | there is nothing to train
evaluate tiny:byte                      | name a TOML file with an [eval] table: --config FILE
evaluate tiny:byte --config EMPTY       | there is no [eval] table
""")
def test_a_wrong_name_is_one_message_with_the_way_out(config, argv: str, wanted, capsys):
    (config.parent / "empty.toml").write_text("")
    words = {"CONFIG": str(config), "EMPTY": str(config.parent / "empty.toml")}
    assert main([words.get(word, word) for word in argv.split()]) == 2
    err = capsys.readouterr().err
    assert err.startswith("ConfigError: ")
    assert wanted in err


@cases("""
argv
unknown
inspect
check
inspect x --nonsense
init x --seed 1
""")
def test_wrong_usage_exits_2(argv, capsys):
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


@pytest.mark.parametrize("task", TASKS)
async def test_what_init_writes_has_rows_and_functions_that_tell_right_from_wrong(tmp_path, task):
    path, _ = write_task(tmp_path, task)
    config, findings = load_config(path), Findings(raises=True)
    rows = load_all_rows(config, ("sft", "rl"), findings)
    functions = load_functions(config, ("sft", "rl"), findings)
    assert all(len(rows.list_rows(stage)) > 15 for stage in ("sft", "rl", "eval"))
    right, wrong = make_trial_samples(rows.list_rows("rl"), turns=False)
    reward, is_right = functions.reward, functions.eval_reward
    assert [is_right(right), is_right(wrong)] == [1.0, 0.0]
    results = [await call_reward(reward, sample) for sample in (right, wrong)]
    assert results[0].reward == 1.0 and results[1].reward < 0.5
    both = tuple(map(apply_reward, (right, wrong), results))
    for group, kept in ((both, True), (both[:1] * 2, False)):
        assert (await call_filter(functions.filters[0], SampleGroup(0, "row-0", group))).keep == kept


def test_what_cannot_be_written_is_named_and_nothing_is_overwritten(tmp_path, capsys):
    (tmp_path / "task.py").write_text("mine", encoding="utf-8")
    with pytest.raises(RunDirError, match=r"task\.py is there already"):
        write_task(tmp_path, "counting")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("task.py", "mine")]
    with pytest.raises(ConfigError, match="did you mean counting"):
        write_task(tmp_path, "countng")
    with pytest.raises(RunDirError, match="cannot be written"):
        write_task(tmp_path / "task.py" / "inside", "counting")
    out = read_command(capsys, "init", tmp_path / "new")
    assert f"check it:  python -m rollouts check {tmp_path / 'new' / 'config.toml'} --call" in out

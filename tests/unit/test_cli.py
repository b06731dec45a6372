"""What `init` writes runs as it is; `check RUN` finds damaged rows, checkpoints and trackers, `check CONFIG`
asks the servers it names; the command line as a whole, and the page docs/command.md.
"""

import os
import re
import shlex
import subprocess
import sys
from functools import partial

import httpx
import pytest

from rollouts.checkpoints.load import compute_manifest, encode_manifest
from rollouts.cli import COMMANDS, main, make_parser
from rollouts.config.load import load_config
from rollouts.config.tables import EngineConfig
from rollouts.errors import ConfigError, RunDirError
from rollouts.preflight.checks import check_servers, check_written_run
from rollouts.preflight.findings import Findings
from rollouts.preflight.functions import load_functions, make_trial_samples
from rollouts.preflight.init import TASKS, write_task
from rollouts.preflight.rows import load_all_rows
from rollouts.rewards.call import call_filter, call_reward
from rollouts.rewards.check import apply_reward
from rollouts.run_dir import RunDir
from rollouts.types import SampleGroup
from tests import ROOT
from tests.support.text_tables import cases, write_jsonl
from tests.unit.run_rows import read_command


@pytest.fixture
def config(tmp_path):
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
def test_a_wrong_name_is_one_message_with_the_way_out(config, argv, wanted, capsys):
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


@cases("task", TASKS)
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
    (tmp_path / "task.py").write_text("mine")
    with pytest.raises(RunDirError, match=r"task\.py is there already"):
        write_task(tmp_path, "counting")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("task.py", "mine")]
    with pytest.raises(ConfigError, match="did you mean counting"):
        write_task(tmp_path, "countng")
    with pytest.raises(RunDirError, match="cannot be written"):
        write_task(tmp_path / "task.py/inside", "counting")
    out = read_command(capsys, "init", tmp_path / "new")
    assert f"check it:  python -m rollouts check {tmp_path / 'new' / 'config.toml'} --call" in out


# --- the whole ----------------------------------------------------------------------------------------------


PAGE = ROOT / "docs/command.md"
SHOWN = re.findall(r"^\$ python -m rollouts (.+)$", PAGE.read_text(), re.MULTILINE)


def run_help(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*words, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_help_lists_every_command_in_order_and_each_explains_itself(capsys):
    assert re.findall(r"^    ([a-z-]+)", run_help([], capsys), re.MULTILINE) == list(COMMANDS)
    assert {shlex.split(line)[0] for line in SHOWN} >= set(COMMANDS)  # the page shows every command
    for command in COMMANDS:
        out = run_help([command], capsys)
        assert out.startswith(f"usage: rollouts {command}")
        assert out.count("\n") > 4


@cases("line", SHOWN)
def test_what_the_page_shows_is_a_command(line, capsys):
    words = [word for word in shlex.split(line) if word != "--help"]
    assert "usage: rollouts" in run_help(words, capsys)
    if len(words) > 1:
        arguments, overrides = make_parser(words[0]).parse_known_args(words)
        assert not overrides or COMMANDS[arguments.chosen]["takes_settings"]


def test_help_loads_nothing_heavy():
    script = """
import sys
from rollouts.cli import make_parser
make_parser().format_help()
print({"torch", "transformers", "rich", "pydantic", "trio", "matplotlib", "duckdb"} & {*sys.modules})
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "set()\n"


# --- check --------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path):
    root = tmp_path / "run"
    checkpoint = root / "checkpoints/rl/step_2"
    checkpoint.mkdir(parents=True)
    rows = [{"stage": "rl", "step": step, "attempt": 1, "time_unix": 1.0} for step in (1, 2)]
    write_jsonl(root / "metrics.jsonl", *rows)
    (checkpoint / "model.safetensors").write_bytes(b"weights")
    manifest = compute_manifest(checkpoint, stage="rl", step=2)
    (checkpoint / "manifest.json").write_bytes(encode_manifest(manifest))
    return root


def check_levels(root, *, deep=False):
    return {finding.subject: finding.level for finding in check_written_run(RunDir(root), deep=deep)}


def test_a_torn_line_is_a_warning_and_a_damaged_one_an_error(run):
    assert check_levels(run, deep=True) == {"metrics.jsonl": "ok", "checkpoints": "ok"}
    for text, level in (('{"stage": "r', "warning"), ("\n", "error")):
        with (run / "metrics.jsonl").open("a") as file:
            file.write(text)
        assert check_levels(run)["metrics.jsonl"] == level


def test_a_flipped_bit_shows_only_when_every_byte_is_read(run):
    weights = run / "checkpoints/rl/step_2/model.safetensors"
    weights.write_bytes(b"weighTs")
    assert check_levels(run)["checkpoints"] == "ok"
    assert check_levels(run, deep=True)["checkpoints/rl/step_2"] == "error"
    for change in (lambda: weights.write_bytes(b"weights and more"), weights.unlink):
        change()
        assert check_levels(run)["checkpoints/rl/step_2"] == "error"


def test_the_command_exits_with_2_where_something_is_wrong(run, capsys):
    (run / "trackers").mkdir()
    (run / "trackers/statsd.json").write_text('{"schema": 1, "id": "a", "files": {}, "number": 0}')
    out = read_command(capsys, "check", run, "--deep")
    assert "warning  tracker statsd: it does not have all rows" in out
    assert "this run is whole (1 warning)" in out
    (run / "checkpoints/rl/step_2/manifest.json").unlink()
    assert main(["check", str(run)]) == 2
    assert "error    checkpoints/rl/step_2: " in capsys.readouterr().out
    assert main(["check", str(run.parent)]) == 2


# address | answers with the key | answers without it | levels of the findings | what is said
@cases("""
url         | with_key                     | without_key | levels | word
127.0.0.1:1 | /health=200 /server_info=200 | | ok | sglang 0.5.23, healthy
10.0.0.5:1 | /health=200 /server_info=200 | /server_info=401 | ok | healthy
10.0.0.5:1 | /health=200 /server_info=200 | /health=200 /server_info=200 | ok warning | whoever reaches it
127.0.0.1:1 | /health=503 | | error | 503 Service
127.0.0.1:1 | /health=200 /server_info=401 | | error | SGLANG_API_KEY
127.0.0.1:1 | | | error | ConnectError
""")
def test_a_server_is_healthy_or_named_with_the_way_out(monkeypatch, url, with_key, without_key, levels, word):
    def answer(request):
        answers = with_key if "authorization" in request.headers else without_key
        codes = dict(pair.split("=") for pair in answers.split())
        if request.url.path not in codes:
            raise httpx.ConnectError("refused")
        content = {"version": "0.5.23", "api_key": "secret-key"}
        return httpx.Response(int(codes[request.url.path]), json=content)

    monkeypatch.setenv("SGLANG_API_KEY", "key")
    config = EngineConfig(kind="sglang", urls=[f"http://{url}"])
    client = partial(httpx.Client, transport=httpx.MockTransport(answer))
    monkeypatch.setattr(httpx, "Client", client)
    check_servers(config, findings := Findings())
    assert [finding.level for finding in findings] == levels.split()
    assert word in findings[-1].message
    assert "secret-key" not in repr(findings)

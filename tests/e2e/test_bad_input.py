"""What is wrong with a setting, a file or a plug-in is said in one message, with exit code 2, before anything
trains.
"""

from collections.abc import Callable

import pytest

from integration_training.train import main
from tests.e2e.conftest import TINY, read_tiny
from tests.support.text_tables import cases

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(tmp_path, capsys):
    """(exit code, what is said) of a run in tmp_path / "run" with these settings."""

    def run_main(settings="", *, config=TINY, mode="sft+rl"):
        given = [*(["--mode", mode] if mode else []), "--output.dir", str(tmp_path / "run")]
        code = main(["--config", str(config), *given, *settings.split()])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.err + captured.out

    return run_main


@cases("""
old                    | new                   | wanted
samples_per_prompt = 8 | sample_per_prompt = 8 | rl.rollout.sample_per_prompt samples_per_prompt
max_new_tokens = 4 | max_new_tokens = "many" | max_new_tokens many
over_sampling = 1.25 | over_sampling = 0.5 | rl.rollout.over_sampling 0.5
advantage = "grpo" | advantage = "grp" | rl.advantage grp grpo
advantage = "grpo" | loss = "ppo_clop" | ppo_clop ppo_clip
advantage = "grpo" | loss_params = { clip_lo = 0.1 } | clip_lo clip_low
advantage = "grpo" | sync_every = 2 | sync_every max_staleness
:close_answer | :clos_answer | clos_answer close_answer
arithmetic.py:close_answer | arithmetics.py:close_answer | arithmetics.py
filters = ["check_reward_nonzero_std"] | filters = ["no_such_module_here:keep"] | no_such_module_here
dataset = "basic_arithmetic" | dataset = "basic_aritmetic" | basic_aritmetic basic_arithmetic
name = "tiny:byte" | name = "tiny:bite" | tiny:bite
""")
def test_a_wrong_setting_is_named_with_the_way_out(run, tmp_path, old, new, wanted):
    text = read_tiny()
    assert old in text
    config = tmp_path / "config.toml"
    config.write_text(text.replace(old, new))
    code, message = run(config=config)
    assert code == 2
    assert all(word in message for word in wanted.split()), message


def test_a_resume_without_its_mode_trains_no_stage_that_comes_before_one_that_has_begun(run, tmp_path):
    short = "--rl.steps 1 --rl.rollout.filters []"
    assert run(short, mode="rl")[0] == 0
    code, message = run(f"{short} --resume", mode="")
    assert (code, not (tmp_path / "run/checkpoints/sft").exists()) == (2, True)
    assert "the stage 'sft' comes before 'rl', which has begun without it" in message
    assert "go on with --mode rl, or name another --output.dir" in message


# {tmp} has a file, another run's directory and a model directory without weights
@cases("""
settings                         | what                      | why
--rl.rollout.max_new_tokens 4000 | rl.rollout.max_new_tokens | more than the context of
--sft.optim.beta2 1.0 | sft.optim.beta2 = 1.0 | less than 1
--seed 18446744073709551616 | seed | less than
--model.template_params.enable_thinkin true | enable_thinkin | template
--sft.max_length 3 | max_length=3 | raise sft.max_length
--rl.rollout.reward nowhere.py:f | reward= | there is no file
--model.name {tmp}/model | {tmp}/model | safetensors
--output.dir {tmp}/other | not empty | --resume
--output.dir {tmp}/other --resume | {tmp}/other | config.toml
--output.dir {tmp}/file/run | output.dir | {tmp}/file/run
""")
def test_what_does_not_fit_is_said_before_a_directory_is_made(run, tmp_path, settings, what, why):
    for name, text in {
        "file": "",
        "other/notes.txt": "",
        "model/config.json": '{"model_type": "llama"}',
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    code, message = run(settings.format(tmp=tmp_path))
    assert code == 2
    assert what.format(tmp=tmp_path) in message and why.format(tmp=tmp_path) in message, message
    assert not (tmp_path / "run").exists()  # the corrected command would be refused


FUNCTIONS = """
import sys

def fine(sample):
    return float(len(sample.response) + sample.id.endswith("s000"))

def letters(*, size, seed):
    return [{"prompt": "abcdef"[index]} for index in range(size)]

def reward(sample):
    return 1e308 if sample.id.endswith("s003") else fine(sample)

def filters(group):
    raise ValueError("no filter")

def curriculum(step, statistics):
    sys.exit(3)

def advantage(inputs):
    return [1e300] * len(inputs.rewards)

def function(*, size, seed):
    sys.exit(3)

async def generate(sample, engine, sampling):
    raise ExceptionGroup("two", [KeyError("a"), ValueError("b")])
"""
USERS_RUN = """
model = { name = "tiny:byte", threads = 1 }
[rl]
steps = 1
[rl.data]
kind = "python"
function = "functions.py:letters"
size = 6
[rl.rollout]
num_prompts = 2
samples_per_prompt = 4
max_new_tokens = 3
max_failed_fraction = 0.9
reward = "functions.py:fine"
"""


# the setting that names the function of that name | the exit code | what is said
@cases("""
setting               | code | said
--rl.rollout.reward   | 0 |
--rl.rollout.filters  | 1 | UserFunctionError: filter filters on group 0
--rl.curriculum       | 1 | functions.py:curriculum in step 1 raised SystemExit: 3
--rl.advantage        | 1 | answered for row 0 with 1e+300; an advantage is one finite number
--rl.rollout.generate | 1 | raised ExceptionGroup: two (2 sub-exceptions)
--rl.data.function    | 2 | raised SystemExit after 0 rows: 3
""")
def test_an_error_of_a_users_function_is_one_message_and_no_traceback(
    run, tmp_path, setting, code: int, said
):
    """A group of exceptions, which Python would print with its traceback, would leave main() as it is."""
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    (tmp_path / "config.toml").write_text(USERS_RUN)
    function = f"{tmp_path}/functions.py:{setting.rpartition('.')[2]}"
    value = f'["{function}"]' if setting.endswith("filters") else function
    found, message = run(f"{setting} {value}", config=tmp_path / "config.toml", mode="rl")
    assert (found, said in message) == (code, True), message


def test_resuming_with_another_setting_or_with_fewer_steps_names_it(run):
    assert run("--sft.steps 3", mode="sft")[0] == 0
    for settings, named in (
        ("--sft.steps 3 --sft.optim.lr 0.5", "sft.optim.lr"),
        ("--sft.steps 2", "sft.steps=2"),
    ):
        code, message = run(f"{settings} --resume", mode="sft")
        assert code == 2
        assert named in message


def test_a_dry_run_reports_and_trains_nothing(run, tmp_path):
    code, message = run("--dry-run", mode="")
    assert code == 0
    assert "nothing was trained" in message
    assert "--mode sft+rl: the stages that the config has tables for" in message
    assert not (tmp_path / "run").exists()


@cases("""
arguments
--mode sft
--config
""")
def test_a_wrong_command_line_exits_with_2(arguments):
    with pytest.raises(SystemExit) as exit_info:
        main(arguments.split())
    assert exit_info.value.code == 2

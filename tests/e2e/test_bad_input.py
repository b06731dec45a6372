"""What is wrong with a setting, a file or a plug-in is said in one message, with exit code 2, before anything
trains.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from integration_training.train import main
from tests.e2e.conftest import TINY


def run(
    capsys: pytest.CaptureFixture[str], *arguments: str, config: Path = TINY, mode: str = "sft+rl"
) -> tuple[int, str]:
    code = main(["--config", str(config), "--mode", mode, *arguments])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return code, captured.err


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory):
    monkeypatch.setenv("ROLLOUTS_CACHE", str(tmp_path_factory.getbasetemp() / "bad_input_cache"))


def changed(tmp_path: Path, old: str, new: str) -> Path:
    text = TINY.read_text().replace("../tasks", str(TINY.parents[1] / "tasks"))
    assert old in text
    path = tmp_path / "config.toml"
    path.write_text(text.replace(old, new))
    return path


@pytest.mark.parametrize(
    ("old", "new", "wanted"),
    [
        (
            "samples_per_prompt = 8",
            "sample_per_prompt = 8",
            ("rl.rollout.sample_per_prompt", "samples_per_prompt"),
        ),
        ("max_new_tokens = 4", 'max_new_tokens = "many"', ("max_new_tokens", "many")),
        ("over_sampling = 1.25", "over_sampling = 0.5", ("rl.rollout.over_sampling", "0.5")),
        ('advantage = "grpo"', 'advantage = "grp"', ("rl.advantage", "grp", "grpo")),
        ('advantage = "grpo"', 'loss = "ppo_clop"', ("ppo_clop", "ppo_clip")),
        ('advantage = "grpo"', "loss_params = { clip_lo = 0.1 }", ("clip_lo", "clip_low")),
        ('advantage = "grpo"', "sync_every = 2", ("sync_every", "max_staleness")),
        (":close_answer", ":clos_answer", ("clos_answer", "close_answer")),
        ("arithmetic.py:close_answer", "arithmetics.py:close_answer", ("arithmetics.py",)),
        (
            'filters = ["check_reward_nonzero_std"]',
            'filters = ["no_such_module_here:keep"]',
            ("no_such_module_here",),
        ),
        (
            'dataset = "basic_arithmetic"',
            'dataset = "basic_aritmetic"',
            ("basic_aritmetic", "basic_arithmetic"),
        ),
        ('name = "tiny:byte"', 'name = "tiny:bite"', ("tiny:bite",)),
    ],
)
def test_a_wrong_setting_is_named_with_the_way_out(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, old: str, new: str, wanted: tuple[str, ...]
):
    code, message = run(capsys, "--output.dir", str(tmp_path / "run"), config=changed(tmp_path, old, new))
    assert code == 2
    assert all(word in message for word in wanted), message


def test_a_model_directory_without_weights_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama"}')
    code, message = run(capsys, "--model.name", str(model), "--output.dir", str(tmp_path / "run"))
    assert code == 2
    assert str(model) in message
    assert "safetensors" in message


def test_the_output_directory_of_another_run_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("not a run")
    code, message = run(capsys, "--output.dir", str(tmp_path / "run"))
    assert (code, "--resume" in message) == (2, True)
    code, message = run(capsys, "--output.dir", str(tmp_path / "run"), "--resume")
    assert (code, "config.toml" in message) == (2, True)


def test_resuming_with_another_setting_names_it(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    out = str(tmp_path / "run")
    assert run(capsys, "--output.dir", out, "--sft.steps", "2", mode="sft")[0] == 0
    code, message = run(
        capsys, "--output.dir", out, "--sft.steps", "2", "--sft.optim.lr", "0.5", "--resume", mode="sft"
    )
    assert code == 2
    assert "sft.optim.lr" in message


def test_a_dry_run_reports_and_trains_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    code = main(
        ["--config", str(TINY), "--mode", "sft+rl", "--dry-run", "--output.dir", str(tmp_path / "run")]
    )
    assert code == 0
    assert "nothing was trained" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("arguments", [["--mode", "sft"], ["--config", "x.toml"]])
def test_a_wrong_command_line_exits_with_2(arguments: list[str]):
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2


def test_a_corrected_command_may_use_the_same_directory(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    out = str(tmp_path / "run")
    assert run(capsys, "--output.dir", out, "--rl.rollout.reward", "nowhere.py:f")[0] == 2
    assert not (tmp_path / "run").exists()
    assert run(capsys, "--output.dir", out, "--sft.steps", "2", mode="sft")[0] == 0
    assert (tmp_path / "run" / "summary.json").exists()


def test_fewer_steps_than_the_checkpoint_has_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    out = str(tmp_path / "run")
    assert run(capsys, "--output.dir", out, "--sft.steps", "3", mode="sft")[0] == 0
    code, message = run(capsys, "--output.dir", out, "--sft.steps", "2", "--resume", mode="sft")
    assert (code, "sft.steps=2" in message) == (2, True)


def test_an_output_directory_that_cannot_be_written_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    (tmp_path / "file").write_text("")
    code, message = run(capsys, "--output.dir", str(tmp_path / "file" / "run"), mode="sft")
    assert (code, "output.dir" in message) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("--rl.rollout.max_new_tokens", "4000"), ("rl.rollout.max_new_tokens", "more than the context of")),
        (("--sft.optim.beta2", "1.0"), ("sft.optim.beta2 = 1.0", "less than 1")),
        (("--seed", "18446744073709551616"), ("seed", "less than")),
        (("--model.template_params.enable_thinkin", "true"), ("enable_thinkin", "template")),
        (("--sft.max_length", "3"), ("max_length=3", "raise sft.max_length")),
    ],
)
def test_what_does_not_fit_is_said_before_a_directory_is_made(capsys, tmp_path, arguments, wanted):
    code, error = run(capsys, *arguments, "--output.dir", str(tmp_path / "run"))
    assert code == 2
    assert all(word in error for word in wanted), error
    assert not (tmp_path / "run").exists(), "the corrected command would be refused"

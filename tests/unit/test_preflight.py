"""What is known about a run before it starts: everything that is wrong, at one look."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from rich.console import Console
from safetensors.numpy import save_file

from rollouts.config.load import load_config
from rollouts.errors import ConfigError, ModelError
from rollouts.preflight.checks import look_at_run, read_context_length
from rollouts.preflight.estimate import (
    Lengths,
    ModelSize,
    count_parameters,
    estimate_memory,
    read_free_memory,
    read_model_size,
)
from rollouts.preflight.findings import Finding, print_findings
from rollouts.preflight.trial import call_functions
from tests.unit.chat_tokenizers import byte_tokenizer

RL = """
[rl]
steps = 1
data = { kind = "jsonl", path = "rl.jsonl" }
[rl.rollout]
reward = "r.py:score"
max_new_tokens = 10
"""
SFT = """
[sft]
steps = 1
max_length = 40
data = { kind = "jsonl", path = "sft.jsonl" }
"""
EVAL = """
[eval]
max_new_tokens = 10
data = { kind = "jsonl", path = "eval.jsonl" }
"""


@pytest.fixture
def house(tmp_path: Path):
    """A directory with a config, its rows, a reward and a model directory of 40 positions."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"max_position_embeddings": 40}', encoding="utf-8")
    (tmp_path / "r.py").write_text(
        "def score(sample):\n    return 1.0\ndef keep(group):\n    return True\n", encoding="utf-8"
    )
    write_rows(tmp_path / "rl.jsonl", {"prompt": "a"}, {"prompt": "bcd"}, {"prompt": "held"})
    write_rows(tmp_path / "sft.jsonl", {"prompt": "q", "answer": "ab"})
    write_rows(tmp_path / "eval.jsonl", {"prompt": "held"}, {"prompt": " HELD "})
    return tmp_path


def write_rows(path: Path, *rows: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def look(house: Path, text: str, stages: tuple[str, ...] = ("rl",), tokenizer: Any = None) -> list[Finding]:
    (house / "run.toml").write_text(text, encoding="utf-8")
    config = load_config(house / "run.toml", ["--model.name", str(house / "model")])
    return look_at_run(
        config,
        stages,
        find_model=find_model,
        open_tokenizer=lambda path: tokenizer or byte_tokenizer(),
        base_dir=house,
    ).findings


def find_model(name: str) -> Path:
    if not Path(name).is_dir():
        raise ModelError(f"no model {name}")
    return Path(name)


def errors(findings: list[Finding]) -> list[str]:
    return [f"{finding.subject}: {finding.message}" for finding in findings if finding.level == "error"]


def test_a_good_run_has_findings_and_no_error(house):
    findings = look(house, SFT + RL + 'filters = ["r.py:keep"]\n' + EVAL, ("sft", "rl"))
    assert not errors(findings)
    # a prompt of n letters takes 8 + n tokens and the assistant's header 11
    assert [(finding.level, finding.subject, finding.message) for finding in findings] == [
        ("ok", "eval.data", "1 rows, 1 left out because they are asked twice"),
        ("ok", "sft.data", "1 rows"),
        ("ok", "rl.data", "2 rows, 1 left out because they are held out by eval.data"),
        ("ok", "rl.rollout.reward", f"{house}/r.py:score"),
        ("ok", "rl.rollout.filters", f"{house}/r.py:keep"),
        ("ok", "model.name", f"{house}/model"),
        (
            "ok",
            "rl.data",
            "the first prompt reads '<|im_start|>user\\na<|im_end|>\\n<|im_start|>assistant\\n'",
        ),
        (
            "ok",
            "rl.rollout.max_new_tokens",
            "the longest prompt has 22 tokens, with max_new_tokens=10 that is 32 of 40",
        ),
        (
            "ok",
            "eval.data",
            "the first prompt reads '<|im_start|>user\\nheld<|im_end|>\\n<|im_start|>assistant\\n'",
        ),
        (
            "ok",
            "eval.max_new_tokens",
            "the longest prompt has 23 tokens, with max_new_tokens=10 that is 33 of 40",
        ),
        (
            "ok",
            "sft.data",
            (
                "of the first conversation this trains: 3 of 24 tokens, within ⟦ ⟧: "
                "'<|im_start|>user\\nq<|im_end|>\\n<|im_start|>assistant\\n⟦ab<|im_end|>⟧\\n'"
            ),
        ),
        ("ok", "sft.data", "the longest conversation trains 24 tokens of max_length=40"),
        ("ok", "memory", "not estimated: config.json or the weight files do not say how large the model is"),
        (
            "ok",
            "sft: work",
            (
                "1 steps of 16 samples, 16 times through the rows; at most 640 tokens a step, 1 or more"
                " micro-batches at that length"
            ),
        ),
        (
            "ok",
            "rl: work",
            (
                "1 steps of 8 prompts x 8 samples, 4 times through the rows; at most 640 tokens a step, 1 or"
                " more micro-batches at that length"
            ),
        ),
        ("ok", "eval: work", "3 evaluations of 1 prompts x 1 samples, at most 10 tokens each"),
    ]


def test_everything_that_is_wrong_is_found_at_one_look(house):
    (house / "rl.jsonl").write_text("{\n", encoding="utf-8")
    (house / "eval.jsonl").unlink()
    (house / "r.py").write_text("def score(sample, engine):\n    return 1.0\n", encoding="utf-8")
    found = errors(look(house, RL + 'filters = ["r.py:kep"]\n' + EVAL, ("sft", "rl"), byte_tokenizer(None)))
    assert [line.partition(":")[0] for line in found] == [
        "sft",
        "eval.data",
        "rl.data",
        "rl.rollout.reward",
        "rl.rollout.filters",
    ]
    assert "no [sft] table" in found[0]
    assert "no such file" in found[1]
    assert found[2].startswith("rl.data: 1 of 1 rows are malformed")
    assert "rl.jsonl:1: not JSON" in found[2]
    assert "takes (sample, engine)" in found[3]
    assert "has no kep" in found[4]


def test_a_missing_model_is_an_error_after_the_other_findings(house):
    (house / "model" / "config.json").unlink()
    findings = look(house, RL)
    assert errors(findings) == [
        f"model.name: {house}/model/config.json: there is no such file; a model directory has a config.json"
    ]
    (house / "model").rmdir()
    assert errors(look(house, RL)) == [f"model.name: no model {house}/model"]


def test_a_missing_reward_is_an_error(house):
    no_reward = RL.replace('reward = "r.py:score"\n', "")
    reward, evaluation = errors(look(house, no_reward + EVAL))
    assert "rl.rollout.reward" in reward
    assert "empty; name a function as module:function or file.py:function" in reward
    assert (
        evaluation
        == "eval.reward: empty, and there is no rl.rollout.reward to fall back on; name a function of one"
        " sample"
    )
    assert (
        errors(look(house, SFT + EVAL.replace("max_new", 'reward = "r.py:score"\nmax_new'), ("sft",))) == []
    )


def test_rl_rows_without_a_prompt_are_an_error(house):
    write_rows(house / "rl.jsonl", {"messages": [{"role": "user", "content": "q"}]})
    (found,) = errors(look(house, RL))
    assert found.endswith(
        "rl.jsonl:1: no `prompt`; RL and evaluation rows need one (`messages` alone is for SFT)"
    )


def test_training_rows_that_are_all_held_out_are_an_error(house):
    write_rows(house / "rl.jsonl", {"prompt": "held"})
    assert errors(look(house, RL + EVAL)) == [
        "rl.data: 0 rows, 1 left out because they are held out by eval.data"
    ]


def test_a_prompt_that_leaves_no_room_for_the_response_is_an_error(house):
    write_rows(house / "rl.jsonl", {"prompt": "a"}, {"prompt": [{"role": "user", "content": "x" * 12}]})
    assert errors(look(house, RL)) == [
        (
            "rl.rollout.max_new_tokens: the longest prompt has 31 tokens, with max_new_tokens=10 that is 41,"
            " more than the context of 40; lower it"
        )
    ]


def test_a_broken_model_config_is_named(house):
    (house / "model" / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match=r"config\.json: not JSON"):
        read_context_length(house / "model")


def test_conversations_that_are_cut_or_dropped_are_a_warning(house):
    write_rows(house / "sft.jsonl", {"prompt": "q", "answer": "x" * 50}, {"prompt": "q" * 50, "answer": "x"})
    findings = look(house, SFT, ("sft",))
    assert [finding for finding in findings if finding.level != "ok"] == [
        Finding("warning", "sft.max_length", "of 2 rows 1 are cut and 1 dropped; raise it if they matter")
    ]


def test_conversations_longer_than_the_context_are_an_error(house):
    write_rows(house / "sft.jsonl", {"prompt": "q", "answer": "x" * 50})
    assert errors(look(house, SFT.replace("= 40", "= 60"), ("sft",))) == [
        "sft.max_length: a row trains 60 tokens, more than the context of 40; lower it"
    ]


def test_a_chat_template_that_cannot_train_is_an_error(house):
    assert errors(look(house, SFT, ("sft",), byte_tokenizer(None)))[0].startswith(
        "sft.data: the tokenizer has no chat template"
    )


@pytest.mark.parametrize(("levels", "code", "verdict"), [
    (["ok"], 0, "nothing stands in the way of this run; nothing was trained"),
    (["ok", "warning"], 0, "nothing stands in the way of this run (1 warning); nothing was trained"),
    (["error", "error", "warning"], 2, "2 things would stop this run (1 warning); nothing was trained"),
])  # fmt: skip
def test_the_verdict_comes_last_and_is_the_exit_code(levels, code, verdict, capsys):
    assert print_findings([Finding(level, "a", "b [c]") for level in levels], Console()) == code
    assert capsys.readouterr().out.splitlines() == [*(f"{level:<8} a: b [c]" for level in levels), verdict]


# --- rows ---------------------------------------------------------------------------------------------------


def test_malformed_rows_are_listed_by_line_and_field(house):
    good = [json.dumps({"prompt": f"p{number}"}) for number in range(75)]
    (house / "rl.jsonl").write_text(
        "\n".join([*good, *('{"prompt": 3}' for _ in range(25))]), encoding="utf-8"
    )
    (message,) = errors(look(house, RL))
    lines = message.splitlines()
    assert (
        lines[0]
        == "rl.data: 25 of 100 rows are malformed, more than max_bad_fraction=0.01 allows; mend them:"
    )
    assert lines[1].startswith(f"{house}/rl.jsonl:76: prompt is of type int")
    assert len(lines) == 22
    assert lines[-1] == "and 5 more"
    allowed = RL.replace('path = "rl.jsonl"', 'path = "rl.jsonl", max_bad_fraction = 0.25')
    findings = look(house, allowed)
    assert errors(findings) == []
    (warning,) = [finding for finding in findings if finding.level == "warning"]
    assert warning.message.startswith("25 of 100 rows are malformed, they are skipped:")


def test_the_sources_of_a_mixture_are_listed_with_their_shares(house):
    write_rows(house / "more.jsonl", {"prompt": "x"}, {"prompt": "y"})
    text = RL.replace('data = { kind = "jsonl", path = "rl.jsonl" }\n', "")
    text += (
        '[[rl.data]]\nkind = "jsonl"\npath = "rl.jsonl"\n[[rl.data]]\nkind = "jsonl"\npath ='
        ' "more.jsonl"\nweight = 3.0\n'
    )
    findings = look(house, text)
    assert errors(findings) == []
    (rows,) = [finding.message for finding in findings if "of the draws" in finding.message]
    assert rows == "5 rows: rl 3 rows (25% of the draws), more 2 rows (75% of the draws)"
    (house / "more.jsonl").unlink()
    (problem,) = errors(look(house, text))
    assert problem.startswith("rl.data.1")


# --- functions ----------------------------------------------------------------------------------------------

EVERY_FUNCTION = """
[sft]
steps = 1
data = { kind = "python", function = "r.py:rows", size = 1 }
[rl]
steps = 1
data = { kind = "python", function = "r.py:rows", size = 1 }
curriculum = "r.py:curriculum"
advantage = "r.py:advantage"
loss = "r.py:loss"
changes = { from_step = 2, advantage = "r.py:advantage" }
rollout.reward = "r.py:score"
rollout.generate = "r.py:generate"
rollout.group_reward = "r.py:group"
rollout.filters = ["r.py:keep"]
[preference]
steps = 1
data = { kind = "python", function = "r.py:rows", size = 1 }
[reward_model]
steps = 1
data = { kind = "python", function = "r.py:rows", size = 1 }
[eval]
data = { kind = "python", function = "r.py:rows", size = 1 }
reward = "r.py:score"
"""
FUNCTIONS = (
    *(f"{stage}.data.function" for stage in ("sft", "rl", "eval")),
    *(f"rl.rollout.{name}" for name in ("generate", "reward", "group_reward", "filters")),
    *("rl.curriculum", "rl.advantage", "eval.reward"),
)
FUNCTIONS_FILE = """
def rows(size, seed):
    return [{"prompt": "p"}]
def curriculum(step, statistics): ...
def advantage(inputs): ...
def loss(inputs): ...
def score(sample): ...
def generate(sample, engine, sampling): ...
def group(samples): ...
def keep(group): ...
"""


@pytest.mark.parametrize(
    ("key", "wrong", "wanted"),
    [(key, wrong, wanted) for key in FUNCTIONS for wrong, wanted in [
        ("gone.py:{}", "there is no file"),
        ("rr.py:{}", "did you mean r.py?"),
        ("no_such_module_here:{}", "there is no module no_such_module_here"),
        ("r.py:{}x", "did you mean {}?"),
        ("r.py:number", "it must be a function"),
        ("r.py:nothing", "is called with"),
    ] if (key, wrong) != ("rl.loss", "r.py:nothing")],  # a loss is called by the backend, which checks it
)  # fmt: skip
def test_every_function_that_is_missing_or_wrong_is_found_before_a_model(house, key, wrong, wanted):
    (house / "r.py").write_text(
        FUNCTIONS_FILE + "number = 3\ndef nothing(*, needed): ...\n", encoding="utf-8"
    )
    (house / "run.toml").write_text(EVERY_FUNCTION, encoding="utf-8")
    names = {
        "group_reward": "group",
        "filters": "keep",
        "function": "rows",
        "reward": "score",
    }
    name = names.get(key.rpartition(".")[2], key.rpartition(".")[2])
    value = wrong.format(name)
    value = str(house / value) if value.startswith(("r", "g")) else value
    flag = f'["{value}"]' if key.endswith("filters") else value
    config = load_config(house / "run.toml", ["--model.name", str(house / "model"), f"--{key}", flag])
    findings = look_at_run(
        config,
        ("sft", "rl"),
        find_model=refuse_model,
        open_tokenizer=lambda path: byte_tokenizer(),
        base_dir=house,
    ).findings
    assert any(
        wanted.format(name) in finding.message
        for finding in findings
        if finding.level == "error" and finding.subject == key
    ), findings


def refuse_model(name: str) -> Path:
    raise ModelError("no model was asked for")


def test_a_filter_that_is_misspelt_gets_the_nearest_name(house):
    (message,) = errors(look(house, RL + 'filters = ["check_reward_nonzero_sdt"]\n'))
    assert "did you mean check_reward_nonzero_std?" in message


def test_an_advantage_that_is_misspelt_or_gets_a_wrong_parameter_is_an_error(house):
    text = RL.replace("[rl.rollout]", 'advantage = "groo"\n[rl.rollout]')
    (message,) = errors(look(house, text))
    assert message.startswith(
        "rl.advantage: rl.advantage='groo' does not name a function (did you mean rloo?); write a name of"
        " grpo, centred"
    )
    text = RL.replace("[rl.rollout]", 'advantage = "opo"\nadvantage_params = { k = 2 }\n[rl.rollout]')
    assert errors(look(house, text)) == ["rl.advantage: advantage 'opo' has no parameter 'k'; it takes none"]


def test_a_loss_that_cannot_be_used_is_an_error(house):
    def check_loss(config: Any) -> None:
        raise ConfigError(f"loss={config.loss!r} is not known")

    (house / "run.toml").write_text(RL, encoding="utf-8")
    config = load_config(house / "run.toml", ["--model.name", str(house / "model")])
    found = look_at_run(
        config,
        ("rl",),
        find_model=find_model,
        open_tokenizer=lambda path: byte_tokenizer(),
        base_dir=house,
        check_loss=check_loss,
    ).findings
    assert errors(found) == ["rl.loss: loss='ppo_clip' is not known"]


def test_the_loss_of_preferences_is_looked_at_as_that_of_rl_is(house):
    def check_loss(section: Any) -> None:
        raise ConfigError(f"loss={section.loss!r} is not known")

    write_rows(house / "pairs.jsonl", {"prompt": "q", "chosen": "ab", "rejected": "cd"})
    preference = '[preference]\nsteps = 1\nloss = "ipo"\ndata = { kind = "jsonl", path = "pairs.jsonl" }\n'
    (house / "run.toml").write_text(preference + RL, encoding="utf-8")
    config = load_config(house / "run.toml", ["--model.name", str(house / "model")])
    look_at = {
        "find_model": find_model,
        "open_tokenizer": lambda path: byte_tokenizer(),
        "base_dir": house,
        "check_loss": check_loss,
    }
    assert errors(look_at_run(config, ("preference",), **look_at).findings) == [
        "preference.loss: loss='ipo' is not known"
    ]
    both = ["preference.loss: loss='ipo' is not known", "rl.loss: loss='ppo_clip' is not known"]
    assert errors(look_at_run(config, ("preference", "rl"), **look_at).findings) == both


def test_a_reward_model_that_cannot_be_had_is_an_error(house):
    def check_models(tokenizer: Any) -> None:
        assert callable(tokenizer.apply_chat_template)
        raise ConfigError("rl.rollout.reward_model='x' is no reward model")

    (house / "run.toml").write_text(RL, encoding="utf-8")
    config = load_config(house / "run.toml", ["--model.name", str(house / "model")])
    found = look_at_run(
        config,
        ("rl",),
        find_model=find_model,
        open_tokenizer=lambda path: byte_tokenizer(),
        base_dir=house,
        check_models=check_models,
    ).findings
    assert errors(found) == ["rl: rl.rollout.reward_model='x' is no reward model"]


def test_a_critic_and_a_reward_model_are_in_the_memory_and_on_the_disk_that_a_run_needs(house):
    """16 bytes a number for what AdamW trains, 4 for what only scores; a checkpoint holds 12 bytes a number
    of the policy and of the critic.
    """
    from rollouts.preflight.estimate import Lengths, ModelSize, estimate_memory

    size = ModelSize(parameters=2**20, layers=1, hidden=8, inner=8, query=8, key_value=8)
    with_both = RL.replace("[rl.rollout]", '[rl.critic]\n[rl.rollout]\nreward_model = "stage"')
    texts: dict[str, str] = {}
    for name, text in (("alone", RL), ("both", with_both)):
        (house / "run.toml").write_text(text, encoding="utf-8")
        config = load_config(house / "run.toml", ["--model.name", str(house / "model")])
        texts[name] = "\n".join(
            finding.message for finding in estimate_memory(config, ("rl",), Lengths(8, 0), size)
        )
    assert "16 MiB a critic of the same size, 4 MiB a reward model of the same size" in texts["both"]
    assert "critic" not in texts["alone"] and "reward model" not in texts["alone"]
    assert "1 kept, 12 MiB each (weights and AdamW's moments), 24 MiB at most" in texts["alone"]
    assert (
        "1 kept, 12 MiB each (weights and AdamW's moments, twice that with a critic), 48 MiB at most"
        in texts["both"]
    )


def test_a_chat_template_that_is_missing_is_an_error(house):
    text = 'model = { chat_template = "gone.jinja" }\n' + RL
    assert errors(look(house, text)) == [
        (
            f"model.chat_template: there is no file {house}/gone.jinja; name a Jinja file, or leave it out to"
            " use the tokenizer's own"
        )
    ]


# --- a trial call -------------------------------------------------------------------------------------------

SCORE = "async def score(sample):\n    return float(sample.response == sample.metadata['answer'])\n"


def call(house: Path, text: str, stages: tuple[str, ...] = ("rl",)) -> list[Finding]:
    (house / "run.toml").write_text(text, encoding="utf-8")
    config = load_config(house / "run.toml", ["--model.name", str(house / "model")])
    run = look_at_run(
        config, stages, find_model=find_model, open_tokenizer=lambda path: byte_tokenizer(), base_dir=house
    )
    return trio.run(lambda: call_functions(config, stages, run.rows, base_dir=house))


def test_functions_are_called_once_and_their_answers_shown(house):
    write_rows(house / "rl.jsonl", {"prompt": "a", "answer": "b"})
    (house / "r.py").write_text(
        SCORE + "async def keep(group):\n    return group.rewards.max() > 1\n", encoding="utf-8"
    )
    assert call(house, RL + 'filters = ["r.py:keep"]\n') == [
        Finding(
            "ok",
            "rl.rollout.reward",
            "called with the response 'b' and the response '(a made-up response)': 1, 0",
        ),
        Finding("ok", "rl.rollout.filters", "keep drops (keep) a group of these two"),
    ]


def test_a_function_that_raises_is_an_error_of_its_setting(house):
    (house / "r.py").write_text(
        "async def score(sample):\n    return sample.metadata['answer']\n", encoding="utf-8"
    )
    (finding,) = call(house, RL)
    assert (finding.level, finding.subject) == ("error", "rl.rollout.reward")
    assert "KeyError: 'answer'" in finding.message


def test_the_reward_of_the_evaluation_and_the_curriculum_are_called_too(house):
    write_rows(house / "rl.jsonl", {"prompt": "a", "answer": "b"})
    write_rows(house / "eval.jsonl", {"prompt": "held", "answer": "c"})
    curriculum = "def curriculum(step, statistics):\n    return {name: step / 2 for name in statistics}\n"
    (house / "r.py").write_text(SCORE + curriculum, encoding="utf-8")
    text = RL.replace("steps = 1", 'steps = 1\ncurriculum = "r.py:curriculum"') + EVAL.replace(
        "max_new", 'reward = "r.py:score"\nmax_new'
    )
    assert [(finding.level, finding.subject, finding.message) for finding in call(house, text)][1:] == [
        ("ok", "eval.reward", "called with the response 'c': 1"),
        ("ok", "rl.curriculum", "step 1: rl 0.5"),
    ]


# --- estimates ----------------------------------------------------------------------------------------------


def test_the_size_of_a_model_is_read_without_its_weights(tmp_path):
    save_file(
        {"a": np.zeros((3, 4), np.float32), "b": np.zeros(5, np.float32)},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    settings = {
        "hidden_size": 8,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "intermediate_size": 16,
        "num_key_value_heads": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    assert read_model_size(tmp_path) == ModelSize(
        parameters=17, layers=2, hidden=8, inner=16, query=8, key_value=4
    )
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    assert read_model_size(tmp_path) is None
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ModelError, match="is no safetensors file"):
        count_parameters(tmp_path / "model.safetensors")


def write_files(root: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")


def test_free_memory_is_the_least_of_the_machines_and_of_every_control_groups_around_the_process(tmp_path):
    assert read_free_memory(tmp_path) is None
    write_files(tmp_path, {"proc/meminfo": "MemTotal:       9000 kB\nMemAvailable:    5000 kB\n"})
    assert read_free_memory(tmp_path) == 5000 * 1024
    job = "sys/fs/cgroup/batch/job"
    write_files(tmp_path, {
        "proc/self/cgroup": "0::/batch/job/step\n",
        f"{job}/step/memory.max": "max\n", f"{job}/step/memory.current": "700\n",
        f"{job}/memory.max": "1000\n", f"{job}/memory.current": "900\n",
        f"{job}/memory.stat": "anon 300\ninactive_file 600\nactive_file 1\n",
        "sys/fs/cgroup/batch/memory.max": "4000\n", "sys/fs/cgroup/batch/memory.current": "3500\n",
        "sys/fs/cgroup/other/memory.max": "1\n", "sys/fs/cgroup/other/memory.current": "1\n",
    })  # fmt: skip
    assert read_free_memory(tmp_path) == 500, "of batch; job has 1000 - (900 - 600)"
    write_files(tmp_path, {"sys/fs/cgroup/batch/memory.max": "9000\n"})
    assert read_free_memory(tmp_path) == 700
    write_files(tmp_path, {f"{job}/memory.current": "2000\n"})
    assert read_free_memory(tmp_path) == 0


def test_free_memory_knows_the_first_version_of_control_groups_and_names_of_another_root(tmp_path):
    write_files(tmp_path, {
        "proc/self/cgroup": "5:cpu,cpuacct:/a\n4:memory:/docker/0123\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "5000\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "3000\n",
        "sys/fs/cgroup/memory/memory.stat": "inactive_file 7\ntotal_inactive_file 1000\n",
    })  # fmt: skip
    assert read_free_memory(tmp_path) == 3000


def test_memory_is_the_sum_of_its_parts(house, monkeypatch):
    text = RL.replace("[rl.rollout]", "kl_coef = 0.1\n[rl.rollout]\nnum_prompts = 1\nsamples_per_prompt = 2")
    (house / "run.toml").write_text(text, encoding="utf-8")
    config = load_config(
        house / "run.toml", ["--output.dir", str(house / "run"), "--output.checkpoint_every", "1"]
    )
    size = ModelSize(parameters=2**20, layers=2, hidden=32, inner=64, query=32, key_value=16)
    monkeypatch.setattr("rollouts.preflight.estimate.read_free_memory", lambda: 2**20)
    memory, disk = estimate_memory(config, ["rl"], Lengths(prompt=6, conversation=0), size)
    # weights, gradients and the reference 4 MiB each, AdamW 8; keys and values 8*2*16*2*16 bytes = 8 KiB; a
    # token 4*6*32 + 2 * 4*(6*32 + 3*32 + 4*16 + 4*64) bytes = 5.5 KiB, of which there are 6 of the prompt and
    # 2*10 of the samples
    assert memory.message.startswith(
        "about 20.1 MiB when every sample has its full length, an estimate: 4 MiB weights 4 x 1.049M, "
    )
    assert "4 MiB gradients as much, 8 MiB AdamW twice that" in memory.message
    assert "0.00781 MiB keys and values 8 x 2 rows x 16 tokens x 2 layers x 16" in memory.message
    assert "0.14 MiB activations 26 tokens x 5.5 KiB" in memory.message
    assert memory.level == "warning"
    assert memory.message.endswith(
        "1 MiB are free: lower micro_batch_tokens or engine.max_rows, or set model.gradient_checkpointing"
    )
    assert disk.message.startswith(
        "1 written, 1 kept, 12 MiB each (weights and AdamW's moments), 24 MiB at most;"
    )


def test_a_row_that_the_template_refuses_is_found_however_short_it_is(house):
    long = [
        {"messages": [{"role": "user", "content": "x" * 90 + str(n)}, {"role": "assistant", "content": "y"}]}
        for n in range(80)
    ]
    unwritten = {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b", "reasoning_content": "thk"},
        ]
    }
    write_rows(house / "sft.jsonl", *long, unwritten)
    (found,) = errors(look(house, SFT, ("sft",)))
    assert found.startswith("sft.data: row 80: ") and "thinking" in found

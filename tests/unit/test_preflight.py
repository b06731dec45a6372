"""What is known about a run before it starts: everything that is wrong, at one look."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollouts.config.load import load_config
from rollouts.errors import ModelError
from rollouts.preflight.checks import Finding, check_run, format_findings, has_errors, read_context_length
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
    (tmp_path / "r.py").write_text("def score(sample):\n    return 1.0\ndef keep(group):\n    return True\n", encoding="utf-8")
    write_rows(tmp_path / "rl.jsonl", {"prompt": "a"}, {"prompt": "bcd"}, {"prompt": "held"})
    write_rows(tmp_path / "sft.jsonl", {"prompt": "q", "answer": "ab"})
    write_rows(tmp_path / "eval.jsonl", {"prompt": "held"}, {"prompt": " HELD "})
    return tmp_path


def write_rows(path: Path, *rows: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def look(house: Path, text: str, stages: tuple[str, ...] = ("rl",), tokenizer: Any = None) -> list[Finding]:
    (house / "run.toml").write_text(text, encoding="utf-8")
    config = load_config(house / "run.toml", ["--model.name", str(house / "model")])
    return check_run(config, stages, find_model=find_model, open_tokenizer=lambda path: tokenizer or byte_tokenizer(), base_dir=house)


def find_model(name: str) -> Path:
    if not Path(name).is_dir():
        raise ModelError(f"no model {name}")
    return Path(name)


def errors(findings: list[Finding]) -> list[str]:
    return [f"{finding.subject}: {finding.message}" for finding in findings if finding.level == "error"]


def test_a_good_run_has_findings_and_no_error(house):
    findings = look(house, SFT + RL + 'filters = ["r.py:keep"]\n' + EVAL, ("sft", "rl"))
    assert not has_errors(findings)
    # a prompt of n letters takes 8 + n tokens and the assistant's header 11
    assert [(finding.level, finding.subject, finding.message) for finding in findings] == [
        ("ok", "eval.data", "1 rows, 1 left out because they are asked twice"),
        ("ok", "sft.data", "1 rows"),
        ("ok", "rl.data", "2 rows, 1 left out because they are held out by eval.data"),
        ("ok", "rl.rollout.reward", f"{house}/r.py:score"),
        ("ok", "rl.rollout.filters", f"{house}/r.py:keep"),
        ("ok", "model.name", f"{house}/model"),
        ("ok", "rl.data", "the first prompt reads '<|im_start|>user\\na<|im_end|>\\n<|im_start|>assistant\\n'"),
        ("ok", "rl.rollout.max_new_tokens", "the longest prompt has 22 tokens, with max_new_tokens=10 that is 32 of 40"),
        ("ok", "eval.data", "the first prompt reads '<|im_start|>user\\nheld<|im_end|>\\n<|im_start|>assistant\\n'"),
        ("ok", "eval.max_new_tokens", "the longest prompt has 23 tokens, with max_new_tokens=10 that is 33 of 40"),
        ("ok", "sft.data", "the longest conversation trains 24 tokens of max_length=40"),
    ]


def test_everything_that_is_wrong_is_found_at_one_look(house):
    (house / "rl.jsonl").write_text("{\n", encoding="utf-8")
    (house / "eval.jsonl").unlink()
    (house / "r.py").write_text("def score(sample, engine):\n    return 1.0\n", encoding="utf-8")
    found = errors(look(house, RL + 'filters = ["r.py:kep"]\n' + EVAL, ("sft", "rl"), byte_tokenizer(None)))
    assert [line.partition(":")[0] for line in found] == ["sft", "eval.data", "rl.data", "rl.rollout.reward", "rl.rollout.filters"]
    assert "no [sft] table" in found[0]
    assert "no such file" in found[1]
    assert "rl.jsonl:1: not JSON" in found[2]
    assert "takes (sample, engine)" in found[3]
    assert "has no kep" in found[4]


def test_a_missing_model_is_an_error_after_the_other_findings(house):
    (house / "model" / "config.json").unlink()
    findings = look(house, RL)
    assert errors(findings) == [f"model.name: {house}/model/config.json: there is no such file; a model directory has a config.json"]
    (house / "model").rmdir()
    assert errors(look(house, RL)) == [f"model.name: no model {house}/model"]


def test_a_missing_reward_is_an_error(house):
    no_reward = RL.replace('reward = "r.py:score"\n', "")
    assert errors(look(house, no_reward + EVAL)) == [
        "rl.rollout.reward: empty; name a function as module:function or file.py:function",
        "eval.reward: empty, and there is no rl.rollout.reward to fall back on; name a function",
    ]
    assert errors(look(house, SFT + EVAL.replace("max_new", 'reward = "r.py:score"\nmax_new'), ("sft",))) == []


def test_rl_rows_without_a_prompt_are_an_error(house):
    write_rows(house / "rl.jsonl", {"messages": [{"role": "user", "content": "q"}]})
    assert errors(look(house, RL)) == ["rl.data: row 0 has no prompt; RL and evaluation rows need one (`messages` alone is for SFT)"]


def test_training_rows_that_are_all_held_out_are_an_error(house):
    write_rows(house / "rl.jsonl", {"prompt": "held"})
    assert errors(look(house, RL + EVAL)) == ["rl.data: 0 rows, 1 left out because they are held out by eval.data"]


def test_a_prompt_that_leaves_no_room_for_the_response_is_an_error(house):
    write_rows(house / "rl.jsonl", {"prompt": "a"}, {"prompt": [{"role": "user", "content": "x" * 12}]})
    assert errors(look(house, RL)) == [
        "rl.rollout.max_new_tokens: the longest prompt has 31 tokens, with max_new_tokens=10 that is 41, more than the context of 40; lower it"
    ]


def test_a_model_that_states_no_context_has_no_limit(house):
    (house / "model" / "config.json").write_text("{}", encoding="utf-8")
    assert errors(look(house, RL.replace("max_new_tokens = 10", "max_new_tokens = 100000"))) == []


def test_a_broken_model_config_is_named(house):
    (house / "model" / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match=r"config\.json: not JSON"):
        read_context_length(house / "model")


def test_conversations_that_are_cut_or_dropped_are_a_warning(house):
    write_rows(house / "sft.jsonl", {"prompt": "q", "answer": "x" * 50}, {"prompt": "q" * 50, "answer": "x"})
    findings = look(house, SFT, ("sft",))
    assert [finding for finding in findings if finding.level != "ok"] == [
        Finding("warning", "sft.max_length", "of the 2 longest rows 1 are cut and 1 dropped; raise it if they matter")
    ]


def test_conversations_longer_than_the_context_are_an_error(house):
    write_rows(house / "sft.jsonl", {"prompt": "q", "answer": "x" * 50})
    assert errors(look(house, SFT.replace("= 40", "= 60"), ("sft",))) == [
        "sft.max_length: a row trains 60 tokens, more than the context of 40; lower it"
    ]


def test_a_chat_template_that_cannot_train_is_an_error(house):
    assert errors(look(house, SFT, ("sft",), byte_tokenizer(None)))[0].startswith("sft.data: row 0: the tokenizer has no chat template")


def test_findings_print_one_a_line():
    findings = [Finding("ok", "a.b", "fine"), Finding("error", "c", "not so")]
    assert format_findings(findings) == "ok       a.b: fine\nerror    c: not so\n"

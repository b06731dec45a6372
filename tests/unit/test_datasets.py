"""Rows: read, checked where they enter, and kept apart from held-out prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollouts.config.tables import DataSourceConfig
from rollouts.data.datasets import load_sources
from rollouts.data.held_out import exclude_prompts, find_asked_prompts, unique_prompts
from rollouts.data.mixture import make_mixture
from rollouts.data.rows import Row, row_to_conversation
from rollouts.errors import DataError
from rollouts.types import check_json


def jsonl(path: Path, **settings: Any) -> DataSourceConfig:
    return DataSourceConfig(kind="jsonl", path=str(path), **settings)


def gym(**settings: Any) -> DataSourceConfig:
    return DataSourceConfig(**{"kind": "reasoning_gym", "dataset": "chain_sum", "size": 3, **settings})


def load_rows(source: DataSourceConfig, *, name: str) -> list[Row]:
    return load_sources([source], name=name).samples


@pytest.fixture
def write(tmp_path: Path):
    def write_rows(*lines: object) -> Path:
        path = tmp_path / "rows.jsonl"
        parts = [
            (
                line
                if isinstance(line, bytes)
                else (line if isinstance(line, str) else json.dumps(line)).encode()
            )
            for line in lines
        ]
        path.write_bytes(b"".join(part + b"\n" for part in parts))
        return path

    return write_rows


def message_of(source: DataSourceConfig) -> str:
    with pytest.raises(DataError) as caught:
        load_rows(source, name="rl.data")
    return str(caught.value)


# --- files --------------------------------------------------------------------------------------------------


def test_size_takes_the_first_rows(write):
    path = write({"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"})
    assert [row["prompt"] for row in load_rows(jsonl(path, size=2), name="rl.data")] == ["a", "b"]


def test_only_a_newline_ends_a_line(write):
    separators = "one\u2028two\u0085three\x0cfour"
    path = write(json.dumps({"prompt": separators}, ensure_ascii=False))
    assert load_rows(jsonl(path), name="rl.data") == [{"prompt": separators}]


def test_empty_lines_and_a_byte_order_mark_are_no_rows(write):
    path = write(b"\xef\xbb\xbf" + json.dumps({"prompt": "a"}).encode(), "", "  \r", {"prompt": "b"})
    assert [row["prompt"] for row in load_rows(jsonl(path), name="rl.data")] == ["a", "b"]


def test_a_missing_file_is_named_with_the_place_looked_at(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert (
        message_of(jsonl(Path("no.jsonl")))
        == f"rl.data.path='no.jsonl': there is no such file (looked for {tmp_path / 'no.jsonl'})"
    )
    assert "cannot be read: Is a directory" in message_of(jsonl(tmp_path))


# --- system prompts -----------------------------------------------------------------------------------------


def test_a_system_prompt_goes_before_every_prompt_that_has_none(write):
    user, own = {"role": "user", "content": "q"}, {"role": "system", "content": "own"}
    path = write(
        {"prompt": "q"},
        {"prompt": [user]},
        {"prompt": [own, user]},
        {"messages": [user, {"role": "assistant", "content": "a"}]},
    )
    rows = load_rows(jsonl(path, system_prompt="be brief"), name="rl.data")
    brief = {"role": "system", "content": "be brief"}
    assert [row.get("prompt", row.get("messages")) for row in rows] == [
        [brief, user],
        [brief, user],
        [own, user],
        [brief, user, {"role": "assistant", "content": "a"}],
    ]


# --- reasoning-gym ------------------------------------------------------------------------------------------


def test_reasoning_gym_rows_have_prompt_answer_and_plain_metadata():
    rows = load_rows(
        gym(seed=1, params={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}), name="rl.data"
    )
    assert len(rows) == 3
    for row in rows:
        assert row["source_dataset"] == "chain_sum"
        assert row["metadata"]["num_terms"] == 2
        left, sign, right = row["metadata"]["expression"].split()
        assert int(row["answer"]) == int(left) + (int(right) if sign == "+" else -int(right))
        assert row["metadata"]["expression"] in row["prompt"]
        check_json("row", row)
        assert json.loads(json.dumps(row)) == row  # no tuples left


def test_an_unknown_reasoning_gym_parameter_is_named():
    message = message_of(gym(params={"min_term": 2}))
    assert message.startswith(
        "rl.data.dataset='chain_sum' with rl.data.params={'min_term': 2} cannot be read"
    )
    assert "unexpected keyword argument 'min_term'" in message


# --- what each stage needs ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"messages": [{"role": "user", "content": "q"}]}, "messages has no assistant turn"),
        ({"prompt": "q"}, "no `messages` and no `answer`"),
        ({"prompt": "q", "answer": 7}, "answer is 7; SFT trains on it, so it must be text"),
        ({"prompt": "q", "answer": ""}, "answer is ''"),
    ],
)
def test_an_sft_row_without_something_to_train_on_is_refused(row, problem):
    with pytest.raises(DataError) as caught:
        row_to_conversation(row)
    assert str(caught.value).startswith(problem)


# --- held-out prompts ---------------------------------------------------------------------------------------


def turns(*contents: str) -> list[dict[str, str]]:
    return [
        {"role": "assistant" if index % 2 else "user", "content": content}
        for index, content in enumerate(contents)
    ]


def test_the_same_question_has_one_key_however_it_is_written():
    forms = [
        {"prompt": "What is 3+4?"},
        {"prompt": "  what is\n3+4? "},
        {"prompt": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "What is 3+4?"}]},
        {"messages": turns("What is 3+4?", "7")},
        {"prompt": "What is \uff13+4?"},  # a full-width three
    ]
    assert len({next(find_asked_prompts(form)) for form in forms}) == 1
    assert [*find_asked_prompts({"prompt": "What is 34?"})] != [*find_asked_prompts(forms[0])]


def test_held_out_prompts_leave_the_training_rows():
    rows = [
        {"prompt": "a", "answer": "1"},
        {"prompt": "b"},
        {"messages": turns("A", "1")},
        {"messages": turns("c", "1", "d", "2")},
    ]
    kept, removed = exclude_prompts(make_mixture(rows), [{"prompt": "a"}], name="sft.data")
    assert (kept.samples, removed) == ([rows[1], rows[3]], 2)


def test_a_held_out_prompt_inside_a_longer_conversation_is_found():
    rows = make_mixture([{"messages": turns("a", "1", "b", "2")}, {"prompt": "z"}])
    for held_out, removed in (
        ("a", 1),
        (turns("a", "1", "b"), 1),
        ("b", 0),  # asked alone, it is another question
    ):
        assert exclude_prompts(rows, [{"prompt": held_out}], name="sft.data")[1] == removed


def test_of_rows_that_ask_the_same_the_first_stays():
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b"}, {"prompt": " A", "answer": "2"}]
    assert unique_prompts(rows) == rows[:2]

"""Which samples `samples` finds, and how it prints them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from tokenizers import Tokenizer, decoders, models

from rollouts.cli import main
from rollouts.errors import RunDirError
from rollouts.inspect.record import open_record
from rollouts.inspect.samples import find_samples, print_samples
from rollouts.inspect.token_texts import split_text
from tests.unit.run_rows import write_block, write_rows


def make_sample(step: int, number: int, **fields: Any) -> dict[str, Any]:
    known = {"id": f"s{number}", "group_index": number // 2, "status": "completed", "prompt": "add"}
    known |= {"step": step, "policy_version": step - 1, "response": f"it is {number}", "reward": number / 10}
    return known | {"tokens": 9, "response_length": 20 - number} | fields


@pytest.fixture
def run(tmp_path: Path) -> Path:
    failure = {"class": "reward", "function": "grade", "message": "Timed out"}
    rows = [make_sample(1 + number // 2, number, weight_version_min=number // 4) for number in range(7)]
    rows[3] |= {"status": "failed", "metadata": {"failure": failure}}
    del rows[3]["reward"]
    rows += [make_sample(4, 7, stage="eval-rl", prompt=[{"role": "user", "content": "Sum"}])]
    write_rows(tmp_path / "samples.jsonl", *rows[:4])
    write_rows(
        tmp_path / "samples.1.jsonl", *rows[4:], make_sample(2, 8, attempt=2), make_sample(2, 3, attempt=2)
    )
    (tmp_path / "config.toml").write_text("")
    return tmp_path


def find_ids(root: Path, **query: Any) -> str:
    with open_record(root) as record:
        return " ".join(row["id"] for row in find_samples(record, **query).rows)


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({}, "s0 s1 s4 s5 s6 s7 s8 s3"),
        ({"limit": 3}, "s7 s8 s3"),
        ({"limit": 3, "reverse": True}, "s3 s8 s7"),
        ({"step": 2}, "s8 s3"),
        ({"stage": "eval-rl"}, "s7"),
        ({"last": True, "group": 2}, "s4 s5"),
        ({"sort": "reward", "limit": 2}, "s0 s1"),
        ({"sort": "length", "limit": 2}, "s8 s7"),
        ({"sort": "lag", "reverse": True, "limit": 2}, "s6 s4"),
        ({"status": "failed"}, ""),
        ({"grep": "IT IS 4"}, "s4"),
        ({"grep": "sum"}, "s7"),
        ({"grep": "user"}, ""),
        ({"grep": "completed"}, ""),
    ],
)
def test_samples_are_chosen_and_ordered(run: Path, query: dict[str, Any], expected: str):
    assert find_ids(run, **query) == expected


def test_a_step_or_stage_without_samples_says_what_there_is(run: Path):
    for query, message in (({"step": 9}, "--step 9: .*steps 1 to 4"), ({"stage": "sft"}, "eval-rl, rl")):
        with pytest.raises(RunDirError, match=message):
            find_ids(run, **query)
    assert main(["samples", str(run), "--limit", "0"]) == 2
    with pytest.raises(SystemExit, match="2"):
        main(["samples", str(run), "--sort", "rewrd"])


@settings(max_examples=25, deadline=None)
@given(
    texts=st.lists(st.text(st.sampled_from('aAéÉ"\\\n\t<日{}[]'), max_size=4), min_size=1, max_size=5),
    needle=st.text(st.sampled_from('aé"\\\n\t<日{}[]'), min_size=1, max_size=2),
    ascii_only=st.booleans(),
)
def test_the_search_finds_what_looking_at_every_row_finds(texts, needle, ascii_only, tmp_path_factory):
    root = tmp_path_factory.mktemp("run")
    rows = [
        {"schema": 1, "stage": "rl", "step": 1, "attempt": 1, "id": str(place)}
        | {
            "prompt": [{"role": "user", "content": text}] if place % 2 else "",
            "response": "" if place % 2 else text,
        }
        for place, text in enumerate(texts)
    ]
    lines = [json.dumps(row, ensure_ascii=ascii_only) + "\n" for row in rows]
    (root / "samples.jsonl").write_text("".join(lines))
    (root / "config.toml").write_text("")
    expected = [str(place) for place, text in enumerate(texts) if needle.lower() in text.lower()]
    assert find_ids(root, grep=needle).split() == expected


def test_a_transcript_has_a_headline_turns_and_what_failed(run: Path, capsys: pytest.CaptureFixture[str]):
    write_rows(run / "samples.2.jsonl", make_sample(9, 9, weight_version_min=7, rewards={"a": 1, "b": 0.5}))
    assert main(["samples", str(run), "--step", "9"]) == 0
    assert capsys.readouterr().out == (
        "── rl step 9 · s9 · group 4 · completed · reward 0.900 · 11 tokens · 1 version behind\n"
        "[prompt] add\n→ it is 9\nrewards: a 1, b 0.5\n\n1 of 9 logged samples\n"
    )
    assert main(["samples", str(run), "--json", "--limit", "1", "--reverse"]) == 0
    assert json.loads(capsys.readouterr().out)["rewards"] == {"a": 1, "b": 0.5}


# --- tokens -------------------------------------------------------------------------------------------------


def test_pieces_make_up_the_text_and_a_character_of_two_tokens_is_one_piece():
    tokenizer = Tokenizer(models.BPE({"a": 0, "Ã": 1, "©": 2, "b": 3}, []))
    tokenizer.decoder = decoders.ByteLevel()
    assert split_text([0, 1, 2, 3], tokenizer) == ["a", "", "é", "b"]


def test_tokens_are_marked_by_arrays_and_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_rows(tmp_path / "samples.jsonl", make_sample(1, 0), make_sample(1, 1))
    (tmp_path / "config.toml").write_text("")
    assert main(["samples", str(tmp_path), "--color", "mask"]) == 0
    assert "not marked, 2 samples: " in capsys.readouterr().out, "there is no tokenizer"
    (tmp_path / "model").mkdir()
    words = models.WordLevel({"<s>": 0, "two": 1, "plus": 2}, unk_token="<s>")
    Tokenizer(words).save(str(tmp_path / "model" / "tokenizer.json"))
    (tmp_path / "config.toml").write_text(f'[model]\nname = "{tmp_path / "model"}"\n')
    arrays = {"tokens": [0, 1, 2], "mask": [0, 1, 1], "advantage": [0.0, 0.5, -0.25]}
    arrays |= {"log_prob": [0.5, -1.0, -1.0], "mu": [0.0, -1.5, -1.0001]}
    place = write_block(tmp_path, "s0", **arrays)
    write_rows(tmp_path / "contributions.jsonl", {"id": "s0", "update": 0, "row": 0, **place})
    assert main(["samples", str(tmp_path), "--color", "advantage"]) == 0
    text = capsys.readouterr().out
    assert "<s>{+++  two}{--  plus}\nadvantage of the token: {--- to -0.5}" in text
    assert "not marked, 1 sample: no update of the weights had this sample" in text
    assert "→ it is 1" in text, "what is not marked is printed plain"
    assert main(["samples", str(tmp_path), "--color", "logprob_diff"]) == 0
    assert "<s>{+++  two} plus\n" in capsys.readouterr().out, (
        "0.0001 is rounding, and what does not train is 0"
    )
    console = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=200)
    with open_record(tmp_path) as record:
        print_samples(console, record, find_samples(record), color="advantage")
    assert isinstance(console.file, io.StringIO)
    assert "\x1b[37;48;2;160;82;15m two" in console.file.getvalue(), "white on the darkest orange"

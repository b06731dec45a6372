"""Which samples `samples` finds, and how it prints them."""

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
from rollouts.inspect.tokens import split_text
from tests.support.text_tables import cases
from tests.unit.run_rows import HEAD, read_command, write_block, write_rows


def make_sample(step: int, number: int, **fields) -> dict[str, Any]:
    known = {"id": f"s{number}", "group_index": number // 2, "status": "completed", "prompt": "add"}
    known |= {"step": step, "policy_version": step - 1, "response": f"it is {number}", "reward": number / 10}
    return known | {"tokens": 9, "response_length": 20 - number} | fields


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Seven samples of three steps and one of an evaluation; a second attempt wrote step 2 again."""
    root = tmp_path_factory.mktemp("run")
    rows = [make_sample(1 + number // 2, number, weight_version_min=number // 4) for number in range(7)]
    rows += [make_sample(4, 7, stage="eval-rl", prompt=[{"role": "user", "content": "Sum"}])]
    write_rows(root / "samples.jsonl", *rows[:3], make_sample(2, 3, status="failed", reward=None))
    again = [make_sample(2, number, attempt=2) for number in (8, 3)]
    write_rows(root / "samples.1.jsonl", *rows[4:], *again)
    (root / "config.toml").touch()
    return root


def find_ids(root: Path, **query) -> str:
    with open_record(root) as record:
        places = find_samples(record, **query).places
        return " ".join(row["id"] for row in record.read_samples(places))


@cases("""
query                              | expected
                                   | s0 s1 s4 s5 s6 s7 s8 s3
limit = 3                          | s7 s8 s3
limit = 3, reverse = true          | s3 s8 s7
step = 2                           | s8 s3
stage = "eval-rl"                  | s7
last = true, group = 2             | s4 s5
sort = "reward", limit = 2         | s0 s1
sort = "length", limit = 2         | s8 s7
sort = "lag", reverse = true, limit = 2 | s6 s4
status = "failed"                  |
grep = "IT IS 4"                   | s4
grep = "sum"                       | s7
grep = "user"                      |
grep = "completed"                 |
""")
def test_samples_are_chosen_and_ordered(run, query: dict, expected):
    assert find_ids(run, **query) == expected


def test_a_step_or_stage_without_samples_says_what_there_is(run):
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
    (root / "config.toml").touch()
    rows = [
        {**HEAD, "id": str(place)}
        | ({"response": text} if place % 2 else {"prompt": [{"role": "user", "content": text}]})
        for place, text in enumerate(texts)
    ]
    lines = [json.dumps(row, ensure_ascii=ascii_only) + "\n" for row in rows]
    (root / "samples.jsonl").write_text("".join(lines))
    expected = [str(place) for place, text in enumerate(texts) if needle.lower() in text.lower()]
    assert find_ids(root, grep=needle).split() == expected


TRANSCRIPT = """── rl step 9 · s9 · group 4 · completed · reward 0.900 · 11 tokens · 1 version behind
[prompt] add
→ it is 9
rewards: a 1, b 0.5

1 of 2 logged samples
"""


def test_a_transcript_has_a_headline_turns_and_the_parts_of_the_reward(tmp_path, capsys):
    (tmp_path / "config.toml").touch()
    parts = {"a": 1, "b": 0.5}
    sample = make_sample(9, 9, weight_version_min=7, rewards=parts)
    write_rows(tmp_path / "samples.jsonl", make_sample(1, 0), sample)
    assert read_command(capsys, "samples", tmp_path, "--step", "9") == TRANSCRIPT
    row = read_command(capsys, "samples", tmp_path, "--json", "--limit", "1", "--reverse")
    assert json.loads(row)["rewards"] == parts


# --- tokens -------------------------------------------------------------------------------------------------


def test_pieces_make_up_the_text_and_a_character_of_two_tokens_is_one_piece():
    tokenizer = Tokenizer(models.BPE({"a": 0, "Ã": 1, "©": 2, "b": 3}, []))
    tokenizer.decoder = decoders.ByteLevel()
    assert split_text([0, 1, 2, 3], tokenizer) == ["a", "", "é", "b"]


def test_tokens_are_marked_by_arrays_and_tokenizer(tmp_path, capsys):
    write_rows(tmp_path / "samples.jsonl", make_sample(1, 0), make_sample(1, 1))
    arrays = {"tokens": [0, 1, 2], "mask": [0, 1, 1], "advantage": [0.0, 0.5, -0.25]}
    arrays |= {"log_prob": [0.5, -1.0, -1.0], "mu": [0.0, -1.5, -1.0001]}
    place = write_block(tmp_path, "s0", **arrays)
    write_rows(tmp_path / "contributions.jsonl", {"id": "s0", "update": 0, "row": 0, **place})
    words = models.WordLevel({"<s>": 0, "two": 1, "plus": 2}, unk_token="<s>")
    Tokenizer(words).save(str(tmp_path / "tokenizer.json"))
    config = f'[model]\nname = "{tmp_path}"\n'
    no_update = "not marked, 1 sample: no update of the weights had this sample"
    for settings_text, column, *parts in (
        (config, "advantage", "<s>{+++  two}{--  plus}\nadvantage of the token: {--- to -0.5}", no_update),
        (config, "advantage", "→ it is 1"),  # what is not marked is printed plain
        (config, "logprob_diff", "<s>{+++  two} plus\n"),  # 0.0001 is rounding; what does not train is 0
        ("", "mask", "0 {+++ 1 2 }\n", "tokens are shown by number: there is no tokenizer.json yet"),
    ):
        (tmp_path / "config.toml").write_text(settings_text)
        printed = read_command(capsys, "samples", tmp_path, "--color", column)
        assert all(part in printed for part in parts), printed
    (tmp_path / "config.toml").write_text(config)
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system="truecolor", width=200)
    with open_record(tmp_path) as record:
        print_samples(console, record, find_samples(record), color="advantage")
    assert "\x1b[37;48;2;160;82;15m two" in out.getvalue(), "white on the darkest orange"

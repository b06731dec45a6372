from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from rollouts.cli import main
from rollouts.errors import ConfigError, RecordError, RunDirError
from rollouts.inspect import samples as samples_module
from rollouts.inspect.columns import open_columns
from rollouts.inspect.samples import SampleQuery, find_samples, longest_plain_run, scan_files, searched_texts
from rollouts.inspect.token_texts import find_tokenizer, split_text
from rollouts.inspect.transcripts import (
    LEVELS,
    Marks,
    compute_levels,
    compute_values,
    describe_sample,
    mark_tokens,
    print_samples,
)
from rollouts.run_dir import RunDir


def make_row(step: int, number: int, **fields: Any) -> dict[str, Any]:
    head = {
        "schema": 1,
        "stage": "rl",
        "step": step,
        "policy_version": step - 1,
        "attempt": 1,
        "time_unix": 1.0,
    }
    known = {
        "id": f"s{number}",
        "group_index": number // 2,
        "status": "completed",
        "prompt": "add",
        "response": f"it is {number}",
    }
    return head | known | {"reward": number / 10, "tokens": 9, "response_length": 20 - number} | fields


def write_samples(root: Path, rows: list[dict[str, Any]], *, ascii_only: bool = False) -> Path:
    root.mkdir(exist_ok=True)
    (root / "config.toml").write_text("")
    lines = [json.dumps(row, ensure_ascii=ascii_only, separators=(",", ":")) + "\n" for row in rows]
    half = len(lines) // 2
    (root / "samples.jsonl").write_text("".join(lines[:half]))
    (root / "samples.1.jsonl").write_text("".join(lines[half:]))
    return root


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Eight samples, two a step: number 3 failed, 5 has no reward, 6 is of an evaluation, 7 was made by old
    weights.
    """
    failure = {"failure": {"class": "reward", "function": "grade", "message": "Timed OUT"}}
    rows = [make_row(1 + number // 2, number) for number in range(8)]
    rows[3] |= {"status": "failed", "metadata": failure}
    del rows[5]["reward"]
    rows[6] |= {"stage": "eval-rl"}
    rows[7] |= {"weight_version_min": 1, "weight_version_max": 3}
    return write_samples(tmp_path / "run", rows)


def ids(root: Path, **query: Any) -> list[str]:
    return [row["id"] for row in find_samples(root, SampleQuery(**query)).rows]


# --- choosing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({}, "s0 s1 s2 s3 s4 s5 s6 s7"),
        ({"limit": 3}, "s5 s6 s7"),
        ({"limit": 3, "reverse": True}, "s7 s6 s5"),
        ({"step": 2}, "s2 s3"),
        ({"last_step": True}, "s7"),
        ({"last_step": True, "stage": "eval-rl"}, "s6"),
        ({"status": "failed"}, "s3"),
        ({"status": "pending"}, ""),
        ({"group": 2}, "s4 s5"),
        ({"sort": "reward", "limit": 2}, "s0 s1"),
        ({"sort": "reward", "reverse": True}, "s7 s6 s4 s3 s2 s1 s0 s5"),
        ({"sort": "length", "limit": 2}, "s7 s6"),
        ({"sort": "lag", "limit": 2}, "s7 s0"),
        ({"sort": "step", "reverse": True, "limit": 2}, "s6 s7"),
    ],
)
def test_samples_are_chosen_and_ordered(run: Path, query: dict[str, Any], expected: str):
    assert ids(run, **query) == expected.split()


def test_how_many_match_is_told(run: Path):
    found = find_samples(run, SampleQuery(limit=3))
    assert (len(found.rows), found.matching, found.total) == (3, 8, 8)
    found = find_samples(run, SampleQuery(grep="it is", limit=3))
    assert (len(found.rows), found.matching) == (3, None), "the search ends when it has enough"
    assert find_samples(run, SampleQuery(grep="it is 4")).matching == 1


def test_samples_of_an_attempt_that_was_repeated_are_left_out(tmp_path: Path):
    rows = [make_row(1, 0), make_row(2, 1), make_row(2, 2) | {"attempt": 2}]
    root = write_samples(tmp_path / "run", rows)
    assert ids(root) == ["s0", "s2"]
    assert ids(root, grep="it is 1") == []


def test_a_step_or_stage_without_samples_says_what_there_is(run: Path):
    with pytest.raises(RunDirError, match=r"--step 9: .*steps 1 to 4"):
        find_samples(run, SampleQuery(step=9))
    with pytest.raises(RunDirError, match=r"--stage sft: .*rl, eval-rl"):
        find_samples(run, SampleQuery(stage="sft"))
    with pytest.raises(ConfigError, match="--limit 0"):
        find_samples(run, SampleQuery(limit=0))


# --- text ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("IT IS 4", "s4"),
        ("timed out", "s3"),
        ("add", "s0 s1 s2 s3 s4 s5 s6 s7"),
        ("completed", ""),  # a status is no text
        ("reward", ""),  # nor is the name of a field
        ("group_in", ""),
        ("it  is", ""),
    ],
)
@pytest.mark.parametrize("scanned", [True, False])
def test_text_is_found_in_what_a_sample_says(
    run: Path, text: str, expected: str, *, scanned: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(samples_module, "SCAN_SHARE", 8 if scanned else 0)
    assert ids(run, grep=text) == expected.split()


@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize(
    "needle", ['say "hi"', "a\nb", "naïve", "ÉTÉ", "日本", "back\\slash", "tab\there", "</p>"]
)
def test_text_that_json_escapes_is_found_whatever_wrote_it(tmp_path: Path, needle: str, *, ascii_only: bool):
    rows = [
        make_row(1, 0),
        make_row(1, 1, response=f"it was {needle.lower()}!"),
        make_row(2, 2, prompt=[{"role": "user", "content": needle}]),
    ]
    root = write_samples(tmp_path / "run", rows, ascii_only=ascii_only)
    assert ids(root, grep=needle) == ["s1", "s2"]


def test_chat_turns_are_searched_without_their_roles():
    row = {
        "prompt": [
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": [{"type": "text", "text": "two"}]},
        ],
        "response": "three",
    }
    assert searched_texts(json.dumps(row).encode()) == ["one", "text", "two", "three"]
    assert searched_texts(b'{"prompt":7,"response":["odd"]}') == ["odd"]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.text(alphabet='abAB"\\ \né:', max_size=12), min_size=1, max_size=12),
    st.text(alphabet='abAB"\\ \né:', min_size=1, max_size=4),
)
def test_the_search_finds_what_looking_at_every_row_finds(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], needle: str
):
    rows = [make_row(1, number, response=text, prompt="") for number, text in enumerate(texts)]
    root = write_samples(tmp_path_factory.mktemp("runs") / "run", rows)
    expected = [f"s{number}" for number, text in enumerate(texts) if needle.lower() in text.lower()]
    assert ids(root, grep=needle, limit=100) == expected


@pytest.mark.parametrize("scan_bytes", [1, 200, 1 << 20])
def test_files_are_scanned_in_pieces_of_any_size(run: Path, scan_bytes: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(samples_module, "SCAN_BYTES", scan_bytes)
    columns = open_columns(RunDir(run), "samples")
    assert scan_files(columns, "it is").tolist() == list(range(8))
    assert scan_files(columns, "it is 6").tolist() == [6]
    assert scan_files(columns, "nothing").tolist() == []


def test_the_plain_part_of_a_text_is_what_json_leaves_as_it_is():
    assert [longest_plain_run(text) for text in ("Hello", 'ab "cdef" g', "é", "a\\bcd", "1/22")] == [
        "hello",
        "cdef",
        "",
        "bcd",
        "22",
    ]


# --- transcripts --------------------------------------------------------------------------------------------


def print_text(root: Path, *, color: str | None = None, colors: bool = False, **query: Any) -> str:
    console = Console(
        width=100,
        highlight=False,
        markup=False,
        force_terminal=colors,
        color_system="truecolor" if colors else None,
    )
    with console.capture() as capture:
        print_samples(console, find_samples(root, SampleQuery(**query)), color=color)
    return capture.get()


def test_a_transcript_has_a_headline_turns_and_what_failed(run: Path):
    assert print_text(run, status="failed").splitlines() == [
        "── rl step 2 · s3 · group 1 · failed · reward 0.300 · 17 tokens",
        "[prompt] add",
        "→ it is 3",
        "failed: reward in grade: Timed OUT",
        "",
        "1 of 8 logged samples",
    ]
    headline = print_text(run, step=4, limit=1).splitlines()[0]
    assert (
        headline == "── rl step 4 · s7 · group 3 · completed · reward 0.700 · 13 tokens · 2 versions behind"
    )
    assert print_text(run, status="pending") == "none of 8 logged samples matches\n"


def test_brackets_in_a_text_are_no_markup(tmp_path: Path):
    root = write_samples(tmp_path / "run", [make_row(1, 0, response="[bold]x[/bold] [red]")])
    assert "→ [bold]x[/bold] [red]" in print_text(root)


def test_a_sample_without_a_reward_says_so():
    assert (
        describe_sample({"stage": "rl", "step": 1, "status": "failed"})
        == "── rl step 1 · failed · no reward · 0 tokens"
    )


# --- tokens -------------------------------------------------------------------------------------------------

WORDS = ["<s>", "two", " plus", " two", " is", " five", "é1", "é2"]


def decode(ids: list[int]) -> str:
    """A vocabulary in which tokens 6 and 7 are the two bytes of é, and a text loses a space at its beginning,
    as with some tokenizers.
    """
    text = b"".join({6: b"\xc3", 7: b"\xa9"}.get(token, WORDS[token].encode()) for token in ids).decode(
        errors="replace"
    )
    return text.removeprefix(" ")


def test_pieces_make_up_the_text_and_a_character_of_two_tokens_is_one_piece():
    assert split_text([1, 2, 3, 6, 7, 4], decode) == [
        (0, 1, "two"),
        (1, 2, " plus"),
        (2, 3, " two"),
        (3, 5, "é"),
        (5, 6, " is"),
    ]
    assert "".join(text for _, _, text in split_text([0, 1, 2, 6], decode)) == "<s>two plus\ufffd"
    assert split_text([], decode) == []


def make_marks(values: list[float], trains: list[bool]) -> Marks:
    return Marks(np.arange(len(values)), np.array(values), np.array(trains))


def test_levels_are_thirds_of_the_largest_value_to_either_side():
    marks = make_marks([9.0, -3.0, 1.0, 2.0, -1.1, 0.0], [False, True, True, True, True, True])
    assert LEVELS == 3
    assert compute_levels(marks).tolist() == [
        0,
        -3,
        1,
        2,
        -2,
        0,
    ]  # of 3: 1/3 is in the first third, 2/3 in the second, 1.1/3 beyond the first
    assert compute_levels(make_marks([0.0], [True])).tolist() == [0]


def test_without_colours_tokens_are_marked_by_brackets_with_a_legend():
    text = mark_tokens(
        make_marks([0.0, 3.0, 3.0, -1.0], [False, True, True, True]), decode, "advantage", plain=True
    ).plain
    assert text.splitlines() == [
        "<s>{+++ two plus}{-  two}",
        "advantage of the token:  --- to -3  -- to -2  - to -1  + to +1  ++ to +2  +++ to +3 ",
    ]


def test_a_sample_without_advantages_has_no_marks_and_says_so():
    text = mark_tokens(make_marks([0.0, 0.0], [True, True]), decode, "advantage", plain=True).plain
    assert text.splitlines() == ["<s>two", "advantage of the token: none has any"]


def test_with_colours_the_text_stays_as_it_is():
    text = mark_tokens(
        make_marks([0.0, 3.0, 3.0, -1.0], [False, True, True, True]), decode, "advantage", plain=False
    )
    assert text.plain.splitlines()[0] == "<s>two plus two"
    assert [(span.start, span.end) for span in text.spans[:2]] == [(3, 11), (11, 15)]


def test_the_values_are_of_the_arrays():
    mu, log_prob = np.array([0.0, -1.5, -1.0], np.float32), np.array([0.0, -1.0, -1.0005], np.float32)
    arrays = {"mask": np.array([0, 1, 1], np.uint8), "mu": mu, "log_prob": log_prob}
    assert compute_values(arrays, "logprob_diff").tolist() == [0.0, 0.5, 0.0], (
        "less than 0.001 nats is rounding"
    )
    assert compute_values(arrays, "mask").tolist() == [0.0, 1.0, 1.0]
    with pytest.raises(RecordError, match="no advantage per token"):
        compute_values(arrays, "advantage")


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models

    folder.mkdir(parents=True)
    Tokenizer(models.WordLevel({"<s>": 0, "two": 1, "plus": 2, "is": 3}, unk_token="<s>")).save(
        str(folder / "tokenizer.json")
    )


def write_contribution(root: Path, write_block: Callable[[Path], tuple[str, int]]) -> None:
    shard, offset = write_block(root)
    row = make_row(1, 0) | {
        "update": 0,
        "row": 0,
        "advantage": 0.5,
        "shard": shard,
        "offset": offset,
        "length": 3,
    }
    (root / "contributions.jsonl").write_text(json.dumps(row) + "\n")


def write_block(root: Path) -> tuple[str, int]:
    """A block of token arrays as rollouts.metrics.token_shards describes it, by hand."""
    import zlib
    from struct import pack

    columns = {
        "tokens": ("<i4", [0, 1, 2]),
        "mask": ("|u1", [0, 1, 1]),
        "advantage": ("<f4", [0.0, 0.5, -0.25]),
    }
    described = [[name, dtype] for name, (dtype, _) in columns.items()]
    header = json.dumps({"id": "s0", "length": 3, "columns": described}).encode()
    payload = b"".join(np.array(values, dtype).tobytes() for dtype, values in columns.values())
    prefix = pack("<4sIII", b"tok1", len(header), len(payload), zlib.crc32(header + payload))
    (root / "tokens").mkdir()
    (root / "tokens" / "rl-1-000001.bin").write_bytes(prefix + header + payload)
    return "rl-1-000001.bin", 0


def test_tokens_of_a_run_are_marked_by_its_arrays_and_its_tokenizer(tmp_path: Path):
    root = write_samples(tmp_path / "run", [make_row(1, 0), make_row(1, 1)])
    write_tokenizer(tmp_path / "model")
    (root / "config.toml").write_text(f'[model]\nname = "{tmp_path / "model"}"\n')
    write_contribution(root, write_block)
    text = print_text(root, color="advantage")
    assert "<s>{+++  two}{--  plus}" in text
    assert "not marked, 1 sample: no update of the weights had this sample" in text
    assert "→ it is 1" in text, "what is not marked is printed plain"
    assert "{+++ <s>" not in print_text(root, color="mask")
    assert "{+++" not in print_text(root, color="advantage", colors=True)
    assert "\x1b[37;48;2;160;82;15m" in print_text(root, color="advantage", colors=True), (
        "white on the darkest orange"
    )


def test_without_a_tokenizer_samples_are_plain_and_the_reason_is_said_once(run: Path):
    text = print_text(run, color="mask")
    assert text.count("not marked") == 1
    assert "has no tokenizer.json yet" in text
    assert "→ it is 0" in text


def test_the_tokenizer_is_of_the_newest_checkpoint(tmp_path: Path):
    for step, complete, time in ((1, True, 100), (2, True, 200), (3, False, 300)):
        folder = tmp_path / "checkpoints" / "rl" / f"step_{step}"
        write_tokenizer(folder)
        if complete:
            (folder / "manifest.json").write_text("{}")
            os.utime(folder / "manifest.json", (time, time))
    assert find_tokenizer(RunDir(tmp_path)) == tmp_path / "checkpoints" / "rl" / "step_2" / "tokenizer.json"


# --- the command --------------------------------------------------------------------------------------------


def test_samples_prints_transcripts_and_json(run: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["samples", str(run), "--sort", "reward", "--reverse", "--limit", "1"]) == 0
    assert "── rl step 4 · s7" in capsys.readouterr().out
    assert main(["samples", str(run), "--step", "1", "--json"]) == 0
    assert [json.loads(line)["id"] for line in capsys.readouterr().out.splitlines()] == ["s0", "s1"]
    assert main(["samples", str(run), "--step", "77"]) == 2
    assert main(["samples", str(run / "nothing")]) == 2

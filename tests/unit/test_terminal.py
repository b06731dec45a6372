"""Texts of a record on a terminal: nothing that a model, a server or a user's function wrote can steer it."""

import io
import json
import re
import shlex
import unicodedata

import pytest

from rollouts.cli import main
from rollouts.inspect.terminal import make_safe, write_lines
from tests.support.text_tables import cases
from tests.unit.run_rows import write_rows

NASTY = "\x1b[2J\x1b[H\x1b]0;title\x07\x9b31m\r\x08\x7f\u202etxt.exe\u2066"


def is_steering(letter):
    return letter not in "\t\n" and (
        unicodedata.category(letter) in ("Cc", "Cs") or unicodedata.bidirectional(letter) in STEERING_CLASSES
    )


# of Unicode: what begins or ends a run of another direction
STEERING_CLASSES = re.findall("[A-Z]+", "LRE RLE LRO RLO PDF LRI RLI FSI PDI")


def test_every_character_that_steers_is_written_out_and_no_other():
    for letter in map(chr, range(0x110000)):
        assert (make_safe(letter) != letter) == is_steering(letter), ascii(letter)


def test_lines_for_programs_are_safe_on_a_terminal_and_as_they_are_elsewhere(monkeypatch):
    for is_terminal, expected in ((True, "a\\x1bb\n"), (False, "a\x1bb\n")):
        monkeypatch.setattr("sys.stdout", out := io.StringIO())
        monkeypatch.setattr(out, "isatty", lambda is_terminal=is_terminal: is_terminal)
        write_lines("a\x1bb\n")
        assert out.getvalue() == expected


# --- the commands -------------------------------------------------------------------------------------------


ROWS = r"""{
    "samples": [
        {"id": "s0NASTY", "status": "completed", "reward": 1.0, "rewards": {"aNASTY": 1.0, "b": 0.5},
            "prompt": [{"role": "userNASTY", "content": "addNASTY"},
                {"role": "tool", "content": [{"text": "NASTY"}]}],
            "response": "two\nlines\tNASTY"},
        {"id": "s1", "status": "failed", "reward": 1.0, "prompt": "addNASTY", "response": "NASTY",
            "metadata": {"failure": {
                "class": "rewardNASTY", "function": "gradeNASTY", "message": "lateNASTY"}}}],
    "metrics": [
        {"reward/mean": 0.5, "loss/total": 1.0, "time/step": 1.0},
        {"step": 2, "reward/mean": 0.5, "loss/total": 1.0, "time/step": 1.0, "fail/rewardNASTY": 1.0,
            "groups/dropped/NASTY": 1.0, "time/NASTY": 0.5}],
    "evaluations": [{"name": "heldoutNASTY", "eval/NASTY/avg@1": 0.5}],
    "spans": [{"name": "generate", "track": "vllmNASTY", "start_unix": 1.0, "duration_s": 1.0, "tokens": 3,
        "step": 2}]
}"""


@pytest.fixture
def run(tmp_path):
    """A run in which everything that is text says what would steer a terminal."""
    for kind, rows in json.loads(ROWS.replace("NASTY", json.dumps(NASTY)[1:-1])).items():
        write_rows(tmp_path / f"{kind}.jsonl", *rows)
    (tmp_path / "summary.json").write_text(json.dumps({"mode": NASTY, "versions": {"torch": NASTY}}))
    return tmp_path


@cases("""
words
samples
samples --status failed
samples --color mask
inspect
tail --once
plot *
query 'SELECT * FROM samples'
query 'SELECT 1 AS "NASTY" FROM metrics'
query 'SELECT "NASTY" FROM metrics'
samples --stage NASTY
plot NASTY
""")
def test_no_command_lets_a_record_steer_the_terminal(run, words, capsys):
    command, *rest = shlex.split(words)
    main([command, str(run), *(word.replace("NASTY", NASTY) for word in rest)])
    written = capsys.readouterr()
    text = written.out + written.err
    assert not [letter for letter in text if is_steering(letter)]
    assert "\\x1b" in text


def test_an_output_that_takes_no_lines_and_curves_gets_question_marks(run, monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", out)
    assert main(["tail", str(run), "--once"]) == 0
    out.flush()
    assert b"reward/mean 0.5 ?? 0.5" in out.buffer.getvalue()

"""The command line as a whole: its help, what it loads, and the page docs/command.md."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rollouts.cli import COMMANDS, main, make_parser

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "command.md"
SHOWN = re.findall(r"^\$ python -m rollouts (.+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


def run_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main([*words, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_help_lists_every_command_in_order_and_each_explains_itself(capsys):
    assert re.findall(r"^    ([a-z-]+)", run_help([], capsys), re.MULTILINE) == list(COMMANDS)
    assert {shlex.split(line)[0] for line in SHOWN} >= set(COMMANDS), "the page shows every command"
    for command in COMMANDS:
        out = run_help([command], capsys)
        assert out.startswith(f"usage: rollouts {command}")
        assert out.count("\n") > 4


@pytest.mark.parametrize("line", SHOWN)
def test_what_the_page_shows_is_a_command(line, capsys):
    words = [word for word in shlex.split(line) if word != "--help"]
    assert "usage: rollouts" in run_help(words, capsys)
    if len(words) > 1:
        arguments, overrides = make_parser(words[0]).parse_known_args(words)
        assert callable(arguments.run)
        assert not overrides or arguments.takes_settings


def test_help_loads_nothing_heavy():
    script = (
        "import sys; from rollouts.cli import make_parser; make_parser().format_help(); print([n for n in %r"
        " if n in sys.modules])"
    )
    heavy = ("torch", "transformers", "rich", "pydantic", "trio", "matplotlib", "duckdb")
    done = subprocess.run(
        [sys.executable, "-c", script % (heavy,)], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"

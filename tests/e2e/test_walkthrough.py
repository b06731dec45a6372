"""Whoever has only docs/walkthrough.md can write a task and a config and train it: its code blocks are run,
in order, in an empty directory.
"""

import json
import os
import re
import shlex
import subprocess
import sys

import pytest

from tests import ROOT

PAGE = ROOT / "docs/walkthrough.md"
BLOCK = re.compile(r"^```(?P<info>[^\n]*)\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE)


def run_command(line, directory, cache):
    words = shlex.split(line)
    assert words[0] == "python", line
    environment = {**os.environ, "ROLLOUTS_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *words[1:]],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.slow
def test_the_walkthrough_trains_a_task(tmp_path):
    cache, directory = tmp_path / "cache", tmp_path / "work"
    directory.mkdir()
    outputs = []
    for block in BLOCK.finditer(PAGE.read_text(encoding="utf-8")):
        kind, _, name = block["info"].partition(" ")
        if kind in ("python", "toml"):
            (directory / name).write_text(block["body"], encoding="utf-8")
        for line in block["body"].splitlines() if kind == "console" else ():
            done = run_command(line.removeprefix("$ "), directory, cache)
            assert done.returncode == (2 if name == "fails" else 0), f"{line}\n{done.stdout}\n{done.stderr}"
            outputs.append(done.stdout + done.stderr)
    assert len(outputs) == 7  # else the page has other commands than this test knows
    refused, checked, trained, inspected, samples, _, resumed = outputs
    assert "samples_per_prompt" in refused
    assert "nothing stands in the way" in checked
    assert "held-out accuracy, after RL" in trained
    assert "last-letter" in inspected and "completed" in samples and "after RL" in resumed
    before_rl, after_rl = (
        json.loads((directory / "runs/last-letter/summary.json").read_text())["accuracy"][name]
        for name in ("sft", "rl")
    )
    assert after_rl > before_rl + 0.1, (before_rl, after_rl)
    assert json.loads((directory / "runs/filtered/summary.json").read_text())["steps"] == 70

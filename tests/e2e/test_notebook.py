"""The notebooks of docs, as a reader runs them: a process, a home and a cache of their own."""

import os
import re
import subprocess
import sys

import pytest

from tests import ROOT

DOCS = ROOT / "docs"
NOTEBOOKS = DOCS / "notebooks"
RUN = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"
# the hub's HTTP client loads trio where there is one, so its absence is what can be tested: None makes
# `import trio` fail
RUN_WITHOUT_TRIO = RUN.replace(";", "; sys.modules['trio'] = None;", 1)


def run_script(script, folder, run=RUN):
    """The lines that a script printed. Everything it may write to is below `folder`."""
    home = folder / "home"
    home.mkdir()
    environment = {
        **os.environ,
        "HOME": str(home),
        "ROLLOUTS_CACHE": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(DOCS.parent),
    }
    command = [sys.executable, "-c", run, str(script)]
    done = subprocess.run(
        command,
        cwd=home,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_the_notebook_improves_its_reward_without_trio(tmp_path):
    reports = run_script(NOTEBOOKS / "grpo_in_a_page.py", tmp_path, RUN_WITHOUT_TRIO)
    assert [line[:32].strip() for line in reports] == [
        "GRPO",
        "RLOO + REINFORCE",
        "GRPO for vowels",
        "GRPO without the chat template",
    ]
    for line in reports:
        first, last = re.findall(r"\d\.\d\d", line)
        assert float(first) < 0.15 < 0.5 < float(last), line


def test_steps_submitted_ahead_overlap_and_give_the_same_bits(tmp_path):
    overlap, same, order, failed = run_script(NOTEBOOKS / "pipelined_futures.py", tmp_path)
    assert int(re.findall(r"\d+", overlap)[0]) > 0 and same.startswith("the same losses, bit for bit")
    assert order.startswith("done in the order: nothing to do, ")
    assert failed == "failed: raised by future 1 of a group of 3"


@pytest.mark.slow
def test_ppo_improves_its_reward_and_its_critic(tmp_path):
    for line in run_script(NOTEBOOKS / "ppo_with_gae.py", tmp_path):
        first, last = re.findall(r"-?\d\.\d\d", line)
        assert float(first) < 0.15 < 0.2 < float(last), line

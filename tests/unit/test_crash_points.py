"""Named points at which a test can make the process die, raise or hang."""

import re
import signal
import subprocess
import sys

import pytest

from rollouts.crash_points import POINTS, arm_crash_points, reach
from rollouts.errors import ConfigError, CrashPointReached
from tests import ROOT
from tests.support.text_tables import cases

POINT = "train.before_optim_step"


@pytest.fixture(autouse=True)
def disarmed():
    yield
    arm_crash_points({})


def run_child(variable):
    """Reaches POINT three times, the second of which the variable names."""
    script = f"""
import os
from rollouts.crash_points import arm_crash_points, reach
arm_crash_points(os.environ)
for number in range(3):
    print(number, flush=True)
    reach({POINT!r})
"""
    environ = {"PYTHONPATH": str(ROOT), variable: f"{POINT}:2"}
    return subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True
    )


def test_every_point_is_in_the_code_and_every_one_in_the_code_is_known():
    sources = [*(ROOT / "rollouts").rglob("*.py"), *(ROOT / "integration_training").rglob("*.py")]
    placed = {
        name
        for path in sources
        if path.name != "crash_points.py"
        for name in re.findall(r'\breach\("([^"]+)"\)', path.read_text())
    }
    assert placed == set(POINTS)


def test_it_happens_on_the_rank_that_is_named():
    arm_crash_points({"ROLLOUTS_RAISE_AT": f"{POINT}:1:2"}, rank=0)
    reach(POINT)
    arm_crash_points({"ROLLOUTS_RAISE_AT": f"{POINT}:1:2"}, rank=2)
    with pytest.raises(CrashPointReached):
        reach(POINT)


def test_a_crash_is_a_sigkill():
    child = run_child("ROLLOUTS_CRASH_AT")
    stdout, _ = child.communicate(timeout=60)
    assert child.returncode == -signal.SIGKILL
    assert stdout.split() == ["0", "1"]


def test_a_hang_ends_only_by_a_signal():
    child = run_child("ROLLOUTS_HANG_AT")
    assert [child.stdout.readline().strip() for _ in range(2)] == ["0", "1"]
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(timeout=0.3)
    child.kill()
    assert child.communicate(timeout=60)[0] == ""


def test_what_is_reached_can_be_listed(tmp_path):
    arm_crash_points({"ROLLOUTS_LIST_POINTS": str(tmp_path / "list")})
    reach(POINT)
    reach("sync.begin")
    reach(POINT)
    assert (tmp_path / "list").read_text().split() == [POINT, "sync.begin", POINT]


@cases("""
settings                                  | said
ROLLOUTS_CRASH_AT=checkpoint.before_renam | 'checkpoint.before_renam'.*'checkpoint.before_rename'
ROLLOUTS_HANG_AT=nonsense:1               | names no crash point
ROLLOUTS_RAISE_AT=sync.begin:0            | nth from 1
ROLLOUTS_RAISE_AT=sync.begin:one          | nth from 1
ROLLOUTS_RAISE_AT=sync.begin:1:-1         | rank from 0
ROLLOUTS_RAISE_AT=sync.begin:1:1:1        | name\\[:nth\\]
ROLLOUTS_RAISE_AT=sync.begin ROLLOUTS_CRASH_AT=sync.begin | one action per point
ROLLOUTS_LIST_POINTS=/nowhere/list        | cannot be written
""")
def test_a_setting_that_means_nothing_is_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        arm_crash_points(dict(setting.split("=") for setting in settings.split()))

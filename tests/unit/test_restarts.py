"""Who resumes without being told to: processes that one launcher starts again, and never a run that a user
starts anew.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from rollouts.config.schema import RunConfig
from rollouts.errors import RunDirError
from rollouts.preflight.restarts import (
    choose_resume,
    find_restart,
    read_agents,
    record_launch,
)
from rollouts.preflight.run_directory import check_run_dir, lock_run_dir, write_holder
from rollouts.ranks.launch import Launch, find_agent, identify_process, read_launch
from rollouts.run_dir import RunDir

ALONE = Launch(0, 1, 0, 1, "localhost", restart=0, run_id="job", agent="a")
SPREAD = Launch(0, 4, 0, 2, "node-a", restart=0, run_id="job", agent="a")  # on two machines


def use(run_dir: RunDir, launch: Launch, *, others: Iterable[str] = ()) -> None:
    """A run of this launch has the directory, and its process ends."""
    restart, _ = choose_resume(run_dir, launch, asked=False)
    lock = lock_run_dir(run_dir)
    try:
        write_holder(lock, record_launch(run_dir, launch, restart))
        write_holder(lock, record_launch(run_dir, launch, restart, [launch.agent, *others]))
    finally:
        os.close(lock)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


def test_what_the_same_agent_starts_is_a_restart_whatever_the_count_says(run_dir):
    use(run_dir, ALONE)
    assert find_restart(run_dir, ALONE) == "yes"
    use(run_dir, SPREAD, others=["b"])
    found = find_restart(run_dir, replace(SPREAD, agent="b"))
    assert found == "yes", "rank 0 is on another machine than before"


@pytest.mark.parametrize("run_id", ["job", "none", ""])
def test_two_runs_of_one_machine_with_the_same_id_are_two(run_dir, run_id):
    use(run_dir, replace(ALONE, run_id=run_id))
    assert choose_resume(run_dir, replace(ALONE, run_id=run_id, agent="later"), asked=False) == ("no", False)


def test_a_start_that_is_refused_once_it_has_locked_leaves_the_run_to_its_own_agent(run_dir):
    later = replace(ALONE, agent="later")
    assert choose_resume(run_dir, later, asked=False) == ("no", False), "both look before either has locked"
    use(run_dir, ALONE)
    run_dir.config.touch()
    lock = lock_run_dir(run_dir)
    with pytest.raises(RunDirError, match="is not empty"):
        check_run_dir(run_dir, RunConfig(), resume=False, locked=True)
    os.close(lock)
    assert find_restart(run_dir, replace(ALONE, restart=1)) == "yes"
    assert find_restart(run_dir, replace(later, restart=1)) == "no"


def test_without_agents_the_launchers_count_tells(run_dir):
    assert find_restart(run_dir, replace(ALONE, restart=1)) == "yes", "it failed before it had the directory"
    use(run_dir, replace(ALONE, agent=""))
    found = [find_restart(run_dir, replace(ALONE, agent="", restart=count)) for count in (0, 1)]
    assert found == ["no", "yes"]


def test_a_new_machine_with_rank_0_resumes_if_a_machine_of_before_is_there(run_dir):
    use(run_dir, SPREAD, others=["b"])
    newcomer = replace(SPREAD, agent="new")
    assert find_restart(run_dir, newcomer) == "if another rank says so"
    use(run_dir, newcomer, others=["b"])
    assert read_agents(run_dir) == ("job", {"a", "b", "new"}), "the machine that left may come back"


@pytest.mark.parametrize("others", [[], ["x"]])
def test_a_launch_of_the_same_id_on_several_machines_is_refused_again_and_again(run_dir, others):
    use(run_dir, SPREAD, others=["b"])
    for count in range(2):
        second = replace(SPREAD, agent="c", restart=count)
        with pytest.raises(RunDirError, match="another launch has used it last; go on with --resume"):
            use(run_dir, second, others=others)
        assert read_agents(run_dir) == ("job", {"a", "b"})


def test_two_processes_are_told_apart_and_one_is_itself():
    script = "import os; from rollouts.ranks.launch import read_launch; print(read_launch(os.environ).agent)"
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "job"}
    program = [sys.executable, "-c", script]
    wrapped = ["sh", "-c", '"$@"; exit $?', "wrapper", *program]
    for argv in (program, wrapped):
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout == identify_process(os.getpid()) + "\n", "both are children of this one"
    assert identify_process(os.getppid()) != identify_process(os.getpid()) != ""
    assert read_launch({}).agent == "", "a shell starts many runs"


def make_process(proc: Path, pid: int, parent: int, run_id: str) -> None:
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "stat").write_text(f"{pid} (a (b) c) S {parent} {' '.join('0' * 17)} {pid}00 0")
    (proc / str(pid) / "environ").write_text("A=1\0" + (f"TORCHELASTIC_RUN_ID={run_id}\0" if run_id else ""))


def test_a_wrapper_between_the_launcher_and_the_program_is_not_the_launcher(tmp_path):
    (tmp_path / "sys/kernel/random").mkdir(parents=True)
    (tmp_path / "sys/kernel/random/boot_id").write_text("boot\n")
    make_process(tmp_path, 5, 1, "")  # torchrun; inside a job of another one it would be the other's process
    make_process(tmp_path, 6, 5, "job")
    make_process(tmp_path, 7, 6, "job")
    make_process(tmp_path, 9, 1, "outer")
    agent = identify_process(5, proc=tmp_path)
    assert agent.endswith("/boot/5/500")
    assert [find_agent("job", parent, proc=tmp_path) for parent in (5, 6, 7)] == [agent] * 3
    assert find_agent("job", 9, proc=tmp_path) == identify_process(9, proc=tmp_path)
    assert find_agent("job", 8, proc=tmp_path) == "", "it has ended, and nothing tells who started it"
    (tmp_path / "6/environ").unlink()
    assert find_agent("job", 7, proc=tmp_path) == "", "one that may not be looked at could be the launcher"

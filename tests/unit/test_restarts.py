"""Who resumes without being told to: processes that one launcher starts again, and never a run that a user
starts anew.
"""

import os

import pytest

from rollouts.config.schema import RunConfig
from rollouts.errors import RunDirError
from rollouts.preflight.run_directory import (
    check_run_dir,
    find_restart,
    lock_run_dir,
    read_agents,
    record_launch,
    write_holder,
)
from rollouts.ranks.launch import Launch, read_launch
from rollouts.run_dir import RunDir

ALONE = Launch(0, 1, 0, 1, "localhost", restart=0, run_id="job", agent="a")
SPREAD = Launch(0, 4, 0, 2, "node-a", restart=0, run_id="job", agent="a")  # on two machines


def use(run_dir, launch, *, others=()):
    """A run of this launch has the directory, and its process ends."""
    restart = find_restart(run_dir, launch)
    with os.fdopen(lock_run_dir(run_dir)) as lock:
        write_holder(lock.fileno(), record_launch(run_dir, launch, restart))
        write_holder(lock.fileno(), record_launch(run_dir, launch, restart, [launch.agent, *others]))


@pytest.fixture
def run_dir(tmp_path):
    return RunDir(tmp_path / "run")


def test_what_the_same_agent_starts_is_a_restart_whatever_the_count_says(run_dir):
    use(run_dir, ALONE)
    assert find_restart(run_dir, ALONE) == "yes"
    use(run_dir, SPREAD, others=["b"])  # then rank 0 is on another machine than before
    assert find_restart(run_dir, SPREAD._replace(agent="b")) == "yes"


@pytest.mark.parametrize("run_id", ["job", "none", ""])
def test_two_runs_of_one_machine_with_the_same_id_are_two(run_dir, run_id):
    launch = ALONE._replace(run_id=run_id)
    use(run_dir, launch)
    assert find_restart(run_dir, launch._replace(agent="later")) == "no"


def test_a_start_that_is_refused_once_it_has_locked_leaves_the_run_to_its_own_agent(run_dir):
    later = ALONE._replace(agent="later")
    assert find_restart(run_dir, later) == "no"  # both look before either has locked
    use(run_dir, ALONE)
    run_dir.config.touch()
    with os.fdopen(lock_run_dir(run_dir)), pytest.raises(RunDirError, match="is not empty"):
        check_run_dir(run_dir, RunConfig(), resume=False, locked=True)
    assert find_restart(run_dir, ALONE._replace(restart=1)) == "yes"
    assert find_restart(run_dir, later._replace(restart=1)) == "no"


def test_without_agents_the_launchers_count_tells(run_dir):
    assert find_restart(run_dir, ALONE._replace(restart=1)) == "yes"  # it failed before it had the directory
    use(run_dir, ALONE._replace(agent=""))
    for count, found in enumerate(("no", "yes")):
        assert find_restart(run_dir, ALONE._replace(agent="", restart=count)) == found


def test_a_new_machine_with_rank_0_resumes_if_a_machine_of_before_is_there(run_dir):
    use(run_dir, SPREAD, others=["b"])
    newcomer = SPREAD._replace(agent="new")
    assert find_restart(run_dir, newcomer) == "if another rank says so"
    use(run_dir, newcomer, others=["b"])
    assert read_agents(run_dir) == ("job", {"a", "b", "new"})  # the machine that left may come back


@pytest.mark.parametrize("others", [[], ["x"]])
def test_a_launch_of_the_same_id_on_several_machines_is_refused_again_and_again(run_dir, others):
    use(run_dir, SPREAD, others=["b"])
    for count in range(2):
        with pytest.raises(RunDirError, match="another launch has used it last; go on with --resume"):
            use(run_dir, SPREAD._replace(agent="c", restart=count), others=others)
        assert read_agents(run_dir) == ("job", {"a", "b"})


def test_a_launcher_is_known_by_its_directory_of_logs_in_every_attempt():
    def find_agent(folder, attempt):
        error_file = f"/tmp/torchelastic_x/{folder}/attempt_{attempt}/0/error.json"
        return read_launch({"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_ERROR_FILE": error_file}).agent

    assert find_agent("job_a", 0) == find_agent("job_a", 1) != find_agent("job_b", 0)
    assert read_launch({"TORCHELASTIC_RUN_ID": "job"}).agent == ""  # nothing tells who started it

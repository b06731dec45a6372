"""Whether a launcher starts a run again, which then resumes by itself, or a user starts one, who must say
--resume.

    torchrun's agent on each machine ─► processes of the run     after a failure: its count is above 0
                                     └─► the same command once more  after a machine left or came: it is not

So run.lock keeps the agents of the run that used the directory last. An agent starts one command only: a
process that one of them has started is a restart. A machine that has taken another's place has an agent that
nobody knows; if rank 0 is on it, an agent of another rank must be known. The run id alone proves nothing: it
is the user's to choose, "none" by default, and the same for two runs that were meant to be two.
"""

from collections.abc import Collection
from typing import Any, Literal

from rollouts.errors import RunDirError
from rollouts.ranks.launch import Launch
from rollouts.run_dir import RunDir, read_holder

Restart = Literal["yes", "no", "if another rank says so"]
NO_IDS = frozenset({"", "none"})  # what torchrun calls a run that was given no id


def read_agents(run_dir: RunDir) -> tuple[str, frozenset[str]]:
    """(run id, agents) of the run that used the directory last; ("", none) where the file does not say."""
    try:
        launch = read_holder(run_dir)["launch"]
        return str(launch["run_id"]), frozenset(str(agent) for agent in launch["agents"])
    except (KeyError, TypeError):
        return "", frozenset()


def find_restart(run_dir: RunDir, launch: Launch) -> Restart:
    """Whether the launcher starts again what used the directory last. Ask before the directory is locked.
    Only reads.

    The launcher's own count tells only where agents are not known: a start that was refused is started again
    too.
    """
    run_id, agents = read_agents(run_dir)
    if not launch.agent or not agents:
        return "yes" if launch.restart > 0 else "no"
    if launch.agent in agents:
        return "yes"
    same = launch.restart > 0 or (launch.run_id == run_id and run_id not in NO_IDS)
    return "if another rank says so" if same and not launch.on_one_node else "no"


def choose_resume(run_dir: RunDir, launch: Launch, *, asked: bool) -> tuple[Restart, bool]:
    """find_restart's answer, and whether the run resumes. `asked`: by --resume, after which no other rank
    need say anything.
    """
    restart = find_restart(run_dir, launch)
    if asked and restart == "if another rank says so":
        restart = "yes"
    return restart, asked or restart != "no"


def record_launch(
    run_dir: RunDir, launch: Launch, restart: Restart, agents: Collection[str] | None = None
) -> dict[str, Any]:
    """What run.lock is to say of this launch: first when the directory is locked and checked, then with the
    `agents` of all ranks. Of a launch that is not proven to be a restart, and may be refused, it says nothing
    new before that. Agents of before stay, for some may come back.

    Raises RunDirError where another rank had to say that this is a restart, and none does.
    """
    _, before = read_agents(run_dir)
    doubtful = restart == "if another rank says so"
    if agents is None:
        before = frozenset() if restart == "no" else before
        agents = () if doubtful else (launch.agent,)
    elif doubtful and before.isdisjoint(agents):
        raise RunDirError(
            f"output.dir={run_dir.root} is not empty, and another launch has used it last; go on with"
            " --resume, or name another directory with --output.dir DIR"
        )
    return {"run_id": launch.run_id, "agents": sorted({*before, *agents} - {""})}

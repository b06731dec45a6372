"""One run of the fleet simulator, drawn from one integer: how it is trained, who serves, what goes wrong and
when.
"""

import math
import random
from dataclasses import dataclass
from typing import Literal

from rollouts.config.schema import RLTrainingConfig
from tests.support.fault_plan import FaultPlan, draw_fault_plan
from tests.support.fault_server import DIALECTS, DialectName
from tests.support.simulated_process import ServerSpeed

LEAST_ENGINES, LEAST_SYNCS, LEAST_REQUESTS, LEAST_FAULTS = 3, 4, 200, 5  # of every run
TRAINED_SAMPLES = 160  # at least; every run makes more requests than that
HORIZON_S = 60.0  # about as long as a run without faults takes
PLANNED_FAULTS = 10  # at least; not all of them strike


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedServer:
    """One server of the run."""

    name: str
    dialect: DialectName
    speed: ServerSpeed
    can_restart: bool  # by the fleet
    is_watched: bool  # the fleet hears when its process exits
    joins_at_s: float = 0.0  # after the start; 0: a member from the start
    leaves_at_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSchedule:
    """One run, drawn from one integer by draw_fleet_schedule."""

    seed: int
    config: RLTrainingConfig
    servers: tuple[SimulatedServer, ...]
    faults: FaultPlan
    max_concurrency: int
    max_attempts: int
    down_limit_s: float
    rows: int  # of the data
    max_new_tokens: int
    drop_rate: float  # of groups, by the filter
    failed_reward_rate: float  # of samples
    skipped_step_rate: float  # of training steps, which leave the weights as they were
    reward_s: float  # a reward takes 0 to 3 times as long
    step_s: float  # of each piece of the trainer's work
    export_s: float  # to write a snapshot
    silence_s: float  # of a request or an update without progress
    checkpoint_every: int
    ends: Literal[
        "never", "stop", "kill"
    ]  # of the first trainer: asked to stop after a step, or killed; another resumes
    ends_at: float  # that step; or those seconds


def draw_fleet_schedule(seed):
    """The schedule of an integer: at least 3 engines, 4 weight syncs, 200 requests and 10 planned faults."""
    draw = random.Random(f"fleet schedule {seed}")
    sync_every = draw.choice([1, 1, 2, 3])
    max_staleness = draw.randint(sync_every - 1, 3)
    steps = sync_every * LEAST_SYNCS + draw.randint(0, 2)
    size = draw.choice([2, 3, 4])
    num_prompts = math.ceil(TRAINED_SAMPLES / (steps * size)) + draw.randint(0, 1)
    over_sampling = draw.choice([1.0, 1.2, 1.5])
    config = RLTrainingConfig.model_validate(
        {
            "data": {"kind": "jsonl", "path": "rows.jsonl"},
            "steps": steps,
            "sync_every": sync_every,
            "max_staleness": max_staleness,
            "rollout": {
                "num_prompts": num_prompts,
                "samples_per_prompt": size,
                "replay": seed % 4 if max_staleness else 0,
                "over_sampling": over_sampling,
                "ranker": "reward_std" if max_staleness == 0 and over_sampling > 1 and seed % 2 else "",
                "max_attempts": 50,
                "max_failed_fraction": 1.0,
                "reward_timeout_s": 5.0,
            },
        }
    )
    servers = _draw_servers(draw)
    ends = draw.choice(["never", "never", "stop", "kill"])
    return FleetSchedule(
        seed=seed,
        config=config,
        servers=servers,
        faults=draw_fault_plan(
            seed,
            engines=[server.name for server in servers],
            count=draw.randint(PLANNED_FAULTS, 2 * PLANNED_FAULTS),
            requests=25,
            updates=LEAST_SYNCS,
            horizon_s=HORIZON_S / 2,
        ),
        max_concurrency=draw.choice([2, 6, 16, 64]),
        max_attempts=draw.choice([2, 4, 20]),
        down_limit_s=draw.choice([60.0, 600.0]),
        rows=draw.choice([17, 50, 400]),
        max_new_tokens=draw.choice([2, 4, 6]),
        drop_rate=draw.choice([0.0, 0.1, 0.3]),
        failed_reward_rate=draw.choice([0.0, 0.02, 0.1]),
        skipped_step_rate=draw.choice([0.0, 0.0, 0.2]),
        reward_s=draw.choice([0.0, 0.2, 0.5]),
        step_s=draw.choice([0.0, 0.5, 2.0]),
        export_s=draw.choice([0.0, 0.5]),
        silence_s=draw.choice([8.0, 15.0]),
        checkpoint_every=sync_every * draw.choice([1, 1, 2]),
        ends=ends,
        ends_at=float(draw.randint(1, steps - 1)) if ends == "stop" else draw.uniform(2.0, HORIZON_S),
    )


def _draw_servers(draw):
    count, joining = draw.randint(LEAST_ENGINES, 4), draw.choice([0, 0, 1])
    leaving = draw.randrange(count) if draw.random() < 0.3 else None  # two at least remain
    slots, token_s, load_s = draw.choice([4, 8]), draw.choice([0.1, 0.3]), draw.choice([0.2, 1.0, 2.0])
    return tuple(
        SimulatedServer(
            name=f"e{index}",
            dialect=draw.choice(DIALECTS),
            speed=ServerSpeed(
                slots=slots,
                token_s=token_s * draw.choice([1.0, 1.0, 1.5]),
                control_s=draw.choice([0.0, 0.05]),
                load_s=load_s * draw.choice([1.0, 2.0]),
                start_s=draw.choice([1.0, 5.0]),
            ),
            can_restart=draw.random() < 0.7,
            is_watched=draw.random() < 0.7,
            joins_at_s=draw.uniform(1.0, HORIZON_S / 2) if index >= count else 0.0,
            leaves_at_s=draw.uniform(1.0, HORIZON_S) if index == leaving else math.inf,
        )
        for index in range(count + joining)
    )

"""Where the time of a stage went: seconds of a step by phase."""

from __future__ import annotations

from typing import NamedTuple

from rich.table import Table

from rollouts.inspect.read import RunRecord
from rollouts.inspect.table import make_plain_table

STEP = "time/step"
PARTS = {"time/weight_sync_pause": "time/weight_sync"}  # a phase that lies within another
LEAST_SHARE = 0.005  # of what no phase has taken, to be shown
BAR = "█"


class Phase(NamedTuple):
    """A phase over all steps of a stage."""

    name: str
    seconds: float  # of all steps together
    share: float  # of the time of all steps; of phases that overlap the shares are more than 1 together
    within: str  # the phase that this one is a part of, "" for none


def compute_phases(record: RunRecord, stage: str) -> list[Phase]:
    """The phases of a stage, longest first, a part after its whole, and last `other`: what no phase has
    taken. Empty without time/step.
    """
    total = float(record.series(stage, STEP)[1].sum())
    if not total:
        return []
    names = [name for name in record.columns.metrics if name.startswith("time/") and name != STEP]
    seconds = {name: float(record.series(stage, name)[1].sum()) for name in names}
    wholes = sorted(
        (name for name in names if name not in PARTS and seconds[name]), key=lambda name: -seconds[name]
    )
    phases: list[Phase] = []
    for whole in wholes:
        phases.append(make_phase(whole, seconds[whole], total))
        phases += [
            make_phase(part, seconds[part], total)
            for part, of in PARTS.items()
            if of == whole and seconds.get(part)
        ]
    rest = total - sum(seconds[name] for name in wholes)
    return [*phases, Phase("other", rest, rest / total, "")] if rest / total >= LEAST_SHARE else phases


def make_phase(name: str, seconds: float, total: float) -> Phase:
    """The phase of a metric `time/NAME`."""
    return Phase(
        name.removeprefix("time/"), seconds, seconds / total, PARTS.get(name, "").removeprefix("time/")
    )


def make_phase_table(record: RunRecord, stage: str, *, width: int) -> Table | None:
    """Seconds per step, share of the time and a bar for each phase; None where the stage has no time/step."""
    phases = compute_phases(record, stage)
    if not phases:
        return None
    steps = len(record.series(stage, STEP)[1])
    overlap = sum(phase.share for phase in phases if not phase.within) > 1 + LEAST_SHARE
    title = f"{stage}, time by phase" + (
        " (phases overlap: together they are more than the step)" if overlap else ""
    )
    table = make_plain_table(title)
    table.add_column("phase", no_wrap=True)
    for heading in ("s/step", "share"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True, style="cyan")
    room = max(4, min(50, width - 46))
    for phase in phases:
        name = f"  of it {phase.name.removeprefix(f'{phase.within}_')}" if phase.within else phase.name
        bar = BAR * round(min(1.0, phase.share) * room)
        table.add_row(name, f"{phase.seconds / steps:.3g}", f"{100 * phase.share:.1f} %", bar)
    return table

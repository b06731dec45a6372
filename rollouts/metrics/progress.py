"""How far a run is, for a person: a live line per stage on a terminal, plain lines in a log file."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from rich.console import Console
from rich.live import Live
from rich.table import Table

from rollouts.types import Numbers

LINE_S = 5.0  # between two plain lines
SHOWN = (  # label, metrics of which the first present is shown, format
    ("reward", ("reward/mean",), "{:.3f}"),
    ("loss", ("loss/total",), "{:.4g}"),
    ("grad", ("optim/grad_norm",), "{:.3g}"),
    ("tok/s", ("perf/generated_tokens_per_s", "perf/trained_tokens_per_s", "perf/tokens_per_s"), "{:.0f}"),
    ("s/step", ("time/step",), "{:.2f}"),
)


Progress = Callable[[str, int, Numbers], None]
"""Shows a completed step: its stage, number and metrics."""


@contextmanager
def open_progress(console: Console, total_steps: Mapping[str, int]) -> Iterator[Progress]:
    """Shows steps on `console`: in a live table if that is a terminal, else in plain lines, at most every
    LINE_S seconds, and the first and last step of a stage.

    `total_steps` of each stage is what it counts towards. It draws when it is told something, and owns no
    thread and no task.
    """
    live = Live(console=console, auto_refresh=False) if console.is_terminal else None
    began = {}  # by stage: first step, when it ended
    shown = {}  # by stage: text by label
    last_line_s = -math.inf

    def show(stage: str, step: int, metrics: Numbers) -> None:
        nonlocal last_line_s
        now, total = time.monotonic(), total_steps[stage]
        first_step, first_time = began.setdefault(stage, (step, now))
        # the pace since the first step was reported, or of this step if it is the first
        pace_s = (now - first_time) / (step - first_step) if step > first_step else metrics.get("time/step")
        texts = shown[stage] = {"stage": stage, "step": f"{step}/{total}"}
        for label, names, form in SHOWN:
            texts[label] = next((form.format(metrics[name]) for name in names if name in metrics), "")
        texts["eta"] = "" if pace_s is None else format_duration((total - step) * pace_s)
        # a terminal that is gone or a full disk under a log ends no run; rich answers a broken pipe by
        # SystemExit
        with suppress(OSError, ValueError, SystemExit):
            if live is not None:
                table = Table.grid(padding=(0, 2))
                table.add_row(*texts, style="dim")
                for row in shown.values():
                    table.add_row(*row.values())
                live.update(table, refresh=True)
            elif step in (first_step, total) or now - last_line_s >= LINE_S:
                last_line_s = now
                words = [f"{label} {text}" for label, text in list(texts.items())[2:] if text]
                line = "  ".join([f"{stage} {texts['step']}", *words])
                console.print(line, markup=False, highlight=False, soft_wrap=True)

    if live is not None:
        live.start()
    try:
        yield show
    finally:
        with suppress(OSError, ValueError, SystemExit):  # as above
            if live is not None:
                live.stop()


def format_duration(seconds: float) -> str:
    """`42s`, `3m05s`, `2h07m`."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"

"""What a check says: one finding for each thing that was looked at, printed one a line."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

from rich.console import Console
from rich.text import Text

from rollouts.errors import RolloutsError

Level = Literal["ok", "warning", "error"]  # error: the run would stop at it
STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}


class Finding(NamedTuple):
    """One thing that was looked at."""

    level: Level
    subject: str  # the setting or file
    message: str  # what is so, with its numbers; may have several lines


class Findings(list[Finding]):
    """What was found, in order. `raises`: of a run, in which the first error rises."""

    def __init__(self, *, raises: bool = False) -> None:
        self.raises = raises

    def note(self, level: Level, subject: str, message: str) -> None:
        """Adds a finding."""
        self.append(Finding(level, subject, message))

    @contextmanager
    def reporting(self, subject: str) -> Iterator[None]:
        """An error of ours within becomes a finding about `subject`, unless it is to rise."""
        try:
            yield
        except RolloutsError as error:
            if self.raises:
                raise
            self.note("error", subject, str(error).removeprefix(f"{subject}: "))


def print_findings(
    findings: Findings,
    console: Console,
    *,
    good: str = "nothing stands in the way of this run",
    bad: str = "would stop this run",
    end: str = "; nothing was trained",
) -> int:
    """The exit code: 0 without an error, else 2. Prints the findings and the verdict, in colour where the
    console has it.
    """
    levels = Counter()
    for level, subject, message in findings:
        levels[level] += 1
        text = Text.assemble((f"{level:<8} ", STYLES[level]), (f"{subject}: ", "bold"))
        console.print(text.append(message.replace("\n", "\n         ")), soft_wrap=True)
    errors, warnings = levels["error"], levels["warning"]
    verdict = f"{errors} thing{'s' if errors > 1 else ''} {bad}" if errors else good
    noted = f" ({warnings} warning{'s' if warnings > 1 else ''})" if warnings else ""
    console.print(Text(f"{verdict}{noted}{end}", STYLES["error" if errors else "ok"]), soft_wrap=True)
    return 2 if errors else 0

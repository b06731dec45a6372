"""What a check says: one finding for each thing that was looked at, printed one a line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.text import Text

from rollouts.errors import RolloutsError

Level = Literal["ok", "warning", "error"]  # error: the run would stop at it
STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    level: Level
    subject: str  # the setting or file
    message: str  # what is so, with its numbers; may have several lines


Findings = list[Finding]


def note(findings: Findings | None, level: Level, subject: str, message: str) -> None:
    """Adds a finding, where findings are collected."""
    if findings is not None:
        findings.append(Finding(level, subject, message))


@contextmanager
def reporting(findings: Findings | None, subject: str) -> Iterator[None]:
    """An error of ours within becomes a finding about `subject`. None, in a run: it rises."""
    try:
        yield
    except RolloutsError as error:
        if findings is None:
            raise
        note(findings, "error", subject, str(error).removeprefix(f"{subject}: "))


def print_findings(
    findings: Iterable[Finding],
    console: Console,
    *,
    good: str = "nothing stands in the way of this run",
    bad: str = "would stop this run",
    end: str = "; nothing was trained",
) -> int:
    """The exit code: 0 without an error, else 2. Prints the findings and the verdict, in colour where the
    console has it.
    """
    levels: Counter[str] = Counter()
    for finding in findings:
        levels[finding.level] += 1
        text = Text(f"{finding.level:<8} ", STYLES[finding.level])
        text.append(f"{finding.subject}: ", "bold")
        text.append(finding.message.replace("\n", "\n" + " " * 9), "")
        console.print(text, soft_wrap=True)
    errors, warnings = levels["error"], levels["warning"]
    verdict = f"{errors} thing{'s' if errors > 1 else ''} {bad}" if errors else good
    noted = f" ({warnings} warning{'s' if warnings > 1 else ''})" if warnings else ""
    console.print(Text(f"{verdict}{noted}{end}", STYLES["error" if errors else "ok"]), soft_wrap=True)
    return 2 if errors else 0

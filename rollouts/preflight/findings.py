"""What a check says: one finding for each thing that was looked at, printed one a line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.text import Text

from rollouts.errors import RolloutsError

STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}
INDENT = " " * 9  # of further lines of a message: the width of the level before it


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    level: Literal["ok", "warning", "error"]  # error: the run would stop at it
    subject: str  # the setting or file
    message: str  # what is so, with its numbers; may have several lines


def print_findings(
    findings: Iterable[Finding],
    console: Console,
    *,
    good: str = "nothing stands in the way of this run",
    bad: str = "would stop this run",
    end: str = "; nothing was trained",
) -> int:
    """The exit code: 0 without an error, else 2. Prints the findings and the verdict, in colour
    where the console has it.
    """
    shown = list(findings)
    for finding in shown:
        console.print(_format(finding), soft_wrap=True)
    errors = sum(finding.level == "error" for finding in shown)
    warnings = sum(finding.level == "warning" for finding in shown)
    noted = f" ({warnings} warning{'s' if warnings > 1 else ''})" if warnings else ""
    what = f"{errors} thing{'s' if errors > 1 else ''} {bad}" if errors else good
    console.print(Text(f"{what}{noted}{end}", STYLES["error" if errors else "ok"]), soft_wrap=True)
    return 2 if errors else 0


def _format(finding: Finding) -> Text:
    text = Text(f"{finding.level:<8} ", STYLES[finding.level])
    text.append(f"{finding.subject}: ", "bold")
    return text.append(finding.message.replace("\n", f"\n{INDENT}"), "")


@contextmanager
def reporting(findings: list[Finding], subject: str) -> Iterator[None]:
    """An error of ours within becomes a finding about `subject`."""
    try:
        yield
    except RolloutsError as error:
        findings.append(Finding("error", subject, str(error).removeprefix(f"{subject}: ")))

"""Texts of a record for a terminal, which would obey escape sequences in what models and servers write."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

PLAIN_WIDTH = 160  # columns where the output is no terminal
# C0 and C1 but tab and newline, what turns the direction of text, and half surrogates, which no output takes
STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
STEERING_LINE = re.compile(f"{STEERING.pattern[:-1]}\t\n\u2028\u2029]")


def make_safe(text: str, *, one_line: bool = False) -> str:
    r"""The text with what would steer a terminal written out: `\x1b` for an escape. Idempotent.

    Tabs and newlines stay; with `one_line` they are written out too.
    """
    pattern = STEERING_LINE if one_line else STEERING
    return pattern.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def write_lines(text: str) -> None:
    """Writes text for programs to stdout: as it is, but safely where it is a terminal."""
    sys.stdout.write(make_safe(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def make_console() -> Console:
    """The terminal, or PLAIN_WIDTH columns where there is none; all that it prints is made safe."""
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class SafeConsole(Console):
        def render(
            self, renderable: RenderableType, options: ConsoleOptions | None = None
        ) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else Segment(make_safe(segment.text), segment.style)

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an encoding without braille gets question marks
    width = None if sys.stdout.isatty() else PLAIN_WIDTH
    return SafeConsole(width=width, highlight=False, markup=False, emoji=False)


def make_table(
    title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], *, lines: bool = True
) -> Table:
    """A table. A heading that begins with ">" is aligned to the right, one with "|" is of a drawing."""
    from rich.box import HEAVY_HEAD
    from rich.table import Table

    table = Table(title=title or None, title_justify="left", title_style="bold", pad_edge=lines)
    table.box, table.padding = (HEAVY_HEAD, (0, 1)) if lines else (None, (0, 2, 0, 0))
    for name in headings:
        style = "cyan" if name.startswith("|") else ""
        table.add_column(name.lstrip(">|"), justify="right" if name.startswith(">") else "left", style=style)
        table.columns[-1].overflow = "fold"
    for row in rows:
        table.add_row(*row)
    return table


def tabulate(
    title: str, rows: Sequence[Mapping[str, str]], *, lines: bool = True, absent: str = "", width: int = 0
) -> Table:
    """A table with a row for each mapping, and a column for each heading that has a text in some row.

    With `width`, columns that do not fit are left out, and the title says how many.
    """
    known = dict.fromkeys(name for row in rows for name in row)
    headings = [name for name in known if any(row.get(name) for row in rows)]
    used, fit = 1, 0
    for name in headings:
        used += max(len(name.lstrip(">|")), *(len(row.get(name, "")) for row in rows)) + 3
        fit += not width or used <= width or fit < 2
    if fit < len(headings):
        title += f" ({len(headings) - fit} more columns in a wider terminal)"
    cells = [[row.get(name) or absent for name in headings[:fit]] for row in rows]
    return make_table(title, headings[:fit], cells, lines=lines)


def format_duration(seconds: float) -> str:
    """`45 s`, `12 min`, `3.5 h`."""
    if seconds < 100:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def format_number(value: float, digits: int = 4) -> str:
    """A number with so many significant digits: 12.35, 0.0012, 12346 where the whole part is longer."""
    return f"{value:.0f}" if 10**digits <= abs(value) < 10**7 else f"{value:.{digits}g}"

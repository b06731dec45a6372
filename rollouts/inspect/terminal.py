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
    """The terminal, or PLAIN_WIDTH columns where there is none; all that it prints is made safe, and lines
    are broken only where `soft_wrap=False` says so.
    """
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
    return SafeConsole(width=width, highlight=False, markup=False, emoji=False, soft_wrap=True)


def make_table(
    title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], *, lines: bool = True
) -> Table:
    """A table. A heading that begins with ">" is aligned to the right, one with "|" is of a drawing."""
    from rich.box import HEAVY_HEAD
    from rich.table import Table

    table = Table(title=title or None, title_justify="left", title_style="bold", pad_edge=lines)
    table.box, table.padding = (HEAVY_HEAD, (0, 1)) if lines else (None, (0, 2, 0, 0))
    for name in headings:
        style, justify = "cyan" * name.startswith("|"), "right" if name.startswith(">") else "left"
        table.add_column(name.lstrip(">|"), justify=justify, style=style, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def tabulate(
    title: str, rows: Sequence[Mapping[str, object]], *, lines: bool = True, absent: str = ""
) -> Table:
    """A table with a row for each mapping, and a column for each heading that has a text in some row."""
    texts = [{name: str(of) for name, of in row.items() if of is not None} for row in rows]
    known = dict.fromkeys(name for row in rows for name in row)
    names = [name for name in known if any(row.get(name) for row in texts)]
    return make_table(
        title, names, ([row.get(name) or absent for name in names] for row in texts), lines=lines
    )


def format_number(value: float, digits: int = 4, *, sign: str = "-") -> str:
    """A number with so many significant digits: 12.35, 0.0012, 12346 where the whole part is longer."""
    return f"{value:{sign}.0f}" if 10**digits <= abs(value) < 10**7 else f"{value:{sign}.{digits}g}"

"""The console of the commands that look at runs."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from rollouts.inspect.terminal import make_safe


class SafeConsole(Console):
    """A console that prints every text as make_safe gives it, in whatever table or style it stands: no record
    can steer the terminal.

    What is laid out by its width is made safe before it is handed over, for here it is measured already.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(make_safe(segment.text), segment.style)

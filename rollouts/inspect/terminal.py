"""Texts of a record for a terminal, which would obey escape sequences in what models and servers write."""

import re
import sys
from contextlib import suppress
from typing import TextIO

# C0 and C1 but tab and newline, what turns the direction of text, and half surrogates, which no output takes
STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
STEERING_LINE = re.compile(f"{STEERING.pattern[:-1]}\t\n\u2028\u2029]")


def make_safe(text: str, *, one_line: bool = False) -> str:
    r"""The text with what would steer a terminal written out: `\x1b` for an escape. Idempotent.

    Tabs and newlines stay; with `one_line` they are written out too.
    """
    pattern = STEERING_LINE if one_line else STEERING
    return pattern.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def say(text: str, file: TextIO | None = None) -> None:
    """A line on stderr, or in `file`. That nobody reads it, or that the disk under it is full, ends no
    run.
    """
    with suppress(OSError, ValueError):
        print(make_safe(text), file=file or sys.stderr, flush=True)


def write_lines(text: str) -> None:
    """Writes text for programs to stdout: as it is, but safely where it is a terminal."""
    sys.stdout.write(make_safe(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()

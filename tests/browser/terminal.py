"""What a command shows on a terminal, as a page for a picture: it runs on a pseudo-terminal, and rich draws
the characters and colours.
"""

import io
import os
import pty
import re
import subprocess
import sys
from contextlib import suppress

from rich.console import Console
from rich.text import Text

PAGE = """<!doctype html><html data-ready="true"><meta charset="utf-8">
<style>{stylesheet} body {{ margin: 0; padding: 16px; background: {background}; color: {foreground} }}
pre {{ margin: 0; font: 14px/18px "DejaVu Sans Mono", monospace }}
i {{ display: inline-block; width: 1ch; font-style: normal }}</style>
<pre>{code}</pre>"""


def capture_terminal(words, *, columns):
    """What `python -m rollouts WORDS` writes to a terminal of this width, with its escape codes. Raises
    CalledProcessError if it fails.
    """
    parent, child = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    command, ends = (
        [sys.executable, "-m", "rollouts", *words],
        dict.fromkeys(("stdin", "stdout", "stderr"), child),
    )
    written = b""
    with subprocess.Popen(command, env=environment, **ends) as process:
        os.close(child)
        with suppress(OSError):  # by which Linux says that the program has ended
            while piece := os.read(parent, 1 << 16):
                written += piece
    os.close(parent)
    if process.returncode != 0:
        raise subprocess.CalledProcessError(process.returncode, words)
    return written.decode().replace("\r\n", "\n")


def write_terminal_page(words, path, *, columns, last):
    """Writes a page of the command's last lines, under the command itself; how many lines those are
    together.
    """
    lines = capture_terminal(words, columns=columns).rstrip("\n").split("\n")[-last:]
    console = Console(
        record=True, width=columns, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    console.print(
        Text(f"$ python -m rollouts {' '.join(words)}\n", style="bold"),
        Text.from_ansi("\n".join(lines)),
        sep="",
        soft_wrap=True,
    )
    page = console.export_html(code_format=PAGE)
    path.write_text(
        re.sub("[\u2800-\u28ff]", r"<i>\g<0></i>", page), encoding="utf-8"
    )  # braille is of another font, in which it is wider
    return len(lines) + 1

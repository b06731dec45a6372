"""Cases of a parametrised test, written as a table; and rows written as a file."""

import json
import tomllib
from pathlib import Path
from typing import Any


def read_cells(text: str) -> list[list[str]]:
    """The cells of each line, divided by |."""
    return [[cell.strip() for cell in line.split("|")] for line in text.strip().splitlines()]


def read_params(text: str) -> dict[str, Any]:
    """The settings of `key = value, …`, values as in TOML."""
    return tomllib.loads(f"params = {{ {text} }}")["params"]


def write_jsonl(path: Path, *rows: Any) -> Path:
    """The path, of a file with a line for each row; one of bytes is written as it is."""
    lines = (row if isinstance(row, bytes) else json.dumps(row).encode() + b"\n" for row in rows)
    path.write_bytes(b"".join(lines))
    return path

"""Cases of a parametrised test, written as a table."""

import tomllib
from typing import Any


def read_cells(text: str) -> list[list[str]]:
    """The cells of each line, divided by |."""
    return [[cell.strip() for cell in line.split("|")] for line in text.strip().splitlines()]


def read_params(text: str) -> dict[str, Any]:
    """The settings of `key = value, …`, values as in TOML."""
    return tomllib.loads(f"params = {{ {text} }}")["params"]

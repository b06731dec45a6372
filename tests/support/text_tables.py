"""Cases of a parametrised test, written as a table; and rows written as a file."""

import builtins
import inspect
import json
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from rollouts import errors


def read_cells(text: str) -> list[list[str]]:
    """The cells of each line, divided by |."""
    return [[cell.strip() for cell in line.split("|")] for line in text.strip().splitlines()]


def read_params(text: str) -> dict[str, Any]:
    """The settings of `key = value, …`, values as in TOML."""
    return tomllib.loads(f"params = {{ {text} }}")["params"]


def read_error(text: str) -> Exception:
    """The error of `its kind: what it says`."""
    kind, _, said = text.partition(": ")
    return (vars(builtins) | vars(errors))[kind](said)


READERS: dict[Any, Callable[[str], Any]] = {
    Exception: read_error,
    int: int,
    float: float,
    bool: {"yes": True, "no": False}.__getitem__,
    list[float]: lambda cell: [float(number) for number in cell.split()],
    dict: read_params,
    Any: json.loads,
}


def cases(text: str, values: Iterable[Any] | None = None, **options) -> Callable[[Any], Any]:
    """Parametrises a test by a table whose first line names the parameters, by `name: case case …`, or by the
    values of the parameters that `text` names; options are those of pytest.mark.parametrize.

    A cell is read as its parameter is annotated: int, float, bool (yes or no), list[float] (divided by
    spaces), dict (by read_params()), Exception (by read_error()), Any (JSON); else it is text. What stands
    under a last name of … is a remark.
    """
    if values is not None:
        return pytest.mark.parametrize(text, values, **options)
    names, *rows = read_cells(text)
    if not rows:
        name, _, words = text.partition(":")
        names, rows = [name], [[word] for word in words.split()]
    if names[-1] == "…":
        names.pop()
        rows = [row[: len(names)] for row in rows]

    def parametrize(test):
        kinds = inspect.get_annotations(test, eval_str=True)
        readers = [READERS.get(kinds.get(name), str) for name in names]
        values = [[read(cell) for read, cell in zip(readers, row, strict=True)] for row in rows]
        return pytest.mark.parametrize(names, values, ids=map("-".join, rows))(test)

    return parametrize


def write_jsonl(path: Path, *rows) -> Path:
    """The path, of a file with a line for each row; one of bytes is written as it is."""
    lines = (row if isinstance(row, bytes) else json.dumps(row).encode() + b"\n" for row in rows)
    path.write_bytes(b"".join(lines))
    return path

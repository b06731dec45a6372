"""Rows that are made: by reasoning-gym, or by a Python function that the config names."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, cast

from rollouts.config.plugins import load_function
from rollouts.config.spelling import nearest
from rollouts.config.tables import DataSourceConfig
from rollouts.data.files import FoundRow
from rollouts.errors import DataError
from rollouts.types import JSONValue, check_json


def make_reasoning_gym_rows(source: DataSourceConfig, name: str) -> Iterator[FoundRow]:
    """`source.size` found rows. Raises DataError naming the dataset or the parameters that reasoning-gym
    refuses, or that the package is missing.
    """
    assert source.size is not None, "the schema asks for it"
    try:
        from reasoning_gym import factory  # takes seconds and is an optional dependency, so not at the top
        from reasoning_gym.composite import DatasetSpec
    except ImportError as error:
        raise DataError(
            f"{name}.kind='reasoning_gym' needs the package reasoning-gym; pip install"
            " 'rollouts-rl[reasoning-gym]'"
        ) from error
    _refuse_own_params(source, name)
    params = dict(source.params)
    specs = params.get("datasets") if source.dataset == "composite" else ()
    for wanted in (source.dataset, *(spec.get("name") for spec in specs or () if isinstance(spec, Mapping))):
        if wanted not in factory.DATASETS:
            close = nearest(str(wanted), list(factory.DATASETS))
            raise DataError(
                f"{name}: {wanted!r} is not one of reasoning-gym's {len(factory.DATASETS)} datasets"
                + (f"; did you mean {close}?" if close else "")
            )
    file, made = f"reasoning_gym {source.dataset}", {"source_dataset": source.dataset}
    try:
        if source.dataset == "composite":
            params["datasets"] = [DatasetSpec(**{"weight": 1, "config": {}, **spec}) for spec in specs or ()]
        dataset = factory.create_dataset(source.dataset, seed=source.seed, size=source.size, **params)
        for index in range(source.size):
            entry = dataset[index]
            kept = {**made, **entry.get("metadata", {})} if source.dataset == "composite" else made
            row = {
                "prompt": entry["question"],
                "answer": entry["answer"],
                "metadata": _to_json(entry.get("metadata", {})),
            }
            yield FoundRow(file, index, False, {**row, "source_dataset": kept["source_dataset"]})
    except Exception as error:  # each of its datasets checks in its own way, mostly by assert
        raise DataError(
            f"{name}: reasoning-gym refused {source.dataset} with {name}.params={source.params}:"
            f" {type(error).__name__}: {error}"
        ) from error


_LEFT_OUT = object()


def _to_json(value: Any) -> JSONValue:
    """`value` without what JSON cannot say; tuples become lists, keys become text."""
    if isinstance(value, Mapping):
        inner = {str(key): _to_json(item) for key, item in value.items()}
        return {key: item for key, item in inner.items() if item is not _LEFT_OUT}
    if isinstance(value, list | tuple):
        return [kept for item in value if (kept := _to_json(item)) is not _LEFT_OUT]
    try:
        check_json("metadata", value)
    except ValueError:
        return _LEFT_OUT
    return value


def _refuse_own_params(source: DataSourceConfig, name: str) -> None:
    for key in ("seed", "size"):
        if key in source.params:
            raise DataError(f"{name}.params.{key}: set {name}.{key} instead")


def make_python_rows(source: DataSourceConfig, name: str) -> Iterator[FoundRow]:
    """At most `source.size` found rows of what function(size=, seed=, **params) gives.

    Raises PlugInError if there is no such function, and DataError, with the cause, for whatever it raises and
    for what has no rows.
    """
    function = load_function(source.function, role="rows", base_dir=Path.cwd())
    _refuse_own_params(source, name)
    what, taken = f"{name}.function={source.function!r}", 0
    try:
        rows = function(size=source.size, seed=source.seed, **source.params)
        if inspect.iscoroutine(rows):
            rows.close()  # or Python warns that nobody awaited it
        iterates = isinstance(rows, Iterable) or hasattr(type(rows), "__getitem__")
        if not iterates or isinstance(rows, str | bytes | Mapping):
            raise DataError(
                f"{what} gave a value of type {type(rows).__name__}; it must give a list of rows or iterate"
                " them"
            )
        for row in islice(cast(Iterable[Any], rows), source.size):
            yield FoundRow(source.function, taken, False, row)
            taken += 1
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{what} raised {type(error).__name__} after {taken} rows: {error}") from error

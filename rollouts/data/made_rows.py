"""Rows that are made: by reasoning-gym, or by a Python function that the config names."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from rollouts.config.plugins import load_function
from rollouts.config.spelling import nearest
from rollouts.config.tables import DataSourceConfig
from rollouts.data.files import FoundRow
from rollouts.data.rows import Row
from rollouts.errors import DataError
from rollouts.types import JSONValue, check_json

COMPOSITE = "composite"
SPEC_KEYS = ("name", "weight", "config")
HAVE_ONE_PLACE = ("seed", "size")  # settings of the source itself

# --- reasoning-gym ------------------------------------------------------------------------------------------


def make_reasoning_gym_rows(source: DataSourceConfig, name: str) -> Iterator[FoundRow]:
    """`source.size` found rows. Raises DataError naming the dataset or the parameter that is wrong, or that
    the package is missing.
    """
    assert source.size is not None, "the schema asks for it"
    try:
        from reasoning_gym import factory  # takes seconds and is an optional dependency, so not at the top
    except ImportError as error:
        raise DataError(
            f"{name}.kind='reasoning_gym' needs the package reasoning-gym; pip install"
            " 'rollouts-rl[reasoning-gym]'"
        ) from error
    _check_dataset(source.dataset, f"{name}.dataset", factory.DATASETS)
    _check_params(source.params, source.dataset, f"{name}.params", name, factory.DATASETS)
    try:
        params = _make_params(source, name, factory.DATASETS)
        dataset = factory.create_dataset(source.dataset, seed=source.seed, size=source.size, **params)
        for index in range(source.size):
            yield FoundRow(
                f"reasoning_gym {source.dataset}",
                index,
                False,
                _reasoning_gym_row(source.dataset, dataset[index]),
            )
    except DataError:
        raise
    except Exception as error:  # each of its datasets checks in its own way, mostly by assert
        message = (
            f"{name}: reasoning-gym refused {source.dataset} with {name}.params={source.params}:"
            f" {type(error).__name__}: {error}"
        )
        raise DataError(message) from error


def _check_dataset(dataset: str, key: str, known: Mapping[str, Any]) -> None:
    if dataset not in known:
        close = nearest(dataset, list(known))
        raise DataError(
            f"{key}={dataset!r} is not one of reasoning-gym's {len(known)} datasets"
            + (f"; did you mean {close}?" if close else "")
        )


def _check_params(
    params: Mapping[str, Any], dataset: str, key: str, name: str, datasets: Mapping[str, Any]
) -> None:
    known = [
        field.name for field in dataclasses.fields(datasets[dataset][1]) if field.name not in HAVE_ONE_PLACE
    ]
    for param in params:
        if param in HAVE_ONE_PLACE:
            raise DataError(f"{key}.{param}: set {name}.{param} instead")
        if param not in known:
            close = nearest(param, known)
            hint = f"; did you mean {close}?" if close else "."
            raise DataError(f"{key}.{param} is no parameter of {dataset}{hint} It takes: {', '.join(known)}")


def _make_params(source: DataSourceConfig, name: str, known: Mapping[str, Any]) -> dict[str, Any]:
    if source.dataset != COMPOSITE:
        return dict(source.params)
    from reasoning_gym.composite import DatasetSpec

    specs = source.params.get("datasets")
    key = f"{name}.params.datasets"
    if not isinstance(specs, list) or not specs:
        raise DataError(
            f'{key} is {specs!r}; composite takes a list such as [{{ name = "chain_sum", weight = 2, config ='
            " { min_terms = 2 } }]"
        )
    checked = [_check_spec(spec, f"{key}[{index}]", name, known) for index, spec in enumerate(specs)]
    return {**source.params, "datasets": [DatasetSpec(**spec) for spec in checked]}


def _check_spec(spec: Any, key: str, name: str, known: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(spec, Mapping):
        raise DataError(
            f"{key} is of type {type(spec).__name__}; it must be a table with {', '.join(SPEC_KEYS)}"
        )
    for field in spec:
        if field not in SPEC_KEYS:
            close = nearest(str(field), SPEC_KEYS)
            hint = f"; did you mean {close}?" if close else ""
            raise DataError(
                f"{key}.{field} is not read; a dataset of composite has {', '.join(SPEC_KEYS)}{hint}"
            )
    dataset, weight, config = spec.get("name"), spec.get("weight", 1), spec.get("config", {})
    if not isinstance(dataset, str) or dataset == COMPOSITE:
        raise DataError(
            f"{key}.name is {dataset!r}; it must be the name of another of reasoning-gym's datasets"
        )
    _check_dataset(dataset, f"{key}.name", known)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not weight > 0:
        raise DataError(f"{key}.weight is {weight!r}; it must be a number above 0")
    if not isinstance(config, Mapping):
        raise DataError(
            f"{key}.config is of type {type(config).__name__}; it must be a table of the parameters of"
            f" {dataset}"
        )
    _check_params(config, dataset, f"{key}.config", name, known)
    return {"name": dataset, "weight": weight, "config": dict(config)}


def _reasoning_gym_row(dataset: str, entry: Mapping[str, Any]) -> Row:
    metadata = entry.get("metadata", {})
    made_by = metadata.get("source_dataset", dataset) if dataset == COMPOSITE else dataset
    return {
        "prompt": entry["question"],
        "answer": entry["answer"],
        "source_dataset": made_by,
        "metadata": _json_subset(metadata),
    }


_LEFT_OUT = object()


def _json_subset(value: Any) -> JSONValue:
    """`value` without what JSON cannot say; tuples become lists, keys become text."""
    if isinstance(value, Mapping):
        inner = {str(key): _json_subset(item) for key, item in value.items()}
        return {key: item for key, item in inner.items() if item is not _LEFT_OUT}
    if isinstance(value, list | tuple):
        return [kept for item in value if (kept := _json_subset(item)) is not _LEFT_OUT]
    try:
        check_json("metadata", value)
    except ValueError:
        return _LEFT_OUT
    return value


# --- Python functions ---------------------------------------------------------------------------------------


def make_python_rows(source: DataSourceConfig, name: str) -> Iterator[FoundRow]:
    """At most `source.size` found rows of what function(size=, seed=, **params) gives.

    Raises PlugInError if there is no such function, and DataError, with the cause, for whatever it raises and
    for what has no rows.
    """
    function = load_function(source.function, role="rows", base_dir=Path.cwd())
    for key in HAVE_ONE_PLACE:
        if key in source.params:
            raise DataError(f"{name}.params.{key}: set {name}.{key} instead")
    taken = 0
    try:
        rows = function(size=source.size, seed=source.seed, **source.params)
        _check_iterable(rows, f"{name}.function={source.function!r}")
        for row in islice(rows, source.size):
            yield FoundRow(source.function, taken, False, row)
            taken += 1
    except DataError:
        raise
    except Exception as error:
        raise DataError(
            f"{name}.function={source.function!r} raised {type(error).__name__} after {taken} rows: {error}"
        ) from error


def _check_iterable(rows: Any, what: str) -> None:
    if inspect.iscoroutine(rows):
        rows.close()  # or Python warns that nobody awaited it
    iterates = isinstance(rows, Iterable) or hasattr(type(rows), "__getitem__")
    if not iterates or isinstance(rows, str | bytes | Mapping):
        raise DataError(
            f"{what} gave a value of type {type(rows).__name__}; it must give a list of rows or iterate them"
        )

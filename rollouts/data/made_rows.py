"""Rows that are made: by reasoning-gym, or by a Python function that the config names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollouts.config.plugins import load_function
from rollouts.config.spelling import did_you_mean
from rollouts.config.tables import DataSourceConfig
from rollouts.data.rows import FoundRow


def make_reasoning_gym_rows(source: DataSourceConfig) -> Iterator[FoundRow]:
    """`source.size` found rows. Metadata that is not JSON becomes null. Raises ValueError naming a dataset
    that reasoning-gym does not have, and what its datasets raise for their parameters.
    """
    from reasoning_gym import factory  # takes seconds and is an optional dependency, so not at the top
    from reasoning_gym.composite import DatasetSpec

    params: dict[str, Any] = dict(source.params)
    specs = [dict(spec) for spec in params.get("datasets", ())] if source.dataset == "composite" else []
    for wanted in (source.dataset, *(spec.get("name") for spec in specs)):
        if wanted not in factory.DATASETS:
            hint = did_you_mean(str(wanted), factory.DATASETS)
            raise ValueError(
                f"{wanted!r} is not one of reasoning-gym's {len(factory.DATASETS)} datasets{hint}"
            )
    if specs:
        params["datasets"] = [DatasetSpec(**{"weight": 1, "config": {}, **spec}) for spec in specs]
    dataset: Any = factory.create_dataset(source.dataset, seed=source.seed, size=source.size, **params)
    for number in range(len(dataset)):
        entry = dataset[number]
        text = json.dumps(entry.get("metadata", {}), default=lambda _: None, skipkeys=True)
        metadata = json.loads(text, parse_constant=lambda _: None)
        row = {"prompt": entry["question"], "answer": entry["answer"], "metadata": metadata}
        row["source_dataset"] = metadata.get("source_dataset", source.dataset)
        yield FoundRow(f"reasoning_gym {source.dataset}", number, False, row)


def make_python_rows(source: DataSourceConfig) -> Iterator[FoundRow]:
    """What function(size=, seed=, **params) gives. Raises PlugInError if there is no such function."""
    function = load_function(source.function, role="rows", base_dir=Path.cwd())
    for number, row in enumerate(function(size=source.size, seed=source.seed, **source.params)):
        yield FoundRow(source.function, number, False, row)

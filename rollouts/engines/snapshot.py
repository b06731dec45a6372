"""What lies in a directory of safetensors, read without torch: enough to refuse it before a server is told to
load it. A server that fails in the middle of a load has its weights in pieces, and dies at the next request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from rollouts.errors import SnapshotError

INDEX = "model.safetensors.index.json"


def read_tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Name → shape of every tensor in a model directory. Raises SnapshotError naming the file that is
    missing, cut or no safetensors.
    """
    index = path / INDEX
    names = sorted(file.name for file in path.glob("*.safetensors"))
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise SnapshotError(f"{index} is damaged: {error!r}") from error
    if not names:
        raise SnapshotError(f"{path} has no *.safetensors file")
    shapes: dict[str, tuple[int, ...]] = {}
    for name in names:
        if Path(name).name != name:
            raise SnapshotError(f"{index} names the file {name!r}; shards lie beside their index")
        try:
            with safe_open(path / name, framework="np") as file:  # also checks the file's size
                shapes |= {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise SnapshotError(f"{path / name} cannot be read as safetensors: {error}") from error
    return shapes


def check_same_model(
    shapes: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], *, path: Path
) -> None:
    """Raises SnapshotError unless `shapes` are those of the model `expected`. A tied output layer may be
    missing, and so may rotary frequencies, which old checkpoints carry and nobody loads.
    """
    for name in sorted(shapes.keys() | expected.keys()):
        here, there = shapes.get(name), expected.get(name)
        may_lack = name == "lm_head.weight" or (here is None and name.endswith(".inv_freq"))
        if here != there and not (may_lack and None in (here, there)):
            raise SnapshotError(
                f"{path}: the tensor {name} has the shape {here}; the model that the server was started with"
                f" has {there} (None: it is not there)"
            )

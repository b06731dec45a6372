"""What lies in a directory of safetensors, read without torch: enough to refuse it before a server is told to
load it. A server that fails in the middle of a load has its weights in pieces, and dies at the next request.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open

from rollouts.errors import ModelError, SnapshotError
from rollouts.models.directories import WEIGHT_INDEX, read_shard_names
from rollouts.models.quiet import naming_errors


def read_tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Name → shape of every tensor in a model directory. Raises SnapshotError naming the file that is
    missing, cut or no safetensors.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    try:
        indexed = (path / WEIGHT_INDEX).exists()
        names = read_shard_names(path) if indexed else [file.name for file in path.glob("*.safetensors")]
        for name in sorted(names):
            # opening also checks the file's size
            with naming_errors(f"{path / name} cannot be read"), safe_open(path / name, "np") as file:
                shapes |= {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    except ModelError as error:
        raise SnapshotError(str(error)) from error
    if not shapes:
        raise SnapshotError(f"{path} has no *.safetensors file with weights")
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

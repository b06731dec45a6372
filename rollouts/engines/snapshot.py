"""What lies in a directory of safetensors, read without torch: enough to refuse it before a server is told to
load it. A server that fails in the middle of a load has its weights in pieces, and dies at the next request.
"""

from collections.abc import Mapping
from pathlib import Path

from rollouts.errors import ModelError
from rollouts.models.directories import list_tensors

TensorShapes = Mapping[str, tuple[int, ...]]


def read_tensor_shapes(path: Path) -> TensorShapes:
    """Name → shape of every tensor in a model directory. Raises ModelError as list_tensors."""
    return {tensor.name: tensor.shape for tensor in list_tensors(path)}


def find_tensor_shapes(path: Path) -> TensorShapes | None:
    """Those of the model that a server was started with; None if it lies on another machine or in another
    format.
    """
    try:
        return read_tensor_shapes(path)
    except ModelError:
        return None


def check_same_model(shapes: TensorShapes, expected: TensorShapes, *, path: Path) -> None:
    """Raises ModelError unless `shapes` are those of the model `expected`. A tied output layer may be
    missing, and so may rotary frequencies, which old checkpoints carry and nobody loads.
    """
    for name, _ in sorted(shapes.items() ^ expected.items()):
        here, there = shapes.get(name), expected.get(name)
        may_lack = name == "lm_head.weight" or name.endswith(".inv_freq")
        if not (may_lack and None in (here, there)):
            raise ModelError(
                f"{path}: the tensor {name} has the shape {here}; the model that the server was started with"
                f" has {there} (None: it is not there)"
            )

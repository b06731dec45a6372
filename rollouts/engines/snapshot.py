"""What lies in a directory of safetensors, read without torch: enough to refuse it before a server is told to
load it.

A server that fails in the middle of a load has its weights in pieces, and dies at the next request.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from rollouts.errors import SnapshotError

INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
LENGTH_BYTES = 8


class _Tensor(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


def read_tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Name → shape of every tensor in a model directory. Raises SnapshotError naming the file that is
    missing, cut or no safetensors.
    """
    if not path.is_dir():
        raise SnapshotError(f"{path} is no directory; weights are loaded from a directory of safetensors")
    names = _list_shards(path)
    shapes: dict[str, tuple[int, ...]] = {}
    for file in names:
        shapes |= {name: tensor.shape for name, tensor in _read_header(path / file).items()}
    return shapes


def check_same_model(
    shapes: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], *, path: Path
) -> None:
    """Raises SnapshotError unless `shapes` are those of the model `expected`. A tied output layer may be
    missing, and so may rotary frequencies, which old checkpoints carry and nobody loads.
    """
    for name, shape in shapes.items():
        if name not in expected and name != "lm_head.weight":
            raise SnapshotError(
                f"{path} has a tensor {name}, which the model that the server was started with has not"
            )
        if name in expected and expected[name] != shape:
            raise SnapshotError(
                f"{path}: {name} is {list(shape)}; the model that the server was started with has"
                f" {list(expected[name])}"
            )
    missing = sorted(
        name
        for name in expected.keys() - shapes.keys()
        if name != "lm_head.weight" and not name.endswith(".inv_freq")
    )
    if missing:
        raise SnapshotError(
            f"{path} lacks {len(missing)} of {len(expected)} tensors, {missing[0]} for one; a server would"
            " keep its old ones"
        )


def _list_shards(path: Path) -> list[str]:
    index = path / INDEX
    if not index.exists():
        files = sorted(file.name for file in path.glob("*.safetensors"))
        if not files:
            raise SnapshotError(f"{path} has no *.safetensors file")
        return files
    try:
        shards = sorted(set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values()))
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SnapshotError(f"{index} is damaged: {error}") from error
    for shard in shards:
        if Path(shard).name != shard:
            raise SnapshotError(f"{index} names the file {shard!r}; shards lie beside their index")
    return shards


def _read_header(file: Path) -> dict[str, _Tensor]:
    try:
        with file.open("rb") as source:
            length = int.from_bytes(source.read(LENGTH_BYTES), "little")
            raw = source.read(length) if length <= MAX_HEADER_BYTES else b""
        if len(raw) != length:
            raise SnapshotError(
                f"{file} is cut, or no safetensors file: its header should have {length} bytes"
            )
        header = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        tensors = {name: msgspec.json.decode(text, type=_Tensor) for name, text in header.items()}
        size = file.stat().st_size
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SnapshotError(f"{file} cannot be read as safetensors: {error}") from error
    end = LENGTH_BYTES + length + max((tensor.data_offsets[1] for tensor in tensors.values()), default=0)
    if size != end:
        raise SnapshotError(f"{file} has {size} bytes; its header speaks of {end}")
    return tensors

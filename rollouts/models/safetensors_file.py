"""Writing safetensors files in plain Python, tensor by tensor: other threads run meanwhile, errors are
OSErrors, and no more than one tensor is held.

The library holds the interpreter for as long as it writes, which would stop training, and says in words only
why a disk refused. Format: 8 bytes with the header's length (little-endian), the header as JSON padded with
spaces to 8 bytes, the tensors one after the other. The header is written last, into room that is kept for it.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from rollouts.errors import ModelError

CHUNK_BYTES = 16 * 2**20
LENGTH_BYTES = 8
ENTRY_BYTES = 256  # room in the header for what it says of one tensor beside its name
DTYPES = {
    torch.int64: "I64", torch.float64: "F64", torch.float32: "F32", torch.int32: "I32",
    torch.bfloat16: "BF16", torch.float16: "F16", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip


class TensorFile:
    """A safetensors file that tensors of one dtype, or of narrower and narrower ones, are appended to. Open
    only while something is written: one that is given up leaks nothing.
    """

    def __init__(self, path: Path, *, header_bytes: int, metadata: Mapping[str, str] | None = None) -> None:
        self.path = path
        self.names: list[str] = []
        self.nbytes = 0  # of the tensors
        self._room = -(-header_bytes // 8) * 8
        self._header = f'{{"__metadata__":{json.dumps(dict(metadata or {"format": "pt"}))}'
        path.write_bytes(bytes(LENGTH_BYTES + self._room))

    def has_room(self, name: str) -> bool:
        """Whether the header still holds another tensor."""
        return len(self._header.encode()) + len(name.encode()) + ENTRY_BYTES <= self._room

    def append(self, name: str, tensor: Tensor) -> None:
        """Writes one tensor, on whatever device it is. Raises OSError; ModelError for a dtype outside
        DTYPES.
        """
        if tensor.dtype not in DTYPES:
            raise ModelError(
                f"tensor {name!r} has dtype {tensor.dtype}, which files do not hold here; convert it first"
            )
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        content = flat.view(torch.uint8).numpy().data if flat.numel() else b""
        with self.path.open("ab") as file:
            for start in range(0, len(content), CHUNK_BYTES):
                file.write(content[start : start + CHUNK_BYTES])
        offsets = [self.nbytes, self.nbytes + tensor.nbytes]
        entry = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        self._header += f",{json.dumps(name)}:{json.dumps(entry, separators=(',', ':'))}"
        self.nbytes += tensor.nbytes
        self.names.append(name)

    def finish(self) -> None:
        """Writes the header: the file is complete. Raises OSError."""
        text = (self._header + "}").encode().ljust(self._room)
        assert len(text) == self._room, "has_room was asked before each tensor"
        with self.path.open("r+b") as file:
            file.write(self._room.to_bytes(LENGTH_BYTES, "little") + text)


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str] | None = None
) -> None:
    """The file `path` holds `tensors`, on whatever device they are. Not synced. Tensors that share memory are
    written once each. Raises OSError; ModelError for a dtype outside DTYPES.
    """
    room = len(json.dumps(metadata)) + sum(len(json.dumps(name)) + ENTRY_BYTES for name in tensors)
    file = TensorFile(path, header_bytes=room + ENTRY_BYTES, metadata=metadata)
    # widest first, which keeps every tensor aligned
    for name in sorted(tensors, key=lambda name: (-tensors[name].itemsize, name)):
        file.append(name, tensors[name])
    file.finish()

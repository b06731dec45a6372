"""Writing a safetensors file in plain Python: the same bytes as the library's own, but other threads run
meanwhile and errors are OSErrors.

The library holds the interpreter for as long as it writes, which would stop training, and says in words only
why a disk refused. Format: 8 bytes with the header's length (little-endian), the header as JSON padded to 8
bytes, the tensors one after the other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 16 * 2**20
# in the order of the library's files: widest first, which keeps every tensor aligned
DTYPES: dict[torch.dtype, str] = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str] | None = None
) -> None:
    """The file `path` holds `tensors`, on whatever device they are. Not synced. Raises OSError; TypeError for
    a dtype outside DTYPES.

    Tensors that share memory are written once each.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise TypeError(
                f"tensor {name!r} has dtype {tensor.dtype}, which a checkpoint does not hold; convert it"
                " first"
            )
    rank = {dtype: number for number, dtype in enumerate(DTYPES)}
    names = sorted(tensors, key=lambda name: (rank[tensors[name].dtype], name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in names:
        tensor = tensors[name]
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            content = read_bytes(tensors[name])
            for start in range(0, len(content), CHUNK_BYTES):
                file.write(content[start : start + CHUNK_BYTES])


def read_bytes(tensor: Tensor) -> memoryview:
    """The tensor's elements in row-major order, without a copy where they lie so in host memory already."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy() if flat.numel() else b"")  # pyright: ignore[reportArgumentType]

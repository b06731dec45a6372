"""Keys and values of the rows being decoded, by slot. Buffers grow with what is asked for and stay until
dropped.
"""

from __future__ import annotations

import torch
from torch import Tensor

LENGTH_BLOCK = 64  # positions
ROW_BLOCK = 8


class KVSlots:
    """Per layer one buffer of keys and one of values, [slots, K, capacity, D]: K key-value heads, D the size
    of a head.

    Everything past a row's own length is stale but finite (buffers start as zeros), so a mask is enough to
    leave it out.
    """

    keeps_prefixes = True

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        max_rows: int,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.max_rows = max_rows
        self.max_length = max_length
        self._shape = (num_kv_heads, head_dim)
        self._num_layers = num_layers
        self._options = {"dtype": dtype, "device": device}
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.moves = 0  # how often the buffers changed their place in memory

    @property
    def rows(self) -> int:
        return self.keys[0].shape[0] if self.keys else 0

    @property
    def capacity(self) -> int:
        return self.keys[0].shape[2] if self.keys else 0

    @property
    def num_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in (*self.keys, *self.values))

    def reserve(self, rows: int, length: int) -> None:
        """Makes room for `rows` slots of `length` positions, with half as much again, so that growing is
        rare; contents stay.
        """
        assert rows <= self.max_rows and length <= self.max_length, (rows, length)
        if rows <= self.rows and length <= self.capacity:
            return
        rows = self.rows if rows <= self.rows else _grown(self.rows, rows, ROW_BLOCK, self.max_rows)
        length = (
            self.capacity
            if length <= self.capacity
            else _grown(self.capacity, length, LENGTH_BLOCK, self.max_length)
        )
        self.moves += 1
        kv_heads, head_dim = self._shape
        for buffers in (self.keys, self.values):
            for layer in range(self._num_layers):
                grown = torch.zeros(rows, kv_heads, length, head_dim, **self._options)
                if layer < len(buffers):
                    held = buffers[layer]
                    grown[: held.shape[0], :, : held.shape[2]] = held
                    buffers[layer] = grown
                else:
                    buffers.append(grown)

    def write_prompts(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Positions 0..S-1 of the given slots."""
        self.keys[layer][slots, :, : keys.shape[2]] = keys.to(self.keys[layer].dtype)
        self.values[layer][slots, :, : values.shape[2]] = values.to(self.values[layer].dtype)

    def write_tokens(self, layer: int, places: Tensor, keys: Tensor, values: Tensor) -> None:
        """One position of each of B rows: keys and values [B, K, D], at `places` [B * K] of `find_places`."""
        for buffer, new in ((self.keys[layer], keys), (self.values[layer], values)):
            buffer.view(-1, buffer.shape[-1]).index_copy_(
                0, places, new.reshape(-1, buffer.shape[-1]).to(buffer.dtype)
            )

    def find_places(self, positions: Tensor) -> Tensor:
        """Where in a layer's buffer, in units of D values, each head of slots 0..B-1 has its `positions` [B]:
        [B * K].
        """
        heads = torch.arange(len(positions) * self._shape[0], device=positions.device).view(
            len(positions), -1
        )
        return (heads * self.capacity + positions[:, None]).view(-1)

    def copy(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """The first `length` positions of each source slot, into the target slot beside it."""
        for buffer in (*self.keys, *self.values):
            buffer[targets, :, :length] = buffer[sources, :, :length]

    def move(self, source: int, target: int, length: int) -> None:
        """One row's first `length` positions, into another slot."""
        for buffer in (*self.keys, *self.values):
            buffer[target, :, :length] = buffer[source, :, :length]

    def drop(self) -> None:
        """Gives the memory back."""
        self.moves += 1
        self.keys.clear()
        self.values.clear()


def _grown(held: int, wanted: int, block: int, limit: int) -> int:
    target = max(wanted, held + held // 2)
    return min(limit, -(-target // block) * block)

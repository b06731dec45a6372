"""What tells two copies of a model directory apart without reading them whole."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from rollouts.errors import ModelError
from rollouts.models.directories import WEIGHT_INDEX, read_shard_names

WHOLE_BYTES = 8 * 2**20  # files up to here are hashed whole
BLOCKS, BLOCK_BYTES = (
    32,
    64 * 2**10,
)  # of a longer one: as many pieces of so many bytes, evenly spread, the first and the last among them
CONFIG_FILES = ("config.json", "generation_config.json")  # of which each rank makes its model
WHOLE_FILE = "model.safetensors"


def compute_model_digests(path: Path) -> dict[str, str]:
    """ "SIZE:SHA-256" of each file from which a model is made, by name: the config, and the weights that are
    loaded. A missing file has none.

    Files above 8 MiB are hashed by their size, the safetensors header and 32 blocks of 64 KiB: a directory of
    100 GB in 20 files costs 40 MiB of reading. So another model, another revision, a file that is cut or has
    its weights in another place is told apart; a copy in which few bytes differ, as by a failing disk, only
    where they lie in a block. Raises ModelError if a file cannot be read.
    """
    found: dict[str, str] = {}
    for name in list_model_files(path):
        file = path / name
        try:
            if file.is_file():
                found[name] = f"{file.stat().st_size}:{_hash_file(file)}"
        except OSError as error:
            raise ModelError(f"{file} cannot be read ({error}); copy the model directory again") from error
    return found


def list_model_files(path: Path) -> list[str]:
    """Names of the files that loading the model reads, whether they are there or not."""
    if (path / WHOLE_FILE).is_file() or not (path / WEIGHT_INDEX).is_file():
        return [*CONFIG_FILES, WHOLE_FILE]
    return [*CONFIG_FILES, WEIGHT_INDEX, *read_shard_names(path)]


def _hash_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        size = path.stat().st_size
        for start, count in _choose_blocks(size, header=int.from_bytes(file.read(8), "little")):
            file.seek(start)
            digest.update(file.read(count))
    return digest.hexdigest()


def _choose_blocks(size: int, *, header: int) -> Iterator[tuple[int, int]]:
    """(start, bytes) of what is read. `header`: bytes of the safetensors header, as its first eight say,
    which may be nonsense.
    """
    if size <= WHOLE_BYTES:
        yield 0, size
        return
    yield 0, min(8 + header, WHOLE_BYTES)
    for number in range(BLOCKS):
        yield (size - BLOCK_BYTES) * number // (BLOCKS - 1), BLOCK_BYTES

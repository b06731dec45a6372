"""What the service knows and must not forget: an SQLite file, written before anybody is told.

    sessions ─► models ─► requests, of a model in the order of their seq
            └─► samplers ─► requests, in any order
    models ─► checkpoints, by their tinker:// paths

A request is kept whole until what it did is in a snapshot, so that a server that is started again does it
once more; its result until it has been kept for long enough.

    request ─► queued ─► running ─► done or failed ─► collected, once or often ─► forgotten
       └─ again, with the same scope and seq: the same id, and nothing else happens
"""

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import Any, NamedTuple

import msgspec
import trio

from rollouts.errors import ServiceRefused, StorageError

SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
    id TEXT PRIMARY KEY, owner TEXT, tag TEXT, created REAL, seen REAL, ended REAL, UNIQUE (owner, tag));
CREATE TABLE IF NOT EXISTS models (
    id TEXT PRIMARY KEY, session TEXT, owner TEXT, base TEXT, lora TEXT, metadata TEXT, created REAL,
    seen REAL, source TEXT, snapshot INTEGER, optim TEXT);
CREATE TABLE IF NOT EXISTS samplers (
    id TEXT PRIMARY KEY, session TEXT, owner TEXT, base TEXT, path TEXT, folder TEXT, model TEXT,
    inflight INTEGER, created REAL, used REAL);
CREATE TABLE IF NOT EXISTS requests (
    id TEXT PRIMARY KEY, owner TEXT, scope TEXT, seq INTEGER, kind TEXT, body BLOB, state TEXT, result BLOB,
    media TEXT, submitted REAL, begun REAL, ended REAL, told REAL, UNIQUE (scope, seq));
CREATE INDEX IF NOT EXISTS requests_by_state ON requests (state, scope);
CREATE TABLE IF NOT EXISTS checkpoints (
    path TEXT PRIMARY KEY, owner TEXT, run TEXT, id TEXT, kind TEXT, folder TEXT, created REAL, size INTEGER,
    public INTEGER, metadata TEXT, expires REAL, request TEXT, lora TEXT);
"""
Row = sqlite3.Row
JSON, PROTOBUF, MSGPACK = "application/json", "application/x-protobuf", "application/msgpack"
FAILED = ("failed", "lost")
BEGIN = "UPDATE requests SET state = 'running', begun = ? WHERE id = ?"


class Store:
    """The file, open. Calls are short, and made on trio's thread alone. Made by open_store."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def run(self, statement: str, *values: Any) -> None:
        """Changes rows. Durable when it returns, but for a power cut."""
        self._connection.execute(statement, values)

    def one(self, statement: str, *values: Any) -> Row | None:
        """The first row, None if there is none."""
        return self._connection.execute(statement, values).fetchone()

    def value(self, statement: str, *values: Any) -> Any:
        """The first column of the first row, None if there is none."""
        row = self.one(statement, *values)
        return None if row is None else row[0]

    def find(self, table: str, **having: Any) -> Row:
        """The row with these values. Raises ServiceRefused with 404."""
        conditions = " AND ".join(f"{name} = ?" for name in having)
        row = self.one(f"SELECT * FROM {table} WHERE {conditions}", *having.values())
        if row is None:
            raise ServiceRefused(f"there is no {table.removesuffix('s')} {having['id']!r}", 404)
        return row

    def all(self, statement: str, *values: Any) -> list[Row]:
        """Every row."""
        return self._connection.execute(statement, values).fetchall()


def remove_others(folder: Path, kept: Iterable[str]) -> None:
    """What a kill has left in the folder is gone: all but these names."""
    for path in folder.glob("*"):
        if path.name not in kept:
            rmtree(path, ignore_errors=True)


async def remove(folder: Path | str) -> None:
    """It is not there, or nobody could remove it."""
    await trio.to_thread.run_sync(partial(rmtree, folder, ignore_errors=True))


def list_sizes(folder: Path) -> dict[str, int]:
    """Bytes of each file, by its name below the folder."""
    return {
        str(file.relative_to(folder)): file.stat().st_size for file in folder.rglob("*") if file.is_file()
    }


@contextmanager
def open_store(path: Path) -> Iterator[Store]:
    """The file `path`, made where there is none, for this process alone. Raises StorageError."""
    try:
        connection = sqlite3.connect(path, isolation_level=None, timeout=0)
    except sqlite3.Error as error:
        raise StorageError(f"{path} cannot be opened: {error}; name another directory: output.dir") from error
    try:
        path.chmod(0o600)
        connection.row_factory = Row
        # a log beside the file: a kill loses nothing that was committed, and no commit waits for the disk
        for pragma in ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = NORMAL"):
            connection.execute(f"PRAGMA {pragma}")
        connection.executescript(SCHEMA)
        yield Store(connection)
    except sqlite3.OperationalError as error:
        raise StorageError(f"{path} cannot be used: {error}; does another server use it?") from error
    finally:
        connection.close()


# --- results ------------------------------------------------------------------------------------------------


class Result(NamedTuple):
    """What a request came to."""

    content: bytes
    media: str = JSON


def answer(**fields: Any) -> Result:
    """A result in JSON."""
    return Result(msgspec.json.encode(fields))

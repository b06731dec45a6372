"""The weights that are published, for readers anywhere: in this process, in others, on a shared disk.

writer   leftovers removed ─► snapshot vN complete and synced ─► published.json replaced ─► old ones removed
reader   published.json ─► its snapshot, every byte compared ─► loaded ─► still there?
         something is gone or differs, and another one is published ─► published.json once more

The number of a publication only grows; its snapshot may be an older one again. Nothing is written into a
snapshot that has its name. A published one is renamed before its files are removed, and no other gets its
name: a reader that still finds it after reading has read all of it.
"""

import errno
import re
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import field
from itertools import pairwise
from pathlib import Path
from shutil import rmtree
from typing import TypeVar

import msgspec
import trio
from trio.to_thread import run_sync as run_in_thread

from rollouts.checkpoints.load import FileRecord, compute_sha256, describe_unreadable
from rollouts.checkpoints.save import find_os_error, move_aside
from rollouts.errors import CheckpointDamaged, CheckpointError
from rollouts.run_dir import checkpoint_manifest, replace_file
from rollouts.types import live

POINTER = "published.json"
SCHEMA = 1  # of published.json: {"schema": 1, "held": [publications that are kept, the newest first]}
EMPTY = b'{"schema": 1, "held": []}'
WAY_OUT = f"restore it from a copy, or write {EMPTY.decode()} into it to give up the snapshots that are there"
TRIES = 3  # of a reader whose snapshot is removed while it reads, or whose file system says ESTALE
# of a snapshot, whose number is group 2; with group 1, of what an interrupted write or removal of one left
OWN_NAME = re.compile(r"(\.tmp-(?:removed-)?)?v([1-9][0-9]*)(?(1)-[0-9a-f]{8})")
T = TypeVar("T")


class Publication(msgspec.Struct, frozen=True):
    """Weights that were published."""

    publication: int  # its number, from 1
    snapshot: str  # the folder's name
    digest: str  # SHA-256 of the snapshot's manifest, which has those of its files
    weight_version: int
    reason: str  # update, rollback, …
    time_unix: float


# --- readers ------------------------------------------------------------------------------------------------


def list_publications(folder: Path, *, tries: int = TRIES) -> tuple[Publication, ...]:
    """Those whose snapshots are kept, the newest, which counts, first; none before the first. Blocks.

    Raises CheckpointError where published.json cannot be read, now or by this version; CheckpointDamaged if
    it was changed.
    """
    path = folder / POINTER
    try:
        content = msgspec.json.decode(path.read_bytes(), type=dict)
        schema = content.get("schema")
        if schema == SCHEMA:
            held = msgspec.convert(content.get("held"), tuple[Publication, ...])
            if all(one.publication > 0 and re.fullmatch(r"v[1-9][0-9]*", one.snapshot) for one in held):
                return held
            raise ValueError("it names what no run writes")
    except FileNotFoundError:
        return ()
    except OSError as error:
        if tries > 1 and error.errno == errno.ESTALE:  # it was replaced after it was opened
            return list_publications(folder, tries=tries - 1)
        raise describe_unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"{path} cannot be read ({error}): it was changed; {WAY_OUT}") from error
    raise CheckpointError(
        f"{path} has schema {schema!r}; this version reads {SCHEMA}: use the newer version of rollouts that"
        " wrote it"
    )


def load_published(folder: Path, load: Callable[[Path], T], *, tries: int = TRIES) -> tuple[Publication, T]:
    """The newest publication, and what `load` makes of the directory of its weights, of which every byte is
    as it was written. Blocks.

    Raises CheckpointError before the first publication, CheckpointDamaged for a snapshot that is not as it
    was written, and what `load` raises. Where another one was published meanwhile, or a network file system
    says ESTALE, it begins again with the newest; `tries` is how often it begins at most.
    """
    held = list_publications(folder)
    if not held:
        raise CheckpointError(f"nothing is published in {folder}; wait with follow()")
    newest = held[0]
    path = folder / newest.snapshot
    try:
        check_files(path, newest.digest)
        loaded = load(path)
        checkpoint_manifest(path).read_bytes()  # `load` may pass over files that are gone
        return newest, loaded
    except Exception as error:
        stale = getattr(find_os_error(error), "errno", None) == errno.ESTALE
        if tries > 1 and (stale or list_publications(folder) != held):
            return load_published(folder, load, tries=tries - 1)
        raise


async def follow(folder: Path, *, after: int = 0, poll_s: float = 1.0) -> Publication:
    """The newest publication, once its number is above `after`. Looks every poll_s: a shared disk tells
    nobody what another machine has written. Raises CheckpointError.
    """
    while True:
        held = await run_in_thread(list_publications, folder)
        if held and held[0].publication > after:
            return held[0]
        await trio.sleep(poll_s)


def check_files(snapshot: Path, digest: str) -> None:
    """Raises CheckpointDamaged for the first file that is not as the manifest of that digest says. Blocks."""
    manifest = checkpoint_manifest(snapshot)

    def check(path: Path, sha256: str) -> None:
        with suppress(FileNotFoundError):
            if compute_sha256(path) == sha256:
                return
        raise CheckpointDamaged(f"{path} is missing or not as it was written; publish again")

    check(manifest, digest)
    files = msgspec.json.decode(manifest.read_bytes())["files"]
    for record in msgspec.convert(files, list[FileRecord]):
        check(snapshot / record.path, record.sha256)


# --- the writer ---------------------------------------------------------------------------------------------


async def open_publisher(folder: Path, *, keep: int = 3, keep_s: float = 600.0) -> "Publisher":
    """The one writer of a folder, which is made if it is not there; what an earlier writer left is removed.

    Raises CheckpointError where published.json is missing beside snapshots, or cannot be read; OSError,
    StorageError.
    """
    publisher = Publisher(folder, keep, keep_s)
    await run_in_thread(publisher._clear)
    return publisher


@live
class Publisher:
    """Publishes weights in one folder, one publication after the other. Made by open_publisher.

    It keeps the snapshots of the newest `keep` publications, and those that were superseded less than keep_s
    ago, for readers that are slow. All that it knows is on disk.
    """

    folder: Path
    keep: int
    keep_s: float
    _lock: trio.Lock = field(default_factory=trio.Lock)

    async def publish(
        self, write: Callable[[Path], Awaitable[object]], weight_version: int, *, reason: str = "update"
    ) -> Publication:
        """The publication of what `write` puts into a directory: complete and synced under that name when it
        returns, with a manifest, as export_snapshot does. Raises what it raises, and as open_publisher.
        """
        async with self._lock:
            number = await run_in_thread(self._clear)
            path = self.folder / f"v{number}"
            await write(path)
            digest = await run_in_thread(compute_sha256, checkpoint_manifest(path))
            new = Publication(number, path.name, digest, weight_version, reason, time.time())
            return await run_in_thread(self._point, new)

    async def publish_again(self, publication: int, *, reason: str = "rollback") -> Publication:
        """A new publication of the snapshot of an older one, of which every byte is compared. Raises
        CheckpointError if that is not kept, CheckpointDamaged if it is not as it was written, and as
        open_publisher.
        """

        def point() -> Publication:
            number, held = self._clear(), list_publications(self.folder)
            for old in held:
                if old.publication == publication:
                    check_files(self.folder / old.snapshot, old.digest)
                    return self._point(
                        Publication(number, old.snapshot, old.digest, old.weight_version, reason, time.time())
                    )
            raise CheckpointError(
                f"publication {publication} is not kept in {self.folder}; choose one of"
                f" {[one.publication for one in held]}"
            )

        async with self._lock:
            return await run_in_thread(point)

    def _point(self, new: Publication) -> Publication:
        kept = [new]
        for newer, one in pairwise([new, *list_publications(self.folder)]):  # `newer` superseded `one`
            if len(kept) < self.keep or new.time_unix - newer.time_unix < self.keep_s:
                kept.append(one)
        content = {"schema": SCHEMA, "held": kept}
        replace_file(self.folder / POINTER, [msgspec.json.encode(content)])
        self._clear()
        return new

    def _clear(self) -> int:
        """The number of the next publication, above all that are in use. Removes what is not kept; but no
        snapshot before the first publication: their numbers would be used again.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        held, pointer = list_publications(self.folder), self.folder / POINTER
        if not held and not pointer.exists():
            if there := sorted(path.name for path in self.folder.glob("v[1-9]*")):
                raise CheckpointError(f"{pointer} is missing, but there are {', '.join(there)}; {WAY_OUT}")
            replace_file(pointer, [EMPTY])  # so that it is there if the first publication is interrupted
        number = held[0].publication if held else 0
        names = {one.snapshot for one in held}
        for path in self.folder.iterdir():
            own = OWN_NAME.fullmatch(path.name)
            if own and path.name not in names:
                number = max(number, int(own[2]))
                if held or own[1]:
                    with suppress(OSError):  # tried again before and after the next publication
                        rmtree(path if own[1] else move_aside(path))
        return number + 1

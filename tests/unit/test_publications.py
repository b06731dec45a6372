"""What is published is whole, its number only grows, and what a reader had begun with stays a while."""

import errno
import hashlib
import json
from functools import partial
from pathlib import Path
from shutil import rmtree
from types import SimpleNamespace

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from rollouts.checkpoints import follow as module
from rollouts.checkpoints.follow import POINTER, follow, list_publications, load_published, open_publisher
from rollouts.errors import CheckpointDamaged, CheckpointError, StorageError


async def write(path, text="unpublished"):
    """A snapshot of one file."""
    path.mkdir()
    (path / "weights").write_text(text)
    record = {"path": "weights", "size": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    (path / "manifest.json").write_text(json.dumps({"files": [record]}))


async def publish(publisher, text, version=0):
    """The number of its publication."""
    return (await publisher.publish(lambda path: write(path, text), version)).publication


def load(path):
    return (path / "weights").read_text()


def read(folder):
    found, text = load_published(folder, load)
    return found.publication, found.weight_version, found.reason, text


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# --- what stays ---------------------------------------------------------------------------------------------


async def test_a_reader_gets_the_newest_and_older_ones_go(tmp_path):
    publisher = await open_publisher(tmp_path / "new", keep=2, keep_s=0)
    for number, text in enumerate("abc", 1):
        assert await publish(publisher, text, 10 * number) == number
        assert read(tmp_path / "new") == (number, 10 * number, "update", text)
    assert names(tmp_path / "new") == [POINTER, "v2", "v3"]


async def test_a_snapshot_stays_for_slow_readers_from_when_it_was_superseded(tmp_path, monkeypatch):
    clock = SimpleNamespace()
    monkeypatch.setattr(module, "time", clock)
    publisher = await open_publisher(tmp_path, keep=1, keep_s=600)
    # a is superseded at 3600 and goes at 4200, b at 4100 and goes at 4700
    for now, kept in ((0, "1"), (3600, "12"), (4199, "123"), (4200, "234"), (4798, "2345"), (4799, "3456")):
        clock.time = lambda now=now: float(now)
        await publish(publisher, str(now))
        assert names(tmp_path) == [POINTER, *(f"v{number}" for number in kept)], now


async def test_a_rollback_is_a_new_publication_of_an_older_snapshot(tmp_path):
    publisher = await open_publisher(tmp_path, keep_s=0)
    for version, text in enumerate("ab"):
        await publish(publisher, text, version)
    old, new = list_publications(tmp_path)[1], await publisher.publish_again(1)
    assert (new.digest, new.snapshot, new.publication) == (old.digest, old.snapshot, 3)
    assert read(tmp_path) == (3, 0, "rollback", "a")
    assert await publish(publisher, "c", 2) == 4
    assert read(tmp_path) == (4, 2, "update", "c") and names(tmp_path) == [POINTER, "v1", "v2", "v4"]
    with pytest.raises(CheckpointError, match=r"publication 9 is not kept in .*; choose one of \[4, 3, 2\]"):
        await publisher.publish_again(9)
    (tmp_path / "v2/weights").write_text("B")
    with pytest.raises(CheckpointDamaged, match="v2/weights is missing or not as it was written"):
        await publisher.publish_again(2)
    assert read(tmp_path)[0] == 4


# --- the writer ---------------------------------------------------------------------------------------------


async def test_publications_that_are_asked_for_at_once_come_one_after_the_other(tmp_path):
    publisher, done = await open_publisher(tmp_path, keep=5), []

    async def slowly(path):
        await wait_all_tasks_blocked()  # the others have asked, and wait
        await write(path, path.name)

    async def ask(work, *arguments):
        done.append((await work(*arguments)).publication)

    await publish(publisher, "a")
    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(ask, publisher.publish, slowly, 0)
            nursery.start_soon(ask, publisher.publish_again, 1)
    assert done == [2, 3, 4, 5]
    for one in list_publications(tmp_path):
        module.check_files(tmp_path / one.snapshot, one.digest)


async def test_a_killed_writer_leaves_what_was_published(tmp_path):
    await publish(await open_publisher(tmp_path, keep_s=0), "a")
    others = ["notes", "v01", "v2-2", "vx", ".tmp-v3", ".tmp-step_3-01234567"]
    for name in ("v2", ".tmp-v3-01234567", ".tmp-removed-v1-89abcdef", *others):
        await write(tmp_path / name)
    (tmp_path / f".tmp-{POINTER}").touch()
    again = await open_publisher(tmp_path, keep_s=0)
    assert names(tmp_path) == sorted([POINTER, "v1", f".tmp-{POINTER}", *others])
    assert read(tmp_path) == (1, 0, "update", "a")
    await write(tmp_path / "v2")  # by a publication that failed once it was written
    assert await publish(again, "b") == 3
    assert names(tmp_path) == sorted([POINTER, "v1", "v3", *others])

    async def fail(path):
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        await again.publish(fail, 0)
    assert read(tmp_path)[0] == 3 and await publish(again, "c") == 4


async def test_a_writer_killed_in_its_first_publication_is_no_lost_pointer(tmp_path):
    await open_publisher(tmp_path)
    await write(tmp_path / "v1")
    publisher = await open_publisher(tmp_path, keep_s=0)
    assert list_publications(tmp_path) == () and await publish(publisher, "a") == 2
    assert names(tmp_path) == [POINTER, "v2"] and read(tmp_path)[-1] == "a"


async def test_nothing_is_removed_where_the_pointer_is_lost(tmp_path):
    for name in ("v3", "v7", ".tmp-removed-v2-01234567"):
        await write(tmp_path / name)
    before = names(tmp_path)
    with pytest.raises(CheckpointError, match=r"json is missing, but there are v3, v7; restore it") as caught:
        await open_publisher(tmp_path)
    assert names(tmp_path) == before
    (tmp_path / POINTER).write_text(str(caught.value).partition("write ")[2].partition(" into")[0])
    publisher = await open_publisher(tmp_path)
    assert names(tmp_path) == [POINTER, "v3", "v7"]
    assert await publish(publisher, "a") == 8  # the numbers go on
    assert names(tmp_path) == [POINTER, "v8"]


async def test_what_could_not_be_removed_is_tried_again(tmp_path, monkeypatch):
    publisher = await open_publisher(tmp_path, keep=1, keep_s=0)
    await publish(publisher, "a")

    def refuse(path):
        raise OSError("a reader on another machine has it open")

    monkeypatch.setattr(module, "rmtree", refuse)
    for number, text in enumerate("bc", 2):
        assert await publish(publisher, text) == number
    *hidden, pointer, newest = names(tmp_path)
    assert [name[:16] for name in hidden] == [".tmp-removed-v1-", ".tmp-removed-v2-"]
    assert (pointer, newest) == (POINTER, "v3")
    monkeypatch.setattr(module, "rmtree", rmtree)
    assert await publish(publisher, "d") == 4 and names(tmp_path) == [POINTER, "v4"]


async def test_a_number_that_readers_may_have_seen_is_not_given_again(tmp_path, monkeypatch):
    publisher = await open_publisher(tmp_path)
    replace = module.replace_file

    def replace_and_fail(path, chunks):
        replace(path, chunks)
        raise StorageError("the folder cannot be synced")

    monkeypatch.setattr(module, "replace_file", replace_and_fail)
    with pytest.raises(StorageError):
        await publish(publisher, "a")
    monkeypatch.undo()
    assert read(tmp_path) == (1, 0, "update", "a")
    assert await publish(publisher, "b") == 2


# --- readers ------------------------------------------------------------------------------------------------


async def test_a_reader_whose_snapshot_goes_reads_the_next(tmp_path):
    publisher = await open_publisher(tmp_path, keep=1, keep_s=0)
    await publish(publisher, "old")
    seen = []

    def load_late(path):
        seen.append(path.name)
        if len(seen) == 1:
            trio.from_thread.run(publish, publisher, "new")
        return [file.read_text() for file in path.glob("weights")]  # finds none, and says nothing

    found, texts = await trio.to_thread.run_sync(partial(load_published, tmp_path, load_late))
    assert (found.publication, texts, seen) == (2, ["new"], ["v1", "v2"])


async def test_a_reader_gives_up_when_what_it_reads_always_goes(tmp_path):
    publisher = await open_publisher(tmp_path, keep=1, keep_s=0)
    await publish(publisher, "a")

    def load_late(path):
        trio.from_thread.run(publish, publisher, "b")
        return load(path)

    with pytest.raises(FileNotFoundError):
        await trio.to_thread.run_sync(partial(load_published, tmp_path, load_late))
    assert list_publications(tmp_path)[0].publication == 4  # three tries


async def test_a_stale_file_handle_is_read_again(tmp_path, monkeypatch):
    """As network file systems answer for a file that was replaced after it was opened."""
    await publish(await open_publisher(tmp_path), "a")
    plain, left = Path.read_bytes, []

    def read_bytes(path):
        if left and path.name == left[-1]:
            raise OSError(errno.ESTALE, "Stale file handle", left.pop())
        return plain(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    for name in (POINTER, "manifest.json"):
        left[:] = [name] * 2
        assert read(tmp_path) == (1, 0, "update", "a") and left == []
    left[:] = [POINTER] * 3
    with pytest.raises(CheckpointError, match=r"json cannot be read now \(Stale file handle\)"):
        read(tmp_path)
    left[:] = ["manifest.json"] * 3
    with pytest.raises(OSError, match="Stale file handle"):
        read(tmp_path)


async def test_what_was_changed_is_not_loaded(tmp_path):
    await publish(await open_publisher(tmp_path), "good")
    for name in ("weights", "manifest.json"):
        path = tmp_path / "v1" / name
        before = path.read_text()
        path.write_text("g00d")
        for _ in range(2):
            with pytest.raises(CheckpointDamaged, match=f"{name} is missing or not as it was written"):
                read(tmp_path)
            path.unlink(missing_ok=True)
        path.write_text(before)
    assert read(tmp_path)[0] == 1


async def test_a_pointer_that_cannot_be_used_says_why(tmp_path):
    for text in ("{", "[]", '{"schema": 1}', '{"schema": 1, "held": [{"publication": 1}]}'):
        (tmp_path / POINTER).write_text(text)
        with pytest.raises(
            CheckpointDamaged, match=r"published\.json cannot be read .*: it was changed; rest"
        ):
            read(tmp_path)
    (tmp_path / POINTER).write_text('{"schema": 2, "newest": 7}')
    for use in (open_publisher, follow):
        with pytest.raises(
            CheckpointError, match="has schema 2; this version reads 1: use the newer version"
        ):
            await use(tmp_path)


def test_before_the_first_publication_a_reader_is_told_to_wait(tmp_path):
    assert list_publications(tmp_path) == ()
    with pytest.raises(CheckpointError, match="nothing is published in"):
        read(tmp_path)


async def test_followers_wake_with_the_next_publication(tmp_path):
    publisher = await open_publisher(tmp_path)
    told, said = trio.open_memory_channel[int](0)

    async def watch():
        async with told:
            for after in range(2):
                await told.send((await follow(tmp_path, after=after, poll_s=0.01)).publication)

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            for number, text in enumerate("ab", 1):
                await publish(publisher, text)
                assert await said.receive() == number

"""Commands, answers and heartbeats of the ranks, through a TCPStore that rank 0 hosts.

    rank 0: send(command) ─► a queue for each other rank ─► receive() there             JSON, in order
    rank r: answer(name, text) ─► wait_answers(name) on rank 0
    every rank, each second, in a thread: its heartbeat out, everybody's in ─► watch() judges

    no new heartbeat for SILENT_BEATS seconds · its process on this machine has ended · the store is gone or
    does not answer (rank 0) · it reported a failure of its own ──► that rank is lost ──► on_lost

Nothing here needs the device thread, which may hang in a collective with the lost rank.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from threading import Event
from typing import Any, NoReturn

import trio
from torch.distributed import DistError, TCPStore  # pyright: ignore[reportPrivateImportUsage]  (documented)

from rollouts.errors import RankLost
from rollouts.ranks.launch import has_ended

Command = dict[str, Any]  # JSON values; "name" says what to do

EXIT_RANK_LOST = 75  # EX_TEMPFAIL: start it again
BEAT_S = 1.0
SILENT_BEATS = 20
PROOFS = 3  # of life, after a failure: a dead rank's last beats come in two readings at most
NOTICE_S = 3.0  # rank 0 waits so long for the others to read who is lost before its store goes with it
PATIENCE_S = 8.0  # the others wait so long for a failed rank to end first, with its own message and exit code
CLOSE_S = 10.0  # rank 0 waits so long for the others to leave
REASON_CHARS = 1000
ENDED = "its process has ended"
SILENT = f"no heartbeat came for {SILENT_BEATS} s"
FORCED = "a requested stop did not end in time, so it ends by force"


class NoOtherRanks:
    """The channel of a process that is alone."""

    phase = ""

    def send(self, command: Command) -> None:
        """Nobody listens."""

    async def wait_answers(self, name: str) -> Mapping[int, str]:
        """No answers."""
        return {}


class Channel:
    """One rank's end. `connect` opens another connection to the store; `processes`: identify_process of each
    rank.
    """

    def __init__(self, rank: int, connect: Callable[[], TCPStore], processes: list[str]) -> None:
        self._phase = "start-up"
        self.rank = rank
        self.processes = processes
        self._store = connect()  # for operations that return at once
        self._commands = connect() if rank else self._store  # receive() blocks it
        self._others = [other for other in range(len(processes)) if other != rank]
        self._closing = Event()
        self._wake = Event()  # the next heartbeat is due at once
        self._beats: list[list[Any]] = [[0, "start-up"] for _ in processes]  # [count, phase] as last read
        self._exchanges = 0
        self._broken = False  # the store is gone
        self._failed = False  # this rank has, and ends by itself
        self._report: list[Any] | None = None  # what `lost` says

    @property
    def phase(self) -> str:
        """What this rank does now, for the others to say if it is lost."""
        return self._phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self._phase = phase
        self._wake.set()

    # --- commands

    def send(self, command: Command) -> None:
        """Gives the other ranks a command, after those before it. Returns at once; may be called on any
        thread.
        """
        text = json.dumps(command)
        for rank in self._others:
            self._store.queue_push(f"commands/{rank}", text)

    async def receive(self) -> Command | None:
        """Rank 0's next command; None after it has closed the channel."""
        try:
            text = await trio.to_thread.run_sync(
                self._commands.queue_pop, f"commands/{self.rank}", abandon_on_cancel=True
            )
        except DistError as error:
            raise RankLost(0, self._beats[0][1], ENDED) from error
        command = json.loads(text)
        if command["name"] == "close":
            self.stop_watching()
            return None
        return command

    def answer(self, name: str, text: str) -> None:
        """Answers rank 0, which waits for it by `name`."""
        self._store.set(f"answers/{name}/{self.rank}", text)

    async def wait_answers(self, name: str) -> Mapping[int, str]:
        """The answers of all other ranks, by rank, once all have come."""
        keys = {rank: f"answers/{name}/{rank}" for rank in self._others}
        while not self._store.check([*keys.values()]):  # noqa: ASYNC110  (of other processes)
            await trio.sleep(0.02)
        found = {rank: self._store.get(key).decode() for rank, key in keys.items()}
        for key in keys.values():
            self._store.delete_key(key)
        return found

    # --- watching

    async def watch(self, on_lost: Callable[[RankLost, str], object]) -> None:
        """Calls `on_lost` once with the rank that the run has lost and, where that rank will end by itself,
        its process. Returns when the channel is closed.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(trio.to_thread.run_sync, self._exchange, abandon_on_cancel=True))
            # in seconds by this process's own count, for a machine may sleep
            silent = dict.fromkeys(self._others, 0)
            ended = set()  # ranks whose process had ended a second ago: what they reported is read
            heard, exchanges = self._beats, 0
            while not self._closing.is_set():
                await trio.sleep(BEAT_S)
                beats, answers = self._beats, self._exchanges > exchanges
                for rank in self._others:
                    fresh = answers and beats[rank][0] > heard[rank][0]
                    missing = answers or rank == 0  # without an answer nothing is known of the others
                    silent[rank] = 0 if fresh else silent[rank] + missing
                heard, exchanges = beats, self._exchanges
                lost = None if self._closing.is_set() else self._find_lost(silent, ended)
                if lost is not None:
                    if self._report is None and lost.rank:
                        self.report(lost)
                    on_lost(lost, self.processes[lost.rank] if self._report and self._report[-1] else "")
                    break
            self.stop_watching()

    def _exchange(self) -> None:
        keys = [f"beats/{rank}" for rank in range(len(self._beats))]
        count = 0
        while True:
            self._wake.wait(BEAT_S / 2)
            self._wake.clear()
            if self._closing.is_set():
                return
            count += 1
            try:
                self._store.set(keys[self.rank], json.dumps([count, self.phase]))
                if self._store.check(keys):
                    self._beats = [json.loads(beat) for beat in self._store.multi_get(keys)]
                if self._store.check(["lost"]):
                    self._report = json.loads(self._store.get("lost"))
            except DistError:
                self._broken = True
                return
            self._exchanges += 1

    def _find_lost(self, silent: Mapping[int, int], ended: set[int]) -> RankLost | None:
        if self._report is not None:
            rank, phase, reason, _ = self._report
            return None if rank == self.rank and self._failed else RankLost(rank, phase, reason)
        for rank in self._others:
            if (rank == 0 and self._broken) or rank in ended:
                return RankLost(rank, self._beats[rank][1], ENDED)
            if has_ended(self.processes[rank]) and not (
                self.rank == 0 and self._store.check([f"left/{rank}"])
            ):
                ended.add(rank)
            if silent[rank] >= SILENT_BEATS:
                return RankLost(rank, self._beats[rank][1], SILENT)
        return None

    def report(self, lost: RankLost, *, own: bool = False) -> None:
        """Tells all ranks whom the run has lost, unless one has told them already. own: this rank has failed
        and will end by itself.
        """
        with suppress(DistError):
            text = json.dumps([lost.rank, lost.phase, lost.reason[:REASON_CHARS], own])
            self._store.compare_set("lost", "", text)

    async def report_failure(self, error: BaseException) -> None:
        """Tells the others that this rank has failed, unless watch() finds meanwhile that another rank is
        lost, which explains a failure inside a collective. So it waits until all others have shown that they
        live, or watch() must have judged.
        """
        if self._failed:
            return
        with trio.move_on_after((SILENT_BEATS + 2) * BEAT_S):
            for _ in range(PROOFS):
                heard = self._beats
                while not self._closing.is_set() and any(  # noqa: ASYNC110  (of other processes)
                    self._beats[rank] == heard[rank] for rank in self._others
                ):
                    await trio.sleep(BEAT_S / 10)
        self._failed = True
        self.report(RankLost(self.rank, self.phase, f"{type(error).__name__}: {error}"), own=True)
        await self._wait_left(NOTICE_S)

    # --- leaving

    async def close(self) -> None:
        """On rank 0: ends the other ranks' receive(), and waits until they have left; watch() names one that
        ends without leaving. Elsewhere: leaves.
        """
        if self.rank == 0:
            self.send({"name": "close"})
            await self._wait_left(CLOSE_S)
            self.stop_watching()
        else:
            assert self._closing.is_set(), f"rank {self.rank} left before rank 0 closed the channel"
            self.leave()

    def stop_watching(self) -> None:
        """watch() returns soon."""
        self._closing.set()
        self._wake.set()

    def leave(self) -> None:
        """Tells rank 0, which hosts the store, that this rank needs it no more."""
        self.stop_watching()
        with suppress(DistError):
            self._store.set(f"left/{self.rank}", "")

    def end_others(self) -> None:
        """The other ranks end with exit code 0, whatever they wait for. The caller, on any thread, then ends
        this process.
        """
        self.report(RankLost(0, self.phase, FORCED))
        self.wait_notice(len(self._others))

    def count_left(self) -> int:
        """Ranks that have left. On rank 0."""
        return sum(self._store.check([f"left/{rank}"]) for rank in self._others)

    def wait_notice(self, count: int) -> None:
        """Blocks until so many have read from this process's store who is lost, at most NOTICE_S."""
        for _ in range(int(NOTICE_S / 0.1)):
            if self.count_left() >= count:
                break
            Event().wait(0.1)

    async def _wait_left(self, timeout_s: float) -> None:
        if self.rank == 0:
            with trio.move_on_after(timeout_s, shield=True):
                while self.count_left() < len(self._others):  # noqa: ASYNC110  (of other processes)
                    await trio.sleep(0.02)


RankChannel = Channel | NoOtherRanks  # rank 0's end of a channel, as a backend needs it


# --- the end of a process -----------------------------------------------------------------------------------


def exit_on_lost(channel: Channel, lost: RankLost, process: str) -> NoReturn:
    """Says on stderr who is lost and in which phase, and ends this process: with 75, or with 0 where rank 0
    ends by force in a requested stop.

    A launcher ends all ranks as soon as one has ended and shows that one's exit code, so a rank that has
    failed by itself, `process`, ends first.
    """
    forced, pause = lost.reason == FORCED, Event()
    if channel.rank and (lost.rank or lost.reason not in (ENDED, SILENT)):
        channel.leave()
    for _ in range(int(PATIENCE_S / 0.1)):
        if not process or forced or has_ended(process):
            break
        pause.wait(0.1)
    if not channel.rank:
        channel.wait_notice(len(channel.processes) - 2)
    with suppress(OSError, ValueError):  # whoever read it may be gone
        sys.stdout.flush()
        print(f"rollouts: {' '.join(str(lost).split())}; this process ends too", file=sys.stderr, flush=True)
    os._exit(0 if forced else EXIT_RANK_LOST)

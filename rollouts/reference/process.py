"""A frozen reference in a process of its own, so that scoring does not stand in the queue of the trainer's
device thread.

    score() ──► its turn ──► unix socket ──► child (worker.py): one batch at a time ──► log-probs
                                  │
                                  └─ the child ends ──► it is started again, once, and asked again; the next time: ScoringError

The child runs under rollouts.engines.process_guard: when the context is left, or this process ends by any
signal, nothing of it is left. Its output goes to log_dir/reference.log. The socket lies in a directory that
only this user may enter.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import trio

from rollouts.distributed.commands import Command, decode_command
from rollouts.engines.processes import GuardedProcess, describe_signal, read_tail, start_guarded
from rollouts.errors import ConfigError, ControlError, DataError, ModelError, RolloutsError, ScoringError
from rollouts.reference.messages import (
    LENGTH,
    MOST_BYTES,
    decode_scores,
    encode_batch,
    encode_frame,
    read_fields,
)
from rollouts.types import FloatArray, RolloutBatch

KILL_S = 30.0  # for SIGKILL to take effect; a GPU driver may hold a process for seconds
TAKE_S = 1.0  # for a child to take a batch whose sender was cancelled
READ_BYTES = 1 << 20
RESTARTS = 1
SAME_ERRORS = {
    error.__name__: error for error in (ConfigError, DataError, ModelError)
}  # that keep their class across the socket


class _Ended(RolloutsError):
    """The child's end of the socket is closed."""


async def _hurry_when_cancelled(scope: trio.CancelScope) -> None:
    """Gives what is shielded in `scope` TAKE_S more once this is cancelled."""
    try:
        await trio.sleep_forever()
    finally:
        scope.deadline = trio.current_time() + TAKE_S


class ReferenceProcess:
    """A LogProbScorer in a child process. Made by open_reference_process."""

    def __init__(
        self, load: Command, *, log_path: Path, socket_path: Path, start_s: float, say: Callable[[str], None]
    ) -> None:
        self.metrics: Mapping[str, float] = {}
        self.restarts = 0
        self._load = load
        self._log_path, self._socket_path = log_path, socket_path
        self._start_s = start_s
        self._say = say
        self._turn = trio.Lock()  # who talks to the child
        self._child: GuardedProcess | None = None
        self._stream: trio.SocketStream | None = None
        self._received = bytearray()  # of frames that are not whole yet; outlives a reader that was cancelled
        self._last_id = 0
        self._unanswered = 0  # requests that the child has, and whose answers nobody has read
        self._ended_for_good = ""  # why nothing will be scored any more

    @property
    def pid(self) -> int:
        """Of the child that was started last."""
        return 0 if self._child is None else self._child.pid

    async def score(self, batch: RolloutBatch) -> tuple[FloatArray, ...]:
        """[T_i] per row at batch.temperature; 0.0 where the loss mask is 0. One batch after the other, in the
        order of asking.

        Raises ScoringError when the child has ended once too often or answers nonsense, and after the context
        was left; what the model raises (ModelError, DataError). Cancelling leaves the child at work, and its
        answer is passed over; one that does not even take the batch is killed, and started anew for the next.
        """
        async with self._turn:
            while True:
                if self._ended_for_good:
                    raise ScoringError(self._ended_for_good)
                if self._stream is None:
                    await self.start()
                try:
                    return await self._ask(batch)
                except _Ended:
                    await self._note_end()

    async def start(self) -> None:
        """Returns when the child has loaded the model. Raises ScoringError if it ends before, and what
        loading raised.
        """
        self._socket_path.unlink(missing_ok=True)
        try:
            with (
                trio.fail_after(self._start_s),
                trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_STREAM) as listener,
            ):
                await listener.bind(str(self._socket_path))
                listener.listen(1)
                command = [sys.executable, "-m", "rollouts.reference.worker", str(self._socket_path)]
                self._child = await start_guarded(
                    command, os.environ, self._log_path, headline="start of the reference", grace_s=0.0
                )
                self._stream = await self._accept(listener, self._child)
                self._received.clear()
                self._unanswered = 0
                await self._send(self._load)
                loaded = await self._read_frame()
        except BaseException as error:
            await self.stop()
            if isinstance(error, trio.TooSlowError):
                raise ScoringError(
                    f"the reference process had not loaded its model after start_s={self._start_s:g};"
                    f" {self._read_log()}"
                ) from error
            if isinstance(error, _Ended):
                raise ScoringError(
                    f"the reference process {self._describe_end()} before it had loaded its model;"
                    f" {self._read_log()}"
                ) from error
            raise
        if loaded.name == "failed":
            await self.stop()
            raise _make_error(loaded)
        fields = read_fields(loaded, metrics=dict, said=list)
        self.metrics = {str(name): float(value) for name, value in fields["metrics"].items()}
        for line in fields["said"]:
            self._say(str(line))

    async def stop(self) -> None:
        """Ends the child, if there is one: killed at once, for it has nothing to lose. Not to be interrupted."""
        child, stream = self._child, self._stream
        self._stream = None
        if stream is not None:
            with trio.CancelScope(shield=True):
                await trio.aclose_forcefully(stream)
        if child is None or child.has_ended:
            return
        with trio.CancelScope(shield=True):
            await child.release()  # the guard kills it when its stdin closes
            with trio.move_on_after(KILL_S):
                await child.wait_ended()
            await child.release()
        if not child.has_ended:
            raise ScoringError(
                f"the reference process (pid {child.pid}) did not end {KILL_S:g} s after SIGKILL"
            )

    async def close(self) -> None:
        """Ends the child; later calls raise."""
        self._ended_for_good = "the reference process was closed; score inside its `async with`"
        await self.stop()

    # --- talking --------------------------------------------------------------------------------------------

    async def _ask(self, batch: RolloutBatch) -> tuple[FloatArray, ...]:
        self._last_id += 1
        number = self._last_id
        await trio.lowlevel.checkpoint_if_cancelled()
        await self._send_reading(Command("score", {"id": number}, encode_batch(batch)))
        while True:
            answer = await self._read_answer()
            if answer.fields.get("id") != number:
                continue  # to someone who was cancelled
            if answer.name == "failed":
                raise _make_error(answer)
            return decode_scores(answer, batch)

    async def _send_reading(self, command: Command) -> None:
        """Sends, and reads meanwhile what is answered to those who were cancelled: else each side could wait
        for the other to read.

        Half a frame would spoil the next one: who is cancelled leaves the child TAKE_S to take the rest,
        after which it is killed.
        """
        ended: _Ended | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._read_late_answers)
            with trio.CancelScope(shield=True) as sending:
                nursery.start_soon(_hurry_when_cancelled, sending)
                try:
                    await self._send(command)
                except _Ended as error:
                    ended = error
            if sending.cancelled_caught:
                await self.stop()
            else:
                self._unanswered += 1
            nursery.cancel_scope.cancel()
        if ended is not None:
            raise ended
        await trio.lowlevel.checkpoint_if_cancelled()

    async def _read_late_answers(self) -> None:
        with suppress(_Ended):  # who sends sees it too
            while self._unanswered:
                await self._read_answer()

    async def _read_answer(self) -> Command:
        answer = await self._read_frame()
        self._unanswered -= 1
        return answer

    async def _send(self, command: Command) -> None:
        assert self._stream is not None
        try:
            for piece in encode_frame(command):
                await self._stream.send_all(piece)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise _Ended("sending") from error

    async def _read_frame(self) -> Command:
        assert self._stream is not None
        while True:
            if len(self._received) >= LENGTH.size:
                (count,) = LENGTH.unpack_from(self._received)
                if count > MOST_BYTES:
                    raise ScoringError(
                        f"the reference process announced a message of {count} bytes, which is none;"
                        f" {self._read_log()}"
                    )
                if len(self._received) >= LENGTH.size + count:
                    body = bytes(self._received[LENGTH.size : LENGTH.size + count])
                    del self._received[: LENGTH.size + count]
                    return _decode(body)
            try:
                data = await self._stream.receive_some(READ_BYTES)
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise _Ended("receiving") from error
            if not data:
                raise _Ended("receiving")
            self._received += data

    async def _accept(self, listener: trio.socket.SocketType, child: GuardedProcess) -> trio.SocketStream:
        """The child's connection. Raises _Ended if it ends before it makes one."""
        stream: trio.SocketStream | None = None
        async with trio.open_nursery() as nursery:

            async def notice_end() -> None:
                await child.wait_ended()
                nursery.cancel_scope.cancel()

            nursery.start_soon(notice_end)
            connection, _ = await listener.accept()
            stream = trio.SocketStream(connection)
            nursery.cancel_scope.cancel()
        if stream is None:
            raise _Ended("connecting")
        return stream

    async def _note_end(self) -> None:
        """The child is gone: cleared away, and remembered. Raises ScoringError if that was once too often."""
        await self.stop()
        why = f"the reference process {self._describe_end()}"
        if self.restarts >= RESTARTS:
            self._ended_for_good = (
                f"{why}, after it had been started again {self.restarts} time(s); {self._read_log()}"
            )
            return
        self.restarts += 1
        self._say(f"{why} and is started again; {self._read_log()}")

    def _describe_end(self) -> str:
        said = {} if self._child is None else self._child.said
        if "failed" in said:
            return f"did not start: {said['failed']}"
        code = said.get("ended")
        if code is None:
            return "ended with its guard"
        return f"was killed by {describe_signal(-code)}" if code < 0 else f"ended with exit code {code}"

    def _read_log(self) -> str:
        start = 0 if self._child is None else self._child.log_start
        return f"last lines of {self._log_path}:\n{read_tail(self._log_path, start=start)}"


def _decode(body: bytes) -> Command:
    try:
        return decode_command(body)
    except ControlError as error:
        raise ScoringError(
            f"the reference process answered with something that is no message: {error}"
        ) from error


def _make_error(answer: Command) -> RolloutsError:
    fields = read_fields(answer, error=str, message=str)
    kind = SAME_ERRORS.get(fields["error"])
    return (
        kind(fields["message"])
        if kind
        else ScoringError(f"the reference process failed: {fields['error']}: {fields['message']}")
    )


@asynccontextmanager
async def open_reference_process(
    path: Path,
    *,
    log_dir: Path,
    dtype: str = "float32",
    device: str = "cpu",
    micro_batch_tokens: int = 8192,
    torch_threads: int | None = None,
    probe: RolloutBatch | None = None,
    start_s: float = 900.0,
    say: Callable[[str], None] = lambda _: None,
) -> AsyncIterator[ReferenceProcess]:
    """The model at `path`, loaded in a child process, as a LogProbScorer.

    `torch_threads`: that the child computes with; None: torch's own choice. `start_s`: seconds for loading,
    quantising included. `say` is told of a restart and of what a quantised model's error is. Raises
    ModelError and ConfigError as load_reference does, ScoringError if the child ends before it has loaded.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    fields: dict[str, Any] = {
        "path": str(path.absolute()),
        "dtype": dtype,
        "device": device,
        "micro_batch_tokens": micro_batch_tokens,
        "torch_threads": torch_threads,
    }
    load = Command("load", fields, {} if probe is None else encode_batch(probe))
    with tempfile.TemporaryDirectory(prefix="rollouts-reference-") as folder:
        scorer = ReferenceProcess(
            load,
            log_path=log_dir / "reference.log",
            socket_path=Path(folder) / "socket",
            start_s=start_s,
            say=say,
        )
        try:
            await scorer.start()
            yield scorer
        finally:
            await scorer.close()

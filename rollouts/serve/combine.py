"""Requests for training of several users' adapters, done by one pass over their model.

    train ─► waits ─► one job of all that wait ─► each its answer
               └─ first for those of the last pass, which are about to come back, unless they take their time

Clients that train in step get their answers at the same time, and their next requests are here within what it
takes to step the optimizers and to cross the network. So the device is not left to the first of them. A model
that is alone waits for nobody.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import field
from typing import TYPE_CHECKING

import trio

from rollouts.backends.pytorch import RankedTrainingBackend as Backend
from rollouts.backends.together import Asked, forward_backward_together
from rollouts.types import ForwardBackwardResult, live

if TYPE_CHECKING:
    from rollouts.device_thread import DeviceThread

Answer = ForwardBackwardResult | Exception


Waiting = tuple[Asked, trio.MemorySendChannel[Answer]]  # a request, and where its answer goes


@live
class Combiner:
    """What waits for the next pass. Somebody must be in run_passes."""

    device_thread: "DeviceThread"
    window_s: float  # that an idle device waits for the next of those that are expected
    run: Callable[[Sequence[Asked]], Awaitable[list[Answer]]] = forward_backward_together
    waiting: dict[Backend, Waiting] = field(default_factory=dict)  # in their order
    expected: set[Backend] = field(default_factory=set)  # those of the last pass that are not back
    pass_s: float = 0.0  # what the last pass took
    changed: trio.lowlevel.ParkingLot = field(default_factory=trio.lowlevel.ParkingLot)

    async def train(self, asked: Asked) -> ForwardBackwardResult:
        """What the request gives or raises, done with all that wait then. One that is cancelled while it
        waits is not done.
        """
        backend, (answer_to, answers) = asked.backend, trio.open_memory_channel[Answer](1)
        self.waiting[backend] = mine = asked, answer_to
        self.expected.discard(backend)
        self.changed.unpark_all()
        try:
            answer = await answers.receive()
        finally:
            if self.waiting.get(backend) is mine:
                del self.waiting[backend]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def run_passes(self) -> None:
        """Runs pass after pass, until cancelled."""
        while True:
            while not self.waiting:
                await self.changed.park()
            await self._wait_for_expected()
            taken, self.expected = [*self.waiting.values()], {*self.waiting}
            self.waiting.clear()
            start = trio.current_time()
            try:
                answers: Sequence[Answer] = await self.run([asked for asked, _ in taken]) if taken else []
            except Exception as error:  # nothing was done: the device is closed
                answers = [error] * len(taken)
            self.pass_s = trio.current_time() - start
            for (_, answer_to), answer in zip(taken, answers, strict=True):
                answer_to.send_nowait(answer)

    async def _wait_for_expected(self) -> None:
        """Until all are back, or none has come within the window, in which the device had nothing to do; but
        not for longer than the last pass took.
        """
        with trio.move_on_after(self.window_s + self.pass_s):
            while self.expected:
                # what is queued there, as optimizer steps of those that are expected, comes before it anyway
                await self.device_thread.submit(lambda: None)
                with trio.move_on_after(self.window_s) as window:
                    if self.expected:
                        await self.changed.park()
                if window.cancelled_caught and not self.device_thread.statistics()["queued"]:
                    return

"""The engine that a generate function is given: what the engines below it abort, it continues; and what the
function notes of its progress is kept.

    generate function ──► ContinuingEngine ──► engine or fleet
        │ note_progress        └ aborted: asked again for the rest, unless the run is stopping
        └──► the member of its group, which goes on from there whatever ends the call
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import trio

from rollouts.errors import EngineError
from rollouts.generation.generate import ask_for_rest
from rollouts.protocols import InferenceEngine
from rollouts.types import Completion, GenerateRequest, Sample, Status, live

if TYPE_CHECKING:
    from rollouts.generation.group import GroupPlan, Member

MAX_STARTS = 8  # aborts in a row of one sample without a token more; after that it has failed
_RUNNING: "ContextVar[ContinuingEngine | None]" = ContextVar("running", default=None)


@live
class ContinuingEngine:
    """An InferenceEngine for one call of a generate function. All but `generate` is the engine's own."""

    plan: "GroupPlan"
    member: "Member"  # with what the function has noted
    asking: int = 0  # requests that wait for an answer
    waits: bool = False  # for a tool or an environment, between two turns
    made: list[Completion] = field(default_factory=list)  # what the function was answered
    in_vain: int = 0  # aborts in a row without a token more
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)  # around the call

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plan.engine, name)

    async def generate(self, request: GenerateRequest) -> Completion:
        """The whole completion, however often the engine aborts it. "abort", with the tokens that there are,
        only if the run is stopping or they are too old to go on from.

        Raises like the engine, and EngineError after MAX_STARTS aborts in a row without a token more.
        """
        whole, done = None, 0
        self.scope.deadline = math.inf
        self._count_waiting(False)
        self.asking += 1
        try:
            while True:
                whole = await ask_on(self.plan.engine, request, whole if done else None)
                more, done = len(whole.token_ids) - done, len(whole.token_ids)
                oldest = min(whole.weight_versions.tolist(), default=None)
                if whole.finish_reason != "abort" or self.plan.is_stale(oldest) or self.plan.is_stopping():
                    return whole
                if done >= request.sampling.max_new_tokens:
                    return replace(whole, finish_reason="length")
                self.count_abort(more)
        finally:
            self.made += [] if whole is None else [whole]
            self.asking -= 1
            self._limit()
            self._count_waiting(self.member.partial is not None and not self.asking)

    def _limit(self) -> None:
        if not self.asking:
            self.scope.deadline = trio.current_time() + self.plan.generate_timeout_s

    def _count_waiting(self, waits: bool) -> None:
        """Tells whether the trajectory has begun and waits for something other than the engine."""
        if waits != self.waits:
            self.waits = waits
            self.plan.on_waiting(1 if waits else -1)

    def count_abort(self, more: int) -> None:
        """Raises EngineError after MAX_STARTS aborts in a row that left no token `more`."""
        self.in_vain = 0 if more > 0 else self.in_vain + 1
        if self.in_vain == MAX_STARTS:
            raise EngineError(
                f"sample {self.member.pending.id} was aborted by its engine {MAX_STARTS} times without a"
                " token more; find out who calls abort_all()"
            )

    @contextmanager
    def running(self) -> Iterator[None]:
        """The call of the generate function. It is cancelled, and the block left, by end_if_idle, and where
        it asks the engine nothing for longer than the plan allows.
        """
        self._limit()
        token = _RUNNING.set(self)
        try:
            with self.scope:
                yield
        finally:
            self._count_waiting(False)
            _RUNNING.reset(token)

    def end_if_idle(self) -> None:
        """Cancels the call if there are tokens to go on from and no request of it is in the engine."""
        if self.member.partial is not None and not self.asking:
            self.scope.cancel()


def note_progress(sample: Sample) -> None:
    """Keeps what the trajectory that is being generated has so far. If the run stops, is cancelled or killed
    before it has ended, its generate function is called with this sample, which is ABORTED then.

    For generate functions, whenever they have something to go on from: its tokens, and in its metadata what
    else they need. Nothing of the sample may change afterwards. Does nothing outside a group's generation.
    """
    call = _RUNNING.get()
    if call is not None:
        call.member.partial = replace(sample, status=Status.ABORTED)
        if call.plan.is_stopping():
            call.end_if_idle()


async def ask_on(engine: InferenceEngine, request: GenerateRequest, held: Completion | None) -> Completion:
    """The completion of a request, of which the engine is only asked for what follows `held`."""
    if held is None:
        return await engine.generate(request)
    answer = await engine.generate(ask_for_rest(request, held.token_ids))
    names = ("token_ids", "log_probs", "weight_versions")
    joined = {name: np.append(getattr(held, name), getattr(answer, name)) for name in names}
    return replace(held, finish_reason=answer.finish_reason, **joined)

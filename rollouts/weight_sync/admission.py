"""What a weight update tells whoever sends requests to the engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import trio

from rollouts.protocols import InferenceEngine


class Admission(Protocol):
    """Decides which engine gets requests. A fleet is one."""

    def close_admission(self, engine: InferenceEngine) -> None:
        """No new requests to `engine`; what it answers from now on is held back until commit or fail."""
        ...

    def commit(self, engine: InferenceEngine, version: int) -> bool:
        """`engine` has proven that it serves `version`: it gets requests again, and what was held back is
        delivered. False: it died meanwhile.
        """
        ...

    def fail(self, engine: InferenceEngine, error: Exception) -> None:
        """`engine` is out of service until an update succeeds; what was held back is discarded and asked
        elsewhere.
        """
        ...

    def publish(self, version: int) -> None:
        """Every engine was updated or taken out, and at least one serves `version`."""
        ...


@runtime_checkable
class UpdatedFleet(Admission, Protocol):
    """An Admission that knows its engines and says when one needs an update."""

    def members_for_update(self) -> tuple[InferenceEngine, ...]: ...

    def needs_update(self, engine: InferenceEngine) -> bool:
        """Whether `engine` is up and out of service until an update succeeds."""
        ...

    @property
    def stale_members(self) -> trio.MemoryReceiveChannel[InferenceEngine]: ...


class DirectAdmission:
    """Engines that are asked directly: nobody stands between, so nothing can be held back and nobody taken
    out.
    """

    def close_admission(self, engine: InferenceEngine) -> None: ...
    def commit(self, engine: InferenceEngine, version: int) -> bool:
        return True

    def fail(self, engine: InferenceEngine, error: Exception) -> None: ...
    def publish(self, version: int) -> None: ...


def list_engines(engines: Sequence[InferenceEngine], admission: Admission) -> tuple[InferenceEngine, ...]:
    """`engines`, and in the place of a fleet among them those of its members that can be reached."""
    members: list[InferenceEngine] = []
    for engine in engines:
        if engine is admission and isinstance(admission, UpdatedFleet):
            members += admission.members_for_update()
        else:
            members.append(engine)
    return tuple(members)

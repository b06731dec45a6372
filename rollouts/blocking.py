"""Engines, loggers and whatever else is opened with `async with`, for a script that has no event loop.

with open_blocking(open_…(…)) as (opened, portal):    trio runs in a thread of its own until the block ends
    portal.call(opened.method, …)                     what the method returns, or raises
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager

from anyio.from_thread import BlockingPortal, start_blocking_portal

from rollouts.protocols import InferenceEngine
from rollouts.types import Completion, GenerateRequest, T


@contextmanager
def open_blocking(opening: AbstractAsyncContextManager[T]) -> Iterator[tuple[T, BlockingPortal]]:
    """What `opening` opens, and anyio's portal to the thread where it lives. Raises what opening and closing
    raise. An exception that leaves the block, an interrupt too, cancels what is still going on.
    """
    with start_blocking_portal("trio") as portal, portal.wrap_async_context_manager(opening) as opened:
        yield opened, portal


def complete_requests(
    opened: tuple[InferenceEngine, BlockingPortal], requests: Sequence[GenerateRequest]
) -> list[Completion]:
    """The completions of an engine of `open_blocking` in the order of the requests, which it is sent at once.
    Raises what its generate raises.
    """
    engine, portal = opened
    asked = [portal.start_task_soon(engine.generate, request) for request in requests]
    return [answer.result() for answer in asked]

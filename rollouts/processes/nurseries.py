"""Nurseries out of which errors come as they are; trio's own wraps every error in an ExceptionGroup."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import trio


@asynccontextmanager
async def open_plain_nursery() -> AsyncIterator[trio.Nursery]:
    """A nursery for helpers of the block: they are cancelled when it ends. An error of the block itself is
    raised as it is.
    """
    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        try:
            yield nursery
        except Exception as error:
            failure = error
        finally:
            nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def run_all(*works: Callable[[], Awaitable[object]]) -> None:
    """Runs all at once, begun in their order. The first error cancels the others and is raised as it is."""
    errors: list[Exception] = []

    async def run(work: Callable[[], Awaitable[object]], task_status: trio.TaskStatus[None]) -> None:
        task_status.started()
        try:
            await work()
        except Exception as error:
            errors.append(error)
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for work in works:
            await nursery.start(run, work)
    if errors:
        raise errors[0]

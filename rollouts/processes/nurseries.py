"""Nurseries out of which errors come as they are; trio's own wraps every error in an ExceptionGroup."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import trio


@asynccontextmanager
async def open_plain_nursery() -> AsyncIterator[trio.Nursery]:
    """A nursery for helpers of the block: they are cancelled when it ends. An error of the block itself is
    raised as it is.
    """
    failure = None
    async with trio.open_nursery() as nursery:
        try:
            yield nursery
        except Exception as error:
            failure = error
        finally:
            nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def run_all(*works: Callable[[], Awaitable[Any]]) -> list[Any]:
    """What they return: all run at once, begun in their order. The first error cancels the others and is
    raised as it is.
    """
    results = [*works]
    errors = []

    async def run(index: int, task_status: trio.TaskStatus[None]) -> None:
        task_status.started()
        try:
            results[index] = await works[index]()
        except Exception as error:
            errors.append(error)
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for index in range(len(works)):
            await nursery.start(run, index)
    if errors:
        raise errors[0]
    return results

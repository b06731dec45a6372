"""Environments, opened for one row and closed once, with the same methods wherever they live.

    open_world ──► async: in the trainer's loop, each call under timeout_s
               └─► sync: in a worker process of its own, which a call that is late or ends it takes with it

Whatever an environment does wrong is EnvironmentFailed, of its own trajectory only. An error or delay in
closing is nobody's: what came before it counts, and a worker is killed.
"""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, NamedTuple

from rollouts.environments.protocol import Observation, Tool, Turn
from rollouts.environments.tools import bind_tool, make_tool, open_apart
from rollouts.environments.worker import check_answer
from rollouts.errors import EnvironmentFailed
from rollouts.rewards.call import call_user
from rollouts.rewards.check import function_name, is_async
from rollouts.rewards.workers import Workers
from rollouts.types import ChatMessage, JSONValue, RewardResult


class World(NamedTuple):
    """An open environment. Its functions raise EnvironmentFailed; where it offers no such method they give
    None.
    """

    tools: list[Tool]
    reset: Callable[[], Awaitable[list[ChatMessage] | None]]
    step: Callable[[Turn], Awaitable[Observation]]  # with a list of messages, and a RewardResult
    score: Callable[[], Awaitable[RewardResult | None]]
    state: Callable[[], Awaitable[JSONValue]]  # what restore of a freshly opened one goes on from
    restore: Callable[[JSONValue], Awaitable[None]]


@asynccontextmanager
async def open_world(
    row: JSONValue, *, opener: Callable[..., Any], request: JSONValue, workers: Workers, timeout_s: float
) -> AsyncIterator[World]:
    """The environment that `opener` opens for a dataset row: in this loop if the function, or the class, says
    that it is async; else in one of the workers, which run rollouts.environments.worker and load what
    `request` names. Waiting for one is in no limit.
    """
    what, step = f"environment {function_name(opener)}", getattr(opener, "step", opener)

    async def host(stack: AsyncExitStack) -> Any:
        """Its tools, and what calls a method by its name."""
        if is_async(opener) or is_async(step) or inspect.isasyncgenfunction(inspect.unwrap(opener)):
            failing = {"late": EnvironmentFailed, "raised": EnvironmentFailed}
            call: Any = partial(call_user, timeout_s=timeout_s, threads=False, **failing)

            def ask(method: str, *arguments: Any) -> Any:
                return call(getattr(held, method, lambda *_: None), *arguments, where=f"{what}: {method}")

            held = await call(opener, row, where=f"{what}: open")
            if hasattr(held, "__aenter__"):
                held = await stack.enter_async_context(held)
            else:
                stack.push_async_callback(ask, "close")
            given = getattr(held, "tools", ())
            return [one if isinstance(one, Tool) else make_tool(one) for one in given], ask
        lent = await stack.enter_async_context(workers.lend())

        async def ask_worker(method: str, *arguments: Any) -> Any:
            asked = {**request, "method": method, "arguments": arguments, "error": EnvironmentFailed.kind}
            value = await lent(asked, f"{what}: {method}")
            if method == "step":
                return Observation(**{**value, "reward": RewardResult(**value["reward"])})
            return RewardResult(**value) if method == "score" and value else value

        schemas = await ask_worker("open", row)
        stack.push_async_callback(ask_worker, "close")
        return [bind_tool(schema, lent, request) for schema in schemas], ask_worker

    async with open_apart(host, what) as (tools, ask):

        async def call(method: str, *arguments: Any) -> Any:
            return check_answer(await ask(method, *arguments), method, f"{what}: {method}")

        methods = ["reset", "step", "score", "state_dict", "load_state_dict"]
        yield World(tools, *(partial(call, method) for method in methods))

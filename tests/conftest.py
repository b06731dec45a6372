"""`async def test_…` runs under trio; a test that asks for `autojump_clock` runs in virtual time (never with a real thread under it)."""

from __future__ import annotations

import functools
import inspect
import os

import pytest
import trio
import trio.testing

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture
def autojump_clock() -> trio.testing.MockClock:
    return trio.testing.MockClock(autojump_threshold=0)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function):
    function = pyfuncitem.obj
    if inspect.iscoroutinefunction(function):
        clock = pyfuncitem.funcargs.get("autojump_clock")

        @functools.wraps(function)
        def run_under_trio(**kwargs):
            return trio.run(functools.partial(function, **kwargs), clock=clock)

        pyfuncitem.obj = run_under_trio
    return (yield)

"""Processes of this machine, and waiting for what they do, of which there are no events here."""

import contextlib
import os

import psutil
import trio


async def wait_until(condition, *, seconds=60.0):
    with trio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.01)


def is_alive(pid):
    """Whether there is such a process, stopped or not, that has not ended."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def find_descendants(of=None):
    """Of a process (default: this one), those that are not yet reaped too."""
    return {one.pid for one in psutil.Process(of).children(recursive=True)}


def find_processes(mark):
    """Other living processes that have the text in their environment or command line."""
    found = []
    for one in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has ended, or is not ours
            if one.pid != os.getpid() and mark in f"{one.environ()} {one.cmdline()}":
                found.append(one)
    return found

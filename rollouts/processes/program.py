"""A program run to its end by a process without an event loop, such as a reward worker. Linux only."""

import os
import select
import signal
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple

REPORT_BYTES = 1 << 16  # what a pipe holds: who reports more waits for ever, and is killed in time
START_S = 60.0  # until the first report; a machine so busy that it takes longer is no fault of the program


class ProgramEnd(NamedTuple):
    """How a program ended."""

    status: int | None  # exit code, or minus the signal; None: it took too long and was killed
    reports: bytes
    stdout: bytes


def wait_readable(timeout_s: float, *fds: int) -> bool:
    """Whether one of the descriptors has bytes to read, or its other end is closed, within that time."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def run_program(
    argv: Sequence[str], *, request: bytes, stdin: bytes, cwd: str, timeout_s: float, output_bytes: int
) -> ProgramEnd:
    """Runs a program in a session of its own, without environment and without files, and kills its group when
    it ends or is late.

    Two descriptors are the last words of its command: one to read the request from, one to report to. It has
    START_S until its first report and `timeout_s` after it. At most `output_bytes` + 1 of its output are
    read (0: it goes nowhere); the program itself must limit the size of its files. Blocking.
    """
    with ExitStack() as stack:

        def open_memory(content: bytes) -> int:
            """A file in memory, at its beginning."""
            file = stack.enter_context(os.fdopen(os.memfd_create("rollouts-program", 0), "w+b", buffering=0))
            file.write(content)
            file.seek(0)
            return file.fileno()

        request_fd, stdin_fd, stdout_fd = map(open_memory, (request, stdin, b""))
        report_fd, report_end = os.pipe()
        stack.callback(os.close, report_fd)
        process = subprocess.Popen(
            [*argv, str(request_fd), str(report_end)],
            stdin=stdin_fd,
            stdout=stdout_fd if output_bytes else subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(request_fd, report_end),
            env={},
            cwd=cwd,
            start_new_session=True,
        )
        os.close(report_end)
        exit_fd = os.pidfd_open(process.pid)
        stack.callback(os.close, exit_fd)
        try:
            has_ended = wait_readable(START_S, report_fd, exit_fd) and wait_readable(timeout_s, exit_fd)
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # not waited for yet, so that the number is its own
            status = process.wait()
        os.set_blocking(report_fd, False)
        reports = b""
        with suppress(BlockingIOError):
            reports = os.read(report_fd, REPORT_BYTES)
        return ProgramEnd(status if has_ended else None, reports, os.pread(stdout_fd, output_bytes + 1, 0))

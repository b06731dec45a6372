"""Reward functions that spoil the process they run in, each in its own way, and a few good ones. Called by
name, in worker processes.
"""

import ctypes
import io
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

from rollouts.types import RewardResult

ANSWER = b'{"id":"","kind":"done","rewards":[{"reward":99.0}]}\n'
SLEEPS = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1e6)"


# --- good ---


def good(sample):
    return RewardResult(len(sample.response), {"length": len(sample.response)}, "counted")


def where(sample):
    words = (os.getpid(), os.environ.get("MY_API_KEY"), os.environ["OMP_NUM_THREADS"], repr(sys.stdin.read()))
    return RewardResult(0.0, {}, " ".join(map(str, words)))


def seen(sample):
    note = repr((sample.prompt, sample.metadata, str(sample.status)))
    return RewardResult(float(sample.rollout_log_probs.sum()), {"tokens": int(sample.tokens.sum())}, note)


def shows_capabilities(sample):
    return RewardResult(0.0, {}, Path("/proc/self/status").read_text().partition("CapEff:")[2].split()[0])


def nap(sample):
    time.sleep(0.2)
    return 1.0


def runs_a_program(sample):
    return float(subprocess.run(["echo", "2"], capture_output=True, check=True).stdout)


def runs_with_preexec(sample):
    return float(subprocess.run(["echo", "2"], capture_output=True, check=True, preexec_fn=os.getpid).stdout)


def ranks(samples):
    return [{"rank": index} for index in range(len(samples))]


# --- no end ---


def loop(sample):
    while True:
        pass


def ignores_term(sample):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    loop(sample)


def own_session(sample):
    subprocess.Popen([sys.executable, "-c", SLEEPS], start_new_session=True)
    loop(sample)


# --- other processes ---


def fork(sample):
    if os.fork() == 0:
        return 7.0
    os.wait()
    return 1.0


def libc_fork(sample):
    """A fork that Python does not notice; the child comes back through this function too."""
    child = ctypes.CDLL(None).fork()
    if child == 0:
        return 7.0
    os.waitpid(child, 0)
    return 1.0


def pool(sample):
    with multiprocessing.get_context("fork").Pool(1) as workers:
        return workers.map(abs, [1])[0]


def leaves_child(sample):
    subprocess.Popen(["sleep", "1000000"])
    return 1.0


def daemon(sample):
    subprocess.run(["sh", "-c", "setsid sleep 1000000 >/dev/null 2>&1 &"], check=True)
    return 1.0


def forks_for_ever(sample):
    """Always another process: each forks the next and ends, in a session of its own, whose number is left in
    the file of the sample.

    Twenty seconds of it: whatever kills the guard before it has swept lets such a chain go on, and it takes a
    core.
    """
    note = sample.metadata.get("path", os.devnull)
    chain = (
        "import os, sys, time\nos.setsid()\nopen(sys.argv[1], 'w').write(str(os.getpid()))\nend ="
        " time.monotonic() + 20\nwhile time.monotonic() < end:\n    if os.fork():\n        os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", chain, note], check=True)
    return 1.0


def kills_guard(sample):
    os.kill(os.getppid(), signal.SIGKILL)
    loop(sample)


def forges(sample):
    """A child writes an answer to the trainer."""
    channel = max(fd for fd in range(3, 10) if Path(f"/proc/self/fd/{fd}").exists())
    code = f"import os; os.write({channel}, {ANSWER!r})"
    subprocess.run([sys.executable, "-c", code], pass_fds=[channel], check=True)
    return 1.0


# --- the end ---


def allocate(sample):
    return float(np.ones(10 << 30, np.uint8).sum())


def segfault(sample):
    ctypes.string_at(0)


def abort(sample):
    os.abort()


def kill_self(sample):
    os.kill(os.getpid(), signal.SIGKILL)


def sys_exit(sample):
    sys.exit(3)


def os_exit(sample):
    print("bye", flush=True)
    os._exit(4)


def closes_files(sample):
    os.closerange(0, 1000)
    return 1.0


# --- too much, or nonsense ---


def prints(sample):
    while True:
        print("x" * 100)


def prints_a_little_too_much(sample):
    print("x" * 70_000)
    return 1.0


def prints_and_raises(sample):
    print("state: odd")
    raise ValueError("oops")


def long_name(sample):
    return {"x" * 100_000_000: 1.0}


def writes_nonsense(sample):
    os.write(3, b"\xff" * 4000)
    loop(sample)


def raises(sample):
    return sample.metadata["gold"]


def nan(sample):
    return float("nan")


async def asynchronous(sample):
    return 1.0


def too_few(samples):
    return [1.0]


# --- what stays behind ---


def answers_itself(sample):
    os.write(3, ANSWER)
    return 1.0


def says_that_it_is_loaded(sample):
    os.write(3, b"\n")
    return 1.0


def shows_process(sample):
    umask = os.umask(0o077)
    os.umask(umask)
    threads = [thread.name for thread in threading.enumerate()]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    words = (
        str(Path.cwd()),
        umask,
        signal.getsignal(signal.SIGUSR1),
        os.environ.get("LEFT"),
        limits,
        threads,
        type(sys.stdout).__name__,
    )
    return RewardResult(0.0, {}, repr(words))


def after(act, *arguments):
    """A reward of 1 for a sample, whatever it is, after `act`."""

    def reward(sample):
        act(*arguments)
        return 1.0

    return reward


def replace_json():
    json.dumps = lambda *arguments, **options: "7"
    json.loads = lambda *arguments, **options: {}


changes_directory = after(os.chdir, "/")
sets_umask = after(lambda: os.umask(0o077 if os.umask(0) != 0o077 else 0o022))
leaves_alarm = after(signal.setitimer, signal.ITIMER_REAL, 0.05)
sets_handler = after(signal.signal, signal.SIGUSR1, signal.SIG_IGN)
sets_environment = after(os.environ.update, {"LEFT": "behind"})
lowers_limit = after(resource.setrlimit, resource.RLIMIT_NOFILE, (64, 64))
leaves_thread = after(lambda: threading.Thread(target=time.sleep, args=(1e6,), daemon=True).start())
replaces_stdout = after(setattr, sys, "stdout", io.StringIO())
replaces_json = after(replace_json)

"""Findings about this machine. Each probe takes what it looks at, a root that holds proc and sys for example,
so that another can be given.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata, util
from pathlib import Path

from rollouts.engines.environments import STAMP
from rollouts.errors import RolloutsError
from rollouts.models.host_memory import read_free_memory
from rollouts.preflight.findings import Finding
from rollouts.rewards.code import describe_isolation

PACKAGE = "rollouts-rl"
GIB = 1 << 30
LEAST_DISK, LITTLE_DISK = GIB, 5 * GIB
LITTLE_MEMORY = 2 * GIB
LITTLE_SHM = 128 << 20  # a container has 64 MiB unless told otherwise; NCCL and vLLM's workers need more
LITTLE_FILES = 4096  # open at once: sockets to engines, workers, shards
CLOCK_SLIP_S = 5.0  # between this machine and the run's file system
OLDEST_S = 1.7e9  # a wall clock that says less was never set
GPU_QUERY = ("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
EXTRA = re.compile(r"""extra\s*==\s*['"]([^'"]+)['"]""")
SUPERVISOR = "rollouts.trackers.supervisor"


def examine_machine(place: Path, *, environment: Mapping[str, str]) -> list[Finding]:
    """All findings about the machine, for a run at or below `place`."""
    directory = find_existing(place)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    root = Path("/")
    return [
        check_python(sys.version_info[:3]),
        *check_packages(list_requirements(), find_version),
        check_extras(list_requirements(), find_version),
        check_gpu(run_nvidia_smi(), find_torch_cuda()),
        check_cores(cores, root, environment),
        check_memory(read_free_memory(root)),
        check_disk(directory, shutil.disk_usage(directory).free, os.statvfs(directory).f_favail),
        check_shm(Path("/dev/shm")),
        check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)),
        check_isolation(),
        *check_file_system(directory, time.time),
        *(check_engine_environment(kind, Path(f".venv-{kind}")) for kind in ("vllm", "sglang")),
        check_orphans(list(read_commands(root)), lambda pid: Path(f"/proc/{pid}").exists()),
    ]


def find_existing(path: Path) -> Path:
    """The directory, or the nearest one above it that exists."""
    absolute = path.absolute()
    return next(place for place in (absolute, *absolute.parents) if place.is_dir())


def check_python(version: Sequence[int]) -> Finding:
    """Its version against the oldest that is supported."""
    text = ".".join(map(str, version))
    return (
        Finding("ok", "python", text)
        if tuple(version[:2]) >= (3, 11)
        else Finding("error", "python", f"{text}; 3.11 is the oldest that works")
    )


# --- packages -----------------------------------------------------------------------------------------------


def list_requirements() -> list[str]:
    """What the package says that it needs, extras included; nothing where it is not installed as one."""
    try:
        return metadata.requires(PACKAGE) or []
    except metadata.PackageNotFoundError:
        return []


def find_version(name: str) -> str | None:
    """Of an installed package, None if it is not there. Nothing is imported."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_packages(requirements: Sequence[str], version_of: Callable[[str], str | None]) -> list[Finding]:
    """torch and transformers by name; of the others those that are missing or too old."""
    findings: list[Finding] = []
    for requirement in requirements:
        match = re.match(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*(?:>=\s*([0-9.]+))?", requirement)
        if match is None or EXTRA.search(requirement):
            continue
        name, floor = match[1], match[2] or "0"
        version = version_of(name)
        if version is None:
            findings.append(Finding("error", name, f"not installed; pip install '{name}>={floor}'"))
        elif parse_version(version) < parse_version(floor):
            findings.append(
                Finding("error", name, f"{version} is older than {floor}; pip install '{name}>={floor}'")
            )
        elif name in ("torch", "transformers"):
            findings.append(Finding("ok", name, f"{version} (at least {floor})"))
    return findings or [
        Finding(
            "warning",
            "packages",
            f"{PACKAGE} is not installed as a package, so that no floors are known; pip install -e .",
        )
    ]


def parse_version(text: str) -> tuple[int, ...]:
    """Its leading numbers without zeros at the end: (2, 13) of 2.13.0+cpu."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    numbers = [int(part) for part in match[0].split(".")] if match else [0]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def check_extras(requirements: Sequence[str], version_of: Callable[[str], str | None]) -> Finding:
    """Which extras are there in full, and which are not. Extras that only gather others are left out."""
    extras: dict[str, list[str]] = {}
    for requirement in requirements:
        extra, match = EXTRA.search(requirement), re.match(r"[A-Za-z0-9._-]+", requirement)
        if extra and match and match[0] != PACKAGE:
            extras.setdefault(extra[1], []).append(match[0])
    there = [name for name, packages in extras.items() if all(version_of(package) for package in packages)]
    missing = [name for name in extras if name not in there]
    text = f"installed: {', '.join(there) or 'none'}"
    return Finding(
        "ok",
        "extras",
        f"{text}; not: {', '.join(missing)} (pip install '{PACKAGE}[NAME]')" if missing else text,
    )


# --- hardware and limits ------------------------------------------------------------------------------------


def run_nvidia_smi() -> str | None:
    """A line for each GPU, None where there is no driver."""
    try:
        done = subprocess.run(GPU_QUERY, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def find_torch_cuda() -> str | None:
    """The CUDA that the installed torch is built for, None for a build without; torch is not loaded."""
    spec = util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"^cuda\b[^=]*=\s*'([^']+)'", text, re.MULTILINE)
    return match[1] if match else None


def check_gpu(listed: str | None, torch_cuda: str | None) -> Finding:
    """GPUs against the build of torch."""
    if not listed:
        build = f", though torch is built for CUDA {torch_cuda}" if torch_cuda else ""
        return Finding("ok", "gpu", f"none{build}: runs compute on the CPU")
    gpus = "; ".join(listed.splitlines())
    if torch_cuda is None:
        return Finding(
            "warning",
            "gpu",
            f"{gpus}, but torch is built for the CPU and will not use it; install a CUDA build from"
            " https://pytorch.org",
        )
    return Finding("ok", "gpu", f"{gpus}; torch is built for CUDA {torch_cuda}")


def check_cores(cores: int, root: Path, environment: Mapping[str, str]) -> Finding:
    """Cores against the time that the control group allows and the threads that OMP_NUM_THREADS asks for."""
    quota = read_cpu_quota(root)
    usable = cores if quota is None else min(cores, quota)
    text = (
        f"{cores}" if quota is None else f"{cores}, of whose time the control group allows {quota:g} cores'"
    )
    threads = environment.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads) > usable:
        return Finding(
            "warning",
            "cores",
            f"{text}; OMP_NUM_THREADS={threads} is more than run at once: set {max(1, math.floor(usable))}",
        )
    if quota is not None and quota < cores:
        return Finding(
            "warning",
            "cores",
            f"{text}; set model.threads = {max(1, math.floor(quota))}, or more threads wait for each other",
        )
    return Finding("ok", "cores", text)


def read_cpu_quota(root: Path) -> float | None:
    """Cores' worth of time that the control group allows (cgroup 2, or 1); None: no limit, or none that can
    be read.
    """
    try:
        quota, period = (root / "sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (root / "sys/fs/cgroup/cpu/cpu.cfs_quota_us").read_text().strip()
            period = (root / "sys/fs/cgroup/cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() and int(period) else None


def check_memory(free: int | None) -> Finding:
    """Of the machine and of the control groups, whichever is least."""
    if free is None:
        return Finding(
            "warning",
            "memory",
            "it cannot be read how much is free; see that the model, twice its gradients and the"
            " optimizer fit",
        )
    if free < LITTLE_MEMORY:
        return Finding(
            "warning",
            "memory",
            f"{free / GIB:.1f} GiB free; end other programs, or raise the limit of the control group",
        )
    return Finding("ok", "memory", f"{free / GIB:.1f} GiB free")


def check_disk(directory: Path, free: int, inodes: int) -> Finding:
    """Room for checkpoints."""
    text = f"{free / GIB:.1f} GiB free at {directory}"
    if free < LEAST_DISK or 0 < inodes < 100:
        return Finding(
            "error",
            "disk",
            f"{text}, {inodes} files more: a checkpoint will not fit; free space, or point output.dir at"
            " another disk",
        )
    way_out = (
        "; lower output.keep_checkpoints, or point output.dir at another disk" if free < LITTLE_DISK else ""
    )
    return Finding("warning" if way_out else "ok", "disk", text + way_out)


def check_shm(directory: Path) -> Finding:
    """Shared memory, that NCCL and engines' workers talk through."""
    try:
        held = os.statvfs(directory)
    except OSError:
        return Finding(
            "warning",
            "shared memory",
            f"{directory} is not there; vLLM, SGLang and NCCL need it: mount a tmpfs on it",
        )
    size = held.f_frsize * held.f_blocks
    if size < LITTLE_SHM:
        text = (
            f"{size >> 20} MiB at {directory}; for engines or several ranks start the container with"
            " --shm-size 8g"
        )
        return Finding("warning", "shared memory", text)
    return Finding("ok", "shared memory", f"{size >> 20} MiB at {directory}")


def check_open_files(limits: tuple[int, int]) -> Finding:
    """What `ulimit -n` says."""
    soft, hard = limits
    if soft == resource.RLIM_INFINITY or soft >= LITTLE_FILES:
        return Finding("ok", "open files", "no limit" if soft == resource.RLIM_INFINITY else str(soft))
    most = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    return Finding(
        "warning", "open files", f"{soft} at most; many requests at once need more: ulimit -n {most}"
    )


def check_isolation() -> Finding:
    """What code that a reward runs cannot reach here."""
    try:
        missing = describe_isolation().missing()
    except RolloutsError as error:
        return Finding("warning", "isolation of rewards", f"a child for code does not start ({error})")
    if not missing:
        return Finding(
            "ok", "isolation of rewards", "full: network, files, processes, memory, user, privileges"
        )
    return Finding(
        "warning",
        "isolation of rewards",
        f"none of {', '.join(missing)} for code of samples; run as root or allow user namespaces",
    )


def check_file_system(directory: Path, now: Callable[[], float]) -> list[Finding]:
    """Whether the run's file system locks, and agrees on the time. Writes an unnamed file there."""
    if now() < OLDEST_S:
        return [
            Finding(
                "error",
                "clock",
                f"it says {time.strftime('%Y-%m-%d', time.gmtime(now()))}; set it: rows, TLS and trackers go"
                " by it",
            )
        ]
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"\n")
            file.flush()
            slip = os.fstat(file.fileno()).st_mtime - now()
            clock = Finding("ok", "clock", "as that of the file system")
            if abs(slip) > CLOCK_SLIP_S:
                clock = Finding(
                    "warning",
                    "clock",
                    f"that of the file system at {directory} is {slip:+.0f} s off; synchronise both with NTP",
                )
            return [check_lock(directory, file.fileno()), clock]
    except OSError as error:
        return [
            Finding(
                "error",
                "run directory",
                f"{directory} cannot be written ({error}); name another with --output.dir DIR",
            )
        ]


def check_lock(directory: Path, descriptor: int) -> Finding:
    """Whether an open file there can be locked."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        why = errno.errorcode.get(error.errno or 0, str(error))
        return Finding(
            "warning",
            "flock",
            f"{directory}: {why}: nothing keeps a second run off a run directory there; see that none is"
            " started",
        )
    return Finding("ok", "flock", f"works at {directory}")


# --- engines, and what earlier runs left --------------------------------------------------------------------


def check_engine_environment(kind: str, root: Path) -> Finding:
    """The version of an engine in its environment, by its metadata."""
    named = re.compile(rf"{kind}(?:_cpu)?-(.+)\.dist-info")  # a build for CPUs may be called so
    found = [
        match
        for path in sorted(root.glob("lib/python*/site-packages/*.dist-info"))
        if (match := named.fullmatch(path.name))
    ]
    if not found:
        own = find_version(kind)
        return Finding(
            "ok",
            kind,
            (
                f"{own}, in this Python"
                if own
                else f"not installed (python -m rollouts engines install-{kind}-cpu, for a CPU)"
            ),
        )
    version = found[-1][1]
    if not (root / "bin" / "python").exists():
        return Finding(
            "warning",
            kind,
            f"{version} in {root}, whose bin/python leads nowhere; remove {root} and install again",
        )
    note = "" if (root / STAMP).exists() else ", not made by rollouts engines"
    return Finding("ok", kind, f"{version} in {root}{note}")


def read_commands(root: Path) -> Iterator[tuple[int, tuple[str, ...]]]:
    """(process id, its words) of every process that can be seen."""
    for path in sorted((root / "proc").glob("[0-9]*/cmdline")):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it has ended, or is another user's
            continue
        yield int(path.parent.name), tuple(words)


def check_orphans(
    commands: Sequence[tuple[int, tuple[str, ...]]], is_alive: Callable[[int], bool]
) -> Finding:
    """Guards of servers and followers of trackers whose run has ended."""
    left = [
        (pid, what, parent)
        for pid, words in commands
        for what, parent in [find_owner(words)]
        if parent is not None and not is_alive(parent)
    ]
    if not left:
        return Finding("ok", "earlier runs", "left no process")
    named = ", ".join(f"{what} {pid} of process {parent}" for pid, what, parent in left)
    way_out = f"if they are there a minute later, kill {' '.join(str(pid) for pid, _, _ in left)}"
    return Finding("warning", "earlier runs", f"{named}, which has ended; {way_out}")


def find_owner(words: Sequence[str]) -> tuple[str, int | None]:
    """What a process of ours is, and the process that it was started for; None for a process that is not of
    ours.
    """
    place = next(
        (
            place
            for place, word in enumerate(words)
            if word.endswith("process_guard.py") or word == SUPERVISOR
        ),
        None,
    )
    if place is None:
        return "", None
    if words[place] == SUPERVISOR:
        pid = words[place + 2] if len(words) > place + 2 else ""
        return "follower", int(pid) if pid.isdecimal() else None
    try:
        settings = json.loads(words[place + 1])
        return "guard of a server", None if settings.get("inner") else int(settings["parent_pid"])
    except (IndexError, ValueError, KeyError, TypeError, AttributeError):
        return "", None

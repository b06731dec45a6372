"""How much memory of this machine a process may still take. No torch."""

from pathlib import Path, PurePosixPath

# Of each version of control groups: the folder, what a group may hold, what it holds, and the line of
# memory.stat with pages of files, which the system gives back before it refuses any.
VERSIONS = {
    1: ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("", "memory.max", "memory.current", "inactive_file"),
}


def read_free_memory(root: Path = Path("/")) -> int | None:
    """Bytes that this process may still take: of the machine, of its control group and of those around it,
    whichever is least; None where none can be read. `root` holds proc and sys.
    """
    machine = _read_numbers(root / "proc/meminfo").get("MemAvailable:")
    found = [] if machine is None else [machine * 1024]
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        folder, limit_file, used_file, cached_line = VERSIONS[1 if controllers else 2]
        # in a container it may be the host's name, which is not here: the root of what is here is the last
        inner = PurePosixPath(path.strip("/"))
        for place in (inner, *inner.parents):
            group = root / "sys/fs/cgroup" / folder / place
            limit, used = (read_text(group / name).strip() for name in (limit_file, used_file))
            if limit.isdecimal() and used.isdecimal():  # not "max", and not missing
                cached = _read_numbers(group / "memory.stat").get(cached_line, 0)
                found.append(max(0, int(limit) - max(0, int(used) - cached)))
    return min(found, default=None)


def _read_numbers(path: Path) -> dict[str, int]:
    """Of lines that are a name and a number."""
    rows = [line.split() for line in read_text(path).splitlines()]
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # another system, or a group that is gone: nothing is known from there
        return ""

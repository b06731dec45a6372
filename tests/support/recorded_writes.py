"""What reaches the disk, in its order."""

import os
from pathlib import Path


def record_writes(monkeypatch, method):
    """The fsyncs and the calls of a method of Path that gives another name, as they happen from now on."""
    calls = []
    fsync, give = os.fsync, getattr(Path, method)

    def record_fsync(descriptor):
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        calls.append(f"fsync {name}")
        fsync(descriptor)

    def record_name(self, target):
        calls.append(f"{method} {target.name}")
        return give(self, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(Path, method, record_name)
    return calls

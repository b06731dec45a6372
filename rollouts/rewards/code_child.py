"""The child process in which model-written code runs. A script of its own: `python -I -S code_child.py
REQUEST_FD RESULT_FD`.

    worker ──> outer ──(own namespaces)──> init ──(own root, no privileges, limits)──> the code
               waits                       waits; all that is left dies with it

Each of the three is killed when the one before it dies. Without namespaces there is only one process, which
puts itself under the limits. The request is one JSON object, the results are lines of JSON. It imports
nothing of the package: what is here can be seen by the code.
"""

# pathlib would lengthen the start of this process.
# ruff: noqa: PTH102, PTH103, PTH110, PTH112, PTH114, PTH115, PTH120, PTH123, PTH211, S102
import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

CLONE_NEWUSER = 0x10000000
CLONE_REST = 0x00020000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000  # mounts, UTS, IPC, pids, network
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
MNT_DETACH = 2
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID = 1, 2
SYS_MOUNT_SETATTR = 442  # the same number on every architecture
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38
LINUX_CAPABILITY_VERSION_3 = 0x20080522
NOBODY = 65534
FIRST_OWN_UID = 1_000_000_000  # real root gives each child a user of its own: this plus its process id
# where the new root is put together: a directory that every host has and that nothing is taken from
NEW_ROOT = "/proc"
WORK = "/work"
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
LIBC = ctypes.CDLL(None, use_errno=True)


def main(request_fd: int, result_fd: int) -> None:
    die_with_parent()
    with open(request_fd, "rb") as file:
        request = json.load(file)
    if os.getppid() != request["worker"]:
        return  # it died before this process asked to die with it
    # In case that the worker hangs; the inner processes do not inherit it.
    signal.alarm(request["timeout_s"] + 90)
    # here, for in a namespace of processes the numbers start anew
    own_uid = FIRST_OWN_UID + os.getpid() if os.geteuid() == 0 else None
    got = dict.fromkeys(request["isolations"], False)
    if request["namespaces"] and enter_namespaces(is_root=own_uid is not None):
        got["network"] = got["processes"] = True
        die_with_parent()  # new credentials can take it away
        wait_for(os.fork())  # the child goes on as init
        die_with_parent()
        call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)
        got["filesystem"] = succeeds(enter_own_root, request)
        wait_for(os.fork())  # the child goes on as the one that runs the code
    give_up_privileges(request, got, own_uid)
    die_with_parent()  # and a change of user does
    if request["expected"] not in (None, got):
        problem = f"this process is isolated by {got}, the first one by {request['expected']}"
        report(result_fd, {"error": problem})
        os._exit(1)
    report(result_fd, {"isolation": got})
    if request["code"] is not None:
        run_code(request, result_fd)


def wait_for(child: int) -> None:
    """Returns in the child; in the parent it ends the process with the child's status."""
    while child:  # init is given orphans too
        process, status = os.wait()
        if process == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


# --- namespaces ---------------------------------------------------------------------------------------------


def enter_namespaces(*, is_root: bool) -> bool:
    """Whether the children of this process have a network, process ids, mounts and IPC of their own. Root of
    a container without the right to do so tries a user namespace, as any other user does.
    """
    if is_root and succeeds(call, "unshare", CLONE_REST):
        return True
    uid, gid = os.geteuid(), os.getegid()
    if not succeeds(call, "unshare", CLONE_REST | CLONE_NEWUSER):
        return False
    # Without these maps the process is nobody, with all the rights that count here; a host that forbids them
    # forbids the mounts too.
    with contextlib.suppress(OSError):
        write_text("/proc/self/setgroups", "deny")
        write_text("/proc/self/gid_map", f"{NOBODY} {gid} 1")
        write_text("/proc/self/uid_map", f"{NOBODY} {uid} 1")
    return True


def enter_own_root(request: dict[str, Any]) -> None:
    """Makes the file system a small one in memory: libraries to read, an empty working directory to write,
    nothing else. Raises OSError.
    """
    call("mount", "none", "/", None, MS_REC | MS_PRIVATE, None)
    call("mount", "tmpfs", NEW_ROOT, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=1m")
    for path in [*LIBRARIES, *filter(os.path.isdir, sys.path), *request["import_paths"], *DEVICES]:
        bind(path)
    os.mkdir(NEW_ROOT + WORK)
    if not os.path.lexists(NEW_ROOT + "/tmp"):
        os.symlink(WORK, NEW_ROOT + "/tmp")
    attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID, 0, 0, 0)
    size = ctypes.sizeof(attributes)
    call("syscall", SYS_MOUNT_SETATTR, AT_FDCWD, NEW_ROOT, AT_RECURSIVE, ctypes.byref(attributes), size)
    options = f"mode=777,size={request['disk_bytes']},nr_inodes=4096"
    call("mount", "tmpfs", NEW_ROOT + WORK, "tmpfs", MS_NOSUID | MS_NODEV, options)
    os.chdir(NEW_ROOT)
    call("pivot_root", ".", ".")
    call("umount2", ".", MNT_DETACH)
    os.chdir(WORK)


def bind(path: str) -> None:
    """`path` appears in the new root, unless it is not there or is already part of another that is."""
    target = NEW_ROOT + path
    if not os.path.exists(path) or os.path.lexists(target):
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path) and os.path.isdir(path):
        os.symlink(os.readlink(path), target)  # /lib -> usr/lib, which is bound itself
        return
    if os.path.isdir(path):
        os.mkdir(target)
    else:
        write_text(target, "")
    call("mount", path, target, None, MS_BIND | MS_REC, None)


# --- privileges and limits ----------------------------------------------------------------------------------


def give_up_privileges(request: dict[str, Any], got: dict[str, bool], own_uid: int | None) -> None:
    """Writes into `got` what succeeded. The order matters: first what needs rights, then the rights."""
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_CPU, request["timeout_s"] + 1)
    limit(resource.RLIMIT_FSIZE, max(request["disk_bytes"], request["output_bytes"] + 1))  # stdout is a file
    limit(resource.RLIMIT_NOFILE, 64)
    # a container may know no large numbers
    changed_user = own_uid is not None and (succeeds(set_user, own_uid) or succeeds(set_user, NOBODY))
    got["user"] = changed_user or got["filesystem"]
    got["memory"] = limit(resource.RLIMIT_AS, request["memory_bytes"])
    # Outside a namespace of processes none may be started, for it could outlive this one.
    limited = limit(resource.RLIMIT_NPROC, request["max_processes"] if got["processes"] else 0)
    got["processes"] |= limited and changed_user
    header, none = (ctypes.c_uint32 * 2)(LINUX_CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    got["privileges"] = succeeds(call, "prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) and succeeds(
        call, "capset", ctypes.byref(header), ctypes.byref(none)
    )


def limit(which: int, value: int) -> bool:
    return succeeds(resource.setrlimit, which, (value, value))


def set_user(uid: int) -> None:
    """This process, root's until now, becomes a user's that owns nothing. Raises OSError."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(uid, uid, uid)


def die_with_parent() -> None:
    call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


# --- the code -----------------------------------------------------------------------------------------------


def run_code(request: dict[str, Any], result_fd: int) -> None:
    """Reports `compiled`, then how it ended: `done` with the nonce, or why it `failed`. Ends the process."""
    nonce, send, leave = request.pop("nonce"), report, os._exit  # the code may replace what is in modules
    sys.path += request["import_paths"]
    os.environ.clear()  # Python sets the locale itself
    is_test = request["test"] is not None
    try:
        code = compile(request["code"], "<response>", "exec")
        send(result_fd, {"compiled": True})
        space = {"__name__": "solution" if is_test else "__main__", "__builtins__": __builtins__}
        exec(code, space)
        if is_test:
            entry_point = request["entry_point"]
            if entry_point is not None:
                if entry_point not in space:
                    raise NameError(f"the response does not define {entry_point}")
                space["candidate"] = space[entry_point]
            check_of_code = space.get("check")
            exec(compile(request["test"], "<test>", "exec"), space)
            if entry_point is not None and space.get("check") is not check_of_code:
                space["check"](space["candidate"])
    except BaseException as error:
        if isinstance(error, SystemExit) and not is_test:
            raise  # a whole program's status counts
        send(result_fd, {"failed": describe(error)})
        leave(1)
    send(result_fd, {"done": nonce})
    if is_test:
        leave(0)
    # A whole program ends as programs do: its threads are waited for and its output is flushed.


def describe(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"it called sys.exit({error.code!r})"[:200]
    try:
        return f"{type(error).__name__}: {error}"[:200]
    except BaseException:  # an exception of the code's own kind
        return "an exception that cannot be shown"


def report(result_fd: int, result: dict[str, Any]) -> None:
    os.write(result_fd, json.dumps(result).encode() + b"\n")


# --- the system ---------------------------------------------------------------------------------------------


def call(name: str, *arguments: Any) -> None:
    """Calls a function of the C library. Raises OSError unless it returns 0."""
    given = [
        ctypes.c_ulong(word) if isinstance(word, int) else word.encode() if isinstance(word, str) else word
        for word in arguments
    ]
    if getattr(LIBC, name)(*given) != 0:
        raise OSError(ctypes.get_errno(), name)


def succeeds(action: Callable[..., object], *arguments: Any) -> bool:
    """Whether the system allowed it."""
    try:
        action(*arguments)
    except (OSError, ValueError):
        return False
    return True


def write_text(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

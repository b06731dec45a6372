"""Model-written code: what its tests decide, what it cannot forge cheaply, and that nothing of it stays."""

import contextlib
import os
import re
import socket
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollouts.errors import ConfigError, DataError, UserFunctionError
from rollouts.rewards import code as code_module
from rollouts.rewards.code import Isolation, Limits, describe_isolation, extract_code, make_code_reward
from rollouts.types import Sample
from tests.support.processes import find_processes
from tests.support.text_tables import cases

QUICK = Limits(timeout_s=2.0)

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")


@pytest.fixture(params=[True, False], ids=["namespaces", "limits"])
def namespaces(request):
    """Hostile code meets both: all that this host isolates, and the limits alone."""
    if request.param and not describe_isolation().network:
        pytest.skip("this host lets this user have no namespaces")
    return request.param


@pytest.fixture(autouse=True)
def leaves_nothing_behind(tmp_path_factory, monkeypatch):
    directory = tmp_path_factory.mktemp("temporary")
    directory.chmod(0o755)
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    descriptors = len(list(Path("/dev/fd").iterdir()))
    yield directory
    assert list(directory.iterdir()) == []
    assert len(list(Path("/dev/fd").iterdir())) == descriptors
    # one that is killed already takes a moment to end, under load
    assert psutil.wait_procs([*code_processes()], timeout=5.0)[1] == []


def code_processes():
    """Every process of this machine whose session was opened for a child of ours, by the descriptors and
    script in its command line.
    """
    for one in find_processes("code_child.py"):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            if one.ppid() in (os.getpid(), 1):
                yield one


def run(code, tests="pass", *, metadata=None, **options):
    reward = make_code_reward(**{"limits": QUICK, "namespaces": True} | options)
    return reward(Sample(id="s", prompt="q", response=code, metadata={"tests": tests, **(metadata or {})}))


@pytest.fixture
def run_there(namespaces):
    """run, isolated in this way."""
    return partial(run, namespaces=namespaces)


def check(result, reward, note):
    """`note` is a regular expression that the note begins with, after any text."""
    assert result.reward == reward and re.search(note, result.note or ""), result


def open_to_all(directory):
    """The code runs as another user, who must be let through to what it may import."""
    for one in (directory, *directory.parents):
        if one == Path(tempfile.gettempdir()) or one == one.parent:
            return
        one.chmod(one.stat().st_mode | 0o055)


# --- what the tests decide ---


CHECK = "def check(candidate):\n    assert candidate(1) == 2\n    assert candidate(2) == 3"
SUMS = [{"input": "3 4\n", "output": "7\n"}, {"input": "-1 1", "output": "0"}]


# code | tests, divided by &, or what is to be printed | entry point | reward | what the note says
def printing(output):
    return [{"input": "", "output": output}]


@cases(r"""
code  | tests                        | entry_point | reward | note
x = 1 | assert x == 1 & assert x < 2 | | 1 | ^2 of 2 tests passed; isolated:
x = 3 | assert x & assert x == 1, x & assert x > 2 & x[0] | | 0.5 | ^2 of 4 .*; test 1: AssertionError: 3;
def f(: | pass & pass | | 0 | test 0: SyntaxError
def inc(x):\n    return x + 1 | CHECK | inc | 1 |
def inc(x):\n    return 2 | CHECK | inc | 0 |
def check(x):\n    return x + 1 | assert check(1) == 2 | check | 1 |
def dec(x):\n    return x - 1 | CHECK | inc | 0 | NameError: the response does not define inc
if __name__ == '__main__':\n    a, b = map(int, input().split())\n    print(a + b, ' ') | SUMS | | 1 |
print(7) | SUMS | | 0.5 | it printed '7\\n'
print(7)\nprint(8) | -> 7 8 | | 0 |
import sys\nprint(1)\nsys.exit() | -> 1 | | 1 |
import sys\nprint(1)\nsys.exit(3) | -> 1 | | 0 | it ended with status 3
print(1)\n1 / 0 | -> 1 | | 0 | ZeroDivisionError
import os\nwhile True:\n    os.fork() | pass | | 0 | BlockingIOError
x = bytearray(10**10) | pass | | 0 | MemoryError
open('big', 'wb').write(bytes(64 << 20)) | pass | | 0 | OSError
import sys\nsys.exit(0) | pass | | 0 | it called sys.exit\(0\)
import os\nos._exit(0) | pass | | 0 | it ended with status 0 before the test had
import os, signal\nos.kill(os.getpid(), signal.SIGKILL) | pass | | 0 | it ended with status [-1]
raise KeyboardInterrupt | pass | | 0 | KeyboardInterrupt
def f():\n    f()\nf() | pass | | 0 | RecursionError
class E(Exception):\n    def __str__(self):\n        raise SystemExit\nraise E | pass | | 0 | cannot be shown
import os | assert dict(os.environ) == {}, os.environ & assert os.getuid() != 0 | | 1 |
import ctypes\nlibc = ctypes.CDLL(None) | assert libc.mount(b'none', b'/', None, 1 << 18, None) != 0 | | 1 |
import ctypes\nlibc = ctypes.CDLL(None) | assert libc.sethostname(b'x', 1) != 0 | | 1 |
""")
def test_the_share_of_passed_tests_is_the_reward_and_the_note_names_the_first_failure(
    code, tests, entry_point, reward: float, note, run_there
):
    known = {"CHECK": CHECK, "SUMS": SUMS}.get(tests, tests.split(" & "))
    known = printing(tests.removeprefix("-> ")) if "->" in tests else known
    options = {"metadata": {"entry_point": entry_point or None}, "limits": Limits(timeout_s=5.0)}
    result = run_there(code.replace("\\n", "\n"), known, partial=True, **options)
    check(result, reward, note)
    assert result.parts == {"passed": reward, "compiled": float(code != "def f(:")}


def test_a_program_ends_as_programs_do_and_without_partial_all_tests_must_pass(namespaces, run_there):
    code = "import atexit, threading\natexit.register(print, 'c')\n"
    code += "threading.Thread(target=print, args=('a',)).start()\nprint('b')"
    threads = describe_isolation(namespaces=namespaces).network  # else it may start none
    check(run_there(code, printing("a\nb\nc")), float(threads), "")
    check(run_there("print(7)", SUMS), 0.0, "^1 of 2")


@cases(r"""
response | code
x = 1 | x = 1
First\n```python\na\n```\nthen\n```python\nb\n```\nand\n```\noutput\n``` | b\n
Text\n```\na\n```\n | a\n
```py\na\n | a\n
```Python3\na\n``` | a\n
```json\n{}\n``` | ```json\n{}\n```
```python title='x'\na\n``` | a\n
""")
def test_the_last_python_block_is_the_program(response, code):
    assert extract_code(response.replace("\\n", "\n")) == code.replace("\\n", "\n")


# --- bad rows and options ---


@cases(r"""
tests            | message
null             | no metadata\['tests'\]
[]               | is empty; a program without tests passes nothing
[1]              | metadata\['tests'\]\[0\] is '1'; a test is Python source
" "              | a test is Python source
[{"input": "1"}] | the texts 'input' and 'output'
"assert ("       | is not Python
""")
def test_a_row_without_sound_tests_is_an_error(tests: Any, message):
    with pytest.raises(DataError, match=message):
        run("x = 1", tests)


@cases("""
options                | message
require = ["internet"] | it is a list of network, filesystem, processes, memory, user, privileges
require = "network"    | it is a list of
require = ["memory", "network"], namespaces = false | no isolation of network; run as root or allow
limits = 0             | limits.timeout_s=0; it must be a number above 0
import_paths = ["relative"] | the absolute path of a directory that exists
""")
def test_bad_options_are_refused(options: dict, message):
    if "limits" in options:
        options["limits"] = Limits(timeout_s=options["limits"])
    with pytest.raises(ConfigError, match=message):
        make_code_reward(**options)


def test_a_child_that_does_not_start_is_an_error_and_not_a_reward(monkeypatch, tmp_path):
    describe_isolation()
    monkeypatch.setattr(code_module, "CHILD", tmp_path / "gone.py")
    message = "sample s: the child process that runs the code .* did not start: it ended with status 2"
    with pytest.raises(UserFunctionError, match=message):
        run("x = 1")


def test_a_child_isolated_less_than_described_does_not_run_the_code(monkeypatch):
    claimed = Isolation(**dict.fromkeys(Isolation._fields, True))._replace(filesystem=False)
    monkeypatch.setattr(code_module, "describe_isolation", lambda *, namespaces: claimed)
    with pytest.raises(UserFunctionError, match="did not start: this process is isolated by"):
        run("x = 1", namespaces=False)


def test_directories_to_import_from_can_be_named(tmp_path, run_there):
    open_to_all(tmp_path)
    (tmp_path / "helper_of_test.py").write_text("value = 5")
    code = "import sys\nsys.dont_write_bytecode = True\nimport helper_of_test"
    tests = "assert helper_of_test.value == 5"
    check(run_there(code, tests, import_paths=[str(tmp_path)]), 1.0, "")
    check(run_there(code, tests), 0.0, "ModuleNotFoundError")


# --- hostile code ---

ENDLESS = {
    "loop": "while True:\n    pass",
    "forks": "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
    "closes all": "import os\nos.closerange(0, 64)\nwhile True:\n    pass",
    "deaf": "import signal\nfor s in (1, 2, 3, 14, 15):\n    signal.signal(s, signal.SIG_IGN)\n"
    "while True:\n    pass",
}


@cases("code", ENDLESS.values(), ids=ENDLESS)
def test_code_that_does_not_end_is_ended(code, run_there):
    result = run_there(code, ["pass", "pass"], limits=Limits(timeout_s=0.3))
    check(result, 0.0, "^0 of 2 tests passed; test 0: it took longer than 0.3 s")
    assert result.parts == {"passed": 0.0, "compiled": 1.0}


def test_output_without_end_is_cut(run_there):
    limits = Limits(timeout_s=10.0, output_bytes=10_000)
    result = run_there("while True:\n    print('x' * 1000)", printing(""), limits=limits)
    check(result, 0.0, "it wrote more than 10000 bytes of output")


WRITES = (
    "import os\nfor fd in range(64):\n    try:\n        os.write(fd, {!r})\n"
    "    except OSError:\n        pass\n"
)
FORGERIES = {
    "prints": "import os\nprint('{\"done\": 1}', flush=True)\nos._exit(0)",
    "says that it is done": WRITES.format(b'\n{"done": ""}\n[1]\n') + "os._exit(0)",
    "fails without a reason": WRITES.format(b'\n{"failed": ""}\n'),
    "replaces what modules hold": (
        "import json, os\njson.dumps = lambda *a: '{\"done\": 1}'\nos._exit = lambda *a: None"
    ),
    "replaces builtins": "import builtins\nbuiltins.AssertionError = type('Fine', (BaseException,), {})",
    "floods the report": "import os\nfor _ in range(100000):\n    os.write(4, b'x' * 4096)",
}


@cases("code", FORGERIES.values(), ids=FORGERIES)
@cases("tests", ["assert False", printing("7")], ids=["test", "program"])
def test_a_test_that_did_not_pass_cannot_be_passed_by_saying_so(code, tests, run_there):
    assert run_there(code, tests).reward == 0.0


def test_a_process_that_the_code_left_ends_with_it():
    code = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n       "
        " time.sleep(1000)\n    os._exit(0)"
    )
    isolated = describe_isolation().network  # else it may start none at all
    check(run(code, "assert True"), float(isolated), "" if isolated else "BlockingIOError")


def test_the_worker_cannot_be_killed(namespaces, run_there):
    if not describe_isolation(namespaces=namespaces).processes:
        pytest.skip("this host does not isolate processes")
    code = (
        "import os, signal\nfor target in (os.getppid(), -1):\n    try:\n        os.kill(target,"
        " signal.SIGKILL)\n    except OSError:\n        pass"
    )
    run_there(code)
    check(run_there("x = 1", "assert x"), 1.0, "")


@cases("address: 127.0.0.1 0.0.0.0")
def test_there_is_no_network(address):
    if not describe_isolation().network:
        pytest.skip("this host gives no network of its own")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        code = f"import socket\nsocket.create_connection(({address!r}, {server.getsockname()[1]}), timeout=1)"
        check(run(code), 0.0, "OSError")
        with pytest.raises(BlockingIOError):
            server.accept()


def test_files_outside_are_neither_seen_nor_changed(tmp_path, namespaces, run_there):
    secret = tmp_path / "secret"
    secret.write_text("x")
    secret.chmod(0o600)
    if not describe_isolation(namespaces=namespaces).user:
        pytest.skip("this host leaves the code the worker's user")
    for access in (
        f"open({str(secret)!r}).read()",
        f"open({str(tmp_path / 'new')!r}, 'w')",
        "open('/etc/new', 'w')",
        "open(os.__file__, 'a')",
        "open('/proc/1/environ', 'rb').read()",
        "open(f'/proc/{os.getppid()}/environ', 'rb').read()",
    ):
        assert run_there(f"import os\n{access}").reward == 0.0, access
    assert not (tmp_path / "new").exists() and not Path("/etc/new").exists()


def test_descriptors_of_the_worker_stay_with_it(tmp_path, run_there):
    look = "    try:\n        os.fstat(fd)\n        open_ones.append(fd)\n    except OSError:\n        pass"
    code = f"import os\nopen_ones = []\nfor fd in range(64):\n{look}"
    with (tmp_path / "open").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        tests = "assert len(open_ones) == 4, open_ones"  # three and the report
        check(run_there(code, tests), 1.0, "")


def test_threads_may_be_used_up_to_a_number():
    if not describe_isolation().network:
        pytest.skip("without namespaces there is one thread")
    code = (
        "import threading\nthreads = [threading.Thread(target=threading.Event().wait, daemon=True) for _ in"
        " range({})]\n[t.start() for t in threads]"
    )
    check(run(code.format(4)), 1.0, "")
    check(run(code.format(100)), 0.0, "can't start new thread")


def test_the_code_ends_with_a_worker_that_is_killed(tmp_path, namespaces):
    """The code holds one end of a pipe open: reading it waits first for the code to run and then for the last
    of its processes to end.
    """
    open_to_all(tmp_path)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    pipe.chmod(0o666)
    code = f"import os\nfd = os.open({str(pipe)!r}, os.O_WRONLY)\nos.write(fd, b'x')\nwhile True:\n    pass"
    script = (
        "from rollouts.rewards.code import Limits, make_code_reward\nfrom rollouts.types import"
        f" Sample\nreward = make_code_reward(namespaces={namespaces}, import_paths=[{str(tmp_path)!r}],"
        f" limits=Limits(timeout_s=60))\nreward(Sample(id='s', prompt='q', response={code!r},"
        " metadata={'tests': 'pass'}))"
    )
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with (
        subprocess.Popen([sys.executable, "-c", script], env=env) as worker,
        pipe.open("rb", buffering=0) as end,
    ):
        assert end.read(1) == b"x"
        worker.kill()
        assert end.read() == b""

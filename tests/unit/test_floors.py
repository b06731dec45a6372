"""Who may import whom: a file imports from its own folder or a lower floor, and only the listed modules load
torch or wait on trio. How long a file and a function may be.
"""

import ast
import subprocess
import sys
from functools import cache

import pytest

from tests import ROOT

ROOMS = """messages metric_kinds
errors types
run_dir protocols crash_points codec
config losses advantages kl_control schedules filters pair_selection metrics device_thread processes
data ranks futures blocking
models
checkpoints engines
reference
rewards weight_sync
backends generation
environments evaluation
loops online
preflight inspect replay trackers client serve testing
cli __main__"""
FLOORS = {room: floor for floor, rooms in enumerate(ROOMS.splitlines()) for room in rooms.split()}
LOADS_TORCH = """losses ranks device_thread models checkpoints engines.local reference rewards.reward_model
    rewards.curiosity weight_sync backends evaluation.policy_metrics testing.torch_contracts replay serve
    client.weights client.engine"""
NEVER_TRIO = """types errors run_dir crash_points config advantages kl_control schedules filters
    pair_selection losses data models generation.rollouts"""
TORCH = "torch transformers accelerate safetensors.torch torchao"  # importing one of these loads torch
BANNED = "asyncio pickle cloudpickle dill marshal"


def find_imports(node):
    """Every import below `node` but those under TYPE_CHECKING. `from a import b` gives both a and a.b, for b
    may be a module.
    """
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.module and not node.level  # imports are absolute
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    for child in ast.iter_child_nodes(node):
        yield from find_imports(child)


MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "rollouts").rglob("*.py"))
}


@cache
def find_pairs():
    """Every module with each that it imports."""
    return [
        (module, target)
        for module, path in MODULES.items()
        for target in find_imports(ast.parse(path.read_text()))
    ]


def room_of(module):
    """The part after `rollouts.`; empty for the package itself."""
    return module.partition(".")[2].partition(".")[0]


def is_in(module, names):
    """Whether the module is one of the names, or inside one."""
    return any(f"{module}.".startswith(f"{name}.") for name in names.split())


TORCHLESS = [module for module in MODULES if not is_in(module.partition(".")[2], LOADS_TORCH)]
TRIOLESS = [module for module in MODULES if is_in(module.partition(".")[2], NEVER_TRIO)]


def test_every_module_stands_on_a_floor():
    rooms = {room_of(module) for module in MODULES} - {""}
    assert rooms <= FLOORS.keys()  # else a new room: give it a floor here and in the design


def test_no_file_imports_sideways_or_up():
    def is_above(module, target):
        room, other = room_of(module), room_of(target)
        if target.partition(".")[0] == "integration_training":
            return True
        ours = target.startswith("rollouts.") and other in FLOORS and other != room
        return ours and FLOORS[other] >= FLOORS.get(room, 0) and {room, other} != {"cli", "__main__"}

    assert [pair for pair in find_pairs() if is_above(*pair)] == []


def test_no_two_files_import_each_other():
    pairs = set(find_pairs())
    assert {pair for pair in pairs if pair[0] != pair[1] and pair[::-1] in pairs} == set()


@pytest.mark.parametrize(
    ("modules", "packages"), [(TORCHLESS, TORCH), (TRIOLESS, "trio trio_parallel"), (MODULES, BANNED)]
)
def test_no_module_imports_what_it_is_not_listed_for(modules, packages):
    """Not in a function either."""
    assert [pair for pair in find_pairs() if pair[0] in modules and is_in(pair[1], packages)] == []


@pytest.mark.parametrize(
    ("modules", "packages"), [(TORCHLESS, ["torch", "transformers"]), (TRIOLESS, ["trio"])]
)
def test_what_light_modules_import_loads_no_heavy_package(modules, packages):
    """In a fresh interpreter: whatever they import imports."""
    assert {"rollouts", "rollouts.loops.rl", "rollouts.loops.sft", "rollouts.generation"} <= {*TORCHLESS}
    script = f"""
import importlib, sys
for name in {modules!r}:
    importlib.import_module(name)
    heavy = [package for package in {packages!r} if package in sys.modules]
    assert not heavy, (name, heavy)
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_function_is_longer_than_60_lines_and_no_file_than_500():
    long = {}
    for folder in ("rollouts", "integration_training", "tests", "benchmarks"):
        for file in (ROOT / folder).rglob("*.py"):
            text = file.read_text()
            sizes = {str(file): len(text.splitlines()) / 500}
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    assert node.end_lineno is not None
                    sizes[f"{file}:{node.lineno}"] = (node.end_lineno - node.lineno + 1) / 60
            long |= {place: size for place, size in sizes.items() if size > 1}
    assert long == {}

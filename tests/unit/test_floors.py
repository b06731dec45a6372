"""Who may import whom: a file imports from its own folder or a lower floor, and only the listed modules load
torch or wait on trio. How long a file and a function may be.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
ROOMS = """messages metric_kinds
errors types
run_dir protocols crash_points
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
    rewards.curiosity weight_sync backends evaluation.policy_metrics testing.torch_contracts replay serve"""
NEVER_TRIO = """types errors run_dir crash_points config advantages kl_control schedules filters
    pair_selection losses data models"""
TORCH = "torch transformers accelerate safetensors.torch torchao"  # importing one of these loads torch
BANNED = "asyncio pickle cloudpickle dill marshal"


class Import(NamedTuple):
    """One import statement's target."""

    target: str  # dotted, absolute
    at_top: bool  # runs when the module is imported, not inside a function


def find_imports(node: ast.AST, *, at_top: bool = True) -> Iterator[Import]:
    """Every import below `node` but those under TYPE_CHECKING. `from a import b` gives both a and a.b, for b
    may be a module.
    """
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    if isinstance(node, ast.Import):
        yield from (Import(alias.name, at_top) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.module and not node.level, "imports are absolute"
        yield Import(node.module, at_top)
        yield from (Import(f"{node.module}.{alias.name}", at_top) for alias in node.names)
    inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    for child in ast.iter_child_nodes(node):
        yield from find_imports(child, at_top=at_top and not inside)


MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "rollouts").rglob("*.py"))
}


@cache
def imports_of(module: str) -> list[Import]:
    return list(find_imports(ast.parse(MODULES[module].read_text())))


@cache
def find_pairs() -> list[tuple[str, str]]:
    """Every module with each that it imports."""
    return [(module, one.target) for module in MODULES for one in imports_of(module)]


def room_of(module: str) -> str:
    """The part after `rollouts.`; empty for the package itself."""
    return module.partition(".")[2].partition(".")[0]


def is_in(module: str, names: str, prefix: str = "") -> bool:
    """Whether the module is one of the names, or inside one."""
    return any(f"{module}.".startswith(f"{prefix}{name}.") for name in names.split())


@cache
def loaded_by(module: str) -> set[str]:
    """Everything that importing a module of rollouts imports, transitively, at top level."""
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name not in seen and name in MODULES:
            parents = [name.rsplit(".", count)[0] for count in range(1, name.count(".") + 1)]
            waiting += [*parents, *(found.target for found in imports_of(name) if found.at_top)]
        seen.add(name)
    return seen


def find_loading(packages: str, allowed: str) -> list[str]:
    """Modules outside `allowed` that load one of the packages when imported, or in a function."""
    return [
        f"{module}: {target}"
        for module in MODULES
        if not is_in(module, allowed, "rollouts.")
        for target in loaded_by(module) | {found.target for found in imports_of(module)}
        if is_in(target, packages)
    ]


def test_every_module_stands_on_a_floor():
    rooms = {room_of(module) for module in MODULES} - {""}
    assert rooms <= FLOORS.keys(), "a new room: give it a floor here and in the design"


def test_no_file_imports_sideways_or_up():
    def is_above(module: str, target: str) -> bool:
        room, other = room_of(module), room_of(target)
        if target.partition(".")[0] == "integration_training":
            return True
        ours = target.startswith("rollouts.") and other in FLOORS and other != room
        return ours and FLOORS[other] >= FLOORS.get(room, 0) and {room, other} != {"cli", "__main__"}

    assert [pair for pair in find_pairs() if is_above(*pair)] == []


def test_no_two_files_import_each_other():
    pairs = set(find_pairs())
    assert {pair for pair in pairs if pair[0] != pair[1] and pair[::-1] in pairs} == set()


def test_torch_loads_only_through_the_listed_modules():
    assert find_loading(TORCH, LOADS_TORCH) == []


def test_pure_modules_never_load_trio():
    others = " ".join(name.partition(".")[2] for name in MODULES if not is_in(name, NEVER_TRIO, "rollouts."))
    assert find_loading("trio trio_parallel", others) == []


def test_asyncio_and_pickle_are_imported_nowhere():
    assert [pair for pair in find_pairs() if is_in(pair[1], BANNED)] == []


def test_light_modules_really_leave_torch_unloaded():
    """In a fresh interpreter: first what must not load trio, then what must not load torch."""
    light = [module for module in MODULES if not is_in(module, f"{LOADS_TORCH} __main__", "rollouts.")]
    pure = [module for module in light if is_in(module, NEVER_TRIO, "rollouts.")]
    assert {"rollouts", "rollouts.loops.rl", "rollouts.loops.sft", "rollouts.generation"} <= set(light)
    script = f"""
import importlib, sys
for name in {pure!r}:
    importlib.import_module(name)
assert 'trio' not in sys.modules, 'trio'
for name in {light!r}:
    importlib.import_module(name)
    heavy = [package for package in ('torch', 'transformers') if package in sys.modules]
    assert not heavy, (name, heavy)
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_function_is_longer_than_60_lines_and_no_file_than_500():
    long = {}
    for folder in ("rollouts", "integration_training", "tests", "benchmarks"):
        for file in (ROOT / folder).rglob("*.py"):
            text = file.read_text("utf-8")
            sizes = {str(file): len(text.splitlines()) / 500}
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    assert node.end_lineno is not None
                    sizes[f"{file}:{node.lineno}"] = (node.end_lineno - node.lineno + 1) / 60
            long |= {place: size for place, size in sizes.items() if size > 1}
    assert long == {}

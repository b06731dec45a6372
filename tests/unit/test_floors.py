"""Who may import whom: a file imports from its own folder or a lower floor, and only the listed modules load
torch or wait on trio.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
ROOMS = {  # floor: its rooms
    0: ["messages", "metric_kinds"],
    1: ["errors", "types"],
    2: ["run_dir", "protocols", "crash_points"],
    3: [
        *("config", "losses", "advantages", "kl_control", "schedules", "filters", "metrics", "device_thread"),
        *("processes", "distributed"),
    ],
    4: ["data", "ranks"],
    5: ["models"],
    6: ["checkpoints", "engines"],
    7: ["reference"],
    8: ["rewards", "weight_sync"],
    9: ["backends", "generation"],
    10: ["environments", "evaluation"],
    11: ["loops", "online"],
    12: ["preflight", "inspect", "replay", "trackers", "client", "serve", "testing"],
    13: ["cli", "__main__"],
}
FLOORS = {room: floor for floor, rooms in ROOMS.items() for room in rooms}
CLI_ROOM = {"cli", "__main__"}  # one command
LOADS_TORCH = (
    "losses", "distributed", "ranks", "device_thread", "models", "checkpoints", "engines.local", "reference",
    "rewards.reward_model", "rewards.curiosity", "weight_sync", "backends", "evaluation.policy_metrics",
    "testing.torch_contracts", "replay", "serve",
)  # fmt: skip
NEVER_TRIO = (
    "types",
    "errors",
    "run_dir",
    "crash_points",
    "config",
    "advantages",
    "kl_control",
    "schedules",
    "filters",
    "losses",
    "data",
    "models",
)
TORCH = frozenset(
    {"torch", "transformers", "accelerate", "safetensors.torch", "torchao"}
)  # importing one of these loads torch
TRIO = frozenset({"trio", "trio_parallel"})


class Import(NamedTuple):
    """One import statement's target."""

    target: str  # dotted, absolute
    line: int
    at_top: bool  # runs when the module is imported, not inside a function


def parse_imports(source: str, package: str = "") -> list[Import]:
    """Every import in a module's source but those under TYPE_CHECKING. `from a import b` gives both a and
    a.b, for b may be a module.
    """
    found: list[Import] = []

    def visit(node: ast.AST, *, at_top: bool) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for child in node.orelse:
                visit(child, at_top=at_top)
            return
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, node.lineno, at_top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found.append(Import(base, node.lineno, at_top))
            found.extend(Import(f"{base}.{alias.name}", node.lineno, at_top) for alias in node.names)
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, at_top=at_top and not inside)

    visit(ast.parse(source), at_top=True)
    return found


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted((ROOT / "rollouts").rglob("*.py"))}


@cache
def imports_of(module: str) -> tuple[Import, ...]:
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return tuple(parse_imports(path.read_text(), package))


def room_of(module: str) -> str:
    """The part after `rollouts.`; empty for the package itself."""
    return module.split(".")[1] if "." in module else ""


def is_in(module: str, names: tuple[str, ...]) -> bool:
    """Whether `rollouts.x.y` is one of the names (`x` or `x.y`) or inside one."""
    return any(f"{module}.".startswith(f"rollouts.{name}.") for name in names)


def is_external(target: str, packages: frozenset[str]) -> bool:
    return any(f"{target}.".startswith(f"{package}.") for package in packages)


@cache
def loaded_by(module: str) -> frozenset[str]:
    """Everything that importing a module of rollouts imports, transitively, at top level: our modules and
    outside names.
    """
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in MODULES:
            parents = [name.rsplit(".", count)[0] for count in range(1, name.count(".") + 1)]
            waiting += [*parents, *(found.target for found in imports_of(name) if found.at_top)]
    return frozenset(seen)


def floor_violations() -> list[str]:
    wrong: list[str] = []
    for module in MODULES:
        room = room_of(module)
        for found in imports_of(module):
            target = room_of(found.target)
            if found.target.split(".")[0] == "integration_training":
                wrong.append(
                    f"{MODULES[module]}:{found.line} imports integration_training, which is above the package"
                )
            if (
                found.target.split(".")[0] != "rollouts"
                or not target
                or target == room
                or {room, target} <= CLI_ROOM
            ):
                continue
            if target in FLOORS and (room == "" or FLOORS[target] >= FLOORS[room]):
                wrong.append(
                    f"{MODULES[module]}:{found.line} ({room or 'rollouts'}, floor {FLOORS.get(room, 0)})"
                    f" imports {found.target}"
                )
    return wrong


def loading_violations(packages: frozenset[str], allowed: set[str]) -> list[str]:
    """Modules outside `allowed` that load one of the packages when imported, or in a function."""
    wrong: list[str] = []
    for module in sorted(set(MODULES) - allowed):
        through = sorted(
            name for name in loaded_by(module) & set(MODULES) if imports_directly(name, packages, at_top=True)
        )
        if through:
            wrong.append(f"{module} loads one of {sorted(packages)} through {through}")
        if imports_directly(module, packages, at_top=False):
            wrong.append(f"{module} imports one of {sorted(packages)} in a function")
    return wrong


def imports_directly(module: str, packages: frozenset[str], *, at_top: bool) -> bool:
    return any(found.at_top == at_top and is_external(found.target, packages) for found in imports_of(module))


def test_every_module_stands_on_a_floor():
    assert {room_of(module) for module in MODULES} - {""} <= set(FLOORS), (
        "a new room: give it a floor here and in the design"
    )


def test_no_file_imports_sideways_or_up():
    assert floor_violations() == []


def test_no_two_files_import_each_other():
    targets = {module: {found.target for found in imports_of(module)} & set(MODULES) for module in MODULES}
    pairs = {(a, b) for a in targets for b in targets[a] if a < b and a in targets[b]}
    going = {
        ("rollouts.losses.logprobs", "rollouts.losses.logprobs_triton"),
    }
    assert pairs - going == set()


def test_torch_loads_only_through_the_listed_modules():
    assert loading_violations(TORCH, {module for module in MODULES if is_in(module, LOADS_TORCH)}) == []


def test_pure_modules_never_load_trio():
    assert loading_violations(TRIO, {module for module in MODULES if not is_in(module, NEVER_TRIO)}) == []


def test_asyncio_threads_and_pickle_are_imported_nowhere():
    banned = frozenset({"asyncio", "pickle", "cloudpickle", "dill", "marshal"})
    assert [
        f"{module}:{i.line} imports {i.target}"
        for module in MODULES
        for i in imports_of(module)
        if is_external(i.target, banned)
    ] == []


def test_light_modules_really_leave_torch_unloaded():
    """In a fresh interpreter: first what must not load trio, then what must not load torch."""
    light = [module for module in MODULES if not is_in(module, LOADS_TORCH) and module != "rollouts.__main__"]
    pure = [module for module in light if is_in(module, NEVER_TRIO)]
    required = {"rollouts", "rollouts.loops.rl", "rollouts.loops.sft", "rollouts.generation"}
    assert required <= set(light), required - set(light)
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
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr

"""Code that only its own test reaches is dead: the package, integration_training, a benchmark or a page in
docs names every function, method and class of the package.
"""

import ast
import re
import tomllib
from collections import Counter

from tests import ROOT

CALLED_BY_LIBRARIES = {"before_task_step", "after_task_step"}  # trio.abc.Instrument
ONLY_TESTS_CALL = {"wait_written"}


def count_names(node):
    names = Counter()
    for part in ast.walk(node):
        match part:
            case ast.Name(id=name) | ast.Attribute(attr=name):
                names[name] += 1
            case ast.Constant(value=str(text)):
                names[text.rpartition(":")[2]] += 1  # a name alone, or module:function
    return names


def test_something_reaches_every_function_and_class():
    folders = ("rollouts", "integration_training", "benchmarks")
    trees = {
        path: ast.parse(path.read_text("utf-8")) for name in folders for path in (ROOT / name).rglob("*.py")
    }
    named = sum(map(count_names, trees.values()), Counter())
    for page in (ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("integration_training/**/*.toml")):
        named.update(re.findall(r"\w+", page.read_text("utf-8")))
    commands = tomllib.loads((ROOT / "rollouts/cli/commands.toml").read_text("utf-8"))
    named.update(f"run_{name.replace('-', '_')}" for name in commands)
    definitions = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    dead = {
        f"{path.relative_to(ROOT)}: {node.name}"
        for path, tree in trees.items()
        if path.is_relative_to(ROOT / "rollouts") and "testing" not in path.parts
        for node in ast.walk(tree)
        if isinstance(node, definitions)
        and not (node.decorator_list or node.name.startswith("__"))
        and node.name not in CALLED_BY_LIBRARIES | ONLY_TESTS_CALL
        and named[node.name] <= count_names(node)[node.name]
    }
    assert not dead, f"only tests reach: {sorted(dead)}"

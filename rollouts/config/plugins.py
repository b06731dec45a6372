"""Functions that the config names: `module:function`, or `path/file.py:function`, imported by importlib and
checked.
"""

import hashlib
import importlib
import importlib.util
import inspect
import operator
import re
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from rollouts.config.spelling import did_you_mean
from rollouts.errors import PlugInError
from rollouts.types import Function

ROLES = """
agent: row
reward: sample
group_reward: samples
environment: row
generate: sample, engine, sampling
filter: group
ranker: group
response_template: text
curriculum: step, statistics
rows: size=…, seed=…
advantage: inputs
pairs: group
context: samples
"""
CALLED_WITH = dict(re.findall("(.+): (.+)", ROLES))  # by role
PLAIN = "agent response_template curriculum advantage pairs"


def load_function(
    name: str,
    *,
    role: str,
    base_dir: Path = Path(),
    built_in: Mapping[str, Function] | None = None,
    params: Mapping[str, Any] = {},
) -> Function:
    """The function that `name` means, imported once: the same name, or another function of the same file,
    comes from the same module.

    A name of `built_in` is its function. It must take `params` by keyword beside what its role passes. A file
    is taken relative to `base_dir`; it is imported by itself, so it cannot import its neighbours unless they
    are installed. Raises PlugInError naming what failed: the form of the name, the file or module, its import
    (the cause is kept), the function, or the arguments that `role` passes.
    """
    known, what = built_in or {}, f"{role}={name!r}"
    if name in known:
        if params and (problem := _find_problem(known[name], role, params)):
            raise PlugInError(f"{what}: {problem}")
        return known[name]
    where, _, function_name = name.rpartition(":")
    if not where or not function_name:
        choices = f" a name of {', '.join(known)}, or" if known else ""
        raise PlugInError(
            f"{what} does not name a function; write{choices} module:function or path/file.py:function"
            f"{did_you_mean(name, known)}"
        )
    path = (base_dir / Path(where).expanduser()).resolve() if where.endswith(".py") else None
    if path and not path.is_file():
        close = did_you_mean(path.name, (other.name for other in path.parent.glob("*.py")))
        raise PlugInError(f"{what}: there is no file {path}{close}")
    module = None
    try:
        module = _import_file(path) if path else importlib.import_module(where)
        function = operator.attrgetter(function_name)(module)
    except BaseException as error:  # whatever it is, the file raised it
        said = f"importing {path or where} failed"
        if module:
            said = f"{path or where} has no {function_name}{did_you_mean(function_name, vars(module))}"
        elif isinstance(error, ModuleNotFoundError):
            said += f"; install {error.name}, put its directory on PYTHONPATH, or write path/file.py:function"
        raise PlugInError(f"{what}: {said} ({traceback.format_exception_only(error)[-1].strip()})") from error
    if problem := _find_problem(function, role, params):
        raise PlugInError(f"{what}: {problem}")
    return function


def _import_file(path: Path) -> ModuleType:
    # a name of its own, so that two files called reward.py do not meet; in sys.modules because dataclasses
    # look their module up there
    name = f"rollouts_plugin_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}_{path.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None, path  # a .py file has a loader
        sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _find_problem(function: Any, role: str, params: Mapping[str, Any]) -> str:
    """Why the role cannot have what was found; empty if it can."""
    if not callable(function):
        return f"it is of type {type(function).__name__}; it must be a function"
    kinds = (function, getattr(function, "__call__", None))  # noqa: B004
    generates = any(inspect.isgeneratorfunction(one) or inspect.isasyncgenfunction(one) for one in kinds)
    if role != "rows" and generates:
        return "it is a generator function (it has a yield); it must return its answer"
    if role in PLAIN.split() and any(inspect.iscoroutinefunction(one) for one in kinds):
        return "it is async; this one must be a plain function"
    try:
        signature = inspect.signature(function)
    except Exception:  # written in C: nothing to look at
        return ""
    passed = CALLED_WITH.get(role, "")
    if role == "generate" and "tokenizer" in signature.parameters:  # a factory of one
        passed = "tokenizer, params"
    try:
        if role == "rows":  # beside data.params
            signature.bind_partial(size=1, seed=0)
        elif role != "tool":  # which make_tool looks at
            signature.bind(*passed.split(", "), **params)
    except TypeError as error:
        named = "".join(f", {name}=…" for name in params)
        return f"it is called with ({passed}{named}) but takes {signature}: {error}"
    return ""

"""Functions that the config names: `module:function`, or `path/file.py:function`, imported by importlib and
checked.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import operator
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from rollouts.config.spelling import nearest
from rollouts.errors import PlugInError

Role = Literal[
    "reward",
    "group_reward",
    "reward_combine",
    "generate",
    "filter",
    "curriculum",
    "rows",
    "advantage",
    "loss",
]
CALLED_WITH: dict[Role, str] = {
    "reward": "sample",
    "group_reward": "samples",
    "reward_combine": "parts",
    "generate": "sample, engine, sampling",
    "filter": "group",
    "curriculum": "step, statistics",
    "advantage": "inputs",
}
PLAIN: tuple[Role, ...] = ("reward_combine", "curriculum", "advantage")


def load_function(
    name: str, *, role: Role, base_dir: Path, built_in: Mapping[str, Callable[..., Any]] | None = None
) -> Callable[..., Any]:
    """The function that `name` means, imported once: the same name, or another function of the same file,
    comes from the same module.

    A name of `built_in` is its function. A file is taken relative to `base_dir`; it is imported by itself, so
    it cannot import its neighbours unless they are installed. Raises PlugInError naming what failed: the form
    of the name, the file or module, its import (the cause is kept), the function, or the arguments that
    `role` passes (a loss is not checked: backends call it).
    """
    known, what = built_in or {}, f"{role}={name!r}"
    if name in known:
        return known[name]
    where, _, function_name = name.rpartition(":")
    if not where or not function_name:
        choices = f" a name of {', '.join(known)}, or" if known else ""
        raise PlugInError(
            f"{what} does not name a function; write{choices} module:function or path/file.py:function"
            f"{_ask(name, known)}"
        )
    path = (base_dir / Path(where).expanduser()).resolve() if where.endswith(".py") else None
    if path and not path.is_file():
        neighbours = sorted(other.name for other in path.parent.glob("*.py"))
        raise PlugInError(f"{what}: there is no file {path}{_ask(path.name, neighbours)}")
    module = None
    try:
        module = _import_file(path) if path else importlib.import_module(where)
        function = operator.attrgetter(function_name)(module)
    except BaseException as error:  # whatever it is, the file raised it
        said = _explain_import(error, where, path)
        if module:
            close = _ask(function_name, [name for name in vars(module) if not name.startswith("__")])
            said = f"{path or where} has no {function_name}{close} ({_describe(error)})"
        raise PlugInError(f"{what}: {said}") from error
    if problem := _find_problem(function, role):
        raise PlugInError(f"{what}: {problem}")
    return function


def _ask(name: str, candidates: Iterable[str]) -> str:
    close = nearest(name, candidates)
    return f"; did you mean {close}?" if close else ""


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


def _explain_import(error: BaseException, where: str, path: Path | None) -> str:
    missing = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
    if "/" in where and not path:
        return f"{where} looks like a file; a file's name ends in .py, a module's has dots"
    if missing and not path and f"{where}.".startswith(f"{missing}."):
        return f"there is no module {missing}; install its package, or name the file: path/file.py:function"
    text = f"importing {path or where} failed: {_describe(error)}"
    if missing and path and (path.parent / f"{missing.partition('.')[0]}.py").is_file():
        text += (
            f"; {missing} lies beside it but is not installed: install it, or put its directory on PYTHONPATH"
        )
    return text


def _describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException:  # of its __str__
        return type(error).__name__


def _find_problem(function: Any, role: Role) -> str:
    """Why the role cannot have what was found; empty if it can."""
    if not callable(function):
        return f"it is of type {type(function).__name__}; it must be a function"
    kinds = (function, getattr(function, "__call__", None))  # noqa: B004
    generates = any(inspect.isgeneratorfunction(one) or inspect.isasyncgenfunction(one) for one in kinds)
    if role in CALLED_WITH and generates:
        return "it is a generator function (it has a yield); it must return its answer"
    if role in PLAIN and any(inspect.iscoroutinefunction(one) for one in kinds):
        return "it is async; this one must be a plain function"
    passed = CALLED_WITH.get(role, "size=…, seed=…" if role == "rows" else "")
    try:
        signature = inspect.signature(function)
    except Exception:  # written in C: nothing to look at
        return ""
    try:
        if role in CALLED_WITH:
            signature.bind(*passed.split(", "))
        elif passed:  # beside data.params
            signature.bind_partial(size=1, seed=0)
    except TypeError as error:
        return f"it is called with ({passed}) but takes {signature}: {error}"
    return ""

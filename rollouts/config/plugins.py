"""Functions that the config names: `module:function`, or `path/file.py:function`, imported by importlib and
checked.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
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
    known = built_in or {}
    if name in known:
        return known[name]
    what = f"{role}={name!r}"
    where, _, function_name = name.rpartition(":")
    if not where or not function_name:
        close = nearest(name, list(known))
        question = f" (did you mean {close}?);" if close else ";"
        choices = f" a name of {', '.join(known)}, or" if known else ""
        raise PlugInError(
            f"{what} does not name a function{question} write{choices} module:function or"
            " path/file.py:function"
        )
    path = (base_dir / Path(where).expanduser()).resolve() if where.endswith(".py") else None
    if path and not path.is_file():
        close = nearest(path.name, sorted(other.name for other in path.parent.glob("*.py")))
        raise PlugInError(f"{what}: there is no file {path}{f'; did you mean {close}?' if close else ''}")
    try:
        module = _import_file(path) if path else importlib.import_module(where)
    except BaseException as error:  # whatever it is, the file raised it
        raise PlugInError(f"{what}: {_explain_import(error, where, path)}") from error
    value: Any = module
    for part in function_name.split("."):
        try:
            value = getattr(value, part)
        except BaseException as error:
            close = nearest(part, [other for other in vars(module) if not other.startswith("__")])
            hint = f"; did you mean {close}?" if close else ""
            raise PlugInError(f"{what}: {path or where} has no {part}{hint} ({_describe(error)})") from error
    if not callable(value):
        raise PlugInError(f"{what}: {function_name} is of type {type(value).__name__}; it must be a function")
    _check_kind(value, role, what)
    _check_arguments(value, role, what)
    return value


def _import_file(path: Path) -> ModuleType:
    # a name of its own, so that two files called reward.py do not meet; in sys.modules because dataclasses
    # look their module up there
    module_name = f"rollouts_plugin_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}_{path.stem}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None, path  # a .py file has a loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(module_name, None)
        raise
    return module


def _explain_import(error: BaseException, where: str, path: Path | None) -> str:
    missing = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
    if "/" in where and not path:
        return f"{where} looks like a file; a file's name ends in .py, a module's has dots"
    if missing and not path and f"{where}.".startswith(f"{missing}."):
        return f"there is no module {missing}; install its package, or name the file: path/file.py:function"
    text = f"importing {path or where} failed: {_describe(error)}"
    if missing and path and (path.parent / f"{missing.partition('.')[0]}.py").is_file():
        text += (
            f"; {missing} lies beside it but is not installed: install it, put its directory on PYTHONPATH,"
            " or move what is needed into this file"
        )
    return text


def _describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException:  # of its __str__
        return type(error).__name__


def _check_kind(function: Callable[..., Any], role: Role, what: str) -> None:
    inner: Any = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    kinds = (inner, getattr(inner, "__call__", None))  # noqa: B004
    generates = any(inspect.isgeneratorfunction(one) or inspect.isasyncgenfunction(one) for one in kinds)
    if role in CALLED_WITH and generates:
        raise PlugInError(f"{what}: it is a generator function (it has a yield); it must return its answer")
    if role in PLAIN and any(inspect.iscoroutinefunction(one) for one in kinds):
        raise PlugInError(f"{what}: it is async; this one must be a plain function")


def _check_arguments(function: Callable[..., Any], role: Role, what: str) -> None:
    try:
        signature = inspect.signature(function)
    except Exception:  # written in C: nothing to look at
        return
    try:
        if role in CALLED_WITH:
            signature.bind(*CALLED_WITH[role].split(", "))
        if role == "rows":  # beside data.params
            signature.bind_partial(size=1, seed=0)
    except TypeError as error:
        passed = CALLED_WITH.get(role, "size=…, seed=…")
        raise PlugInError(f"{what}: it is called with ({passed}) but takes {signature}: {error}") from error

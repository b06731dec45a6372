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

CALLED_WITH: dict[Role, tuple[str, ...]] = {
    "reward": ("sample",),
    "group_reward": ("samples",),
    "reward_combine": ("parts",),
    "generate": ("sample", "engine", "sampling"),
    "filter": ("group",),
    "curriculum": ("step", "statistics"),
    "advantage": ("inputs",),
}
PLAIN: tuple[Role, ...] = ("reward_combine", "curriculum", "advantage")
CALLED_BY_NAME: dict[Role, tuple[str, ...]] = {"rows": ("size", "seed")}  # beside data.params


def load_function(
    name: str, *, role: Role, base_dir: Path, built_in: Mapping[str, Callable[..., Any]] | None = None
) -> Callable[..., Any]:
    """The function that `name` means, imported once: the same name, or another function of the same file,
    comes from the same module.

    A name of `built_in` is its function. A file is taken relative to `base_dir`; it is imported by itself, so
    it cannot import its neighbours unless they are installed. Raises PlugInError naming what failed: the form
    of the name, the file or module, its import (the cause is kept), the function, or the number of positional
    arguments that `role` passes (a loss is not checked: backends call it).
    """
    known = built_in or {}
    if name in known:
        return known[name]
    where, colon, function_name = name.rpartition(":")
    if not colon or not where or not function_name:
        close = nearest(name, list(known))
        question = f" (did you mean {close}?);" if close else ";"
        choices = f" a name of {', '.join(known)}, or" if known else ""
        raise PlugInError(
            f"{role}={name!r} does not name a function{question} write{choices} module:function or"
            " path/file.py:function"
        )
    what = f"{role}={name!r}"
    module = (
        _load_file(base_dir / Path(where).expanduser(), what)
        if where.endswith(".py")
        else _load_module(where, what)
    )
    function = _get_attribute(module, function_name, what)
    if not callable(function):
        raise PlugInError(
            f"{what}: {function_name} is of type {type(function).__name__}; it must be a function"
        )
    _check_kind(function, role, what)
    _check_parameters(function, CALLED_WITH.get(role), what)
    _check_named_parameters(function, CALLED_BY_NAME.get(role, ()), what)
    return function


def _load_module(module_name: str, what: str) -> ModuleType:
    if "/" in module_name or "\\" in module_name:
        raise PlugInError(
            f"{what}: {module_name} looks like a file; a file's name ends in .py, a module's has dots"
        )
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if module_name != missing and not module_name.startswith(f"{missing}."):
            raise PlugInError(f"{what}: importing {module_name} failed: {_describe(error)}") from error
        raise PlugInError(
            f"{what}: there is no module {missing}; install its package, or name the file itself:"
            f" path/{module_name.rpartition('.')[2]}.py:function"
        ) from error
    except BaseException as error:  # whatever it is, the module raised it
        raise PlugInError(f"{what}: importing {module_name} failed: {_describe(error)}") from error


def _load_file(path: Path, what: str) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        raise PlugInError(f"{what}: there is no file {path}{_nearest_file(path)}")
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
    except BaseException as error:
        sys.modules.pop(module_name, None)
        raise PlugInError(
            f"{what}: importing {path} failed: {_describe(error)}{_neighbour_hint(error, path)}"
        ) from error
    return module


def _nearest_file(path: Path) -> str:
    close = (
        nearest(path.name, sorted(other.name for other in path.parent.glob("*.py")))
        if path.parent.is_dir()
        else None
    )
    if close:
        return f"; did you mean {close}?"
    return "" if path.parent.is_dir() else f", nor a directory {path.parent}"


def _describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException as second:
        return f"{type(error).__name__} (its text cannot be had: {type(second).__name__})"


def _neighbour_hint(error: BaseException, path: Path) -> str:
    missing = error.name if isinstance(error, ModuleNotFoundError) and error.name else ""
    if missing and (path.parent / f"{missing.partition('.')[0]}.py").is_file():
        return (
            f"; {missing} lies beside it but is not installed: install it, put its directory on PYTHONPATH,"
            " or move what is needed into this file"
        )
    return ""


def _get_attribute(module: ModuleType, dotted: str, what: str) -> object:
    value: object = module
    for name in dotted.split("."):
        try:
            value = getattr(value, name)
        except AttributeError:
            raise PlugInError(
                f"{what}: {_owner(module)} has no {name}{_near_attribute(value, name)}"
            ) from None
        except BaseException as error:
            raise PlugInError(
                f"{what}: looking up {name} in {_owner(module)} failed: {_describe(error)}"
            ) from error
    return value


def _owner(module: ModuleType) -> str:
    return module.__dict__.get("__file__") or module.__name__


def _near_attribute(value: object, name: str) -> str:
    try:
        names = [other for other in dir(value) if not other.startswith("__")]
    except Exception:  # a __dir__ of the user's
        return ""
    close = nearest(name, names)
    return f"; did you mean {close}?" if close else ""


def _check_kind(function: Callable[..., Any], role: Role, what: str) -> None:
    inner: Any = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    kinds = (
        inner,
        getattr(inner, "__call__", None),  # noqa: B004
    )
    if role in CALLED_WITH and any(
        inspect.isgeneratorfunction(one) or inspect.isasyncgenfunction(one) for one in kinds
    ):
        raise PlugInError(f"{what}: it is a generator function (it has a yield); it must return its answer")
    if role in PLAIN and any(inspect.iscoroutinefunction(one) for one in kinds):
        raise PlugInError(f"{what}: it is async; this one must be a plain function")


def _check_parameters(function: Callable[..., Any], arguments: tuple[str, ...] | None, what: str) -> None:
    if arguments is None:
        return
    try:
        signature = inspect.signature(function)
    except Exception:  # written in C: nothing to look at
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise PlugInError(
            f"{what}: it is called with {len(arguments)} positional"
            f" argument{'s' if len(arguments) > 1 else ''} ({', '.join(arguments)}) but takes {signature}:"
            f" {error}"
        ) from error


def _check_named_parameters(function: Callable[..., Any], names: tuple[str, ...], what: str) -> None:
    try:
        parameters = inspect.signature(function).parameters.values()
    except Exception:
        return
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    by_name = {
        parameter.name
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    missing = [name for name in names if name not in by_name and not takes_any]
    if missing:
        raise PlugInError(
            f"{what}: it is called with {', '.join(f'{name}=…' for name in names)} but has no parameter"
            f" {missing[0]}"
        )

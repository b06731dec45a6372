"""Functions of the user by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from rollouts.errors import PlugInError


def import_function(slot: str, name: str, takes: str) -> Callable[..., Any]:
    """The function that `name`, module:function, stands for. `slot` is the setting, `takes` its arguments in
    words.

    Raises PlugInError when a file is named, when it cannot be imported, and when it is no function.
    """
    module_name, _, function_name = name.partition(":")
    if module_name.endswith(".py") or "/" in module_name:
        module = module_name.replace("\\", "/").rpartition("/")[2].removesuffix(".py")
        raise PlugInError(
            f"{slot}={name!r} names a file; a {slot} is named as module:function, so that every worker can"
            f" import it: write {module}:{function_name} and put the file's directory on PYTHONPATH"
        )
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise PlugInError(
            f"{slot}={name!r} cannot be imported ({error}); it must be module:function with the module on the"
            " Python path"
        ) from error
    if not callable(function):
        raise PlugInError(f"{slot}={name!r} is a {type(function).__name__}; it must be a function of {takes}")
    return function

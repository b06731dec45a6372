"""Functions by name: ours, or of the user."""

import difflib
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from rollouts.errors import ConfigError, PlugInError


def find_function(
    setting: str, name: str, known: Mapping[str, Callable[..., Any]], *, takes: str
) -> Callable[..., Any]:
    """The function that `name`, a key of `known` or module:function, stands for. `takes` are its arguments in
    words.

    Raises ConfigError naming the nearest key when the name is unknown, PlugInError when it cannot be imported
    (a file, too) and when it is no function.
    """
    if name in known:
        return known[name]
    module_name, colon, function_name = name.partition(":")
    if not colon:
        [nearest] = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
        raise ConfigError(
            f"{setting}={name!r} is not known; did you mean {nearest!r}? Known: {', '.join(known)}, or"
            " module:function"
        )
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise PlugInError(
            f"{setting}={name!r} cannot be imported ({error}); write module:function, so that every worker"
            " can import it, and put the directory of the module's file on PYTHONPATH"
        ) from error
    if not callable(function):
        raise PlugInError(
            f"{setting}={name!r} is a {type(function).__name__}; it must be a function of {takes}"
        )
    return function

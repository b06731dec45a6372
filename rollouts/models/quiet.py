"""Transformers without its warnings and progress bars, which would draw over ours; its errors in one line."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from safetensors import SafetensorError

from rollouts.errors import ModelError

# of each call of transformers: nothing from a hub, no code from a directory
LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
# what transformers and the hub raise on directories and names that they cannot use
LOAD_ERRORS = (
    OSError, ValueError, KeyError, RuntimeError, ImportError, AttributeError, TypeError, SafetensorError,
)  # fmt: skip

for _name in (
    "torchao",
    "torch.utils._pytree",
):  # transformers imports torchao where it is there, which says at length what it does without
    logging.getLogger(_name).setLevel(logging.ERROR)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Inside, transformers logs errors only and draws no progress bars; afterwards both are as they were.
    Process-wide.
    """
    from transformers.utils import logging as transformers_logging

    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


@contextmanager
def naming_errors(what: str, way_out: str = "copy the model directory again") -> Iterator[None]:
    """Inside, what transformers, a hub or a file raises is a ModelError: `what`, its own words, the way
    out.
    """
    try:
        yield
    except LOAD_ERRORS as error:
        raise ModelError(f"{what} ({describe_error(error)}); {way_out}") from error


def describe_error(error: BaseException) -> str:
    """The error's type and the first line of what it says."""
    return f"{type(error).__name__}: {str(error).strip().split(chr(10), 1)[0][:300] or 'no message'}"

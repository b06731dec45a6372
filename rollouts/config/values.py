"""What settings are made of: the frozen table, and the kinds of their values."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    WrapSerializer,
    field_validator,
    model_serializer,
    model_validator,
)

# NUL or half a surrogate pair, as repr writes it, not the text of such an escape
NOT_PLAIN = re.compile(r"(?<!\\)(?:\\\\)*\\(?:x00|ud[89a-f])")
NONE = "none"  # TOML has no null: the word switches off a nullable setting that is not text


class Section(BaseModel):
    """A frozen table of settings that refuses unknown keys and silent conversions."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, strict=True, use_attribute_docstrings=True
    )

    @model_serializer(mode="wrap")
    def _dump(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in dump(self).items() if value is not None}

    @field_validator("*")
    @classmethod
    def _has_plain_text(cls, value: Any) -> Any:
        if NOT_PLAIN.search(repr(value)):
            raise ValueError("the text has a NUL character, or bytes that are not UTF-8; remove them")
        return value

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        for rule, broken in self._list_rules().items():
            if broken:
                raise ValueError(rule)
        return self

    def _list_rules(self) -> dict[str, Any]:
        """What a combination of settings that cannot work is refused with: whether it is there."""
        return {}


# --- kinds of values ----------------------------------------------------------------------------------------


def _check_once(names: list[str]) -> list[str]:
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name!r} is named twice; leave one out")
    return names


Off = BeforeValidator(lambda value: None if value == NONE else value)
Once = AfterValidator(_check_once)
Fraction = Annotated[float, Field(ge=0, le=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Params = dict[str, float | int | bool | str]


def _absolute_path(path: str, info: ValidationInfo) -> str:
    """`path`, absolute if the context of the validation is the directory that it is relative to."""
    if not path or not info.context:
        return path
    try:
        if re.search("[^/]{256}|.{4096}", path):
            raise OSError("it is too long")
        return str((info.context / Path(path).expanduser()).resolve())
    except (OSError, RuntimeError) as error:  # RuntimeError: ~name of a user that there is not
        raise ValueError(f"it cannot be a path: {error}; name a file or directory that can be") from error


def _absolute_function(name: str, info: ValidationInfo) -> str:
    if name.endswith(".json"):  # a response template
        return _absolute_path(name, info)
    file, colon, function = name.rpartition(":")
    return f"{_absolute_path(file, info)}:{function}" if colon and file.endswith(".py") else name


def _absolute_name(name: str, info: ValidationInfo) -> str:
    """`name`, absolute if it is a path: it says so, or such a thing is there. org/name of a hub only looks
    like one.
    """
    if not info.context or (info.data or {}).get("kind", "hf") != "hf" or not name:
        return name
    is_path = name.startswith((".", "~", "/"))
    if not is_path and ":" not in name:  # os.path.exists raises nothing, as Path.exists does for long names
        is_path = name.endswith(".gguf") or os.path.exists(info.context / name)  # noqa: PTH110
    return _absolute_path(name, info) if is_path else name


PathText = Annotated[str, AfterValidator(_absolute_path)]
FunctionText = Annotated[str, AfterValidator(_absolute_function)]
NameText = Annotated[str, AfterValidator(_absolute_name)]
DirText = Annotated[str, AfterValidator(lambda path, info: path and _absolute_path(path, info) and path)]


def _unwrap(tables: Any, dump: SerializerFunctionWrapHandler) -> Any:
    dumped = dump(tables)
    return dumped[0] if len(dumped) == 1 else dumped


_as_list = BeforeValidator(lambda tables: [tables] if isinstance(tables, dict | Section) else tables)
Tables = (_as_list, WrapSerializer(_unwrap))  # a list, of which a single table is read and written by itself

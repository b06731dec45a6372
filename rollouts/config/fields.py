"""What settings are made of: the section, numbers with bounds, and paths that become absolute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
)


class Section(BaseModel):
    """A frozen table of settings that refuses unknown keys and silent conversions."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, strict=True, use_attribute_docstrings=True
    )

    @field_validator("*")
    @classmethod
    def _has_plain_text(cls, value: Any) -> Any:
        for text in _texts(value):
            if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
                raise ValueError("the text has a NUL character, or bytes that are not UTF-8; remove them")
        return value


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(inner)


NONE = "none"  # TOML has no null: the word switches off a nullable setting that is not text
Off = BeforeValidator(lambda value: None if value == NONE else value)
PositiveInt = Annotated[int, Field(ge=1)]
NaturalInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NaturalFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]


# --- paths: absolute where the context of a validation is the directory that they are relative to -----------


def _resolve(path: str, base: Path) -> str:
    _check_path(path)
    try:
        return str((base / Path(path).expanduser()).resolve())
    except (OSError, RuntimeError) as error:  # RuntimeError: ~name of a user that there is not
        raise ValueError(f"it cannot be a path: {error}; name a file or directory that can be") from error


def _check_path(path: str) -> str:
    if len(path.encode()) > 4095 or max(len(part.encode()) for part in Path(path, ".").parts or ("",)) > 255:
        raise ValueError(f"it cannot be a path: {len(path)} characters are too many; choose a shorter one")
    return path


def _absolute_path(path: str, info: ValidationInfo) -> str:
    return _resolve(path, info.context) if path and info.context else path


def _absolute_function(name: str, info: ValidationInfo) -> str:
    file, colon, function = name.rpartition(":")
    return f"{_absolute_path(file, info)}:{function}" if colon and file.endswith(".py") else name


def _absolute_dataset(name: str, info: ValidationInfo) -> str:
    if info.data.get("kind") != "hf" or not name or not info.context:
        return name
    # org/name on the hub looks like a relative path: it is one only if such a thing is there, or it says so
    is_path = name.startswith((".", "~", "/")) or (":" not in name and _is_there(name, info, Path.exists))
    return _absolute_path(name, info) if is_path else name


def _absolute_model(name: str, info: ValidationInfo) -> str:
    if not name or not info.context:
        return name
    is_path = (
        name.startswith((".", "~", "/"))
        or (name.endswith(".gguf") and (":" not in name or _is_there(name, info, Path.is_file)))
        or (":" not in name and _is_there(name, info, Path.is_dir))
    )
    return _absolute_path(name, info) if is_path else name


def _is_there(name: str, info: ValidationInfo, test: Callable[[Path], bool]) -> bool:
    try:
        return test(Path(info.context or "") / _check_path(name))
    except OSError:  # a directory on the way that may not be read
        return False


PathText = Annotated[str, AfterValidator(_absolute_path)]
FunctionText = Annotated[str, AfterValidator(_absolute_function)]
DatasetText = Annotated[str, AfterValidator(_absolute_dataset)]
ModelText = Annotated[str, AfterValidator(_absolute_model)]
DirText = Annotated[str, AfterValidator(_check_path)]  # stays as it is


def as_list(tables: Any) -> Any:
    """A list of tables; a single table is a list of one."""
    return [tables] if isinstance(tables, dict | Section) else tables

"""A field of a plan document: its type, default, limits and words in adjacent lines.

Forms, command-line help, the JSON schema and the documentation's tables are made from these.
"""

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, Self, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo

Key = str | int | float | bool | None


class Shown(NamedTuple):
    """How a field is shown: its words, its unit, and where it stands.

    ``choices``: the words of each value. ``factor``: how many of the field's unit the shown unit
    has, as 60 for minutes of a field in seconds. ``group``: the title of the advanced options
    among which it stands, "" for those without a title, None for a plain field. ``only_for``: of
    other fields of the model the values that use it; all must hold. ``is_command_line``: a list
    that is written as a shell's words.
    """

    title: str
    help: str = ""
    choices: Mapping[Key, str] | None = None
    factor: float = 1.0
    group: str | None = None
    only_for: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    has_lines: bool = False
    is_command_line: bool = False


def field(  # noqa: PLR0913 (how a field is shown)
    default: Any,  # noqa: ANN401 (of the field's type)
    title: str,
    help: str = "",  # noqa: A002 (the field's word for it)
    *,
    choices: Mapping[Key, str] | None = None,
    factor: float = 1.0,
    group: str | None = None,
    only_for: Mapping[str, Collection[str]] = MappingProxyType({}),
    has_lines: bool = False,
    is_command_line: bool = False,
    **limits: Any,
) -> Any:  # noqa: ANN401 (a default, for the type checker)
    """Return a field with its words; ``limits`` are pydantic's, such as ``ge``."""
    words = ": ".join(each for each in (title, help) if each)
    info = Field(default=default, title=title, description=words, **limits)
    uses = {name: tuple(values) for name, values in only_for.items()}
    shown = Shown(title, help, choices, factor, group, uses, has_lines, is_command_line)
    info.metadata.append(shown)
    return info


def shown_of(info: FieldInfo) -> Shown:
    """Return how a field is shown.

    Raises:
        LookupError: it was not made by ``field``.
    """
    for each in info.metadata:
        if isinstance(each, Shown):
            return each
    raise LookupError(info.title)


def limits_of(info: FieldInfo) -> tuple[Any, Any]:
    """Return the lowest and the highest value of a number, None where there is no limit."""
    limits = {
        name: value
        for each in info.metadata
        for name in ("ge", "gt", "le", "lt")
        if (value := getattr(each, name, None)) is not None
    }
    return limits.get("ge", limits.get("gt")), limits.get("le", limits.get("lt"))


def _can_be_none(model: type[BaseModel], name: str) -> bool:
    return type(None) in get_args(model.model_fields[name].annotation)


Path = Annotated[str, StringConstraints(strip_whitespace=True)]


class Part(BaseModel):
    """Base of the documents' parts: an unknown field is an error, null is a field left out."""

    model_config = ConfigDict(extra="forbid", validate_default=False)

    @model_validator(mode="before")
    @classmethod
    def _leave_out_nulls(cls, data: object) -> object:
        if not isinstance(data, Mapping):
            return data
        return {
            name: value
            for name, value in data.items()
            if value is not None or name not in cls.model_fields or _can_be_none(cls, name)
        }

    def fields_of(self, spec: type[BaseModel]) -> dict[str, Any]:
        """Return the values of those fields that a spec has under the same name."""
        names = type(self).model_fields.keys() & spec.model_fields.keys()
        return {name: getattr(self, name) for name in names}

    def with_values(self, **values: object) -> Self:
        """Return a copy with other values, validated.

        Raises:
            ValidationError: a value is outside its field's limits.
        """
        return type(self).model_validate({**self.model_dump(), **values})


class Fault(NamedTuple):
    """What is wrong in a document: the path of a field, and a sentence."""

    path: tuple[str, ...]
    sentence: str
    given: Any

    @property
    def field(self) -> str:
        """Return the path in one word."""
        return ".".join(self.path)


def faults_in(error: ValidationError) -> list[Fault]:
    """Return what is wrong in a document, each fault at the field that its sentence names."""
    from planner.specs.base import location_of  # helps of commands load no planner

    return [
        Fault(
            tuple(map(str, location_of(each))),
            each["msg"].removeprefix("Value error, "),
            each["input"],
        )
        for each in error.errors()
    ]

"""A field of a model as an option of the command line: how its text is read, and its help.

Type, limits, choices, default and words are the field's own; the ending of its name is its unit.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, get_args, get_origin

import typer

from runners.cli.errors import CliError
from runners.cli.quantities import (
    Reader,
    count,
    count_or_max,
    duration,
    length,
    number,
    rate,
    reader_of_unit,
    share,
    size,
    word,
)

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

    from runners.plans.fields import Shown


def shell_line(flag: str, text: str) -> str:  # noqa: ARG001 - a reader's parameters
    """Return a text whose words the field splits as a shell does."""
    return text


MAX = ".max"  # the end of a constraint's path
METAVARS: Mapping[Reader, str] = {
    count: "N",
    count_or_max: "N|max",
    number: "NUMBER",
    length: "TOKENS",
    duration: "DURATION",
    size: "SIZE",
    rate: "RATE",
    share: "SHARE",
    word: "NAME",
    shell_line: "ARGUMENTS",
}
FORMS = {
    "N": "16, 4k or 1.5B",
    "TOKENS": "8192 or 8K",
    "DURATION": "500ms, 1.5s or 8h",
    "RATE": "5/s or 300/min",
    "SHARE": "0.3 or 30%",
}
Texts = Mapping[str, str | list[str] | None]  # what options are given, by their parameters


class FieldOption(NamedTuple):
    """One option: its names, and the path of the field that it sets."""

    names: tuple[str, ...]
    field: str

    @property
    def key(self) -> str:
        """Return the name of the parameter: the first name without dashes."""
        return self.names[0].lstrip("-").replace("-", "_")

    @property
    def name(self) -> str:
        """Return the name of the field, of a constraint that of its figure."""
        return self.field.removesuffix(MAX).rpartition(".")[2]

    def read(self, text: str | list[str], info: "FieldInfo") -> object:
        """Return the value of the option's text, in the unit of the field.

        Raises:
            CliError: the text is no such quantity; the message names option, text and form.
        """
        if isinstance(text, list):
            return text
        if text.strip() == "0" and _limit(info, "ge") == 0:
            return 0  # a quantity is above it elsewhere
        value, factor = _reader(self.name, info)(self.names[0], text), _limit(info, "factor")
        return value * factor if factor and isinstance(value, float) else value

    def parameter(self, info: "FieldInfo", usual: object = None) -> inspect.Parameter:
        """Return the parameter of a command: a text, with the help of the field."""

        def complete(incomplete: str) -> list[str]:
            return [str(each) for each in choices_of(info) if str(each).startswith(incomplete)]

        shown = typer.Option(
            *self.names,
            metavar=METAVARS[_reader(self.name, info)],
            help=help_of(info, " at most" if self.field.endswith(MAX) else "", usual),
            autocompletion=complete,
        )
        kind, texts = inspect.Parameter.KEYWORD_ONLY, Annotated[list[str] | None, shown]
        is_list = get_origin(info.annotation) is list and not _is_shell(info)
        text = texts if is_list else Annotated[str | None, shown]
        return inspect.Parameter(self.key, kind, default=None, annotation=text)


def give_options(
    command: Callable[..., None],
    options: Mapping[FieldOption, "FieldInfo"],
    usual: Mapping[str, object] | None = None,
) -> None:
    """Let options be the ``**texts`` of a command, before its ``output``; ``usual`` has defaults.

    The help says how their quantities are written.
    """
    signature = inspect.signature(command)
    *own, output, _ = signature.parameters.values()
    given = [each.parameter(info, (usual or {}).get(each.name)) for each, info in options.items()]
    command.__signature__ = signature.replace(parameters=[*own, *given, output])  # type: ignore[attr-defined]
    shown = {METAVARS[_reader(each.name, info)] for each, info in options.items()}
    forms = ", ".join(f"{name} as {form}" for name, form in FORMS.items() if name in shown)
    if forms:
        command.__doc__ = f"{inspect.getdoc(command)}\n\nQuantities are written: {forms}."


def read_options(
    model: "type[BaseModel]", options: Iterable[FieldOption], texts: Texts
) -> dict[str, Any]:
    """Return the fields of a model that texts give.

    Raises:
        CliError: a value is none of its field's; the message names option, text and limit.
    """
    from pydantic import ValidationError

    fields = model.model_fields
    given = {each.name: (each, texts.get(each.key)) for each in options}
    values = {
        name: option.read(text, fields[name])
        for name, (option, text) in given.items()
        if text is not None and text != []
    }
    try:
        model.model_validate(values)
    except ValidationError as error:
        fault = error.errors()[0]
        name = str(fault["loc"][0])
        (flag, *_), text = given[name][0].names, given[name][1]
        limits = limits_in_words(fields[name])
        why = f"it can be {limits}" if limits else fault["msg"]
        raise CliError(f"{flag} is {text!r}: {why}", field=flag) from error
    return values


def _types_and_limits(info: "FieldInfo") -> Iterator[Any]:
    """Yield what a field's type consists of, such as int, None, Literal and Ge(0)."""
    pending: list[Any] = [info.annotation, *info.metadata]
    for each in pending:  # grows while it is read
        yield each
        pending += getattr(each, "metadata", ())
        pending += () if get_origin(each) is Literal else get_args(each)


def choices_of(info: "FieldInfo") -> tuple[object, ...]:
    """Return the values that a field may have, or none if it is not a choice."""
    return next((get_args(e) for e in _types_and_limits(info) if get_origin(e) is Literal), ())


def _limit(info: "FieldInfo", side: str) -> float | None:
    """Return a number that a field's type states, such as the limit ``ge``."""
    found = (getattr(each, side, None) for each in _types_and_limits(info))
    return next((each for each in found if each is not None), None)


def _shown_of(info: "FieldInfo") -> "Shown | None":
    """Return how a field of a plan document is shown, None of other models."""
    from runners.plans.fields import Shown

    return next((each for each in info.metadata if isinstance(each, Shown)), None)


def _is_shell(info: "FieldInfo") -> bool:
    shown = _shown_of(info)
    return shown is not None and shown.is_command_line


def _reader(name: str, info: "FieldInfo") -> Reader:
    if _is_shell(info):
        return shell_line
    types = [*_types_and_limits(info)]
    if _limit(info, "factor") not in {None, 1}:
        return number  # in the unit that a form shows
    numeric = (int, count), (float, number)
    plain = word if choices_of(info) else next((r for t, r in numeric if t in types), word)
    read = reader_of_unit(name) or plain
    return count if read is count_or_max and type(None) not in types else read


def help_of(info: "FieldInfo", ending: str = "", usual: object = None) -> str:
    """Return the help of a field: its words, then its choices, limits and default.

    ``usual`` is a default that takes the place of the field's own, where the situation is usual.
    """
    *others, last = map(str, choices_of(info) or ("",))
    default = None if info.is_required() else info.get_default()
    facts = [
        f"{', '.join(others)} or {last}" if others else last,
        limits_in_words(info),
        f"usually {_shown(usual)}" if usual else f"default {_shown(default)}" if default else "",
    ]
    stated = "; ".join(each for each in facts if each)
    return f"{_words(info)}{ending}{f' ({stated})' if stated else ''}."


def _words(info: "FieldInfo") -> str:
    """Return the words of a field; of a plan document's its help, or the title with its unit."""
    shown = _shown_of(info)
    if shown is None:
        return str(info.description)
    return shown.help if shown.help and shown.factor == 1 else shown.title


def limits_in_words(info: "FieldInfo") -> str:
    """Return the lowest and highest value of a number as ``1 to 100``, nothing if it has none.

    A plan document's field is in the unit that its form shows, such as hours.
    """
    low, high, factor = _limit(info, "ge"), _limit(info, "le"), _limit(info, "factor") or 1.0
    if high is None:
        return ""
    return f"{f'{low / factor:,g} to' if low is not None else 'at most'} {high / factor:,g}"


def parameter_of(info: "FieldInfo") -> Any:  # noqa: ANN401 (what a parameter is annotated with)
    """Return the words and limits of a plan document's field, in the unit that its form shows."""
    from pydantic import Field

    factor = _limit(info, "factor") or 1
    limits: dict[str, Any] = {
        side: limit if factor == 1 else limit / factor
        for side in ("ge", "le", "max_length")
        if (limit := _limit(info, side)) is not None
    }
    return Field(description=_words(info), **limits)


def _shown(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)

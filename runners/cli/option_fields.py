"""A field of a model as an option of the command line: how its text is read, and its help.

Type, limits, choices, default and words are the field's own; the ending of its name is its unit.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from runners.cli.quantities import (
    Reader,
    count,
    count_or_max,
    duration,
    length,
    rate,
    reader_of_unit,
    share,
    size,
    word,
)

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

METAVARS: dict[Reader, str] = {
    count: "N",
    count_or_max: "N|max",
    length: "TOKENS",
    duration: "DURATION",
    size: "SIZE",
    rate: "RATE",
    share: "SHARE",
    word: "NAME",
}
FORMS = (
    "N is written as 16, 4k or 1.5B, TOKENS as 8192 or 8K, a DURATION as 500ms, 1.5s or 8h, a "
    "RATE as 5/s or 300/min, a SHARE as 0.3 or 30%."
)


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


def _reader(name: str, info: "FieldInfo") -> Reader:
    is_number = int in _types_and_limits(info) and not choices_of(info)
    return reader_of_unit(name) or (count if is_number else word)


def read_as(option: str, text: str, name: str, info: "FieldInfo") -> object:
    """Return the value of an option's text for a field of this name.

    Raises:
        CliError: the text is no such quantity; the message names option, text and form.
    """
    if text.strip() == "0" and _limit(info, "ge") == 0:
        return 0  # a quantity is above it elsewhere
    return _reader(name, info)(option, text)


def metavar_of(name: str, info: "FieldInfo") -> str:
    """Return what the help shows for the value of a field of this name."""
    return METAVARS[_reader(name, info)]


def help_of(info: "FieldInfo", *, ending: str = "", usual: object = None) -> str:
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
    from runners.plans.fields import Shown

    shown = next((each for each in info.metadata if isinstance(each, Shown)), None)
    if shown is None:
        return str(info.description)
    return shown.help if shown.help and shown.factor == 1 else shown.title


def limits_in_words(info: "FieldInfo") -> str:
    """Return the lowest and highest value of a number as ``1 to 100``, or nothing.

    A plan document's field is in the unit that its form shows, such as hours.
    """
    low, high, factor = _limit(info, "ge"), _limit(info, "le"), _limit(info, "factor") or 1.0
    return "" if low is None or high is None else f"{low / factor:,g} to {high / factor:,g}"


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

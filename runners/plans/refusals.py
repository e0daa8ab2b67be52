"""Why a document cannot be planned or launched: a sentence, and the document's field."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from planner.specs.base import location_of

Document = TypeVar("Document", bound=BaseModel)


def first_message(error: ValidationError) -> str:
    """Return the message of the first invalid field, without pydantic's prefix."""
    return str(error.errors()[0]["msg"]).removeprefix("Value error, ")


@dataclass(unsafe_hash=True)  # not frozen: exception handling sets the traceback
class DraftProblem(Exception):  # noqa: N818 -- shown to people, who have problems
    """A draft that cannot be planned or launched; the sentence includes a remedy."""

    sentence: str
    field: str = ""
    is_passing: bool = False  # temporary: callers may retry
    is_refused: bool = False  # complete, but the planner or the engine refuses it
    path: tuple[str, ...] = ()  # of the field in the document

    def __str__(self) -> str:
        return self.sentence


def validated(
    kind: type[Document],
    fields: Mapping[str, Any],
    words: str,
    field: str,
    *,
    names_its_field: bool = False,
) -> Document:
    """Return a job's specification of the chosen options.

    ``words`` begin the sentence of a refusal, and ``field`` is the option that it stands at,
    unless the specification's own field, which the option is named like, is to be named.

    Raises:
        DraftProblem: the options exclude each other.
    """
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        place = error.errors()[0]["loc"]
        if names_its_field and place:
            field = str(place[0])
        raise DraftProblem(f"{words}: {first_message(error)}.", field) from error


@contextmanager
def naming_the_field() -> Iterator[None]:
    """Turn the refusal of a value by one of the planner's documents into a DraftProblem.

    Raises:
        DraftProblem: a value is not valid there; the sentence names it and its field.
    """
    try:
        yield
    except ValidationError as error:
        first = error.errors()[0]
        field, message = ".".join(map(str, location_of(first))), first_message(error)
        given = first["input"]
        shown = "" if isinstance(given, dict | BaseModel) else f" (it is {given!r})"
        raise DraftProblem(f"{field}: {message}{shown}.", field) from error

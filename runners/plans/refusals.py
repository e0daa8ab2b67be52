"""Why a document cannot be planned or launched: a sentence, and the document's field."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pydantic import ValidationError


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
        field = ".".join(str(part) for part in first["loc"])
        raise DraftProblem(
            f"{field}: {first['msg']} (it is {first['input']!r}).", field
        ) from error

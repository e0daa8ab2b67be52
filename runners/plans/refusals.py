"""Why a document cannot be planned or launched: a sentence, and the document's field."""

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

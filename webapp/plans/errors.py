"""Problems of a draft, as a sentence with the field."""

from dataclasses import dataclass


@dataclass(unsafe_hash=True)  # not frozen: exception handling sets the traceback
class DraftProblem(Exception):  # noqa: N818 -- shown to people, who have problems
    """A draft that cannot be planned or launched; the sentence includes a remedy."""

    sentence: str
    field: str = ""
    is_passing: bool = False  # temporary: callers may retry
    is_refused: bool = False  # complete, but the planner or the engine refuses it

    def __str__(self) -> str:
        return self.sentence

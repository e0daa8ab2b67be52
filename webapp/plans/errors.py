"""What is wrong with a draft, in words and with the field that it is about."""

from dataclasses import dataclass


@dataclass(unsafe_hash=True)  # not frozen: who lets it pass sets its traceback
class DraftProblem(Exception):  # noqa: N818 -- shown to people, who have problems
    """A draft that cannot be planned or launched: the sentence says the way out."""

    sentence: str
    field: str = ""
    is_passing: bool = False  # it passes by itself: whoever waits may ask again

    def __str__(self) -> str:
        return self.sentence

"""Reward functions of a reinforcement learning: which ones, with which weights and limits."""

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

BUILT_IN: Mapping[str, str] = {
    "exact_match": "1 where the answer is the record's “answer”, without regard to white space",
    "last_number": "1 where the last number of the answer is that of the record's “answer”",
    "think_format": "1 where the answer is <think>…</think> and then some text",
}
USUAL_FUNCTION = "reward"  # of a file that names none
MOST_REWARDS = 8
_FUNCTION = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$(?!\n)")


class RewardFunction(BaseModel):
    """A function that scores completions: a built-in one, or of a Python file on the host.

    ``path`` lies below the host's folder ``rewards``, or another that its operator names; empty:
    built in. The function is called as TRL calls its own: with ``prompts``, ``completions``,
    ``completion_ids``, and ``answer``, ``solution`` and ``ground_truth`` where the records have
    them, each a list with an entry per completion. It returns a number for each, or None where it
    has nothing to say. ``weight`` multiplies it in the sum.

    Source: https://huggingface.co/docs/trl/grpo_trainer (using a custom reward function).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    function: str = Field(default=USUAL_FUNCTION, pattern=_FUNCTION, max_length=40)
    path: str = Field(default="", max_length=1000)
    weight: Annotated[float, Field(gt=-1000.0, lt=1000.0)] = 1.0

    @model_validator(mode="after")
    def _is_there(self) -> Self:
        if not self.path and self.function not in BUILT_IN:
            raise ValueError(
                f"{self.function} is no built-in reward function ({', '.join(BUILT_IN)}); choose "
                "one, or name a file of yours as FILE.py:FUNCTION"
            )
        if self.path and PurePosixPath(self.path).suffix != ".py":
            raise ValueError(
                f"{self.path[:80]} is no Python file: a reward function stands in one that ends "
                "in .py"
            )
        if ".." in self.path.split("/") or "\0" in self.path:
            raise ValueError("a reward function's path may not contain “..”")
        return self


def parse_rewards(text: str) -> tuple[RewardFunction, ...]:
    r"""Return the functions of a text with one a line: ``NAME [WEIGHT]``.

    ``NAME`` is a built-in one, ``FILE.py`` or ``FILE.py:FUNCTION``.

    >>> parse_rewards("exact_match\nrewards/short.py:brevity 0.2")[1].weight
    0.2

    Raises:
        ValueError: a line is none of these, or there are too many; the text names the line.
    """
    lines = [line.split() for line in text.splitlines() if line.strip()]
    if len(lines) > MOST_REWARDS:
        raise ValueError(f"there are {len(lines)} reward functions; give {MOST_REWARDS} at most")
    try:
        found = tuple(_of_words(words) for words in lines)
    except ValidationError as error:
        raise ValueError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None
    if twice := twice_named(found):
        raise ValueError(twice)
    return found


def twice_named(functions: Sequence[RewardFunction]) -> str:
    """Return why two of some functions do not go together, "" if all have names of their own."""
    names = [each.function for each in functions]
    if twice := {each for each in names if names.count(each) > 1}:
        return (
            f"two reward functions have the name {min(twice)}, which their curves have; rename one"
        )
    return ""


def _of_words(words: list[str]) -> RewardFunction:
    name, *rest = words
    if len(rest) > 1:
        raise ValueError(f"{' '.join(words)[:80]!r} is no function and its weight")
    try:
        weight = float(rest[0]) if rest else 1.0
    except ValueError:
        raise ValueError(f"{rest[0][:40]!r}, the weight of {name[:80]}, is no number") from None
    if not name.endswith(".py") and ".py:" not in name:
        return RewardFunction(function=name[:41], weight=weight)
    path, _, function = name.partition(":")
    return RewardFunction(path=path, function=function or USUAL_FUNCTION, weight=weight)

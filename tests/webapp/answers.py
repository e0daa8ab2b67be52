"""The planner's answers, each computed once in a process however many tests ask for it.

The planner is pure: the same question has the same answer, which is frozen. The wizard's tests
ask few questions many times. A test of planning itself asks under ``fresh``.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from typing import Any

import pytest

from planner import api
from planner.specs.base import Spec

MOST_ANSWERS = 48  # one may take a megabyte
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    name: getattr(api, name) for name in ("plan", "best_plan", "estimate", "inverse")
}


class _Question:
    """A request to a function of the planner, compared by its text."""

    def __init__(self, function: str, request: Spec) -> None:
        self.function, self.request, self.text = function, request, repr(request)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Question) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[str, str]:
        return self.function, self.text


@lru_cache(maxsize=MOST_ANSWERS)
def _answer(question: _Question) -> Any:
    return FUNCTIONS[question.function](question.request)


def _ask(function: str, request: Spec) -> Any:
    return _answer(_Question(function, request))


SHARED = {function: partial(_ask, function) for function in FUNCTIONS}


@contextlib.contextmanager
def _patched(functions: Mapping[str, Callable[[Any], Any]]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, function in functions.items():
            patch.setattr(api, name, function)
        yield


shared = partial(_patched, SHARED)  # answers of earlier tests count
fresh = partial(_patched, FUNCTIONS)  # every answer is computed anew

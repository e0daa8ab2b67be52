"""How much of a product of cases a run takes: every pair in the suite, everything nightly.

``--nightly`` runs all combinations of ``combinations``, all cases of ``first``, 500 examples of
each property, and the soak. The suite itself runs enough combinations that every two values of
two axes meet once, and each property with the examples that its own settings ask for, new ones in
every run. A failing example is printed so that it can be kept.
"""

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
from allpairspy import AllPairs
from hypothesis import settings

NIGHTLY_EXAMPLES = 500
_nightly: list[bool] = []  # filled before test modules are imported


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take the option."""
    parser.addoption(
        "--nightly", action="store_true", help="run every combination, and 500 examples"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Note it before test modules are imported."""
    _nightly[:] = [True] if config.getoption("nightly") else []


def combinations(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return combinations of one value of each axis: each pair of values once, all nightly."""
    lists = [list(axis) for axis in axes]
    if _nightly or len(lists) < 2:
        return list(itertools.product(*lists))
    return [tuple(row) for row in AllPairs(lists)]


def first(cases: Iterable[Any], num: int = 1) -> list[Any]:
    """Return the first of some cases that a cheaper test shows one by one; all nightly."""
    found = list(cases)
    return found if _nightly else found[:num]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let every property draw many examples where all is to be run."""
    if not _nightly:
        return
    for item in items:
        function = getattr(item, "obj", None)
        if getattr(function, "is_hypothesis_test", False):
            _draw_more(getattr(function, "__func__", function))


def _draw_more(function: Any) -> None:
    found = getattr(function, "_hypothesis_internal_use_settings", None) or settings.default
    if found.max_examples < NIGHTLY_EXAMPLES:
        function._hypothesis_internal_use_settings = settings(found, max_examples=NIGHTLY_EXAMPLES)

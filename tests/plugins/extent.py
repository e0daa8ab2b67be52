"""How much of a product of cases a run takes: a sample in the gate, everything nightly.

``--nightly`` runs all combinations of ``combinations``, all cases of ``first``, 500 examples of
each property, and the soak. The suite itself runs enough combinations that every two values of
two axes meet once, and each property with the examples that its own settings ask for, new ones in
every run. A failing example is printed so that it can be kept.

The gate leaves out what is marked ``slow``, and takes a quarter or more of ``sample`` and of each
property's examples. Its sample follows the seed of the order, so ``--gate --randomly-seed=N``
repeats it; every run without ``--gate`` takes all.
"""

import itertools
import math
import random
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

import pytest
from allpairspy import AllPairs
from hypothesis import settings

NIGHTLY_EXAMPLES = 500
SMALLEST_SHARE = 0.25
FEWEST_EXAMPLES = 5
Case = TypeVar("Case")
_nightly: list[bool] = []  # filled before test modules are imported
_gate_seed: list[int] = []  # likewise


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take the option."""
    parser.addoption(
        "--nightly", action="store_true", help="run every combination, and 500 examples"
    )


@pytest.hookimpl(trylast=True)  # pytest-randomly has read or drawn its seed
def pytest_configure(config: pytest.Config) -> None:
    """Note it before test modules are imported."""
    _nightly[:] = [True] if config.getoption("nightly") else []
    seed = getattr(config.option, "randomly_seed", 0)
    _gate_seed[:] = [seed] if config.getoption("gate", default=False) else []


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


def sample(
    cases: Iterable[Case],
    share: float = SMALLEST_SHARE,
    kind: Callable[[Case], Hashable] = lambda _: None,
) -> list[Case]:
    """Return some of the cases in the gate, drawn by the run's seed, and all in every other run.

    Args:
        cases: What one test walks, or what ``parametrize`` gets, in a fixed order.
        share: The part of them that the gate takes, from ``SMALLEST_SHARE`` to 1.
        kind: Returns the kind of a case; one case of each kind is always taken.

    Returns:
        Cases in their given order.

    Raises:
        ValueError: If the share is smaller than ``SMALLEST_SHARE`` or larger than 1.
    """
    if not SMALLEST_SHARE <= share <= 1:
        raise ValueError(f"share is {share}; a sample takes {SMALLEST_SHARE} to 1 of its cases")
    found = list(cases)
    if not _gate_seed:
        return found
    order = list(range(len(found)))
    random.Random(_gate_seed[0]).shuffle(order)  # noqa: S311
    one_of_each = {kind(found[index]): index for index in order}
    taken = dict.fromkeys([*one_of_each.values(), *order])
    number = max(len(one_of_each), math.ceil(share * len(found)))
    return [found[index] for index in sorted(itertools.islice(taken, number))]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave slow tests out of the gate, and set how many examples each property draws."""
    if config.getoption("gate", default=False):
        slow = [item for item in items if item.get_closest_marker("slow")]
        if slow:
            config.hook.pytest_deselected(items=slow)
            items[:] = [item for item in items if item not in slow]
    functions = [getattr(item, "obj", None) for item in items]
    properties = {  # the cases of a table share their function
        getattr(each, "__func__", each)
        for each in functions
        if getattr(each, "is_hypothesis_test", False)
    }
    for function in properties:
        found = getattr(function, "_hypothesis_internal_use_settings", None) or settings.default
        number = num_examples(found.max_examples)
        if number != found.max_examples:
            function._hypothesis_internal_use_settings = settings(found, max_examples=number)


def num_examples(number: int) -> int:
    """Return how many examples a run draws of a property whose settings ask for ``number``."""
    if _nightly:
        return max(number, NIGHTLY_EXAMPLES)
    return (
        max(min(number, FEWEST_EXAMPLES), math.ceil(number * SMALLEST_SHARE))
        if _gate_seed
        else number
    )

"""The budget of the gate: tests that take long are drawn by the run's seed, the rest always runs.

``costs.csv`` has the seconds of processor time of every test function from ``COSTLY_SECONDS`` on,
a case of it where it has several. The gate runs all tests below that, and of those in the list as
many as ``BUDGET_SECONDS`` allow, so that it takes the same time when tests are added. Which ones
follows from the seed of the order: ``--gate --randomly-seed=N`` repeats them, and every run
without ``--gate`` takes all. ``ALWAYS`` are those whose law no cheaper test holds.

``--record-costs`` writes the list anew from a run of the gate's folders.
"""

import csv
import os
import random
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest

LIST = Path(__file__).with_name("costs.csv")
COSTLY_SECONDS = 0.5
BUDGET_SECONDS = 150.0  # of processor time, of two cores
ALWAYS = (  # who may do what, and the checks
    "tests/architecture/",
    "tests/books/",
    "tests/planner/laws/",
    "tests/system/",
    "tests/webapp/accounts/test_matrix.py",
    "tests/webapp/api/test_budgets.py",
    "tests/webapp/api/test_matrix.py",
    "tests/webapp/core/test_hostile_requests.py",
)
_recorded: dict[str, list[float]] = defaultdict(list)
_began: dict[str, float] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take the option."""
    parser.addoption(
        "--record-costs", action="store_true", help=f"write the tests' times to {LIST.name}"
    )


def read() -> dict[str, float]:
    """Return the seconds of processor time of a case of each costly test function."""
    with LIST.open(encoding="utf-8", newline="") as file:
        return {row["test"]: float(row["seconds"]) for row in csv.DictReader(file)}


def function_of(test: str) -> str:
    """Return the id of a test function, of whose cases one is given."""
    return test.partition("[")[0]


def drawn(tests: list[str], costs: dict[str, float], seed: int, budget: float) -> set[str]:
    """Return those of some tests that a gate runs: the cheap ones, and what the budget allows."""
    costly = [test for test in tests if function_of(test) in costs and not test.startswith(ALWAYS)]
    taken = set(tests).difference(costly)
    random.Random(seed).shuffle(costly)  # noqa: S311
    for test in costly:
        budget -= costs[function_of(test)]
        if budget < 0:
            break
        taken.add(test)
    return taken


@pytest.hookimpl(tryfirst=True)  # before the order is drawn: both workers see one list
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out of the gate what its budget does not reach."""
    if not config.getoption("gate", default=False):
        return
    seed = getattr(config.option, "randomly_seed", 0)
    names = [item.nodeid for item in items if not item.get_closest_marker("slow")]
    taken = drawn(sorted(names), read(), seed, BUDGET_SECONDS)
    left = set(names) - taken
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left])
    items[:] = [item for item in items if item.nodeid not in left]


def _processor_seconds() -> float:
    times = os.times()
    return sum((times.user, times.system, times.children_user, times.children_system))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Note when a test begins."""
    _began[item.nodeid] = _processor_seconds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Give the time of set-up and call to the report, which a worker sends on."""
    report = yield
    if call.when == "call":
        taken = _processor_seconds() - _began.pop(item.nodeid, _processor_seconds())
        report.user_properties.append(("processor_seconds", taken))
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep the time of a test that ran."""
    if report.when == "call":
        _recorded[function_of(report.nodeid)] += [
            seconds for name, seconds in report.user_properties if name == "processor_seconds"
        ]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the list, in the process that hears of all tests."""
    if not session.config.getoption("record_costs") or hasattr(session.config, "workerinput"):
        return
    means = {test: sum(found) / len(found) for test, found in _recorded.items() if found}
    with LIST.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("test", "seconds"))
        writer.writerows(
            (test, f"{seconds:.1f}")
            for test, seconds in sorted(means.items())
            if seconds >= COSTLY_SECONDS
        )

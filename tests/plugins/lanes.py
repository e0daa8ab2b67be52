"""Run the suite in lanes that overlap: computing, jobs with torch, and tests that mostly wait.

``--lanes`` collects once and forks workers (``workers.py``); each takes one unit after the other
from its lane, the longest first by the seconds of an earlier run (``durations.csv``, kept by
``--keep-durations``). A unit is a file, or a whole area where the tests of several files share
something that is dear to start. Each lane is a marker too: ``-m jobs``.

A worker more than cores takes what the tests that wait leave of them. Four and five gained
nothing where they were tried: products under test keep a core busy themselves, and jobs with a
budget of seconds did too little in it.
"""

import csv
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

KEPT = Path(__file__).with_name("durations.csv")
UNKNOWN_SECONDS = 5.0  # a file that no kept run has seen


LANES = {"wait": 1, "jobs": 1, "cpu": 1}  # workers; one whose lane is empty helps another
LANE_OF_FOLDER = {  # a folder before the one that holds it; all others compute
    "tests/runners/jobs": "jobs",
    "tests/runners/slurm": "wait",
    "tests/runners/environments": "wait",
    "tests/faults": "wait",
    "tests/browser": "wait",
    "tests/namespaces": "wait",
    "tests/boot": "wait",
}
AREAS = (  # one unit each: their files share a product, an endpoint or a cluster
    "tests/faults",
    "tests/browser",
    "tests/runners/jobs/serve",
    "tests/runners/slurm",
)
APART = {  # files of an area that start what they need themselves
    "tests/faults/test_contract_soak.py",
    "tests/faults/test_history_on_postgres.py",
    "tests/faults/test_hostile_soak.py",
    "tests/faults/test_laws.py",
    "tests/faults/test_out_of_memory.py",
    "tests/faults/test_postgres_killed.py",
}


@dataclass
class Unit:
    """What one worker runs in one go."""

    name: str
    lane: str
    items: list[int] = field(default_factory=list)  # positions in the session's list
    seconds: float = 0.0


def lane_of(path: str) -> str:
    """Return the lane of a test file, given relative to the project's root."""
    found = (lane for folder, lane in LANE_OF_FOLDER.items() if path.startswith(f"{folder}/"))
    return next(found, "cpu")


def unit_of(path: str) -> str:
    """Return the name of the unit that a test file belongs to: its area's, else its own path."""
    areas = (area for area in AREAS if path.startswith(f"{area}/") and path not in APART)
    return next(areas, path)


def path_of(item: pytest.Item) -> str:
    """Return a test's file relative to the project's root."""
    return item.nodeid.partition("::")[0]


def make_units(paths: Iterable[str], seconds: dict[str, float]) -> list[Unit]:
    """Return the units of tests in the given files, the longest first."""
    units: dict[str, Unit] = {}
    files: dict[str, set[str]] = defaultdict(set)
    for number, path in enumerate(paths):
        unit = units.setdefault(unit_of(path), Unit(unit_of(path), lane_of(path)))
        unit.items.append(number)
        files[unit.name].add(path)
    for unit in units.values():
        unit.seconds = sum(seconds.get(path, UNKNOWN_SECONDS) for path in files[unit.name])
    return sorted(units.values(), key=lambda unit: -unit.seconds)


def read_durations(path: Path = KEPT) -> dict[str, float]:
    """Return the seconds that each test file took in the kept run."""
    if not path.exists():
        return {}
    with path.open(encoding="utf-8", newline="") as lines:
        return {row["file"]: float(row["seconds"]) for row in csv.DictReader(lines)}


def write_durations(seconds: dict[str, float], path: Path = KEPT) -> None:
    """Keep the seconds of each test file for the order of later runs."""
    with path.open("w", encoding="utf-8", newline="") as lines:
        writer = csv.writer(lines, lineterminator="\n")
        writer.writerow(["file", "seconds"])
        writer.writerows((name, f"{spent:.1f}") for name, spent in sorted(seconds.items()))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take the options of a run in lanes."""
    group = parser.getgroup("lanes")
    group.addoption("--lanes", action="store_true", help="run forked workers, lane by lane")
    group.addoption(
        "--keep-durations", action="store_true", help="keep the seconds of each test file"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Start counting the seconds of each file where they are to be kept."""
    for lane in LANES:
        config.addinivalue_line(
            "markers", f"{lane}: runs in the lane of that name (set by folder)"
        )
    if config.getoption("keep_durations"):
        config.pluginmanager.register(_Durations(), "durations-kept")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test with its lane, before tests are chosen by marker."""
    for item in items:
        item.add_marker(lane_of(path_of(item)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Take over the loop in a run in lanes; leave every other run alone."""
    config = session.config
    if not config.getoption("lanes") or config.option.collectonly:
        return None
    if session.testsfailed and not config.option.continue_on_collection_errors:
        return None  # pytest's own loop says so
    from tests.plugins import workers  # it makes the run's folder, which other runs do without

    units = make_units([path_of(item) for item in session.items], read_durations())
    workers.run(session, LANES, Queues(units).take)
    return True


class Queues:
    """What is still to be run, by lane."""

    def __init__(self, units: list[Unit]) -> None:
        self._waiting = {name: deque(u for u in units if u.lane == name) for name in LANES}

    def take(self, lane: str) -> list[int] | None:
        """Return a lane's next unit; once it has none, one of the lane with the most left."""
        longest = max(self._waiting, key=lambda name: sum(u.seconds for u in self._waiting[name]))
        queue = self._waiting[lane] or self._waiting[longest]
        return queue.popleft().items if queue else None


class _Durations:
    """Adds up the seconds of each test file, and keeps them when all tests have run."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        write_durations(read_durations() | self.seconds)

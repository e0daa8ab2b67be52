"""Measure what each test and fixture costs: ``--measure FOLDER`` writes one JSON line for each.

Seconds are wall-clock; CPU seconds are this process's own and those of the children that it has
waited for. ``python -m tests.plugins.measure FOLDER`` adds the lines up.
"""

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

Line = dict[str, Any]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take the folder that the lines are written to."""
    parser.getgroup("lanes").addoption(
        "--measure", type=Path, metavar="FOLDER", help="write what each phase of a test costs"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Measure where a folder is given."""
    if folder := config.getoption("measure"):
        folder.mkdir(parents=True, exist_ok=True)
        config.pluginmanager.register(Meter(folder), "meter")


class Meter:
    """Writes one line for each phase of each test, each fixture, and the collection."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()

    def _measured(self, kind: str, name: str, **more: object) -> Iterator[None]:
        started, wall, before = time.time(), time.perf_counter(), os.times()
        yield
        after = os.times()
        line = {
            "kind": kind,
            "name": name,
            "started_at": started,
            "wall_s": time.perf_counter() - wall,
            "own_cpu_s": after.user + after.system - before.user - before.system,
            "child_cpu_s": after.children_user
            + after.children_system
            - before.children_user
            - before.children_system,
            **more,
        }
        with (self.folder / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(f"{json.dumps(line)}\n")

    @pytest.hookimpl(hookwrapper=True)
    def pytest_collection(self) -> Iterator[None]:
        yield from self._measured("collection", "collection")

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        yield from self._measured("setup", item.nodeid)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        yield from self._measured("call", item.nodeid)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        yield from self._measured("teardown", item.nodeid)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> Iterator[None]:
        yield from self._measured(
            "fixture", fixturedef.argname, scope=fixturedef.scope, node=request.node.nodeid
        )


def read(folder: Path) -> Iterator[Line]:
    """Yield every line that a run wrote."""
    for path in sorted(folder.glob("*.jsonl")):
        yield from map(json.loads, path.read_text().splitlines())


def by_area(lines: Iterator[Line], depth: int) -> dict[str, list[float]]:
    """Return tests, wall, own CPU and child CPU seconds by the first folders of their paths."""
    found: dict[str, list[float]] = defaultdict(lambda: [0.0] * 4)
    for line in lines:
        if line["kind"] not in {"setup", "call", "teardown"}:
            continue
        area = "/".join(line["name"].partition("::")[0].split("/")[:depth])
        row = found[area]
        row[0] += line["kind"] == "call"
        for column, key in enumerate(("wall_s", "own_cpu_s", "child_cpu_s"), start=1):
            row[column] += line[key]
    return found


def main() -> None:
    """Print the table of a measured run."""
    folder, depth = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 3
    rows = sorted(by_area(read(folder), depth).items(), key=lambda row: -sum(row[1][2:]))
    print(f"{'area':60s} {'tests':>6s} {'wall':>8s} {'own cpu':>8s} {'child':>8s}")  # noqa: T201
    for area, (tests, *seconds) in rows:
        columns = " ".join(f"{each:8.1f}" for each in seconds)
        print(f"{area:60s} {tests:6.0f} {columns}")  # noqa: T201


if __name__ == "__main__":
    main()

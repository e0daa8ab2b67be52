"""The order of a run: what takes a minute first, all else random, with the seed at the end.

pytest-randomly shuffles files and tests. xdist hands out files in that order, so a file of a
minute that came last would leave the other worker idle. The files of one folder of
``tests/system`` stay together, because they share a product, an endpoint or a cluster.
"""

from pathlib import Path

import pytest

FIRST = (
    "tests/system/test_journey.py",
    "tests/architecture/test_checks.py",
    "tests/runners/jobs/test_prove.py",
    "tests/planner/test_accuracy.py",
    "tests/planner/test_brute_force.py",
)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move the long files of the gate to the front, and keep folders of system tests together."""
    places: dict[Path | None, int] = {}

    def place(item: pytest.Item) -> tuple[bool, int]:
        folder = item.path.parent if item.nodeid.startswith("tests/system/") else None
        return not item.nodeid.startswith(FIRST), places.setdefault(folder, len(places))

    items.sort(key=place)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print the seed, which pytest-randomly's own line hides under ``-q``."""
    seed = getattr(config.option, "randomly_seed", None)
    if isinstance(seed, int) and config.option.verbose < 0:
        terminalreporter.write_line(f"Random seed: repeat with --randomly-seed={seed}")

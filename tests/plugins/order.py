"""The order of a run: the longest files first, all else random, with the seed at the end.

pytest-randomly shuffles files and tests. xdist hands out files in that order, so a file of a
minute that came last would leave the other worker idle. What is left for the end takes seconds.
The files of one folder of ``tests/system`` stay together, because they share a product, an
endpoint or a cluster.
"""

from pathlib import Path

import pytest

FIRST = (  # the longest at the head: a minute and more, then half a minute to ten seconds
    "tests/system/test_journey.py",
    "tests/architecture/test_checks.py",
    "tests/webapp/core/test_hostile_requests.py",
    "tests/webapp/core/test_commands.py",
    "tests/planner/test_brute_force.py",
    "tests/planner/test_accuracy.py",
    "tests/runners/jobs/test_prove.py",
    "tests/webapp/accounts/test_matrix.py",
    "tests/webapp/core/test_freed_requests.py",
    "tests/runners/prove/test_proof.py",
)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move the long files of the gate to the front, and keep folders of system tests together."""
    places: dict[Path | None, int] = {}
    ranks = {file: rank for rank, file in enumerate(FIRST)}

    def place(item: pytest.Item) -> tuple[int, int]:
        folder = item.path.parent if item.nodeid.startswith("tests/system/") else None
        rank = ranks.get(item.nodeid.partition("::")[0], len(FIRST))
        return rank, places.setdefault(folder, len(places))

    items.sort(key=place)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print the seed, which pytest-randomly's own line hides under ``-q``."""
    seed = getattr(config.option, "randomly_seed", None)
    if isinstance(seed, int) and config.option.verbose < 0:
        terminalreporter.write_line(f"Random seed: repeat with --randomly-seed={seed}")

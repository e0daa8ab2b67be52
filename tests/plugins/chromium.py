"""Leave out browser tests where there is no Chromium, and say so where nobody can miss it."""

import pytest

from webapp.boot.tools import find_chromium

WORDS = "NO CHROMIUM: the browser tests did not run. Install it (Debian: apt install chromium)."


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `browser` when no Chromium is found."""
    if find_chromium() is None:
        for item in items:
            if item.get_closest_marker("browser"):
                item.add_marker(pytest.mark.skip(reason=WORDS))


def pytest_terminal_summary(terminalreporter) -> None:
    """Print the missing browser in red, right above the last line."""
    if find_chromium() is None:
        terminalreporter.write_sep("!", WORDS, red=True, bold=True)

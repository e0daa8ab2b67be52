"""Tests that failed on an unchanged tree: tests/system/unstable.toml has their cause and date.

``--gate`` leaves them out. Every other run expects that they may fail and reports them apart from
the rest, so that one of them never decides whether a change lands. An entry is to be gone within
two weeks: the test is mended, or deleted.
"""

import datetime as dt
import tomllib
from pathlib import Path

import pytest

LIST = Path(__file__).parents[1] / "system" / "unstable.toml"
LONGEST = dt.timedelta(days=14)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take the option."""
    parser.addoption("--gate", action="store_true", help="leave out the tests of unstable.toml")


def read() -> dict[str, dict]:
    """Return the entries by test id; an id without its [case] names all cases."""
    entries = tomllib.loads(LIST.read_text("utf-8")).get("test", []) if LIST.exists() else []
    return {entry["id"]: entry for entry in entries}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave listed tests out of the gate, or mark them as ones that may fail."""
    entries = read()
    if not entries:
        return
    listed = []
    for item in items:
        entry = entries.get(item.nodeid) or entries.get(item.nodeid.partition("[")[0])
        if entry:
            listed.append(item)
            reason = f"unstable since {entry['since']}: {entry['cause']}"
            item.add_marker(pytest.mark.xfail(strict=False, reason=reason))
    if config.getoption("gate") and listed:
        config.hook.pytest_deselected(items=listed)
        items[:] = [item for item in items if item not in listed]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how each listed test ended, and which entries are older than two weeks."""
    stats = terminalreporter.stats
    ended = [(how, one) for how in ("xfailed", "xpassed") for one in stats.get(how, [])]
    unstable = [(how, one) for how, one in ended if "unstable since" in str(one.wasxfail)]
    for how, one in unstable:
        terminalreporter.write_line(
            f"UNSTABLE {'failed' if how == 'xfailed' else 'passed'}: {one.nodeid} ({one.wasxfail})"
        )
    today = dt.datetime.now(tz=dt.UTC).date()
    for name, entry in read().items():
        if today - entry["since"] > LONGEST:
            terminalreporter.write_line(f"Unstable for more than two weeks: {name}", red=True)

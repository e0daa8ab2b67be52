"""The threat page names real tests, and what it says about the whole house holds."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "templates" / "docs" / "threats.md").read_text("utf-8")
FAULTS = (ROOT / "templates" / "docs" / "trust.md").read_text("utf-8")
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and "---" not in line]
THREATS = [row for row in ROWS if not row.startswith("| Threat |")]
FAILURES = (ROOT / "templates" / "docs" / "failures.md").read_text("utf-8")
NAMED = sorted(set(re.findall(r"`(tests/[^`]+\.py::\w+)`", PAGE + FAILURES + FAULTS)))
# Modules that open connections to addresses which somebody else chose.
CALLERS = {
    *("httpx", "requests", "aiohttp", "urllib.request", "ftplib", "smtplib"),
    "logging.handlers",
}
# The benches call the site that they started themselves.
OWN_SITE = Path("webapp/bench")


def test_every_named_test_exists():
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    defined = {}
    for file in {name.partition("::")[0] for name in NAMED}:
        text = (ROOT / file).read_text("utf-8") if (ROOT / file).exists() else ""
        nodes = ast.walk(ast.parse(text))
        defined[file] = {node.name for node in nodes if isinstance(node, functions)}
    assert [n for n in NAMED if n.partition("::")[2] not in defined[n.partition("::")[0]]] == []


def test_every_threat_names_a_test_or_says_that_nothing_is_built():
    assert [row for row in THREATS if "::" not in row and "*not built*" not in row] == []


def test_every_file_of_tests_that_the_page_of_faults_names_exists():
    named = set(re.findall(r"`(tests/[\w/]+\.py)`", FAULTS))
    assert len(named) > 30
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_the_page_is_not_empty():
    assert len(THREATS) >= 30
    assert len(NAMED) >= 40


def test_the_web_side_calls_its_own_machine_and_whom_its_operator_names():
    callers = {
        str(path.relative_to(ROOT)): sorted(imported_by(path) & CALLERS)
        for path in (ROOT / "webapp").rglob("*.py")
        if not path.relative_to(ROOT).is_relative_to(OWN_SITE)
    }
    assert {path: names for path, names in callers.items() if names} == {
        "webapp/accounts/breached_passwords.py": ["httpx"],  # SLIPWAY_BREACHED_PASSWORDS
        "webapp/core/log_collector.py": ["logging.handlers"],  # SLIPWAY_SYSLOG
        "webapp/pages/playground.py": ["httpx"],
        "webapp/servers/reading.py": ["httpx"],  # servers that operators of a team name
    }


def imported_by(path: Path) -> set[str]:
    """Return the modules that a file imports by name."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found

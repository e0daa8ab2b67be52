"""Say in one line which Debian packages the tests that were left out need; skip browser tests."""

import shutil
from pathlib import Path

import pytest

from webapp.boot.environment import find_chromium

# package: (what is left out without it, a part of the ids of those tests, whether it is there)
PACKAGES = {
    "chromium": ("browser tests", "browser", find_chromium),
    "slurm-wlm": ("Slurm", "system/slurm", lambda: shutil.which("slurmctld")),
    "munge": ("Slurm", "system/slurm", lambda: shutil.which("munged")),
    "iproute2": ("hosts in network namespaces", "system/namespaces", lambda: shutil.which("ip")),
    "nginx": ("nginx before a site", "[nginx", lambda: shutil.which("nginx")),
    "caddy": ("Caddy before a site", "[caddy", lambda: shutil.which("caddy")),
    "postgresql": (
        "PostgreSQL", "postgres", lambda: any(Path("/usr/lib/postgresql").glob("*/bin/initdb")),
    ),
    "redis-server": ("Redis with TLS", "redis_tls", lambda: shutil.which("redis-server")),
    "g++": ("torch.compile", "compiled", lambda: shutil.which("g++")),
}  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `browser` when no Chromium is found."""
    if not find_chromium():
        for item in items:
            if item.get_closest_marker("browser"):
                item.add_marker(pytest.mark.skip(reason="needs Chromium"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print, in red above the last line, the packages that skipped tests lack."""
    skipped = {report.nodeid for report in terminalreporter.stats.get("skipped", [])}
    missing = [
        f"{package} ({what})"
        for package, (what, part, find) in PACKAGES.items()
        if any(part in name for name in skipped) and not find()
    ]
    if missing:
        words = f"LEFT OUT, for want of Debian packages: {', '.join(missing)}"
        terminalreporter.write_line(words, red=True, bold=True)

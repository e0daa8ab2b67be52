"""What every test shares; fixtures of one area live in that area's own conftest.

Property tests draw new examples in every run but the gate; a failing one is printed with a line
that repeats it. ``HYPOTHESIS_PROFILE=repeatable`` draws the same ones each time.
"""

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("fresh", database=None, deadline=None, print_blob=True)
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fresh"))

pytest_plugins = [
    "tests.hub.fixtures",
    "tests.plugins.books",
    "tests.plugins.costs",
    "tests.plugins.databases",
    "tests.plugins.extent",
    "tests.plugins.order",
    "tests.plugins.packages",
    "tests.plugins.soak",
    "tests.plugins.unstable",
    "tests.plugins.workers",
]


@pytest.fixture(autouse=True)
def _own_signal_handlers() -> Iterator[None]:
    """Take back the handlers of Ctrl-C and SIGTERM that a test's commands installed.

    With an agent's own handler left, a later test's Ctrl-C stopped that agent and nothing else.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)

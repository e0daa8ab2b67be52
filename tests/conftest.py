"""What every test shares; fixtures of one area live in that area's own conftest.

Property tests draw the same examples in every run, so that a change is judged by what it changed;
``HYPOTHESIS_PROFILE=explore`` draws new ones.
"""

import os

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", derandomize=False, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

pytest_plugins = [
    "tests.plugins.changed",
    "tests.plugins.chromium",
    "tests.plugins.lanes",
    "tests.plugins.measure",
    "tests.plugins.order",
    "tests.plugins.soak",
]

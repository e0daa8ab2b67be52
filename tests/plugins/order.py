"""Start the long tests first, so that two workers end at about the same time.

With ``--dist loadfile --no-loadscope-reorder`` xdist hands out whole files in the order of the
collection. (Its ``loadgroup`` does nothing under pytest 9.2: seen with xdist 3.8.0.)
"""

import pytest

LONG = ("browser", "faults", "slow", "soak")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move the files that hold a long test to the front, and keep every file together."""
    long_files = {i.path for i in items if any(i.get_closest_marker(name) for name in LONG)}
    items.sort(key=lambda item: item.path not in long_files)

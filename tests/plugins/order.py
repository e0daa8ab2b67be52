"""Hand tests out so that what is dear is started once, and all workers end at about the same time.

Under ``--dist loadfile`` xdist hands out whole files in the order of the collection. An area whose
tests share a product, an endpoint or a trained model goes to one worker as a whole, which starts
the shared part once; the areas of the most seconds go first, then files with a long test, then
all others. (xdist's own ``loadgroup`` does nothing under pytest 9.2: seen with xdist 3.8.0.)
"""

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling, Scheduling

LONG = ("browser", "faults", "slow", "soak")
AREAS = (  # the most seconds first; a folder before the one that holds it
    "tests/faults",
    "tests/browser",
    "tests/runners/jobs/generate",
    "tests/runners/jobs/train",
    "tests/runners/jobs/serve",
    "tests/runners/jobs/compress",
    "tests/runners/jobs",
    "tests/runners/slurm",
)


def unit_of(nodeid: str) -> str:
    """Return what one worker runs in one go: the area that a test belongs to, else its file."""
    path = nodeid.partition("::")[0]
    return next((area for area in AREAS if path.startswith(f"{area}/")), path)


class AreaScheduling(LoadFileScheduling):
    """Hands out areas and files, each whole."""

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling | None:
    """Take over from ``--dist loadfile``; leave every other way alone."""
    return AreaScheduling(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put areas first and files with a long test next, and keep every file together."""
    long_files = {i.path for i in items if any(i.get_closest_marker(name) for name in LONG)}
    first_seen: dict[object, int] = {}
    for number, item in enumerate(items):
        first_seen.setdefault(item.path, number)

    def place(item: pytest.Item) -> tuple[int, int]:
        unit = unit_of(item.nodeid)
        if unit in AREAS:
            return AREAS.index(unit), first_seen[item.path]
        return len(AREAS) + (item.path not in long_files), first_seen[item.path]

    items.sort(key=place)

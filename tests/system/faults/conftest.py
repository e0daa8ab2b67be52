"""One installation for the fault tests of a worker, and the promises checked after every case."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.system.faults.site import Site

HERE = Path(__file__).parent
HOSTS = ("ada", "bea", "cleo")
_sites: list[Site] = []  # at most one


class Sites:
    """The one installation, made anew when a case left it in a state that does not mend."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders

    def current(self) -> Site:
        """Return the installation, started."""
        if not _sites:
            _sites.append(Site(self._folders.mktemp("site"), *HOSTS))
            _sites[0].start()
        return _sites[0]

    def check(self, site: Site) -> dict[str, Any]:
        """Mend what the case did and return every promise that is broken."""
        broken: dict[str, Any] | None = None
        try:
            site.mend()
            broken = site.broken_promises()
        finally:
            if broken != {}:  # the next case is not to be blamed for it
                end_sites()
        return broken


def end_sites() -> None:
    """Leave no process of any installation."""
    while _sites:
        _sites.pop().stop()


@pytest.fixture(scope="session")
def sites(tmp_path_factory) -> Sites:
    """Three hosts and a server; stopped as soon as the worker goes on to other tests."""
    return Sites(tmp_path_factory)


@pytest.fixture
def site(sites) -> Iterator[Site]:
    """The installation; when the case is over, nothing that was promised may be broken."""
    current = sites.current()
    current.begin_case()
    yield current
    assert sites.check(current) == {}


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Stop the installation when the next test is not one of this folder."""
    if HERE in item.path.parents and (nextitem is None or HERE not in nextitem.path.parents):
        end_sites()

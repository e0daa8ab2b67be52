"""A real product and a real browser: one of each for all tests of this folder.

Both have the scope of the package: a product of the session would work on, next to every test that
the same worker still takes, and Playwright's event loop would be in their way.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.stack import Stack
from tests.system.browser import walks
from tests.system.browser.driving import SLOW_MS, Recorder, Visitors
from webapp.boot.environment import find_chromium

HERE = Path(__file__).parent
LAST = "test_hostile_texts.py"  # what it plants must not meet the other tests


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of this folder together, and let those come last that spoil the product."""
    places = [number for number, item in enumerate(items) if HERE in item.path.parents]
    ours = sorted((items[number] for number in places), key=lambda item: item.path.name == LAST)
    for number in reversed(places):
        del items[number]
    if places:
        items[places[0] : places[0]] = ours


@pytest.fixture(scope="package")
def stack(tmp_path_factory) -> Iterator[Stack]:
    """The product with a demo of twenty seconds: a busy machine needs some for three points."""
    with Stack(tmp_path_factory.mktemp("stack"), demo_seconds=20) as running:
        yield running


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """One browser; while it runs, Django refuses the database in this process."""
    expect.set_options(timeout=SLOW_MS / 2)
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(
            executable_path=find_chromium(), args=["--no-sandbox", "--disable-gpu"]
        )
        yield found
        found.close()


@pytest.fixture(scope="package")
def visitors(browser, stack) -> Iterator[Visitors]:
    """Everyone who has logged in, each with the windows that they have asked for."""
    with Visitors(browser, stack.base_url) as everyone:
        yield everyone


@pytest.fixture(scope="package")
def watched(visitors, stack) -> dict[str, Any]:
    """What a newcomer sees from the first step of the demo to its end."""
    with visitors.page() as page:
        return walks.watch_demo(page, stack)


@pytest.fixture(scope="package")
def finished_job(watched) -> str:
    """The id of a demo job that ended well."""
    return watched["job_id"]


@pytest.fixture(scope="package")
def followed(visitors, stack) -> dict[str, Any]:
    """What pages with a good stream, a cut one and none show of one long job, then stopped."""
    return walks.follow_job(visitors, stack)


@pytest.fixture(scope="package")
def stopped_job(followed) -> str:
    """The id of a job that was stopped after it had reported some points."""
    return followed["job_id"]


@pytest.fixture(scope="package")
def tuned(visitors, stack, finished_job) -> dict[str, Any]:
    """What is seen where a team uploads a file, and the finished model learns it."""
    with visitors.page() as page:
        return walks.tune(page, stack, finished_job)


@pytest.fixture
def new_page(visitors) -> Iterator[Callable[..., Page]]:
    """Make a page that is logged in and records what it should not do; close it at the end."""
    made: list[Page] = []

    def make(user: str = "alice", **options: Any) -> Page:
        made.append(visitors.open(user, **options))
        return made[-1]

    yield make
    for page in made:
        page.close()


@pytest.fixture
def page(new_page) -> Page:
    return new_page()


@pytest.fixture
def recorder(page, stack) -> Recorder:
    """What the page asked for and which policies it broke."""
    return Recorder(page, stack.base_url)


@pytest.fixture(scope="package")
def axe() -> str:
    return (HERE / "vendor" / "axe.min.js").read_text()

"""A real product and a real browser: one of each per session, one page per test."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import (
    Browser,
    BrowserContext,
    Page,
    StorageState,
    expect,
    sync_playwright,
)

from tests.browser.driving import WATCH_POLICY, Recorder, log_in
from tests.stack import Stack
from webapp.boot.tools import find_chromium

SLOW_MS = 300_000  # a page of a loaded machine; what never comes is rare, and may take it


@pytest.fixture(scope="session")
def stack(tmp_path_factory) -> Iterator[Stack]:
    """The product with a demo of a quarter of a minute."""
    with Stack(tmp_path_factory.mktemp("stack"), demo_seconds=15) as running:
        yield running


@pytest.fixture(scope="session")
def finished_job(stack) -> str:
    """The id of a demo job that ended well."""
    client = stack.client("alice")
    job_id = client.launch_demo()
    client.wait_for_state(job_id, "succeeded", timeout_s=600)
    return job_id


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Start a browser for one file: Playwright's event loop must not outlive it.

    While it runs, Django refuses the database and asyncio a loop of its own to every other
    test of the same process.
    """
    expect.set_options(timeout=SLOW_MS / 2)
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(
            executable_path=find_chromium(), args=["--no-sandbox", "--disable-gpu"]
        )
        yield found
        found.close()


@pytest.fixture(scope="session")
def logged_in() -> dict[str, StorageState]:
    """The cookies of each user who has logged in: the password is checked once for each."""
    return {}


@pytest.fixture
def new_page(browser, stack, logged_in) -> Iterator[Callable[..., Page]]:
    """Make a page that is logged in and records what it should not do."""
    contexts: list[BrowserContext] = []

    def make(user: str = "alice", **options: Any) -> Page:
        defaults = {"viewport": {"width": 1280, "height": 800}}
        if user in logged_in:
            defaults["storage_state"] = logged_in[user]
        context = browser.new_context(**(defaults | options))
        context.set_default_timeout(SLOW_MS)
        context.add_init_script(WATCH_POLICY)
        contexts.append(context)
        page = context.new_page()
        if user not in logged_in:
            log_in(page, stack.base_url, user)
            logged_in[user] = context.storage_state()
        return page

    yield make
    for context in contexts:
        context.close()


@pytest.fixture
def page(new_page) -> Page:
    return new_page()


@pytest.fixture
def recorder(page, stack) -> Recorder:
    """What the page asked for and which policies it broke."""
    return Recorder(page, stack.base_url)


@pytest.fixture(scope="session")
def axe() -> str:
    return (Path(__file__).parent / "vendor" / "axe.min.js").read_text()

"""The queue page in a real Chromium: by keyboard alone, and without JavaScript."""

import os

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from tests.webapp.conftest import client_of
from webapp.boot.environment import find_chromium
from webapp.jobs.models import Job
from webapp.jobs.waiting import lines_of

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.django_db(transaction=True, databases="__all__"),
]


@pytest.fixture(scope="module")
def browser():
    os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "1"  # Playwright's loop runs in this thread
    with sync_playwright() as playwright:
        path = find_chromium()
        yield playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
    del os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"]


@pytest.fixture
def waiting(submit, node_a) -> list[Job]:
    submit(node_a, devices_per_host=4, name="Long run")
    return [submit(node_a, name=f"Job {name}") for name in "abc"]


def opened(browser: Browser, live_server, user, **options) -> Page:
    """Return the queue page, open for a person."""
    context: BrowserContext = browser.new_context(**options)
    for name, morsel in client_of(user).cookies.items():
        context.add_cookies([{"name": name, "value": morsel.value, "url": live_server.url}])
    page = context.new_page()
    page.goto(f"{live_server.url}/queue/")
    return page


def order(jobs: list[Job]) -> list[str]:
    return [line.job.name for line in lines_of(jobs[0].pool)]


def test_a_job_is_moved_by_keyboard_alone(browser, live_server, olga, waiting):
    page = opened(browser, live_server, olga)
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == f"up-{waiting[2].pk}":
            break
    page.keyboard.press("Enter")
    page.get_by_text("Job c moved up.").wait_for()
    assert order(waiting) == ["Job a", "Job c", "Job b"]


def test_a_job_is_moved_without_javascript(browser, live_server, olga, waiting):
    page = opened(browser, live_server, olga, java_script_enabled=False)
    page.get_by_role("button", name="Move turn 1 down").click()
    page.get_by_text("Job a moved down.").wait_for()
    assert order(waiting) == ["Job b", "Job a", "Job c"]


def test_a_priority_is_set_without_javascript(browser, live_server, olga, waiting):
    page = opened(browser, live_server, olga, java_script_enabled=False)
    page.get_by_label("Priority of turn 3").select_option("High")
    page.locator(f"#set-{waiting[2].pk}").click()
    page.get_by_text("Job c now has high priority.").wait_for()
    assert order(waiting) == ["Job c", "Job a", "Job b"]


def test_the_page_follows_a_queue_that_changes(browser, live_server, alice, waiting):
    """Without a stream the page asks again by itself; with one it asks at once."""
    page = opened(browser, live_server, alice)
    Job.objects.filter(pk=waiting[0].pk).update(state="stopped")
    page.get_by_text("2 queued").wait_for(timeout=60_000)

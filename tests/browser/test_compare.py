"""From the job list to the comparison: ticks stay while rows are live, and need no scripts."""

import re

import pytest
from playwright.sync_api import Page, expect

from tests.browser.driving import violations

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def second_job(stack, finished_job) -> str:
    """The same job once more, which was stopped."""
    client = stack.client("alice")
    _, where = client.post(f"/jobs/{finished_job}/clone/", {})
    job_id = re.search(r"/jobs/([0-9A-Z]{26})/", where)[1]
    client.wait_for_state(job_id, "running")
    client.post(f"/jobs/{job_id}/stop/", {})
    client.wait_for_state(job_id, "stopped")
    return job_id


def tick_both(page: Page, stack, *jobs: str) -> None:
    page.goto(f"{stack.base_url}/jobs/")
    for job in jobs:
        page.locator(f"input[name='job'][value='{job}']").check()


def test_ticked_rows_are_compared_without_javascript(new_page, stack, finished_job, second_job):
    page = new_page(java_script_enabled=False)
    tick_both(page, stack, finished_job, second_job)

    page.get_by_role("button", name="Compare").click()

    expect(page.get_by_role("heading", level=1)).to_have_text("2 jobs side by side")
    expect(page.locator("figure path.series-2:not(.expected)").first).to_be_attached()


def test_ticks_stay_when_the_rows_are_drawn_anew(page, stack, finished_job, second_job):
    tick_both(page, stack, finished_job, second_job)
    page.evaluate("document.querySelector('[data-region=rows] table').dataset.old = 'yes'")

    page.evaluate("document.dispatchEvent(new Event('live:poll'))")

    expect(page.locator("[data-region=rows] table[data-old]")).to_have_count(0)
    expect(page.locator("input[name='job']:checked")).to_have_count(2)


def test_the_charts_are_drawn_within_the_policy(page, stack, finished_job, second_job, recorder):
    page.goto(f"{stack.base_url}/compare/?job={finished_job}&job={second_job}")
    chart = page.locator("[data-chart='memory']")
    chart.scroll_into_view_if_needed()

    expect(chart).to_have_attribute("data-drawn", re.compile(r"[1-9]"))
    expect(chart.locator(".js-plotly-plot .scatterlayer .trace")).to_have_count(4)
    assert recorder.broken == []


def test_the_comparison_is_accessible(page, stack, finished_job, second_job, axe):
    page.goto(f"{stack.base_url}/compare/?job={finished_job}&job={second_job}&all=1")
    page.wait_for_timeout(500)

    assert violations(page, axe) == []

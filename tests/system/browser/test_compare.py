"""From the job list to the comparison: ticks stay while rows are live, and need no scripts."""

import re

import pytest
from playwright.sync_api import Page, expect

from tests.system.browser.driving import violations

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def tick_both(page: Page, stack, *jobs: str) -> None:
    page.goto(f"{stack.base_url}/jobs/")
    for job in jobs:
        page.locator(f"input[name='job'][value='{job}']").check()


def test_ticked_rows_are_compared_without_javascript(new_page, stack, finished_job, stopped_job):
    page = new_page(java_script_enabled=False)
    tick_both(page, stack, finished_job, stopped_job)

    page.get_by_role("button", name="Compare").click()

    expect(page.get_by_role("heading", level=1)).to_have_text("2 jobs side by side")
    expect(page.locator("figure path.series-2:not(.expected)").first).to_be_attached()


def test_ticks_stay_when_the_rows_are_drawn_anew(page, stack, finished_job, stopped_job):
    tick_both(page, stack, finished_job, stopped_job)
    page.evaluate("document.querySelector('[data-region=rows] table').dataset.old = 'yes'")
    box = page.locator(f"input[name='job'][value='{finished_job}']")
    box.focus()

    page.evaluate("document.dispatchEvent(new Event('live:poll'))")

    expect(page.locator("[data-region=rows] table[data-old]")).to_have_count(0)
    expect(page.locator("input[name='job']:checked")).to_have_count(2)
    expect(box).to_be_focused()


def test_the_charts_are_drawn_within_the_policy_and_accessible(
    page, stack, finished_job, stopped_job, recorder, axe
):
    page.goto(f"{stack.base_url}/compare/?job={finished_job}&job={stopped_job}&all=1")
    chart = page.locator("[data-chart='memory']")
    chart.scroll_into_view_if_needed()

    expect(chart).to_have_attribute("data-drawn", re.compile(r"[1-9]"))
    expect(chart.locator(".js-plotly-plot .scatterlayer .trace")).to_have_count(4)
    assert recorder.broken == []
    assert violations(page, axe) == []

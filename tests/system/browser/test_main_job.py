"""The main job end to end, as a newcomer does it: wizard, launch, live charts, history."""

import re

import pytest
from playwright.sync_api import expect

from tests.system.browser.driving import JOB_PATH

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture
def at_the_end(page, stack, finished_job):
    """The page of the job, opened anew."""
    page.goto(f"{stack.base_url}/jobs/{finished_job}/")
    return page


def test_points_arrive_before_the_job_ends(watched):
    assert watched["state_then"] == "running"
    assert watched["points_while_running"] >= 3


def test_the_page_is_never_loaded_again_while_it_is_watched(watched):
    assert watched["same_document"]


def test_the_tab_says_how_far_the_job_is(watched):
    assert re.match(r"\d+ % · ", watched["title_then"])


def test_the_live_region_says_that_it_is_live(watched):
    assert re.match(r"live", watched["stamp_then"])


def test_the_log_follows_the_job(watched):
    assert re.search(r"\d\d:\d\d:\d\d", watched["log_then"])
    assert "Log the last lines · the whole log" in watched["end"]


def test_predicted_stands_beside_measured_at_the_end(watched):
    assert "Predicted against measured" in watched["end"]
    assert "measured · predicted" in watched["end"]
    assert "Calibration of This machine by this run" in watched["end"]
    assert watched["empty_cards"] == []


def test_the_finished_job_is_in_the_history_with_its_ratio(page, stack, finished_job):
    page.goto(f"{stack.base_url}/jobs/")
    row = page.locator("tbody tr", has=page.locator(f"a[href='/jobs/{finished_job}/']"))
    expect(row).to_contain_text("Succeeded")
    assert re.search(r"\d[.,]\d+", row.locator("td.num.hide-s").inner_text())


def test_the_hours_of_a_long_job_are_on_its_time_axis(at_the_end):
    ticks = "() => [...document.querySelectorAll(\"[data-chart='cpu'] .xtick\")].map((one) => one.textContent)"
    chart = at_the_end.locator("[data-chart='cpu']")
    chart.scroll_into_view_if_needed()
    chart.locator(".xtick").first.wait_for()
    for hours, pattern in ((2, r"[01]:\d\d h"), (60, r"day [1-3](, \d+:\d\d)?")):
        at_the_end.evaluate(f"slipway.charts.expect({hours} * 3600e3)")
        wanted = f"() => /^(?:{pattern})$/.test(({ticks})().at(-1))"
        at_the_end.wait_for_function(wanted)
        shown = at_the_end.evaluate(ticks)
        assert len(set(shown)) == len(shown) >= 2, shown
        assert all(re.fullmatch(pattern, each) for each in shown), shown


def test_the_trained_model_can_be_downloaded(at_the_end):
    link = at_the_end.get_by_role("link", name="Download .tar")
    link.wait_for()  # the upload follows the end; the page finds out by itself
    with at_the_end.expect_download() as download:
        link.click()
    assert download.value.suggested_filename.endswith(".tar")


def test_the_next_step_leads_into_the_wizard_with_the_new_model(at_the_end):
    at_the_end.get_by_role("link", name="Compress this model").click()
    at_the_end.wait_for_url(re.compile("/plans/.*/edit/"))


def test_a_clone_opens_the_wizard_and_its_launch_is_a_job_of_its_own(at_the_end, finished_job):
    page = at_the_end
    page.get_by_role("button", name="Clone").click()
    page.wait_for_url(re.compile("/plans/.*/edit/review/"))
    expect(page.get_by_text("All settings are those of the copied job")).to_be_visible()
    page.get_by_role("button", name="Preflight & launch").click()
    page.wait_for_url(lambda url: (found := JOB_PATH.search(url)) and found[1] != finished_job)
    page.get_by_text("Stop…").click()
    page.get_by_role("button", name="Stop this job").click()
    page.wait_for_selector("[data-state-now='stopped']")

"""The main job end to end, as a newcomer does it: wizard, launch, live charts, history."""

import re

import pytest
from playwright.sync_api import Page, expect

from tests.browser.driving import JOB_PATH, drawn_points, launch, log_in, walk_to_review

pytestmark = [pytest.mark.browser, pytest.mark.slow]
LONG_MS = 600_000


@pytest.fixture(scope="module")
def watched(browser, stack):
    """Walk, launch and watch one demo job; what was seen on the way is what the tests judge."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    log_in(page, stack.base_url, "alice")
    seen: dict = {"home": page.title()}
    walk_to_review(page, stack.base_url)
    seen["review"] = page.inner_text("main")
    seen["job_id"] = launch(page)
    watch(page, seen)
    yield page, seen
    context.close()


def watch(page: Page, seen: dict) -> None:
    """Note what the page shows while the job runs, without ever loading it again."""
    page.evaluate("window.sameDocument = true")
    page.wait_for_selector("[data-state-now='running']", timeout=LONG_MS)
    page.wait_for_function(
        "() => Number(document.querySelector(\"[data-chart='loss']\").dataset.drawn || 0) >= 3",
        timeout=LONG_MS,
    )
    seen["points_while_running"] = drawn_points(page, "loss")
    # Points are drawn as they come; the regions and the title follow within seconds.
    page.wait_for_function("() => document.title.includes('%')", timeout=LONG_MS)
    seen["title_then"] = page.title()
    seen["state_then"] = page.get_attribute("[data-state-now]", "data-state-now")
    seen["log_then"] = page.inner_text("[data-log]")
    seen["stamp_then"] = page.inner_text("[data-stamp]")
    page.wait_for_selector("[data-state-now='succeeded']", timeout=LONG_MS)
    page.get_by_role("heading", name="What it left, and what next").wait_for(timeout=LONG_MS)
    seen["same_document"] = page.evaluate("window.sameDocument === true")
    seen["end"] = page.inner_text("main")


def test_points_arrive_before_the_job_ends(watched):
    _, seen = watched
    assert seen["state_then"] == "running"
    assert seen["points_while_running"] >= 3


def test_the_page_is_never_loaded_again_while_it_is_watched(watched):
    _, seen = watched
    assert seen["same_document"]


def test_the_tab_says_how_far_the_job_is(watched):
    _, seen = watched
    assert re.match(r"\d+ % · ", seen["title_then"])


def test_the_live_region_says_that_it_is_live(watched):
    _, seen = watched
    assert re.match(r"live", seen["stamp_then"])


def test_the_log_follows_the_job(watched):
    _, seen = watched
    assert re.search(r"\d\d:\d\d:\d\d", seen["log_then"])


def test_predicted_stands_beside_measured_at_the_end(watched):
    _, seen = watched
    assert "Predicted against measured" in seen["end"]
    assert "measured · predicted" in seen["end"]


def test_the_finished_job_is_in_the_history_with_its_ratio(watched, stack):
    page, seen = watched
    page.goto(f"{stack.base_url}/jobs/")
    row = page.locator("tbody tr", has=page.locator(f"a[href='/jobs/{seen['job_id']}/']"))
    expect(row).to_contain_text("Succeeded")
    assert re.search(r"\d[.,]\d+", row.locator("td.num.hide-s").inner_text())


def test_the_trained_model_can_be_downloaded(watched, stack):
    page, seen = watched
    page.goto(f"{stack.base_url}/jobs/{seen['job_id']}/")
    link = page.get_by_role("link", name="Download .tar")
    link.wait_for(timeout=LONG_MS)  # the upload follows the end; the page finds out by itself
    with page.expect_download() as download:
        link.click()
    assert download.value.suggested_filename.endswith(".tar")


def test_the_next_step_leads_into_the_wizard_with_the_new_model(watched, stack):
    page, seen = watched
    page.goto(f"{stack.base_url}/jobs/{seen['job_id']}/")
    page.get_by_role("link", name="Compress it").click()
    page.wait_for_url(re.compile("/plans/.*/edit/"))


def test_a_clone_is_a_job_of_its_own(watched, stack):
    page, seen = watched
    page.goto(f"{stack.base_url}/jobs/{seen['job_id']}/")
    page.get_by_role("button", name="Clone").click()
    page.wait_for_url(lambda url: JOB_PATH.search(url)[1] != seen["job_id"])
    page.get_by_text("Stop…").click()
    page.get_by_role("button", name="Stop this job").click()
    page.wait_for_selector("[data-state-now='stopped']", timeout=600_000)

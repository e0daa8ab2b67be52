"""The main way through the product without any JavaScript."""

import re

import pytest
from playwright.sync_api import Page, expect

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture
def plain_page(new_page) -> Page:
    return new_page(java_script_enabled=False)


def test_the_wizard_leads_to_a_running_job(followed):
    assert followed["state_without_javascript"] == "running"


def test_a_finished_job_shows_its_charts_as_pictures_and_tables(plain_page, stack, finished_job):
    plain_page.goto(f"{stack.base_url}/jobs/{finished_job}/")
    chart = plain_page.locator("[data-chart='tokens_per_second']")
    expect(chart.locator("path.meas")).to_have_count(1)
    expect(chart.locator("path.pred")).to_have_count(1)
    chart.locator("summary").click()
    expect(chart.locator("tbody tr").first).to_contain_text(re.compile(r"\d:\d\d"))


def test_the_history_filters_by_its_form(plain_page, stack, finished_job):
    plain_page.goto(f"{stack.base_url}/jobs/")
    plain_page.get_by_label("State").select_option("succeeded")
    plain_page.get_by_role("button", name="Filter").click()
    assert "state=succeeded" in plain_page.url
    expect(plain_page.locator(f"a[href='/jobs/{finished_job}/']").first).to_be_visible()


def test_a_limit_is_found_by_its_form(plain_page, stack):
    plain_page.goto(f"{stack.base_url}/limits/?question=most_users")
    plain_page.get_by_label("Hardware").select_option("rtx-4090")
    plain_page.get_by_role("button", name="Find the limit").click()
    expect(plain_page.get_by_role("region", name="Answer")).to_contain_text(
        "requests at once on RTX 4090", timeout=300_000
    )

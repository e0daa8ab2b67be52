"""The template of two jobs in Chromium: one press, two jobs, one comparison with their charts."""

import re

import pytest
from playwright.sync_api import expect

from tests.browser.driving import log_in, violations

pytestmark = [pytest.mark.browser, pytest.mark.slow]
CHARTS = ("loss", "validation_loss", "accuracy", "f1", "tokens_per_second", "memory")


@pytest.fixture(scope="module")
def address(browser, stack) -> str:
    """Press the template's button, see both jobs end well, and return their comparison."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    page = context.new_page()
    log_in(page, stack.base_url, "alice")
    page.goto(f"{stack.base_url}/plans/new/")
    page.goto(re.sub("/edit/.*", "/edit/goal/", page.url))
    page.get_by_role("button", name="Launch both and compare").click()
    page.wait_for_url(re.compile(r"/compare/\?job="))
    found = page.url
    context.close()
    client = stack.client("alice")
    for job in re.findall(r"job=(\w+)", found):
        client.wait_for_state(job, "succeeded", timeout_s=600)
    return found


def test_one_press_leads_to_two_jobs_side_by_side(page, address):
    page.goto(address)

    expect(page.get_by_role("heading", level=1)).to_have_text("2 jobs side by side")
    expect(page.locator("main")).to_contain_text("Classifier, DDP")
    expect(page.locator("main")).to_contain_text("Classifier, ZeRO-2")


@pytest.mark.parametrize("chart", CHARTS)
def test_each_chart_has_a_line_of_both(page, address, recorder, chart):
    page.goto(address)
    figure = page.locator(f"[data-chart='{chart}']")
    figure.scroll_into_view_if_needed()

    expect(figure).to_have_attribute("data-drawn", re.compile(r"[1-9]"))
    expect(figure.locator("figcaption")).to_contain_text(re.compile(r"A: .* B: "))
    assert recorder.broken == []


def test_memory_by_term_and_accuracy_stand_beside_their_prediction(page, address):
    page.goto(address)
    figures = page.locator("section[aria-labelledby='figures-title']")

    for label in ("Accuracy on kept-back samples", "Optimiser states", "Peak memory"):
        expect(figures.get_by_role("rowheader", name=label)).to_be_visible()
    expect(figures.get_by_text(re.compile("predicted .* of it")).first).to_be_visible()


def test_the_settings_that_differ_are_the_layouts(page, address):
    page.goto(address)
    settings = page.locator("#settings")

    expect(settings).to_contain_text(re.compile("zero.stage", re.IGNORECASE))
    expect(settings).not_to_contain_text(re.compile("learning.rate", re.IGNORECASE))


def test_the_template_and_the_comparison_are_accessible(page, stack, address, axe):
    for where in (address, f"{stack.base_url}/plans/new/?preset=serve"):
        page.goto(where)
        page.wait_for_timeout(500)
        assert violations(page, axe) == []

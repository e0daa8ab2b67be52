"""The template of two jobs in Chromium: one press, two jobs, one comparison with their charts.

In the suite the two jobs are stopped at once; nightly both train to the end (four processes).
"""

import re

import pytest
from playwright.sync_api import expect

from tests.system.browser.driving import violations

pytestmark = [pytest.mark.browser, pytest.mark.slow]
CHARTS = ("loss", "validation_loss", "accuracy", "f1", "tokens_per_second", "memory")


@pytest.fixture(scope="module")
def pressed(visitors, stack):
    """Press the template's button, and stop in the end what has not ended by then."""
    with visitors.page() as page:
        page.goto(f"{stack.base_url}/plans/new/")
        page.goto(re.sub("/edit/.*", "/edit/goal/", page.url))
        page.get_by_role("button", name="Launch both and compare").click()
        page.wait_for_url(re.compile(r"/compare/\?job="))
        seen = {
            "address": page.url,
            "heading": page.get_by_role("heading", level=1).inner_text(),
            "main": page.inner_text("main"),
        }
    yield seen
    client = stack.client("alice")
    for job in jobs_of(seen["address"]):
        client.post(f"/jobs/{job}/stop/", {})
        client.wait_for_state(job, "stopped", "succeeded")


def jobs_of(address: str) -> list[str]:
    return re.findall(r"job=(\w+)", address)


@pytest.fixture(scope="module")
def address(pressed, stack) -> str:
    """See both jobs end well, and return their comparison."""
    client = stack.client("alice")
    for job in jobs_of(pressed["address"]):
        client.wait_for_state(job, "succeeded", timeout_s=600)
    return pressed["address"]


def test_one_press_leads_to_two_jobs_side_by_side(pressed):
    assert pressed["heading"] == "2 jobs side by side"
    assert "Classifier, DDP" in pressed["main"]
    assert "Classifier, ZeRO-2" in pressed["main"]


@pytest.mark.soak
@pytest.mark.parametrize("chart", CHARTS)
def test_each_chart_has_a_line_of_both(page, address, recorder, chart):
    page.goto(address)
    figure = page.locator(f"[data-chart='{chart}']")
    figure.scroll_into_view_if_needed()

    expect(figure).to_have_attribute("data-drawn", re.compile(r"[1-9]"))
    expect(figure.locator("figcaption")).to_contain_text(re.compile(r"A: .* B: "))
    assert recorder.broken == []


@pytest.mark.soak
def test_memory_by_term_and_accuracy_stand_beside_their_prediction(page, address):
    page.goto(address)
    figures = page.locator("section[aria-labelledby='figures-title']")

    for label in ("Accuracy on held-out samples", "Optimiser states", "Peak memory"):
        expect(figures.get_by_role("rowheader", name=label)).to_be_visible()
    expect(figures.get_by_text(re.compile("predicted .* ratio ")).first).to_be_visible()


@pytest.mark.soak
def test_the_settings_that_differ_are_the_layouts(page, address):
    page.goto(address)
    settings = page.locator("#settings")

    expect(settings).to_contain_text(re.compile("zero.stage", re.IGNORECASE))
    expect(settings).not_to_contain_text(re.compile("learning.rate", re.IGNORECASE))


@pytest.mark.soak
def test_the_comparison_is_accessible(page, address, axe):
    page.goto(address)
    page.wait_for_timeout(500)
    assert violations(page, axe) == []

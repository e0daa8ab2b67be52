"""How far it is: clicks from the first page to a plan and an answer; all of it by keys alone."""

import re
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.system.browser.driving import JOB_PATH
from tests.system.browser.walks import LONG_MS

pytestmark = [pytest.mark.browser, pytest.mark.slow]
MOST_CLICKS = 6
MOST_TABS = 120  # to a control of a page


class Hand:
    """A person's hand, which counts its clicks; typing and Enter are not counted."""

    def __init__(self, page: Page) -> None:
        """It has done nothing yet."""
        self.page = page
        self.clicks = 0

    def press(self, role: Any, name: str | re.Pattern[str]) -> None:
        """Click the first control of a role and name."""
        self.clicks += 1
        self.page.get_by_role(role, name=name).first.click()

    def type(self, label: str, text: str) -> None:
        """Click a field, type a text in place of what it has, and press Enter."""
        self.clicks += 1
        self.page.locator("input").and_(self.page.get_by_label(label, exact=True)).click()
        self.page.keyboard.press("ControlOrMeta+A")
        self.page.keyboard.type(text)
        self.page.keyboard.press("Enter")


def palette(page: Page, text: str) -> None:
    """Go to the first line that the palette finds for a text."""
    page.keyboard.press("Control+k")
    page.keyboard.type(text)
    expect(page.locator("#palette [role=option]").first).to_contain_text(
        re.compile(text, re.IGNORECASE)
    )
    page.keyboard.press("Enter")


def test_a_70b_on_four_a100_is_a_saved_plan_within_six_clicks(page, stack):
    page.goto(stack.base_url)
    hand = Hand(page)
    hand.type("Model", "meta-llama/Llama-3.1-70B")
    page.wait_for_url("**/edit/review/")
    hand.press("link", re.compile(r"4 · Hardware"))
    page.get_by_text("Catalog hardware").click()
    hand.clicks += 1
    hand.type("Device", "4x a100 sxm4 80")
    hand.press("button", "Review the plan")
    hand.press("button", "Save the plan")
    page.wait_for_url(lambda url: "/edit/" not in url)
    expect(page.get_by_role("heading", level=1)).to_contain_text("Llama 3.1 70B on 4")
    assert hand.clicks <= MOST_CLICKS, hand.clicks


def test_an_endpoint_answers_within_six_clicks(page, stack, finished_job):
    page.goto(stack.base_url)
    hand = Hand(page)
    hand.press("link", "Jobs")
    hand.clicks += 1
    page.locator(f"a.name[href='/jobs/{finished_job}/']").first.click()
    hand.press("link", re.compile("Serve this model"))
    hand.press("button", "Start endpoint")
    page.wait_for_url(JOB_PATH)
    page.get_by_text("Serving", exact=True).first.wait_for(timeout=LONG_MS)
    hand.press("link", "Playground")
    hand.press("button", re.compile("^(Ask|Send)"))
    answered = re.compile("first (token|text) after")
    expect(page.locator("main")).to_contain_text(answered, timeout=LONG_MS)
    assert hand.clicks <= MOST_CLICKS, hand.clicks


def tab_to(page: Page, control: Locator) -> None:
    """Press Tab until a control has the focus, and see that the focus shows."""
    for _ in range(MOST_TABS):
        page.keyboard.press("Tab")
        if control.evaluate("element => element === document.activeElement"):
            shown = control.evaluate(
                "element => [element, element.parentElement].some("
                "each => getComputedStyle(each).outlineStyle !== 'none')"
            )
            assert shown, f"the focus of {control} does not show"
            return
    raise AssertionError(f"no Tab reaches {control}")


def test_the_keyboard_alone_leads_through_wizard_launch_live_job_and_compare(
    page, stack, finished_job
):
    page.goto(f"{stack.base_url}/docs/")
    palette(page, "New plan")
    page.wait_for_url("**/edit/**")
    page.keyboard.press("Escape")
    goal = page.locator("input[name='goal']:checked")
    page.goto(re.sub("/edit/.*", "/edit/goal/", page.url))
    tab_to(page, goal)
    page.keyboard.press("ArrowDown")
    expect(page.locator("input[name='goal'][value='generate']")).to_be_focused()
    tab_to(page, page.locator("button[name='go'][value='next']"))
    page.keyboard.press("Enter")
    page.wait_for_url("**/edit/model/")
    tab_to(page, page.locator("input[name='source']:checked"))

    page.keyboard.press("Control+k")
    page.keyboard.press("Escape")
    palette(page, "Run the demo")
    page.wait_for_url("**/edit/review/")
    tab_to(page, page.locator("button[name='run'][value='job']"))
    page.keyboard.press("Enter")
    page.wait_for_url(JOB_PATH)
    found = JOB_PATH.search(page.url)
    assert found is not None
    tab_to(page, page.get_by_role("link", name="Metrics"))
    page.keyboard.press("Enter")
    page.wait_for_url("**/metrics/")
    stop = page.get_by_role("button", name="Stop").first
    if stop.is_visible():
        tab_to(page, stop)
        page.keyboard.press("Enter")

    page.keyboard.press("g")
    page.keyboard.press("j")
    page.wait_for_url("**/jobs/")
    for job in (found[1], finished_job):
        box = page.locator(f"input[name='job'][value='{job}']")
        page.locator("body").evaluate("body => document.activeElement.blur()")
        tab_to(page, box)
        page.keyboard.press("Space")
        expect(box).to_be_checked()
    page.locator("body").evaluate("body => document.activeElement.blur()")
    tab_to(page, page.get_by_role("button", name="Compare"))
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("2 jobs side by side")

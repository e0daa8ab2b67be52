"""Comboboxes and the palette by keyboard, as the ARIA pattern wants them, and without scripts."""

import re

import pytest
from playwright.sync_api import APIResponse, Page, Route, expect

from tests.system.browser.driving import violations
from webapp.core.display import TIMES

pytestmark = [pytest.mark.browser, pytest.mark.slow]
LIMITS = "/limits/?question=longest_context"


def active(page: Page, field: str) -> str:
    """Return the words of the option that the field names as active."""
    return page.locator(
        f"[id='{page.get_attribute(field, 'aria-activedescendant')}']"
    ).inner_text()


def test_a_model_and_four_devices_are_chosen_by_typing(page, stack, axe):
    page.goto(stack.base_url + LIMITS)
    field = page.get_by_role("combobox", name="Model")
    field.focus()
    expect(field).to_have_attribute("aria-expanded", "false")

    page.keyboard.press("ArrowDown")
    expect(field).to_have_attribute("aria-expanded", "true")
    assert "meta-llama/Llama-3.1-8B" in active(page, "#id_model"), "what is chosen comes first"
    expect(page.get_by_role("option").filter(has_text="fits").first).to_be_visible()
    assert violations(page, axe) == []

    page.keyboard.type("llama-3.1 70b")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowUp")
    assert "parameters" in active(page, "#id_model")
    page.keyboard.press("Escape")
    expect(field).to_have_value("meta-llama/Llama-3.1-8B")
    page.keyboard.type("llama-3.1 70b")
    page.keyboard.press("Enter")
    expect(field).to_have_value("meta-llama/Llama-3.1-70B")
    expect(field).to_be_focused()

    page.keyboard.press("Tab")
    page.keyboard.type("4x a100 sxm 80")
    assert active(page, "#id_hardware").startswith(f"4 {TIMES} NVIDIA A100 SXM4 80GB")
    page.keyboard.press("Enter")
    expect(page.get_by_label("Devices in one machine")).to_have_value("4")
    expect(page.locator("#limit-answer")).to_contain_text(re.compile(f"on 4 {TIMES} .*A100"))
    expect(page.get_by_role("combobox", name="Hardware")).to_have_value(re.compile("A100 SXM4"))


def test_a_name_outside_the_catalog_is_sent_as_typed_and_refused_with_near_ones(page, stack):
    held: list[
        tuple[Route, APIResponse]
    ] = []  # the first answer, on its way while a name is typed

    def hold(route: Route) -> None:
        if held:
            route.continue_()
        else:
            held.append((route, route.fetch()))

    page.route(lambda address: "hardware=" in address, hold)
    page.goto(stack.base_url + LIMITS)
    page.locator("#id_model").fill("llama-99")
    page.wait_for_function("() => document.querySelector('.htmx-request')")
    while not held:
        page.wait_for_timeout(50)
    page.keyboard.press("Tab")
    route, answer = held[0]
    route.fulfill(response=answer)
    expect(page.locator("#id_model_error")).to_contain_text("nearest: ")


def test_without_scripts_the_fields_are_select_elements(new_page, stack):
    page = new_page(java_script_enabled=False)
    page.goto(stack.base_url + LIMITS)
    page.get_by_label("Model", exact=True).select_option("Qwen/Qwen3-8B")
    page.get_by_label("Hardware", exact=True).select_option("rtx-4090")
    page.get_by_role("button", name="Find the limit").click()
    expect(page.locator("#limit-answer")).to_contain_text("RTX 4090")


def test_the_palette_names_its_active_line_and_plans_a_model_on_devices(page, stack, axe):
    page.goto(f"{stack.base_url}/docs/")
    page.keyboard.press("Control+k")
    field = page.get_by_role("combobox", name="Search and actions")
    expect(field).to_be_focused()
    page.keyboard.type("plan llama-3.1-70b on 4x a100 sxm")
    expect(page.get_by_role("option").first).to_contain_text(f"on 4 {TIMES} NVIDIA A100 SXM4")
    first = active(page, "#palette input")
    page.keyboard.press("ArrowDown")
    assert active(page, "#palette input") != first
    assert violations(page, axe) == []
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    page.wait_for_url("**/edit/review/")
    expect(page.locator("main .facts")).to_contain_text(f"4 {TIMES} A100 SXM4")
    expect(page.locator("main .facts")).to_contain_text("Llama-3.1-70B")

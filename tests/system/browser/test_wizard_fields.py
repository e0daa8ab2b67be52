"""A step of the wizard asks for what its method reads, and for nothing else."""

import re

import pytest
from playwright.sync_api import Page, expect

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture
def workload(page, stack) -> Page:
    """Open the workload step of a plan to compress."""
    page.goto(f"{stack.base_url}/plans/new/?preset=serve")
    page.get_by_label("Compress").check()
    page.locator("button[name='go'][value='next']").click()
    page.goto(page.url.replace("/edit/model/", "/edit/workload/"))
    return page


def test_eight_bits_need_no_group_and_no_share(workload):
    for label in ("Bits", "Group size", "Weights to remove"):
        expect(workload.get_by_label(label, exact=True)).to_be_hidden()


def test_another_method_shows_its_own_fields_at_once(workload):
    workload.get_by_label("Method").select_option("gptq")
    expect(workload.get_by_label("Bits", exact=True)).to_be_visible()
    expect(workload.get_by_label("Group size")).to_be_visible()
    workload.get_by_label("Method").select_option("sparsegpt")
    expect(workload.get_by_label("Bits", exact=True)).to_be_hidden()
    expect(workload.get_by_label("Weights to remove")).to_be_visible()


def test_a_field_with_an_error_is_never_hidden(workload):
    workload.get_by_label("Method").select_option("gptq")
    workload.get_by_label("Group size").fill("3")
    workload.get_by_label("Method").select_option("int8_weight_only")
    workload.locator("button[name='go'][value='next']").click()
    expect(workload.locator("#id_group_size_error")).to_contain_text("Group size is 3.")


def test_a_typed_decimal_comma_is_refused_by_its_field_until_it_is_mended(new_page, stack):
    for locale in ("en-US", "de-DE"):
        page = new_page(locale=locale)
        page.goto(f"{stack.base_url}/plans/new/?preset=demo")
        page.goto(re.sub("/edit/.*", "/edit/workload/", page.url))
        field = page.get_by_label("Time budget", exact=True)
        field.press("Control+a")
        page.keyboard.type("0,5")
        expect(field).to_have_value("0,5")
        page.locator("button[name='go'][value='next']").click()
        error = page.locator("#id_time_budget_seconds_error")
        expect(error).to_contain_text("Time budget is 0,5, which has a comma")
        expect(field).to_have_value("0,5")
        field.fill("30")
        field.blur()
        expect(error).to_have_count(0)  # the change is saved
        expect(field).not_to_have_attribute("aria-invalid", "true")
        expect(page.locator("#errors")).to_be_empty()


@pytest.fixture
def mixture(page, stack) -> Page:
    """Open the workload step of the demo's plan at several sources by weight."""
    page.goto(f"{stack.base_url}/plans/new/?preset=demo")
    page.goto(re.sub("/edit/.*", "/edit/workload/", page.url))
    page.locator("input[name='data_source'][value='mixed']").check()
    return page


def test_sources_are_shown_as_they_are_filled_and_added_by_a_button(mixture):
    rows = [mixture.get_by_label(f"Source {row}", exact=True) for row in range(1, 5)]
    more = mixture.get_by_role("button", name="Add a source")
    for row, is_shown in zip(rows, (True, True, False, False), strict=True):
        expect(row).to_be_visible(visible=is_shown)

    more.click()
    expect(rows[2]).to_be_focused()
    rows[2].select_option("host")
    mixture.get_by_label("Weight of source 3").fill("2")
    more.click()

    expect(rows[3]).to_be_visible()
    expect(more).to_be_hidden()
    mixture.locator("button[name='go'][value='next']").click()
    expect(mixture.locator("#id_mix_source_1_error")).to_contain_text("Choose at least 2.")
    for row in rows:
        expect(row).to_be_visible()

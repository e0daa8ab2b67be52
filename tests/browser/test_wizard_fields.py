"""A step of the wizard asks for what its method reads, and for nothing else."""

import pytest
from playwright.sync_api import Page, expect

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture
def workload(page, stack) -> Page:
    """Open the workload step of a plan to compress."""
    page.goto(f"{stack.base_url}/plans/new/?preset=serve")
    page.get_by_label("Compress it").check()
    page.locator("button[name='go'][value='next']").click()
    page.goto(page.url.replace("/edit/model/", "/edit/workload/"))
    return page


def test_eight_bits_need_no_group_and_no_share(workload):
    for label in ("Bits", "Group size", "What goes"):
        expect(workload.get_by_label(label, exact=True)).to_be_hidden()


def test_another_method_shows_its_own_fields_at_once(workload):
    workload.get_by_label("Method").select_option("gptq")
    expect(workload.get_by_label("Bits", exact=True)).to_be_visible()
    expect(workload.get_by_label("Group size")).to_be_visible()
    workload.get_by_label("Method").select_option("sparsegpt")
    expect(workload.get_by_label("Bits", exact=True)).to_be_hidden()
    expect(workload.get_by_label("What goes")).to_be_visible()


def test_a_field_with_an_error_is_never_hidden(workload):
    workload.get_by_label("Method").select_option("gptq")
    workload.get_by_label("Group size").fill("3")
    workload.get_by_label("Method").select_option("int8_weight_only")
    workload.locator("button[name='go'][value='next']").click()
    expect(workload.locator("#id_group_size_error")).to_contain_text("Group size is 3.")

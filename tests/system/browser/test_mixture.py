"""Two sources mixed in the wizard by weights that follow their losses, trained to the end."""

import re
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.system.browser.driving import go_on, launch

pytestmark = [pytest.mark.browser, pytest.mark.slow]
EVERY = 2  # few: a busy machine makes few steps in the seconds of the demo
MILLION_TOKENS = 0.02  # 39 steps


def fill_mixture(page: Page) -> None:
    """Mix the host's text with its file of numbers, three to one, and have the weights move."""
    page.locator("input[name='data_source'][value='mixed']").check()
    page.get_by_label("Source 1", exact=True).select_option("host")
    page.get_by_label("Weight of source 1").fill("3")
    page.get_by_label("Source 2", exact=True).select_option("file")
    page.get_by_label("File of source 2").fill("mixture/numbers.txt")
    page.get_by_label("Weight of source 2").fill("1")
    expect(page.get_by_label("Reference loss of source 2")).to_be_hidden()
    page.locator("input[name='mixture_weights'][value='dynamic']").check()
    page.get_by_label("Steps between two updates").fill(str(EVERY))
    page.locator("#id_tokens").fill(str(MILLION_TOKENS))


@pytest.fixture(scope="module")
def mixed(visitors, stack):
    """Walk the demo's wizard with a wrong reference and a right one, launch, and watch."""
    folder = Path(stack.host_dir) / "models" / "mixture"
    folder.mkdir(parents=True)
    text = "".join(f"Number {n} is followed by {n + 1}.\n" * 80 + "\n" for n in range(40))
    (folder / "numbers.txt").write_text(text)
    page = visitors.open()
    page.goto(f"{stack.base_url}/plans/new/?preset=demo")
    page.goto(re.sub("/edit/.*", "/edit/workload/", page.url))
    fill_mixture(page)
    seen: dict = {}
    page.get_by_label("Reference loss of source 2").fill("21")
    page.locator("button[name='go'][value='next']").click()
    page.locator("#id_mix_reference_2_error").wait_for()
    seen["refused"] = page.inner_text("#id_mix_reference_2_error")
    page.get_by_label("Reference loss of source 2").fill("7.5")
    go_on(page)
    page.goto(re.sub("/edit/.*", "/edit/review/", page.url))
    seen["review"] = page.inner_text("main").replace("\N{NO-BREAK SPACE}", " ")
    seen["job_id"] = launch(page)
    page.wait_for_selector("[data-state-now='succeeded']")
    page.get_by_role("heading", name="Artefacts").wait_for()
    yield page, seen
    page.close()


def test_a_wrong_reference_is_refused_by_its_field(mixed):
    _, seen = mixed
    assert (
        "Reference loss of source 2 is 21. It must be a number from 0 to 20." in (seen["refused"])
    )


def test_the_review_says_what_is_mixed_and_that_it_moves(mixed):
    _, seen = mixed
    said = "at first 75 % its own text and 25 % its file mixture/numbers.txt by weights that move"
    assert f"{said} every {EVERY} steps" in seen["review"]


def test_the_card_shows_the_shares_that_the_losses_made(mixed, stack):
    page, seen = mixed
    rows = page.locator("section[aria-labelledby='mixture-title'] tbody tr")
    expect(rows).to_have_count(2)
    cells = [[each.replace("\N{NO-BREAK SPACE}", " ") for each in row.split("\t")]
             for row in rows.all_inner_texts()]  # fmt: skip
    assert [row[2] for row in cells] == ["75 %", "25 %"]
    shares = [float(row[3].removesuffix(" %")) for row in cells]
    assert sum(shares) == pytest.approx(100, abs=1.0)
    assert shares[1] > 25.0  # a model that knows nothing begins above 8 nats
    assert cells[1][5] == "7.500"
    page.reload()
    page.locator("[data-chart='source2_weight']").scroll_into_view_if_needed()
    drawn = "Number(document.querySelector(\"[data-chart='source2_weight']\").dataset.drawn || 0)"
    page.wait_for_function(f"() => {drawn} >= 2")
    [result] = [
        each["body"]
        for each in stack.client("alice").events(seen["job_id"])
        if each["kind"] == "result"
    ]
    assert f"moved every {EVERY} steps" in result["notes"]["mixture"]

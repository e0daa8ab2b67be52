"""Every page, light and dark, wide and narrow: accessible, within its policy, at home.

Each page is loaded once and then changes its size and its theme. In the suite it is seen in both
sizes and in both themes, not in all four ways.
"""

import re

import pytest
from playwright.sync_api import Page, expect

from tests.plugins.extent import first
from tests.system.browser.driving import Recorder, violations

pytestmark = [pytest.mark.browser, pytest.mark.slow]
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
SIZES = {"wide": (1280, 800), "phone": (390, 844)}
PATHS = {
    "home": "/",
    "plans": "/plans/",
    "jobs": "/jobs/",
    "queue": "/queue/",
    "limits of a team": "/queue/limits/",
    "a machine to plan for": "/hosts/virtual/new/",
    "hosts": "/hosts/",
    "host": "/hosts/this-machine/",
    "add host": "/hosts/add/",
    "models": "/models/",
    "techniques": "/techniques/",
    "docs": "/docs/",
    "missing": "/nowhere/",
    "job": "/jobs/{job}/",
    "job metrics": "/jobs/{job}/metrics/",
    "job logs": "/jobs/{job}/logs/",
    "job events": "/jobs/{job}/events/",
    "job config": "/jobs/{job}/config/",
    "job artefacts": "/jobs/{job}/artefacts/",
    "job post-mortem": "/jobs/{job}/post-mortem/",
    "job to give up": "/jobs/{job}/abandon/",
    "jobs to compare": "/compare/?job={job}",
    "plan": "/plans/{plan}/",
    "alternatives": "/plans/{plan}/alternatives/",
    "strategies side by side": "/plans/{plan}/alternatives/?strategy=0&strategy=1",
    "why": "/plans/{plan}/why/",
    "exports": "/plans/{plan}/exports/",
    "versions": "/plans/{plan}/history/",
    "technique": "/techniques/lora/",
    "model": "/models/Qwen/Qwen3-8B/",
    "found": "/search/?q=llama",
    "found docs": "/docs/?q=slurm",
    "deployments": "/deployments/",
    "approvals": "/approvals/",
    "workflows": "/workflows/",
    "access tokens": "/settings/tokens/",
    "secrets": "/settings/secrets/",
    "password": "/settings/password/",
    "forgotten password": "/password/forgotten/",
    "dead link": "/password/new/MQ/a-b/",
    "training data": "/data/",
    "wizard": "/plans/new/?preset=demo",
    "goal": "/plans/new/?preset=serve",
    "limits": "/limits/",
    "a limit": "/limits/?question=most_users&ask=1&hardware=rtx-4090",
    "a limit that is none": "/limits/?question=longest_context&ask=1&hardware=t4&output_tokens=0",
    "largest model": "/limits/?question=largest_model&ask=1&hardware=rtx-4090",
}


LOOKS = [("wide", "light"), ("phone", "dark"), ("wide", "dark"), ("phone", "light")]


def looks_of(name: str) -> list[tuple[str, str]]:
    """Return both sizes and both themes in two looks, of page to page the others; nightly all."""
    turn = 2 * (list(PATHS).index(name) % 2)
    return first(LOOKS[turn:] + LOOKS[:turn], 2)


@pytest.fixture(scope="module")
def looked_at(visitors):
    """One page of the operator, who may see them all."""
    with visitors.page("olga") as page:
        yield page


@pytest.fixture(scope="module")
def finished_plan(stack, finished_job) -> str:
    """The plan of the demo, as the page of its job names it."""
    found = re.search(
        r"/plans/([0-9A-Z]{26})/", stack.client("alice").get(f"/jobs/{finished_job}/")
    )
    assert found, "the page of a job names no plan"
    return found[1]


def show(page: Page, size: str, theme: str) -> None:
    width, height = SIZES[size]
    page.set_viewport_size({"width": width, "height": height})
    page.emulate_media(color_scheme=theme)


@pytest.mark.parametrize("name", PATHS)
def test_a_page_is_accessible_and_keeps_to_itself(
    name, looked_at, stack, finished_job, finished_plan, axe
):
    recorder = Recorder(looked_at, stack.base_url)
    looks = looks_of(name)
    show(looked_at, *looks[0])
    place = PATHS[name].format(job=finished_job, plan=finished_plan)
    looked_at.goto(stack.base_url + place)
    for size, theme in looks:
        show(looked_at, size, theme)
        looked_at.wait_for_timeout(250)

        assert violations(looked_at, axe) == [], (size, theme)
        assert looked_at.evaluate(OVERFLOW) <= 0, (size, theme)
    assert recorder.broken == []
    assert recorder.external == []


def test_the_bar_of_a_narrow_phone_shows_every_entry_whole(new_page, stack):
    page = new_page("alice", viewport={"width": 360, "height": 700})
    page.goto(stack.base_url + "/jobs/")
    entries = page.get_by_role("navigation", name="Main").get_by_role("link")

    shown = [each for each in entries.all() if each.is_visible()]
    edges = [(box["x"], box["x"] + box["width"]) for each in shown if (box := each.bounding_box())]

    assert [each.inner_text() for each in shown] == [
        "Home", "Plans", "Jobs", "Deployments", "Hosts", "Models"
    ]  # fmt: skip
    assert all(left >= 0 and right <= 360 for left, right in edges)


@pytest.mark.parametrize("name", ["Limits", "Techniques"])
def test_what_the_bar_of_a_phone_leaves_out_stands_in_the_account(new_page, stack, name):
    page = new_page("alice", viewport={"width": 390, "height": 844})
    page.goto(stack.base_url + "/jobs/")
    page.locator(".menu > summary").first.click()

    page.locator(".menu").get_by_role("link", name=name).click()

    expect(page.get_by_role("heading", level=1)).to_be_visible()
    assert f"/{name.lower()}/" in page.url

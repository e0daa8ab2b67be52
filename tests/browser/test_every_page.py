"""Every page, light and dark, wide and narrow: accessible, within its policy, at home."""

import pytest
from playwright.sync_api import expect

from tests.browser.driving import Recorder, violations

pytestmark = [pytest.mark.browser, pytest.mark.slow]
SIZES = {"wide": (1280, 800), "phone": (390, 844)}
THEMES = {  # loaded in the first, turned to the other
    "wide": ("light", "dark"),
    "phone": ("dark", "light"),
}
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
    "secrets": "/settings/secrets/",
    "training data": "/data/",
    "wizard": "/plans/new/?preset=demo",
    "limits": "/limits/",
    "a limit": "/limits/?question=most_users&ask=1&hardware=rtx-4090",
    "a limit that is none": "/limits/?question=longest_context&ask=1&hardware=t4&output_tokens=0",
    "largest model": "/limits/?question=largest_model&ask=1&hardware=rtx-4090",
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", PATHS)
def test_a_page_is_accessible_and_keeps_to_itself(name, size, new_page, stack, finished_job, axe):
    width, height = SIZES[size]
    loaded, turned = THEMES[size]
    page = new_page("olga", viewport={"width": width, "height": height}, color_scheme=loaded)
    recorder = Recorder(page, stack.base_url)
    page.goto(stack.base_url + PATHS[name].format(job=finished_job))
    page.wait_for_load_state("load")
    page.wait_for_timeout(250)
    found = {loaded: violations(page, axe)}

    page.emulate_media(color_scheme=turned)
    page.wait_for_timeout(250)
    found[turned] = violations(page, axe)

    assert found == {"light": [], "dark": []}
    assert recorder.broken == []
    assert recorder.external == []
    overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.evaluate(overflow) <= 0


def test_the_bar_of_a_narrow_phone_shows_every_entry_whole(new_page, stack):
    page = new_page("alice", viewport={"width": 360, "height": 700})
    page.goto(stack.base_url + "/jobs/")
    entries = page.get_by_role("navigation", name="Main").get_by_role("link")

    shown = [each for each in entries.all() if each.is_visible()]
    edges = [(box["x"], box["x"] + box["width"]) for each in shown if (box := each.bounding_box())]

    assert [each.inner_text() for each in shown] == [
        "Home", "Plans", "Jobs", "Queue", "Hosts", "Models"
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

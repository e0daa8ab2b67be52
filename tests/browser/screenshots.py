"""Take pictures of every page: ``python tests/browser/screenshots.py OUTDIR``.

Starts the real product in a temporary folder, runs the demo and a compression of its model, and
saves each page at 1280 and 390 px, light and dark, with a live job in the middle of its run.
"""

import re
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.browser.driving import launch, log_in, walk_to_review
from tests.stack import Stack
from webapp.boot.tools import find_chromium

LOOKS = [(width, theme) for width in (1280, 390) for theme in ("light", "dark")]
HEIGHTS = {1280: 800, 390: 844}
DEMO_SECONDS = 40


def pages(stack: Stack, browser: Browser, user: str = "alice") -> dict[tuple[int, str], Page]:
    """Return one logged-in page per look."""
    made = {}
    for width, theme in LOOKS:
        context = browser.new_context(
            viewport={"width": width, "height": HEIGHTS[width]}, color_scheme=theme
        )
        made[width, theme] = context.new_page()
        log_in(made[width, theme], stack.base_url, user)
    return made


def shoot(page: Page, url: str, target: Path, wait_ms: int = 900) -> None:
    """Save one page in full; charts further down are scrolled into view first."""
    page.goto(url)
    page.evaluate("window.scrollTo(0, document.body.scrollHeight)")
    page.wait_for_timeout(wait_ms)
    page.evaluate("window.scrollTo(0, 0)")
    page.wait_for_timeout(150)
    page.screenshot(path=str(target), full_page=True)


def shoot_all(looks: dict[tuple[int, str], Page], url: str, name: str, out: Path) -> None:
    """Save one address in every look."""
    for (width, theme), page in looks.items():
        shoot(page, url, out / f"{name}-{width}-{theme}.png")
        sys.stdout.write(f"{name}-{width}-{theme}.png\n")


def compress(page: Page, stack: Stack, job_id: str) -> str:
    """Compress the model of a finished job with the wizard's defaults; return the job's id."""
    page.goto(f"{stack.base_url}/jobs/{job_id}/")
    page.get_by_role("link", name="Compress it").click()
    page.wait_for_load_state()
    return launch(page)


def main(out: Path) -> None:
    """Take all pictures."""
    out.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        Stack(Path(folder), demo_seconds=DEMO_SECONDS) as stack,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(
            executable_path=find_chromium(), args=["--no-sandbox"]
        )
        looks = pages(stack, browser)
        first = looks[1280, "light"]
        client = stack.client("alice")
        shoot_all(looks, f"{stack.base_url}/jobs/", "jobs-empty", out)
        walk_to_review(first, stack.base_url)
        review = first.url
        plan = re.sub(r"edit/.*", "", review)
        for step in ("goal", "model", "workload", "hardware", "review"):
            url = review.replace("/edit/review/", f"/edit/{step}/")
            shoot_all(looks, url, f"wizard-{step}", out)
        first.goto(review)
        job_id = launch(first)
        client.wait_for_state(job_id, "running")
        first.wait_for_timeout(DEMO_SECONDS * 500)
        shoot_all(looks, f"{stack.base_url}/jobs/{job_id}/", "job-live", out)
        client.wait_for_state(job_id, "succeeded", timeout_s=600)
        small = compress(first, stack, job_id)
        client.wait_for_state(small, "succeeded", timeout_s=600)
        first.wait_for_timeout(2000)
        for name, path in {
            "job-done": f"/jobs/{job_id}/",
            "job-compressed": f"/jobs/{small}/",
            "job-metrics": f"/jobs/{job_id}/metrics/",
            "job-logs": f"/jobs/{job_id}/logs/",
            "job-events": f"/jobs/{job_id}/events/",
            "job-config": f"/jobs/{job_id}/config/",
            "job-artefacts": f"/jobs/{small}/artefacts/",
            "jobs": "/jobs/",
            "queue": "/queue/",
            "team-limits": "/queue/limits/",
            "hosts": "/hosts/",
            "host": "/hosts/this-machine/",
            "home": "/",
            "models": "/models/",
            "limits": "/limits/",
            "limits-answer": "/limits/?question=most_users&ask=1&hardware=rtx-4090",
        }.items():
            shoot_all(looks, stack.base_url + path, name, out)
        shoot_all(looks, plan, "plan", out)
        operators = pages(stack, browser, "olga")
        shoot_all(operators, f"{stack.base_url}/hosts/add/", "add-host", out)
        for look in operators.values():
            look.get_by_label("Name").fill("node-a")
            look.get_by_role("button", name="Make the command").click()
            look.wait_for_url(re.compile("/hosts/add/.+"))
        for (width, theme), look in operators.items():
            shoot(look, look.url, out / f"check-host-{width}-{theme}.png")
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "screenshots"))

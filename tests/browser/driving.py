"""What the browser tests and the screenshot script share: log in, walk the wizard, watch."""

import re
from typing import Any

from playwright.sync_api import Page, Request

from tests.stack import PASSWORD, Stack

WATCH_POLICY = """
window.broken = [];
document.addEventListener("securitypolicyviolation", (event) => {
  window.broken.push(`${event.violatedDirective}: ${event.blockedURI} ${event.sourceFile || ""}`);
});
window.addEventListener("error", (event) => window.broken.push(`error: ${event.message}`));
window.addEventListener("unhandledrejection", (event) => window.broken.push(`rejected: ${event.reason}`));
"""
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
JOB_PATH = re.compile(r"/jobs/([0-9A-Z]{26})/")


def log_in(page: Page, base_url: str, user: str) -> None:
    """Log in through the page that everyone sees first."""
    page.goto(f"{base_url}/login/")
    page.locator("#id_username").fill(user)
    page.locator("#id_password").fill(PASSWORD)
    page.locator("main button").click()
    page.wait_for_url(lambda url: "/login/" not in url)


def walk_to_review(page: Page, base_url: str, preset: str = "demo") -> None:
    """Walk the wizard from its first step to the review, touching nothing but Next."""
    page.goto(f"{base_url}/plans/new/?preset={preset}")
    page.goto(re.sub("/edit/.*", "/edit/goal/", page.url))
    for _ in range(6):
        if "/edit/review/" in page.url:
            return
        go_on(page)
    raise AssertionError(f"the wizard did not reach its review: {page.url}")


def go_on(page: Page) -> None:
    """Press Next in the wizard."""
    before = page.url
    page.locator("button[name='go'][value='next']").click()
    page.wait_for_url(lambda url: url != before)


def model_of(stack: Stack, job_id: str) -> str:
    """Return the key of the model that a job left, as the links of its page name it."""
    found = re.search(r"model=(\w+)", stack.client("alice").get(f"/jobs/{job_id}/"))
    assert found, "the page offers nothing to do with the job's model"
    return found[1]


def launch(page: Page) -> str:
    """Press the button at the end of the wizard and return the job's id."""
    page.locator("button[name='go'][value='launch']").click()
    page.wait_for_url(JOB_PATH)
    found = JOB_PATH.search(page.url)
    assert found is not None
    return found[1]


def drawn_points(page: Page, chart: str) -> int:
    """Return how many measured points a chart shows now."""
    return int(page.get_attribute(f"[data-chart='{chart}']", "data-drawn") or 0)


def violations(page: Page, axe: str) -> list[tuple[str, Any]]:
    """Return what axe finds wrong on the page as it stands."""
    page.evaluate(axe)
    found = page.evaluate(
        "rules => axe.run(document, {runOnly: rules}).then(r => r.violations.map("
        "v => [v.id, v.nodes.slice(0, 3).map(n => n.html.slice(0, 160) + ' | ' + n.failureSummary)]))",
        RULES,
    )
    return [(name, nodes) for name, nodes in found]


class Recorder:
    """Every request that leaves the page, and every policy that it breaks."""

    def __init__(self, page: Page, base_url: str) -> None:
        """Listen from now on."""
        self.page = page
        self.base_url = base_url
        self.external: list[str] = []
        page.on("request", self._note)

    def _note(self, request: Request) -> None:
        if not request.url.startswith((self.base_url, "data:", "blob:", "about:")):
            self.external.append(request.url)

    @property
    def broken(self) -> list[str]:
        """Return what the content policy blocked and what JavaScript threw."""
        return list(self.page.evaluate("window.broken"))

"""What the browser tests and the screenshot script share: log in, walk the wizard, watch."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from playwright.sync_api import Browser, BrowserContext, Page, Request, Response, StorageState

from tests.stack import PASSWORD, Stack

WATCH_POLICY = """
window.broken = [];
document.addEventListener("securitypolicyviolation", (event) => {
  window.broken.push(`${event.violatedDirective}: ${event.blockedURI} ${event.sourceFile || ""}`);
});
window.addEventListener("error", (event) => window.broken.push(`error: ${event.message}`));
window.addEventListener("unhandledrejection", (event) => window.broken.push(`rejected: ${event.reason}`));
"""
SLOW_MS = 300_000  # a page of a loaded machine; what never comes is rare, and may take it
REDIRECTS = {301, 302, 303}
# WCAG 2.2 A and AA, and what axe calls best practice: landmarks, headings, unique names.
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
JOB_PATH = re.compile(r"/jobs/([0-9A-Z]{26})/")


def log_in(page: Page, base_url: str, user: str) -> None:
    """Log in through the page that everyone sees first."""
    page.goto(f"{base_url}/login/")
    page.locator("#id_username").fill(user)
    page.locator("#id_password").fill(PASSWORD)
    page.locator("main button").click()
    page.wait_for_url(lambda url: "/login/" not in url)


def walk_to_review(page: Page, base_url: str, **workload: str) -> None:
    """Walk the demo's wizard from its first step to the review, touching Next and these fields."""
    page.goto(f"{base_url}/plans/new/?preset=demo")
    page.goto(re.sub("/edit/.*", "/edit/goal/", page.url))
    for _ in range(6):
        if "/edit/review/" in page.url:
            return
        if "/edit/workload/" in page.url:
            for name, value in workload.items():
                page.locator(f"#id_{name}").fill(value)
        go_on(page)
    raise AssertionError(f"the wizard did not reach its review: {page.url}")


def go_on(page: Page) -> None:
    """Press Next in the wizard, and say what the step answers where it does not lead on."""
    before = page.url
    with page.expect_response(is_sent_form) as answered:
        page.locator("button[name='go'][value='next']").click()
    if answered.value.status not in REDIRECTS:
        page.wait_for_load_state()
        said = page.inner_text("main")
        raise AssertionError(f"{before} answered {answered.value.status}: {said[:1500]}")
    page.wait_for_url(lambda url: url != before)


def is_sent_form(answer: Response) -> bool:
    """Return whether this is what a form was answered that leads to a page."""
    return answer.request.method == "POST" and answer.request.is_navigation_request()


def model_of(stack: Stack, job_id: str) -> str:
    """Return the key of the model that a job left, as the links of its page name it."""
    found = re.search(r"model=(\w+)", stack.client("alice").get(f"/jobs/{job_id}/"))
    assert found, "the page offers nothing to do with the job's model"
    return found[1]


def launch(page: Page) -> str:
    """Press the button at the end of the wizard and return the job's id."""
    page.locator("button[name='run'][value='job']").click()
    page.wait_for_url(JOB_PATH)
    found = JOB_PATH.search(page.url)
    assert found is not None
    return found[1]


def drawn_points(page: Page, chart: str) -> int:
    """Return how many measured points a chart shows now."""
    return int(page.get_attribute(f"[data-chart='{chart}']", "data-drawn") or 0)


def violations(page: Page, axe: str) -> list[tuple[str, Any]]:
    """Return what axe finds wrong on the page as it stands."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(axe)
    found = page.evaluate(
        "rules => axe.run(document, {runOnly: rules, resultTypes: ['violations']}).then("
        "r => r.violations.map("
        "v => [v.id, v.nodes.slice(0, 3).map(n => n.html.slice(0, 160) + ' | ' + n.failureSummary)]))",
        RULES,
    )
    return [(name, nodes) for name, nodes in found]


class Visitors:
    """People with a browser each, in windows of their own; every password is checked once."""

    def __init__(self, browser: Browser, base_url: str) -> None:
        """Nobody has logged in yet."""
        self.browser = browser
        self.base_url = base_url
        self._windows: dict[str, BrowserContext] = {}
        self._cookies: dict[str, StorageState] = {}

    def __enter__(self) -> "Visitors":
        """Return them, to be closed at the end."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close every window."""
        for window in self._windows.values():
            window.close()

    def open(self, user: str = "alice", **options: Any) -> Page:
        """Return a new page of a user who is logged in, in a window that has these options."""
        name = f"{user} {options}"
        if name not in self._windows:
            self._windows[name] = self._window(user, options)
        return self._windows[name].new_page()

    @contextlib.contextmanager
    def page(self, user: str = "alice", **options: Any) -> Iterator[Page]:
        """Open a page, and close it at the end."""
        page = self.open(user, **options)
        yield page
        page.close()

    def _window(self, user: str, options: dict[str, Any]) -> BrowserContext:
        defaults: dict[str, Any] = {
            "viewport": {"width": 1280, "height": 800},
            "reduced_motion": "reduce",  # turning marks are drawn anew for ever
        }
        if user in self._cookies:
            defaults["storage_state"] = self._cookies[user]
        window = self.browser.new_context(**(defaults | options))
        window.set_default_timeout(SLOW_MS)
        window.add_init_script(WATCH_POLICY)
        if user not in self._cookies:
            page = window.new_page()
            log_in(page, self.base_url, user)
            self._cookies[user] = window.storage_state()
            page.close()
        return window


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

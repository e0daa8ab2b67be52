"""Walk the product as a newcomer and keep a picture of every step.

``python tests/system/browser/screenshots.py OUTDIR [first] [jobs] [plans] [rest]`` starts the real
product in a temporary folder, walks these parts (all without a name) and saves each page at 1280
and 390 px, light and dark. It prints what a newcomer must never see: a page wider than the
window, an answer that is an error, a script that broke.
"""

import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from playwright.sync_api import Browser, Page, Playwright, sync_playwright

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.stack import Stack
from tests.system.browser import newcomer
from tests.system.browser.driving import SLOW_MS, WATCH_POLICY, log_in
from webapp.boot.environment import find_chromium

Theme = Literal["light", "dark"]
THEMES: tuple[Theme, ...] = ("light", "dark")
LOOKS = [(width, theme) for width in (1280, 390) for theme in THEMES]
HEIGHTS = {1280: 800, 390: 844}
DEMO_SECONDS = 40
PARTS = ("first", "jobs", "plans", "rest")
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
ERROR = 400


class Camera:
    """One logged-in page per look, and what was wrong on the pages that it took."""

    def __init__(self, stack: Stack, browser: Browser, out: Path, user: str) -> None:
        """Log in once; every look is a window of the same person."""
        self.stack, self.out = stack, out
        self.pages: dict[tuple[int, Theme], Page] = {}
        self.wrong: list[str] = []
        cookies = None
        for width, theme in LOOKS:
            window = browser.new_context(
                viewport={"width": width, "height": HEIGHTS[width]},
                color_scheme=theme,
                storage_state=cookies,
            )
            window.set_default_timeout(SLOW_MS)
            window.add_init_script(WATCH_POLICY)
            page = self.pages[width, theme] = window.new_page()
            if cookies is None:
                log_in(page, stack.base_url, user)
                cookies = window.storage_state()

    def shoot(self, path: str, name: str) -> None:
        """Save one address in every look; charts further down are scrolled into view first."""
        for (width, theme), page in self.pages.items():
            answer = page.goto(self.stack.base_url + path)
            page.evaluate("window.scrollTo(0, document.body.scrollHeight)")
            page.wait_for_timeout(700)
            page.evaluate("window.scrollTo(0, 0)")
            page.wait_for_timeout(150)
            page.screenshot(path=str(self.out / f"{name}-{width}-{theme}.png"), full_page=True)
            self._judge(f"{name} {width} {theme}", page, answer.status if answer else 0)
        sys.stdout.write(f"{name}  {path}\n")
        sys.stdout.flush()

    def _judge(self, name: str, page: Page, status: int) -> None:
        wrong = [f"{page.evaluate(OVERFLOW)} px too wide"] if page.evaluate(OVERFLOW) > 0 else []
        wrong += [f"answered {status}"] if status >= ERROR and "missing" not in name else []
        wrong += [str(each) for each in page.evaluate("window.broken")]
        self.wrong += [f"{name}: {each}" for each in wrong]


@contextmanager
def started(playwright: Playwright) -> Iterator[tuple[Stack, Browser]]:
    """Start the product and a browser, and end both."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Stack(Path(folder), demo_seconds=DEMO_SECONDS) as stack,
    ):
        browser = playwright.chromium.launch(
            executable_path=find_chromium(), args=["--no-sandbox"]
        )
        yield stack, browser
        browser.close()


def operators_pages(camera: Camera) -> None:
    """Add a host as an operator does, up to the page that waits for it."""
    camera.shoot("/hosts/add/", "add-host")
    camera.shoot("/hosts/virtual/new/", "host-virtual")
    page = next(iter(camera.pages.values()))
    page.goto(f"{camera.stack.base_url}/hosts/add/")
    page.get_by_label("Name").fill("node-a")
    page.get_by_role("button", name="Create the command").click()
    page.wait_for_url(re.compile("/hosts/add/.+"))
    camera.shoot(page.url.removeprefix(camera.stack.base_url), "check-host")


def first_pages(stack: Stack, browser: Browser, camera: Camera) -> None:
    """Look at what a stranger sees before anything was done."""
    for (width, theme), page in camera.pages.items():
        stranger = browser.new_context(viewport=page.viewport_size, color_scheme=theme).new_page()
        for name, path in {"login": "/login/", "forgotten": "/password/forgotten/"}.items():
            stranger.goto(stack.base_url + path)
            stranger.screenshot(path=str(camera.out / f"{name}-{width}-{theme}.png"))
        stranger.context.close()
    for name, path in {
        "first-page": "/",
        "plans-empty": "/plans/",
        "jobs-empty": "/jobs/",
        "queue-empty": "/queue/",
        "compare-empty": "/compare/",
    }.items():
        camera.shoot(path, name)


def walk(stack: Stack, browser: Browser, out: Path, parts: tuple[str, ...]) -> list[str]:
    """Take these parts of the walk; return what was wrong."""
    camera = Camera(stack, browser, out, "alice")
    page = browser.new_context(viewport={"width": 1280, "height": 800}).new_page()
    page.set_default_timeout(SLOW_MS)
    log_in(page, stack.base_url, "alice")
    if "first" in parts:
        first_pages(stack, browser, camera)
    job_id = ""
    if "jobs" in parts or "rest" in parts:
        job_id = newcomer.demo(page, stack, camera.shoot, DEMO_SECONDS * 500)
    if "jobs" in parts:
        newcomer.compress(page, stack, job_id, camera.shoot)
    if "plans" in parts:
        paths = newcomer.plan_pages(page, stack, camera.shoot)
        newcomer.versions(page, stack, paths["serve-fits"], camera.shoot)
    if "rest" in parts:
        newcomer.rest(camera.shoot, job_id)
        operator = Camera(stack, browser, out, "olga")
        operators_pages(operator)
        camera.wrong += operator.wrong
        sys.stdout.write(newcomer.change_password(page, stack))
        newcomer.log_out(page)
        page.screenshot(path=str(out / "logged-out.png"))
    return camera.wrong


def main(out: Path, parts: tuple[str, ...]) -> int:
    """Take all pictures; return how many pages were wrong."""
    out.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright, started(playwright) as (stack, browser):
        wrong = walk(stack, browser, out, parts)
    sys.stdout.write("".join(f"WRONG {each}\n" for each in wrong))
    return len(wrong)


if __name__ == "__main__":
    asked = tuple(sys.argv[2:]) or PARTS
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "screenshots"), asked) > 0)

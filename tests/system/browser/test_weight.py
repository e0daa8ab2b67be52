"""What a first visit transfers: the page with all that it loads, as Chromium counts the bytes."""

from typing import Any

import pytest
from playwright.sync_api import Page

pytestmark = [pytest.mark.browser, pytest.mark.slow]
MOST_WITH_CHARTS, MOST_WITHOUT = 550_000, 150_000
WITH_CHARTS = {
    "job": "/jobs/{job}/",
    "metrics": "/jobs/{job}/metrics/",
}
WITHOUT = {
    "home": "/",
    "jobs": "/jobs/",
    "hosts": "/hosts/",
    "host": "/hosts/this-machine/",
    "plans": "/plans/",
    "wizard": "/plans/new/?preset=demo",
    "log": "/jobs/{job}/logs/",
    "models": "/models/",
    "docs": "/docs/",
}


def transferred(
    page: Page, url: str, *, has_charts: bool = False
) -> tuple[dict[str, float], dict[str, str]]:
    """Return the bytes on the wire of each request of a first visit, and its encoding."""
    session = page.context.new_cdp_session(page)
    paths: dict[str, str] = {}
    encodings: dict[str, str] = {}
    sizes: dict[str, float] = {}

    def begun(event: dict[str, Any]) -> None:
        path = event["response"]["url"].partition("://")[2].partition("/")[2]
        paths[event["requestId"]] = path
        encodings[path] = event["response"]["headers"].get("content-encoding", "")

    def ended(event: dict[str, Any]) -> None:
        sizes[paths.get(event["requestId"], event["requestId"])] = event["encodedDataLength"]

    session.on("Network.responseReceived", begun)
    session.on("Network.loadingFinished", ended)
    session.send("Network.enable")
    session.send("Network.clearBrowserCache")
    page.goto(url)
    page.wait_for_load_state("load")
    if has_charts:  # drawn, and Plotly fetched, once a chart is in view
        page.locator("[data-chart]").first.scroll_into_view_if_needed()
        page.locator("[data-drawn]").first.wait_for(timeout=120_000)
    page.wait_for_timeout(500)
    return sizes, encodings


@pytest.mark.parametrize("name", WITH_CHARTS)
def test_a_page_with_charts_is_light(name, new_page, stack, finished_job):
    path = WITH_CHARTS[name].format(job=finished_job)
    sizes, encodings = transferred(new_page("olga"), stack.base_url + path, has_charts=True)

    (plotly,) = [path for path in sizes if "plotly" in path]
    assert encodings[plotly] == "br"
    assert encodings[path[1:]] == "gzip"
    assert sum(sizes.values()) <= MOST_WITH_CHARTS, sizes


@pytest.mark.parametrize("name", WITHOUT)
def test_a_page_without_charts_is_light(name, new_page, stack, finished_job):
    path = WITHOUT[name].format(job=finished_job)
    sizes, _ = transferred(new_page("olga"), stack.base_url + path)

    assert not [one for one in sizes if "plotly" in one]
    assert sum(sizes.values()) <= MOST_WITHOUT, sizes


def test_hashed_files_are_kept_for_ever_in_the_encoding_that_is_asked_for(stack, finished_job):
    client = stack.client("alice")
    page = client.get(f"/jobs/{finished_job}/")
    path = next(part for part in page.split('"') if "plotly-basic" in part)

    found = {}
    for accepted in ("br, gzip", "gzip", "identity", "br;q=0, gzip;q=0"):
        status, headers, _ = client.request("GET", path, Accept_Encoding=accepted)
        assert status == 200
        assert headers["Vary"] == "Accept-Encoding"
        assert "immutable" in headers["Cache-Control"]
        found[accepted] = (headers["Content-Encoding"], int(headers["Content-Length"]))

    assert [encoding for encoding, _ in found.values()] == ["br", "gzip", None, None]
    sizes = [size for _, size in found.values()]
    assert sizes[0] < sizes[1] < sizes[2] / 2

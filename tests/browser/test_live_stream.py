"""The one stream of a page: cut, taken up again, and done without."""

import http.client

import pytest

from tests.browser.driving import drawn_points

pytestmark = [pytest.mark.browser, pytest.mark.slow]
WAIT_MS = 600_000
POINTS = "() => Number(document.querySelector(\"[data-chart='loss']\").dataset.drawn || 0)"


@pytest.fixture
def running_job(stack):
    """A demo that has begun to report."""
    client = stack.client("alice")
    job_id = client.launch_demo()
    client.wait_for_state(job_id, "running")
    yield job_id
    client.post(f"/jobs/{job_id}/stop/", {})
    client.wait_for_state(job_id)


def open_job(page, stack, job_id, at_least=2):
    page.goto(f"{stack.base_url}/jobs/{job_id}/")
    page.wait_for_function(f"n => ({POINTS})() >= n", arg=at_least, timeout=WAIT_MS)


def test_a_cut_stream_is_taken_up_without_a_gap(stack, page, running_job):
    streams = []
    page.on("request", lambda sent: streams.append(sent) if "/live/" in sent.url else None)
    open_job(page, stack, running_job)
    page.wait_for_function("() => slipway.live.state.lastId !== ''", timeout=WAIT_MS)
    page.evaluate("slipway.live.drop()")
    page.wait_for_function(
        "() => slipway.live.state.status === 'live' && slipway.live.state.errors === 0",
        timeout=WAIT_MS,
    )
    assert streams[-1].headers.get("last-event-id")
    page.wait_for_selector("[data-state-now='succeeded']", timeout=WAIT_MS)
    stored = stack.client().json(f"/api/v1/jobs/{running_job}/series?metrics=loss&points=5000")
    measured = [value for value in stored["series"][0]["value"] if value is not None]
    page.wait_for_function(f"n => ({POINTS})() >= n", arg=len(measured), timeout=WAIT_MS)


def test_without_a_stream_the_page_polls_and_says_so(stack, page, running_job):
    page.route("**/live/**", lambda route: route.abort())
    open_job(page, stack, running_job, at_least=1)
    before = drawn_points(page, "loss")
    page.wait_for_function(f"n => ({POINTS})() > n", arg=before, timeout=WAIT_MS)
    assert "every 5 s" in page.inner_text("[data-stamp]")


def test_a_page_that_gets_no_stream_polls_and_takes_one_up_when_one_is_free(
    stack, page, running_job
):
    ticket = stack.client().json("/api/v1/tickets?topics=jobs")["ticket"]
    streams = [open_stream(stack.port, ticket) for _ in range(6)]
    open_job(page, stack, running_job, at_least=1)
    page.wait_for_function("() => slipway.live.state.status === 'polling'")
    assert "every 5 s" in page.inner_text("[data-stamp]")
    for stream in streams:
        stream.close()
    page.wait_for_function("() => slipway.live.state.status === 'live'", timeout=WAIT_MS)


def open_stream(port: int, ticket: str) -> http.client.HTTPConnection:
    """Open a stream and return its connection once the server has taken it."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", f"/live/?ticket={ticket}")
    assert connection.getresponse().status == http.client.OK
    return connection


def test_a_stream_closes_while_the_page_is_hidden(stack, page, running_job):
    open_job(page, stack, running_job)
    page.evaluate(
        "Object.defineProperty(document, 'hidden', {value: true, configurable: true});"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    assert page.evaluate("slipway.live.state.stop === null")
    page.evaluate(
        "Object.defineProperty(document, 'hidden', {value: false});"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    page.wait_for_function(
        "() => slipway.live.state.stop !== null && slipway.live.state.status === 'live'"
    )

"""Ways through the product that several tests judge: each returns what was seen on it."""

import http.client
import json
from typing import Any

from playwright.sync_api import Page, Route

from tests.stack import Stack
from tests.system.browser.driving import (
    SLOW_MS,
    Visitors,
    drawn_points,
    go_on,
    launch,
    model_of,
    walk_to_review,
)

LONG_MS = 2 * SLOW_MS
SO_MANY_DRAWN = (
    "n => Number(document.querySelector(\"[data-chart='loss']\").dataset.drawn || 0) >= n"
)
# How many points a chart has drawn within so many milliseconds of its first; null: not yet.
DRAWN_WITHIN = """
span => {
  const { data } = document.querySelector("[data-chart='loss'] .js-plotly-plot");
  const { x } = data.find((trace) => trace.meta && trace.meta.metric);
  return x.at(-1) < x[0] + span ? null : { count: x.filter((at) => at <= x[0] + span).length };
}
"""
# The instant that the job's figures are of, those of its charts, and a caption, for some seconds
# and until each has changed twice: a busy machine makes few steps.
INSTANTS = """
async () => {
  const seen = [];
  const numOf = (place) => new Set(seen.map((one) => one[place])).size;
  for (let i = 0; i < 1200 && (i < 30 || numOf(0) < 3 || numOf(2) < 3); i += 1) {
    const job = document.querySelector("[data-job]").dataset.asOf;
    const charts = [...document.querySelectorAll("[data-chart]")];
    const caption = document.querySelector("[data-region='words-loss']").textContent;
    seen.push([job, charts.map((one) => one.dataset.asOf ?? job), caption]);
    await new Promise((done) => setTimeout(done, 250));
  }
  return seen;
}
"""
HAS_HEARD = """
() => slipway.live.state.lastId !== document.querySelector("[data-live-since]").dataset.liveSince
"""
IS_LIVE = "() => slipway.live.state.status === 'live' && slipway.live.state.stop !== null"
HIDE_OR_SHOW = """
isHidden => {
  Object.defineProperty(document, 'hidden', {value: isHidden, configurable: true});
  document.dispatchEvent(new Event('visibilitychange'));
}
"""
MOST_STREAMS = 6  # one person's
COLOURS = ("red", "green", "blue", "black", "white", "grey", "pink", "brown")
ASKED = [
    {"instruction": f"Which colour is number {n}?", "output": f"It is {COLOURS[n % 8]}."}
    for n in range(60)
]


def watch_demo(page: Page, stack: Stack) -> dict[str, Any]:
    """Walk, launch and watch one demo job, without ever loading its page again."""
    walk_to_review(page, stack.base_url)
    seen: dict[str, Any] = {"review": page.inner_text("main"), "job_id": launch(page)}
    page.evaluate("window.sameDocument = true")
    page.wait_for_selector("[data-state-now='running']", timeout=LONG_MS)
    page.wait_for_function(SO_MANY_DRAWN, arg=3, timeout=LONG_MS)
    seen["points_while_running"] = drawn_points(page, "loss")
    page.wait_for_function("() => document.title.includes('%')", timeout=LONG_MS)
    seen["title_then"] = page.title()
    seen["state_then"] = page.get_attribute("[data-state-now]", "data-state-now")
    seen["log_then"] = page.inner_text("[data-log]")
    seen["empty_cards"] = [card for card in page.locator(".card").all_inner_texts() if not card]
    seen["stamp_then"] = page.inner_text("[data-stamp]")
    page.wait_for_selector("[data-state-now='succeeded']", timeout=LONG_MS)
    page.get_by_role("heading", name="Artefacts").wait_for(timeout=LONG_MS)
    page.locator("#taught").wait_for(timeout=LONG_MS)
    page.get_by_role("link", name="the whole log").wait_for(timeout=LONG_MS)
    seen["same_document"] = page.evaluate("window.sameDocument === true")
    seen["end"] = page.inner_text("main")
    return seen


def follow_job(visitors: Visitors, stack: Stack) -> dict[str, Any]:
    """Launch a job of half an hour without JavaScript, open it in several ways, and stop it."""
    client = stack.client("alice")
    with visitors.page(java_script_enabled=False) as page:
        walk_to_review(page, stack.base_url, time_budget_seconds="30")
        seen: dict[str, Any] = {"job_id": launch(page)}
        client.wait_for_state(seen["job_id"], "running")
        page.reload()
        seen["state_without_javascript"] = page.get_attribute("[data-state-now]", "data-state-now")
    url = f"{stack.base_url}/jobs/{seen['job_id']}/"
    with visitors.page() as cut:  # first: of many points a chart thins the older ones
        cut_and_hide(cut, stack, url, seen)
    with visitors.page("olga") as crowded, visitors.page() as deaf:
        crowd_out(crowded, stack, url, seen)
        poll(deaf, url, seen)
        crowded.wait_for_function(IS_LIVE, timeout=LONG_MS)
        seen["stream_once_there_is_room"] = crowded.evaluate("slipway.live.state.status")
    with visitors.page() as late, visitors.page() as untold:
        miss_the_end(late, untold, stack, seen)
    return seen


def miss_the_end(late: Page, untold: Page, stack: Stack, seen: dict[str, Any]) -> None:
    """Stop a job while one page's stream is not open yet and another's never tells of it."""
    client = stack.client("alice")
    held: list[Route] = []
    late.route("**/live/", lambda route: held.append(route))  # noqa: PLW0108 (Playwright reads the signature)
    other = client.json("/api/v1/tickets?topics=hosts")["ticket"]
    untold.route(
        "**/live/",
        lambda route: route.continue_(headers={**route.request.headers, "live-ticket": other}),
    )
    for page in (late, untold):
        page.goto(f"{stack.base_url}/jobs/{seen['job_id']}/")
    untold.wait_for_function(IS_LIVE, timeout=LONG_MS)
    while not held:
        late.wait_for_timeout(50)
    client.post(f"/jobs/{seen['job_id']}/stop/", {})
    client.wait_for_state(seen["job_id"], "stopped")
    for route in held:
        route.continue_()
    untold.evaluate("slipway.live.state.frameAt -= 60000")
    for name, page in (("opened_late", late), ("told_nothing", untold)):
        page.wait_for_selector("[data-state-now='stopped']", timeout=LONG_MS)
        seen[name] = page.inner_text("[data-state-now]")


def crowd_out(page: Page, stack: Stack, url: str, seen: dict[str, Any]) -> None:
    """Open a job while its reader has as many streams as there may be, then close those."""
    ticket = stack.client("olga").json("/api/v1/tickets?topics=jobs")["ticket"]
    streams = [open_stream(stack.port, ticket) for _ in range(MOST_STREAMS)]
    page.goto(url)
    page.wait_for_function(SO_MANY_DRAWN, arg=1, timeout=LONG_MS)
    page.wait_for_function("() => slipway.live.state.status === 'polling'")
    seen["stamp_when_full"] = page.inner_text("[data-stamp]")
    for stream in streams:
        stream.close()


def open_stream(port: int, ticket: str) -> http.client.HTTPConnection:
    """Open a stream and return its connection once the server has taken it."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/live/", headers={"Live-Ticket": ticket})
    assert connection.getresponse().status == http.client.OK
    return connection


def poll(page: Page, url: str, seen: dict[str, Any]) -> None:
    """Open a job where no stream comes through, and see it drawn on all the same."""
    page.route("**/live/**", lambda route: route.abort())
    page.goto(url)
    page.wait_for_function(SO_MANY_DRAWN, arg=1, timeout=LONG_MS)
    seen["points_polled"] = [drawn_points(page, "loss")]
    page.wait_for_function(SO_MANY_DRAWN, arg=seen["points_polled"][0] + 1, timeout=LONG_MS)
    seen["points_polled"].append(drawn_points(page, "loss"))
    seen["stamp_without_a_stream"] = page.inner_text("[data-stamp]")


def cut_and_hide(page: Page, stack: Stack, url: str, seen: dict[str, Any]) -> None:
    """Cut the stream of an open job, see it taken up again, then hide the page and show it."""
    streams = []
    page.on("request", lambda sent: streams.append(sent) if "/live/" in sent.url else None)
    page.goto(url)
    page.wait_for_function(SO_MANY_DRAWN, arg=2, timeout=LONG_MS)
    page.wait_for_function(HAS_HEARD, timeout=LONG_MS)
    seen["instants"] = page.evaluate(INSTANTS)
    num_before = len(streams)
    page.evaluate("slipway.live.drop()")
    page.wait_for_function(
        "() => slipway.live.state.status === 'live' && slipway.live.state.errors === 0",
        timeout=LONG_MS,
    )
    seen["streams_after_the_cut"] = [each.headers for each in streams[num_before:]]
    query = "metrics=loss&points=5000"
    stored = stack.client().json(f"/api/v1/jobs/{seen['job_id']}/series?{query}")["series"][0]
    times = [
        t for t, value in zip(stored["t_ms"], stored["value"], strict=True) if value is not None
    ]
    span = times[-1] - times[0]
    drawn = page.wait_for_function(DRAWN_WITHIN, arg=span, timeout=LONG_MS)
    seen["points_over_the_cut"] = (drawn.json_value()["count"], len(times))
    page.evaluate(HIDE_OR_SHOW, arg=True)
    seen["stream_while_hidden"] = page.evaluate("slipway.live.state.stop")
    page.evaluate(HIDE_OR_SHOW, arg=False)
    page.wait_for_function(IS_LIVE, timeout=LONG_MS)
    seen["stream_once_shown"] = page.evaluate("slipway.live.state.status")


def lines(documents: list[dict[str, str]]) -> bytes:
    """Return documents as JSON lines."""
    return "".join(f"{json.dumps(each)}\n" for each in documents).encode()


def upload(page: Page, content: bytes) -> None:
    """Hand a file over in the step of the workload."""
    file = {"name": "asked.jsonl", "mimeType": "application/json", "buffer": content}
    page.get_by_label("JSON, JSON lines, Parquet, CSV or text").set_input_files(file)
    page.get_by_role("button", name="Upload", exact=True).click()


def tune(page: Page, stack: Stack, finished_job: str) -> dict[str, Any]:
    """Walk the wizard with a broken file and a sound one, launch, and watch to the end."""
    seen: dict[str, Any] = {}
    page.goto(f"{stack.base_url}/plans/new/?preset=serve")
    page.locator("input[name='goal'][value='finetune']").check()
    go_on(page)
    page.locator("input[name='source'][value='team']").check()
    page.locator("#id_team_model").select_option(model_of(stack, finished_job))
    go_on(page)
    at_workload = page.url
    upload(page, lines(ASKED[:2]) + b"{oops\n")
    page.get_by_role("heading", name="asked.jsonl was rejected").wait_for()
    seen["refused"] = page.inner_text("main")
    page.goto(at_workload)
    upload(page, lines(ASKED))
    page.get_by_text("60 records · instruction").wait_for()
    seen["workload"] = page.inner_text("main")
    fields = {"sequence_length": "64", "global_batch_size": "4", "tokens": "0.008"}
    for name, value in fields.items():
        page.locator(f"#id_{name}").fill(value)
    go_on(page)
    go_on(page)
    seen["review"] = page.inner_text("main")
    seen["job_id"] = launch(page)
    page.wait_for_selector("[data-state-now='succeeded']", timeout=LONG_MS)
    page.get_by_role("heading", name="Artefacts").wait_for(timeout=LONG_MS)
    seen["points"] = drawn_points(page, "loss")
    seen["end"] = page.inner_text("main")
    return seen

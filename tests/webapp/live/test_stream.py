"""The ASGI branch, spoken to as a server does."""

import asyncio
import re
from pathlib import Path

import pytest
import pytest_asyncio
from django.core.signing import BadSignature, TimestampSigner

from tests.stack import SLOW_S, wait_for
from webapp import asgi
from webapp.core import problems
from webapp.live import stream
from webapp.live.stream import BYE, SALT, publish, read_ticket

pytestmark = [pytest.mark.usefixtures("redis_server"), pytest.mark.asyncio]


def ticket(*topics: str, user: int = 1) -> str:
    return TimestampSigner(salt=SALT).sign_object({"u": user, "t": list(topics)})


def with_ticket(text: str, *others: tuple[bytes, bytes]) -> tuple[tuple[bytes, bytes], ...]:
    """Return the headers of a request with a ticket."""
    return ((b"live-ticket", text.encode()), *others)


async def publish_until_taken(topic: str, event: str, data: dict) -> None:
    """Publish until Redis took it: a busy machine may let it answer too late."""
    await asyncio.to_thread(wait_for, lambda: publish(topic, event, data), "Redis")


class Browser:
    """One connection: reads what the branch sends, and may hang up."""

    def __init__(self, headers: tuple = (), method: str = "GET", query: str = "") -> None:
        self.scope = {
            "type": "http",
            "method": method,
            "path": "/live/",
            "query_string": query.encode(),
            "headers": list(headers),
        }
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.is_over = False
        self._body = b""
        self._news = asyncio.Event()
        self._gone = asyncio.Event()
        self.task = asyncio.create_task(asgi.application(self.scope, self._receive, self._send))

    async def _receive(self) -> dict:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], dict(message["headers"])
        else:
            self._body += message["body"]
            self.is_over = not message.get("more_body", False)
        self._news.set()

    async def until(self, text: bytes) -> bytes:
        async with asyncio.timeout(SLOW_S):
            while text not in self._body:
                self._news.clear()
                await self._news.wait()
        return self._body

    async def hang_up(self) -> None:
        self._gone.set()
        async with asyncio.timeout(SLOW_S):
            await self.task


async def listening(*topics: str) -> Browser:
    browser = Browser(with_ticket(ticket(*topics)))
    await browser.until(b"retry: 3000")
    async with asyncio.timeout(SLOW_S):
        await stream.hub_of_this_loop().is_reading.wait()
    return browser


@pytest_asyncio.fixture(autouse=True)
async def _close_hub():
    yield
    stream.hub_of_this_loop().close()
    await asyncio.sleep(0)


async def test_without_a_good_ticket_nothing_is_told():
    for headers in [(), *map(with_ticket, ["", "forged", "a:b:c", "\xff", ticket("job:1")[:-1]])]:
        browser = Browser(headers)
        body = await browser.until(b"ticket_refused")
        assert (browser.status, browser.is_over) == (401, True), headers
        assert b"Load the page again" in body, headers
        await browser.hang_up()


async def test_a_ticket_in_the_address_which_proxies_log_opens_nothing():
    browser = Browser(query=f"ticket={ticket('job:1')}")
    body = await browser.until(b"ticket_refused")
    assert browser.status == 401
    assert b"The header Live-Ticket is missing" in body
    await browser.hang_up()
    script = (Path(__file__).parents[3] / "static/js/live.js").read_text("utf-8")
    assert re.findall(r"fetch\((.)/live/(.*?)\1", script) == [('"', "")]


async def test_a_request_with_a_body_is_refused_and_its_connection_closed(monkeypatch):
    """The server goes on reading the body of a request that is answered, without end."""
    monkeypatch.setattr(problems, "LINGER_SECONDS", 0.01)
    good = with_ticket(ticket("job:1"))
    for method, headers, status in [
        ("GET", ((b"transfer-encoding", b"chunked"),), 413),
        ("GET", ((b"content-length", b"5"),), 413),
        ("POST", (), 405),
        ("HEAD", (), 405),
    ]:
        browser = Browser((*good, *headers), method)
        await browser.task
        assert (browser.status, browser.is_over) == (status, True), (method, headers)
        assert browser.headers[b"connection"] == b"close", (method, headers)
        assert browser.headers[b"allow"] == b"GET", (method, headers)


async def test_a_ticket_older_than_an_hour_is_refused(monkeypatch):
    old = ticket("job:1")
    monkeypatch.setattr("webapp.live.stream.TICKET_SECONDS", -1)
    with pytest.raises(BadSignature):
        read_ticket(old)


async def test_the_answer_is_an_unbuffered_event_stream():
    browser = await listening("job:1")
    assert browser.status == 200
    assert browser.headers[b"content-type"].startswith(b"text/event-stream")
    assert browser.headers[b"cache-control"] == b"no-store"
    assert browser.headers[b"x-accel-buffering"] == b"no"
    assert browser.headers[b"content-security-policy"].startswith(b"default-src 'none'")
    await browser.hang_up()


async def test_what_is_published_arrives():
    browser = await listening("job:1")
    await publish_until_taken("job:1", "job.state", {"state": "running"})
    body = await browser.until(b'"running"')
    assert b'event: job.state\ndata: {"state":"running"}\n\n' in body
    await browser.hang_up()


async def test_a_quiet_stream_is_kept_open_with_pings(monkeypatch):
    monkeypatch.setattr(stream, "STREAM_PING_SECONDS", 0.05)
    browser = await listening("job:1")
    await browser.until(b": ping\n\n")
    await browser.hang_up()


async def test_a_stream_resumes_after_its_last_id():
    browser = await listening("job:1")
    await publish_until_taken("job:1", "job.progress", {"n": 1})
    body = await browser.until(b'"n":1')
    last_id = body.split(b"id: ")[1].split(b"\n")[0]
    await browser.hang_up()
    await publish_until_taken("job:1", "job.progress", {"n": 2})
    other = await listening("job:1")
    await asyncio.sleep(0.2)
    again = Browser(with_ticket(ticket("job:1"), (b"last-event-id", last_id)))
    body = await again.until(b'"n":2')
    assert b'"n":1' not in body
    await again.hang_up()
    await other.hang_up()


async def test_a_process_that_stops_says_goodbye():
    browser = await listening("job:1")
    stream.close_all()
    await browser.until(BYE)
    assert browser.is_over
    async with asyncio.timeout(SLOW_S):
        await browser.task


async def test_a_stream_ends_when_its_hour_is_over(monkeypatch):
    monkeypatch.setattr(stream, "LIFETIME_SECONDS", 0)
    browser = Browser(with_ticket(ticket("job:1")))
    await browser.until(BYE)
    await browser.hang_up()


async def test_one_person_has_six_streams_and_one_more_when_one_ends():
    browsers = [await listening("job:1") for _ in range(stream.MOST_PER_PERSON)]
    seventh = Browser(with_ticket(ticket("job:1")))
    body = await seventh.until(b"too_many_streams")
    assert (seventh.status, seventh.headers[b"retry-after"]) == (429, b"15")
    assert b"One person may have 6 live pages open" in body
    await browsers[0].hang_up()
    browsers[0] = await listening("job:1")
    await asyncio.gather(*(browser.hang_up() for browser in [*browsers, seventh]))


async def test_streams_of_one_person_take_none_from_another():
    mine = [await listening("job:1") for _ in range(stream.MOST_PER_PERSON)]
    theirs = Browser(with_ticket(ticket("job:1", user=2)))
    await theirs.until(b"retry: 3000")
    assert theirs.status == 200
    await asyncio.gather(*(browser.hang_up() for browser in [*mine, theirs]))


async def test_five_hundred_viewers_fill_a_process_and_leave_nothing_behind():
    most = stream.MOST_PER_PROCESS
    browsers = [Browser(with_ticket(ticket("job:1", user=1 + n // 5))) for n in range(most)]
    for browser in browsers:
        await browser.until(b"retry: 3000")
    late = Browser(with_ticket(ticket("job:1", user=1000)))
    assert b"keeps 500 live pages open" in await late.until(b"streams_full")
    await late.hang_up()
    hub = stream.hub_of_this_loop()
    assert len(hub.viewers) == most
    await asyncio.gather(*(browser.hang_up() for browser in browsers))
    assert len(hub.viewers) == 0


async def test_other_paths_go_to_django(monkeypatch):
    seen = []

    async def django(scope, receive, send) -> None:
        seen.append(scope["path"])

    monkeypatch.setattr(asgi, "in_turns", django)
    await asgi.application({"type": "http", "path": "/jobs/"}, None, None)
    assert seen == ["/jobs/"]


async def test_start_and_stop_are_acknowledged(monkeypatch):
    monkeypatch.setattr(asgi, "check_schema", lambda: None)
    monkeypatch.setattr(
        asgi, "freeze_loaded", lambda: None
    )  # it would freeze what the tests loaded
    asked = iter(["lifespan.startup", "lifespan.shutdown"])
    said = []

    async def receive() -> dict:
        return {"type": next(asked)}

    async def send(message: dict) -> None:
        said.append(message["type"])

    await asgi.application({"type": "lifespan"}, receive, send)
    assert said == ["lifespan.startup.complete", "lifespan.shutdown.complete"]

"""The client's requests: errors, repetitions, files and events, against answers made by hand."""

import asyncio
import inspect
import io
import json
import time

import httpx
import pytest
from pydantic import ValidationError

from planner.specs.workload import Strategy
from runners.client import ApiError, AsyncSlipway, Slipway, UnreachableError, transport
from runners.client.transport import server_url

PROBLEM = {"content-type": "application/problem+json"}


@pytest.fixture(autouse=True)
def waits(monkeypatch) -> list[float]:
    """The seconds that the client would have waited."""
    waited: list[float] = []

    async def rest(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(time, "sleep", waited.append)
    monkeypatch.setattr(transport.asyncio, "sleep", rest)
    return waited


class Server:
    """Answers in the given order, and keeps what was sent."""

    def __init__(self, *answers) -> None:
        self.answers, self.sent = list(answers), []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.sent.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def sync(self) -> Slipway:
        client = httpx.Client(transport=httpx.MockTransport(self))
        return Slipway("https://slipway.lan/", "slp_x", client=client)

    def asynchronous(self) -> AsyncSlipway:
        client = httpx.AsyncClient(transport=httpx.MockTransport(self))
        return AsyncSlipway("slipway.lan", "slp_x", client=client)


def each(server: Server, call):
    """Return what a call gives, by both halves of the client in turn."""
    yield lambda: call(server.sync())

    async def waited():
        return await call(server.asynchronous())

    yield lambda: asyncio.run(waited())


def ok(body) -> httpx.Response:
    return httpx.Response(200, json=body)


def test_a_refusal_is_an_error_with_its_code_fields_and_sentence():
    problem = {"code": "invalid", "detail": "No.", "errors": [{"field": "a", "message": "b"}]}
    for number in range(2):
        server = Server(httpx.Response(422, json=problem, headers=PROBLEM))
        call = list(each(server, lambda client: client.list_hosts()))[number]
        with pytest.raises(ApiError, match=r"No\.") as caught:
            call()
        assert (caught.value.status, caught.value.code) == (422, "invalid")
        assert caught.value.errors == problem["errors"]
        assert server.sent[0].headers["authorization"] == "Bearer slp_x"
    page = Server(httpx.Response(502, text="<html>"), *[httpx.Response(502)] * 3)
    with pytest.raises(ApiError, match="The server answered 502"):
        page.sync().list_hosts()


def test_what_passes_is_tried_again_with_the_same_key(waits):
    for number in range(2):
        server = Server(
            httpx.Response(429, headers={"Retry-After": "7"}),
            httpx.ReadError("cut"),
            httpx.Response(409, json={"code": "in_progress"}, headers={"Retry-After": "1"}),
            httpx.Response(204),
        )
        list(each(server, lambda client: client.delete_job("a/b")))[number]()
        assert {one.url.path for one in server.sent} == {"/api/v1/jobs/a/b"}
        assert server.sent[0].url.raw_path == b"/api/v1/jobs/a%2Fb"
        assert len({one.headers["idempotency-key"] for one in server.sent}) == 1
    assert waits == [7.0, 2.0, 1.0] * 2
    other = Server(httpx.Response(409, json={"code": "not_stoppable", "detail": "Over."}))
    with pytest.raises(ApiError, match="Over"):
        other.sync().stop_job("x")


def test_a_server_that_is_away_is_named():
    with pytest.raises(UnreachableError, match=r"https://slipway\.lan does not answer \(refused"):
        Server(httpx.ConnectError("refused")).sync().get_me()
    with pytest.raises(UnreachableError, match="Check the address"):
        asyncio.run(Server(*[httpx.ReadError("")] * 4).asynchronous().get_me())
    with pytest.raises(ApiError, match="older server, or not Slipway's"):
        Server(ok({"hello": 1})).sync().get_me()
    for text in ("ftp://x", "", "https://", "://"):
        with pytest.raises(ValueError, match=r"address of a server|Invalid"):
            server_url(text)
    assert server_url("slipway.lan:8000/") == "https://slipway.lan:8000"


def test_a_newer_servers_fields_are_ignored_and_only_what_was_set_is_sent():
    page = {"items": [], "next_cursor": None, "news": 1}
    server = Server(ok(page))
    assert server.sync().list_jobs(state="running", limit=3).items == []
    query = dict(server.sent[0].url.params)
    assert (query["state"], query["limit"], "until" in query) == ("running", "3", False)
    from runners.client.generated import QuotaChanges

    server = Server(httpx.Response(403, json={"detail": "x"}))
    with pytest.raises(ApiError):
        server.sync().change_limits(QuotaChanges(max_devices=None))
    assert json.loads(server.sent[0].content) == {"max_devices": None}


def events(*frames: str) -> httpx.Response:
    return httpx.Response(200, content="".join(frames).encode())


def test_a_broken_stream_goes_on_after_the_last_number_and_keeps_every_line():
    line = json.dumps({"text": "a\u2028b"}, ensure_ascii=False)

    def answers():
        yield events("retry: 3000\n\n", f"id: 4\nevent: log\ndata: {line}\n\n", "id: 5\neve")
        yield httpx.ReadError("cut")
        yield events(": ping\n\n", 'event: state\ndata: {"state": "succeeded"}\n\nevent: end\n\n')

    server = Server(*answers())
    found = list(server.sync().follow_job("j", kinds="log"))
    assert [(one.name, one.number) for one in found] == [("log", "4"), ("state", "")]
    assert found[0].data["text"] == "a\u2028b"
    assert [one.headers.get("last-event-id") for one in server.sent] == [None, "4", "4"]

    async def read():
        return [one async for one in Server(*answers()).asynchronous().follow_job("j")]

    assert asyncio.run(read()) == found
    with pytest.raises(ApiError, match="No object"):
        next(Server(httpx.Response(404, json={"detail": "No object"})).sync().follow_job("j"))


class Pieces(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A body that comes in pieces and then is cut."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces, self.is_closed = pieces, False

    def __iter__(self):
        yield from self.pieces
        raise httpx.ReadError("cut")

    async def __aiter__(self):
        for piece in self:
            yield piece

    def close(self) -> None:
        self.is_closed = True

    async def aclose(self) -> None:
        self.is_closed = True


def test_whoever_stops_to_follow_releases_the_connection():
    bodies = [Pieces(b"event: a\ndata: {}\n\nevent: b\n\n") for _ in range(3)]
    servers = [Server(httpx.Response(200, stream=body)) for body in bodies]
    followed = servers[0].sync().follow_job("j")
    assert (next(followed).name, bodies[0].is_closed) == ("a", False)
    followed.close()

    async def stop():
        stream = servers[1].asynchronous().follow_job("j")
        first = await anext(stream)
        await stream.aclose()
        # The synchronous half blocks an event loop, and works on it.
        return first, next(servers[2].sync().follow_job("j"))

    first, same = asyncio.run(stop())
    assert first == same
    assert [body.is_closed for body in bodies[:2]] == [True, True]


def test_a_download_is_repeated_only_before_it_began():
    for number in range(2):
        sink = io.BytesIO()
        server = Server(
            httpx.Response(503, headers={"Retry-After": "1"}),
            httpx.Response(200, stream=Pieces(b"x" * transport.PIECE_BYTES, b"y")),
        )
        call = list(each(server, lambda c, sink=sink: c.download_artefact("j", "m", sink)))[number]
        with pytest.raises(UnreachableError, match="cut"):
            call()
        assert (len(server.sent), len(sink.getvalue())) == (2, transport.PIECE_BYTES)


def test_arguments_fill_the_path_the_query_and_the_body_as_declared():
    server = Server(ok({"items": []}), httpx.Response(403, json={"detail": "x"}))
    client = server.sync()
    assert client.list_hosts(q="a b", limit=3).items == []
    assert dict(server.sent[0].url.params) == {"limit": "3", "cursor": "", "q": "a b"}
    with pytest.raises(ApiError):
        client.reorder_queue("p/1", job_id="j", body={"move": "up"}, idempotency_key="k")
    sent = server.sent[-1]
    assert (sent.method, sent.url.raw_path) == ("PATCH", b"/api/v1/pools/p%2F1/jobs/j")
    assert (sent.headers["idempotency-key"], json.loads(sent.content)) == ("k", {"move": "up"})
    for call in (client.get_job, lambda: client.list_jobs(stat="x")):
        with pytest.raises(TypeError, match=r"(get_job|list_jobs)\(\): .*'(job_id|stat)'"):
            call()
    assert str(inspect.signature(client.get_job)) == "(job_id: 'str') -> 'JobDetail'"


def test_the_items_of_all_pages_are_one_iterator():
    def pages() -> Server:
        files = [{"files": {"a": 1}, "sha256": {}, "kind": "model", "total_bytes": 1,
                  "is_complete": True, "created_at": "2026-11-28T00:00:00Z", "name": name}
                 for name in "abc"]  # fmt: skip
        return Server(ok({"items": files[:2], "next_cursor": "c"}), ok({"items": files[2:]}))

    async def waited(client: AsyncSlipway) -> list[str]:
        return [each.name async for each in client.paginate(client.list_artefacts, "j", limit=2)]

    server, other = pages(), pages()
    client = server.sync()
    assert [each.name for each in client.paginate(client.list_artefacts, "j", limit=2)] == list(
        "abc"
    )
    assert asyncio.run(waited(other.asynchronous())) == list("abc")
    for sent in (server.sent, other.sent):
        queries = [dict(one.url.params) for one in sent]
        assert queries == [{"limit": "2", "cursor": cursor} for cursor in ("", "c")]


def test_files_go_and_come_as_bytes(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x"}\n')
    for number in range(2):
        server = Server(httpx.Response(422, json={"detail": "Bad data."}))
        with pytest.raises(ApiError, match="Bad data"):
            list(each(server, lambda client: client.add_data(path)))[number]()
        assert b'filename="a.jsonl"' in server.sent[0].content
        sink = io.BytesIO()
        server = Server(httpx.Response(200, content=b"tar"))
        got = list(
            each(server, lambda client, sink=sink: client.download_artefact("j", "m", sink))
        )
        assert (got[number](), sink.getvalue()) == (3, b"tar")


def test_words_and_fields_of_a_newer_server_are_read():
    match = {"kind": "notebook", "id": "1", "name": "x", "colour": "red"}
    (found,) = Server(ok({"items": [match]})).sync().search(q="x").items
    assert (found.kind, found.name) == ("notebook", "x")
    newer = {"weight_dtype": "bf16", "since": 2}
    with pytest.raises(ValidationError, match="since"):  # the planner's own classes are strict
        Strategy.model_validate(newer)
    reply = httpx.Response(200, json=newer)
    assert transport._reply_of(reply, Strategy).weight_dtype == "bf16"

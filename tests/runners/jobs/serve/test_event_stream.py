"""Streams and refusals of the endpoint: heartbeats, hang-ups, limits, one place for each."""

import ast
import asyncio
import json
from pathlib import Path

import pytest
from starlette.routing import Route

from runners.jobs import serve
from runners.jobs.serve import event_stream
from runners.jobs.serve.contract import (
    EngineEndedError,
    Pending,
    QueueFullError,
    StreamChunk,
)
from runners.jobs.serve.event_stream import HEARTBEAT
from runners.jobs.serve.openai_requests import RequestError
from runners.jobs.serve.openai_server import MAX_BODY_BYTES, OpenAIServer
from runners.shared.event_streams import TokensUsed, read_events
from tests.runners.jobs.serve.test_openai_server import ASKED, CHAT, Door, Echo

ANSWER = StreamChunk("hi", (), "stop", 1)


class Late(Echo):
    """A model that answers after a while, or never; it keeps what was cancelled."""

    def __init__(self, seconds: float | None) -> None:
        super().__init__()
        self.seconds, self.cancelled = seconds, []
        self.engine.cancel = self.cancelled.extend

    def submit(self, requests):
        loop = asyncio.get_running_loop()
        for each in requests if self.seconds is not None else ():
            loop.call_later(self.seconds, each.deliver, ANSWER)
        return [Pending() for _ in requests]


class Forwarding:
    """A model whose engine speaks OpenAI's form; an answer of it is what a test says."""

    def __init__(self, events) -> None:
        self.engine, self.events = Echo().engine, events
        self.model, self.is_streamed, self.has_ended = "model", True, False
        self.used, self.calls_refusal, self.ranking_refusal = TokensUsed(), "", "it ranks none"
        self.template = ""

    def forwarded_request(self, _path, _body, **_options):
        return self

    async def count_tokens(self, document):
        return len(document["messages"])

    async def rank(self, _model, _document):
        raise AssertionError("it is asked in spite of its refusal")


def call(door: Door, *messages: dict, method="POST", path=CHAT, headers=()) -> list[dict]:
    """Return what the server sends to a client that sends these messages and no other."""
    sent: list[dict] = []
    left = list(messages)

    async def receive() -> dict:
        if not left:
            await asyncio.Event().wait()
        if left[0]["type"] == "http.disconnect":
            await asyncio.sleep(0.02)  # a read that is cancelled loses no message
        return left.pop(0)

    async def send(message: dict) -> None:
        sent.append(message)

    async def ask() -> None:
        scope = {"type": "http", "method": method, "path": path, "headers": list(headers)}
        async with asyncio.timeout(10):
            await OpenAIServer(door.service)(scope, receive, send)

    asyncio.run(ask())
    return sent


def body(**fields) -> dict:
    return {"type": "http.request", "body": json.dumps(ASKED | fields).encode()}


def test_a_stream_that_waits_has_heartbeats_and_the_same_answer(monkeypatch):
    plain = Door(Late(0)).ask("POST", CHAT, json=ASKED | {"stream": True}).text
    monkeypatch.setattr(event_stream, "HEARTBEAT_SECONDS", 0.01)

    waited = Door(Late(0.1)).ask("POST", CHAT, json=ASKED | {"stream": True}).text

    assert HEARTBEAT.decode() not in plain
    events = waited.split("\n\n")
    assert events.count(HEARTBEAT.decode().strip()) > 1
    assert [each for each in events if not each.startswith(":")][-2:] == ["data: [DONE]", ""]


def test_an_engine_that_is_silent_has_heartbeats_and_its_later_error_is_an_event(monkeypatch):
    async def refused(seconds):
        await asyncio.sleep(seconds)
        raise RequestError(400, "too long", code="context_length_exceeded")
        yield b""

    at_once = Door(Forwarding(lambda: refused(0))).ask("POST", CHAT, json=ASKED)
    monkeypatch.setattr(event_stream, "HEARTBEAT_SECONDS", 0.01)
    later = Door(Forwarding(lambda: refused(0.1))).ask("POST", CHAT, json=ASKED)

    assert at_once.status_code == 400
    assert (later.status_code, later.text[: len(HEARTBEAT)]) == (200, HEARTBEAT.decode())
    assert json.loads(later.text.split("data: ")[1]) == at_once.json()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_cancels_its_request(stream):
    never = Late(None)
    call(Door(never), body(stream=stream), {"type": "http.disconnect"})
    assert len(never.cancelled) == 1

    door = Door(never)
    half = {"type": "http.request", "body": b"{", "more_body": True}
    call(door, half, {"type": "http.disconnect"})
    assert (door.logged, door.count("refused"), door.count("failed")) == ([], 0, 0)


def test_a_hang_up_closes_the_engines_stream_wherever_it_waits():
    for waits_first in (True, False):
        ended = []

        async def events(waits_first=waits_first, ended=ended):
            try:
                if not waits_first:
                    yield b"data: {}\n\n"
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)  # as a connection that is closed
                ended.append(True)

        sent = call(Door(Forwarding(events)), body(), {"type": "http.disconnect"})
        assert ended == [True]
        assert [each.get("body") for each in sent[1:2]] == (
            [b""] if waits_first else [b"data: {}\n\n"]
        )


def test_limits_are_asked_before_the_body_is_read():
    def full(_answers):
        raise QueueFullError

    def ended(_answers):
        raise EngineEndedError

    length = (b"content-length", str(MAX_BODY_BYTES + 1).encode())
    for admit, headers, status, code in (
        (full, (), 429, "queue_full"),
        (ended, (), 503, "draining"),
        (lambda _answers: None, (length,), 413, "body_too_large"),
        (lambda _answers: None, ((b"content-encoding", b"gzip"),), 415, "unsupported_encoding"),
    ):
        door = Door()
        door.service.loaded.engine.admit = admit
        start, answer = call(door, headers=headers)  # a read would wait for ever
        assert start["status"] == status
        assert json.loads(answer["body"])["error"]["code"] == code
        assert (b"retry-after" in dict(start["headers"])) == (status == 429)
        assert door.count("refused") == 1


def test_an_engines_events_are_read_whole_whatever_the_parts_and_line_ends():
    async def parts(*sent):
        for each in sent:
            yield each

    async def read(*sent):
        return [each async for each in read_events(parts(*sent))]

    text = 'data: {"a": "\u2028\u0085\u000b"}'.encode()
    for end in (b"\n\n", b"\r\n\r\n", b"\r\r"):
        whole = text + end + b"data: [DONE]" + end
        for at in range(len(whole)):
            assert asyncio.run(read(whole[:at], whole[at:])) == [text, b"data: [DONE]"], (end, at)
    assert asyncio.run(read(text + b"\n\n", b"data: {")) == [text]  # torn: no event


def test_no_other_reader_of_events_cuts_lines_by_itself():
    root = Path(serve.__file__).parents[3]
    found = [
        path.name
        for folder in ("runners", "webapp")
        for path in (root / folder).rglob("*.py")
        if "iter_lines(" in path.read_text()
    ]
    assert found == []


def test_every_route_refuses_in_openais_form_and_counts_it():
    for route in OpenAIServer(Door().service).routes:
        assert isinstance(route, Route)
        path = route.path.format(name="model") if "{" not in route.path else "/v1/models/model"
        is_open = path == "/health"
        for method, key, status in (
            ("PATCH", "sk", 405),
            *(((next(iter(route.methods - {"HEAD"})), "wrong", 401),) if not is_open else ()),
        ):
            door = Door(key="sk")
            answer = door.ask(method, path, headers={"Authorization": f"Bearer {key}"})
            assert answer.status_code == status, (method, path)
            assert answer.headers["content-type"] == "application/json"
            assert answer.json(), path
            assert (door.count("refused"), len(door.logged)) == (1, 1)
        door = Door(key="sk")
        door.service.figures.prometheus = door.service.model_card = door.service.touch = None
        door.service.loaded.engine.admit = None
        if not is_open:
            method = next(iter(route.methods - {"HEAD"}))
            answer = door.ask(method, path, json=ASKED, headers={"Authorization": "Bearer sk"})
            assert (answer.status_code, door.count("failed")) == (500, 1), path


def test_streams_and_responses_are_made_in_one_place():
    """Only these two modules know Starlette's responses, and only one writes events."""
    makers, writers = set(), set()
    for path in Path(serve.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("starlette"):
                makers.add(path.name)
            if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
                text = node.value if isinstance(node.value, str) else node.value.decode("latin-1")
                if "event-stream" in text:
                    writers.add(path.name)
                assert "http.response" not in text, path
    assert makers == {"openai_server.py", "event_stream.py"}
    assert writers == {"event_stream.py"}
    calls = [
        node
        for node in ast.walk(
            ast.parse(Path(serve.__file__).with_name("openai_server.py").read_text())
        )
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", "") in ("Response", "EventStream")
    ]
    assert len(calls) == 5  # 204, metrics, whole answer, JSON, a client that went

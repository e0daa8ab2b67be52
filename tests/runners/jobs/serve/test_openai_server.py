"""What clients send an endpoint, and how it answers: history, nulls, methods, errors, streams."""

import asyncio
import json
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import Mock

import httpx
import pytest

from runners.jobs.serve import endpoint, openai_requests, openai_server
from runners.jobs.serve.answers import ResponseFormat
from runners.jobs.serve.anthropic_messages import CountRequest, MessagesRequest
from runners.jobs.serve.contract import (
    BoundedEngine,
    EngineEndedError,
    Limits,
    Pending,
    QueueFullError,
    StreamChunk,
)
from runners.jobs.serve.embeddings import EmbeddingRequest
from runners.jobs.serve.openai_requests import (
    ChatRequest,
    CompletionRequest,
    RequestError,
    parse_chat,
    parse_completion,
)
from runners.jobs.serve.openai_responses import ResponsesRequest
from runners.jobs.serve.openai_server import ErrorLog, OpenAIServer, ServiceState
from runners.jobs.serve.process import ProcessEngine
from runners.jobs.serve.relayed.relay import RelayedChat, RelayedCompletion, parse_request
from runners.jobspec import ServeSpec
from runners.jobspec.serve import key_hash
from tests.runners.jobs.serve.test_endpoint_job import RANDOM

CHAT, MODELS = "/v1/chat/completions", "/v1/models"
COMPLETIONS = "/v1/completions"
OWN = "slipway"
ASKED = {"model": "model", "messages": [{"role": "user", "content": "hi"}]}
NULLS = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "tool_calls"))


class OpenAnswers(BoundedEngine):
    """An engine that has so many answers."""

    num_open = 0


def test_an_engine_takes_answers_up_to_its_limits_and_none_once_it_is_closed():
    engine = OpenAnswers(Limits(2, 3, 64, frozenset()))
    assert engine.is_idle
    for count, answers, fault in [
        (0, 5, None), (4, 1, None), (5, 1, QueueFullError), (1, 5, QueueFullError),
        (0, 6, RequestError), (5, 6, RequestError),  # no later try would succeed
    ]:  # fmt: skip
        engine.num_open = count
        with pytest.raises(fault) if fault else nullcontext() as caught:
            engine.admit(answers)
        if fault is RequestError:
            assert (caught.value.status, caught.value.param) == (400, "n")
            assert "6 answers" in str(caught.value)
            assert "at most 5: 2 at once (max_concurrency) and 3 waiting" in str(caught.value)
    assert OpenAnswers(Limits(4, 0, 64, frozenset())).limits.most_answers == 4
    engine.is_closed = True
    with pytest.raises(EngineEndedError):
        engine.admit(0)
    for kind in (BoundedEngine, ProcessEngine, ResponseFormat):  # they lack what is of each kind
        with pytest.raises(TypeError, match="abstract"):
            kind()


class Echo:
    """A model whose every answer is ``hi``, or the chunks that a test gives it."""

    vocabulary = 100
    template = ""

    def __init__(self, *chunks: StreamChunk) -> None:
        self.engine = SimpleNamespace(
            limits=Limits(4, 4, 64, frozenset()),
            admit=lambda _answers: None,
            cancel=lambda _requests: None,
            is_idle=True,
        )
        self.chunks = chunks or (StreamChunk("hi", (), "stop", 1),)
        self.asked: list = []
        self.constraints: list = []

    async def chat_ids(self, messages, _tools=None):
        self.asked.append(messages)
        return [1]

    async def prompt_ids(self, _prompt):
        raise KeyError("no such token\nFAKE: a line of its own")

    def token_text(self, _token):
        return ""

    constraint_refusal = ""

    async def check_constraint(self, constraint):
        self.constraints.append(constraint)

    def submit(self, requests):
        for each in requests:
            for chunk in self.chunks:
                each.deliver(chunk)
        return [Pending() for _ in requests]


class Door:
    """An endpoint's HTTP server on a model of the test's, and what it logged."""

    def __init__(self, model=None, key="", engine=OWN) -> None:
        hashes = (key_hash(key),) if key else ()
        self.logged: list[str] = []
        spec = ServeSpec(model=RANDOM, key_hashes=hashes).model_copy(update={"engine": engine})
        self.service = ServiceState(spec, self.logged.append)
        self.service.open(model or Echo())

    def ask(self, method: str, path: str, **sent) -> httpx.Response:
        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(OpenAIServer(self.service))
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, **sent)

        return asyncio.run(ask())

    def count(self, name: str) -> int:
        return self.service.figures.counters[name]


def chat(*messages, **fields) -> bytes:
    return json.dumps({"model": "model", "messages": messages, **fields}).encode()


def user(content) -> dict:
    return {"role": "user", "content": content}


def own(body: bytes) -> list[dict[str, str]]:
    """Return the messages as our own engine's chat template sees them."""
    return [each.plain for each in parse_chat(body, OWN).messages]


def relayed(body: bytes) -> list[dict]:
    """Return the messages as an engine with its own API is sent them."""
    return parse_request(CHAT, body, "vllm").model_dump(mode="json", exclude_unset=True)[
        "messages"
    ]


def test_an_answer_comes_back_as_history_and_null_changes_nothing():
    asked = user("hi")
    plain = {"role": "assistant", "content": "hello"}
    answer = Door().ask("POST", CHAT, json=ASKED).json()["choices"][0]["message"]
    for sent, seen in (
        (answer, {"role": "assistant", "content": "hi"}),
        (plain | NULLS, plain),
        (plain | {"tool_calls": [], "annotations": [], "refusal": ""}, plain),
        (plain | {"annotations": [{"type": "url_citation"}]}, plain),
        (plain | {"name": None, "reasoning_content": None, "not_known": None}, plain),
        (plain | {"reasoning_content": "why"}, plain | {"reasoning_content": "why"}),
        (user([{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]),
         user([{"type": "text", "text": "a"}])),
        (user([{"type": "text", "text": "a", "cache_control": None}]),
         user([{"type": "text", "text": "a"}])),
        (user("a") | {"cache_control": {"type": "ephemeral"}, "name": "ann"},
         user("a") | {"name": "ann"}),
    ):  # fmt: skip
        body, wanted = chat(asked, sent, asked), [asked, seen, asked]
        assert relayed(body) == wanted, sent
        assert own(body) == own(chat(*wanted)), sent

    assert own(chat(asked, {"role": "assistant", "content": None}))[1]["content"] == ""
    assert own(chat(user("a"), plain | {"reasoning": "why"}))[1]["reasoning_content"] == "why"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "null"}}
    calling = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "2"}]}
    assert relayed(chat(asked, calling, result))[1:] == [
        {"role": "assistant", "tool_calls": [call]}, result,
    ]  # fmt: skip


def test_a_null_field_of_a_request_is_as_if_it_was_left_out():
    options = ("include_usage", "continuous_usage_stats", "include_obfuscation")
    for fields in (
        {"stream_options": None},
        {"stream_options": dict.fromkeys(options)},
        {"ignore_eos": None, "stop": None, "logit_bias": None, "not_known": None},
        {"response_format": {"type": "text", "json_schema": None}},
    ):
        body = json.dumps({"model": "model", "prompt": "a", **fields}).encode()
        plain = parse_completion(b'{"model": "model", "prompt": "a"}', OWN)
        found = parse_completion(body, OWN)
        asks_nothing = {"stream_options": None, "response_format": None}
        assert found.model_copy(update=asks_nothing) == plain, fields
        assert found.answer_schema is None, fields
        assert not found.wants_usage, fields
        assert parse_chat(chat(user("a"), **fields), OWN), fields

    schema = {"type": "json_schema", "json_schema": {"schema": {"default": None}}, "strict": None}
    request = parse_request(
        CHAT, chat(user("a"), response_format=schema, tool_choice=None), "vllm"
    )
    document = request.model_dump(mode="json", exclude_unset=True)
    assert document["response_format"] == schema  # of the engine's making: not touched
    assert "tool_choice" not in document


def test_what_is_refused_is_named_by_the_field_that_was_sent():
    part = {"type": "text", "text": "a"}
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    for messages, named in (
        ([user("a"), {"role": "assistant", "content": "b", "refusal": "no"}],
         "argument: messages.1.refusal"),
        ([{"role": "assistant", "content": "b", "tool_calls": [{"id": "1"}]}],
         "messages.0.tool_calls.0: a call needs a function with a name"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "1"}}]}],
         "messages.0.tool_calls.0: a call's arguments are a JSON object, as text"),
        ([{"role": "function", "name": "f", "content": "b"}], "messages.0.role: input should"),
        ([user([part, part | {"new": 1}])], "argument: messages.0.content.1.new"),
        ([user([image])], "messages.0.content.0: images are not taken (image_url): this"),
        ([user([part, {"type": "input_audio"}])],
         "messages.0.content.1: audio recordings are not taken (input_audio)"),
        ([user([{"type": "text", "text": None}])], "messages.0.content.0.text: field required"),
        ([user(None)], "messages.0: content is missing; a message of the role user needs"),
        ([user(5)], "messages.0.content: input should be a valid string (given: '5')"),
        ([], "messages: list should have at least 1 item"),
    ):  # fmt: skip
        with pytest.raises(RequestError) as caught:
            parse_chat(chat(*messages), OWN)
        assert named in str(caught.value), named
        assert caught.value.param == "messages"

    with pytest.raises(RequestError, match="prompt: list should have at least 1 item"):
        parse_completion(b'{"model": "model", "prompt": []}', OWN)
    with pytest.raises(RequestError, match="model: field required"):
        parse_completion(b'{"model": null, "prompt": "a"}', OWN)


def test_a_body_that_is_no_json_is_refused_with_the_place():
    for body, said in (
        (b"", "line 1 column 1"),
        (b"{'model': 1}", "line 1 column 2"),
        (b'{"model": "\xff"}', "can't decode byte 0xff"),
        (b'{"model": "model", "prompt": "a", "temperature": NaN}', "NaN is no number of JSON"),
        (b'{"model": "model", "prompt": "\\uD800"}', "surrogates not allowed"),
        (b"[]", "not a JSON object"),
    ):
        answer = Door().ask("POST", "/v1/completions", content=body)
        assert answer.status_code == 400, body
        assert answer.json()["error"]["code"] == "invalid_json", body
        assert said in answer.json()["error"]["message"], body

    for content_type in ("application/json; charset=UTF-8", "text/plain", "", "application/x"):
        headers = {"Content-Type": content_type}
        assert Door().ask("POST", CHAT, json=ASKED, headers=headers).is_success, content_type
    packed = Door().ask("POST", CHAT, json=ASKED, headers={"Content-Encoding": "gzip"})
    assert packed.status_code == 415
    assert "'gzip' is not read here" in packed.json()["error"]["message"]


def test_a_scheme_has_no_case_and_the_key_has():
    door = Door(key="sk-Key")
    for header, status in (
        ("Bearer sk-Key", 200),
        ("bearer sk-Key", 200),
        ("BEARER   sk-Key ", 200),
        ("Bearer\tsk-Key", 200),
        ("sk-Key", 200),
        ("Bearer sk-key", 401),
        ("Basic sk-Key", 401),
        ("Bearer", 401),
        ("", 401),
    ):
        answer = door.ask("GET", MODELS, headers={"Authorization": header})
        assert answer.status_code == status, header
    assert answer.headers["www-authenticate"] == "Bearer"
    assert door.ask("GET", MODELS, headers={"AUTHORIZATION": "bearer sk-Key"}).is_success


def test_each_method_and_each_spelling_of_an_address_is_answered():
    door = Door(key="sk")
    headers = {"Authorization": "Bearer sk"}
    for path in (
        "/health",
        "/metrics",
        MODELS,
        "/v1/models/model",
        "/v1/models/",
        f"http://test/{MODELS}",
    ):
        got, head = (door.ask(each, path, headers=headers) for each in ("GET", "HEAD"))
        assert (head.status_code, head.content) == (200, b""), path
        assert head.headers == got.headers, path
        assert got.content, path
    assert door.ask("HEAD", "/health").is_success  # of a monitor, which has no key
    assert door.ask("GET", "/v1/models/", headers=headers).json()["object"] == "list"
    assert door.ask("POST", f"{CHAT}/", headers=headers, json=ASKED).is_success
    missing = door.ask("HEAD", "/v1/models/x", headers=headers)
    assert (missing.status_code, missing.content) == (404, b"")

    for path, methods in ((MODELS, "GET, HEAD, OPTIONS"), (CHAT, "POST, OPTIONS")):
        options = door.ask("OPTIONS", path)
        assert (options.status_code, options.content) == (204, b"")
        refused = door.ask("DELETE", path, headers=headers)
        assert refused.status_code == 405
        assert refused.json()["error"]["code"] == "method_not_allowed"
        assert options.headers["allow"] == refused.headers["allow"] == methods
    assert CHAT in door.ask("POST", "/chat/completions").json()["error"]["message"]


def test_every_error_is_openais_is_counted_and_leaves_a_line():
    door = Door()

    refused = door.ask("POST", CHAT, json=ASKED | {"n": 99})
    failed = door.ask("POST", "/v1/completions", json={"model": "model", "prompt": "a"})

    assert refused.json()["error"]["param"] == "n"
    assert failed.status_code == 500
    assert failed.json()["error"] == {
        "message": "The endpoint failed (KeyError); see the job's log.",
        "type": "server_error", "param": None, "code": "internal_error",
    }  # fmt: skip
    assert (door.count("refused"), door.count("failed")) == (1, 1)
    assert door.logged[0].startswith(f"POST {CHAT}: 400 n: input should be less than")
    first, *traceback = door.logged[1].splitlines()
    assert first == "POST /v1/completions: 500 The endpoint failed (KeyError); see the job's log."
    assert "KeyError: 'no such token" in traceback[-1]

    door.ask("GET", "/a%0aGET%20/b%1b[0m")
    assert door.logged[2].startswith("GET /a GET /b [0m: 404 ")


def test_a_stream_is_not_held_back_and_ends_with_the_error_that_ended_it():
    answered = Door().ask("POST", CHAT, json=ASKED | {"stream": True})
    assert answered.headers["x-accel-buffering"] == "no"
    assert answered.headers["cache-control"] == "no-cache"
    assert answered.text.endswith("data: [DONE]\n\n")

    ended = StreamChunk(finish_reason="error")
    for chunks, code in (((StreamChunk("h"), ended), "engine_ended"), ((None,), "internal_error")):
        door = Door(Echo(*chunks))
        events = door.ask("POST", CHAT, json=ASKED | {"stream": True}).text.split("\n\n")
        assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == code
        assert events[-1] == ""
        assert (door.count("failed"), len(door.logged)) == (1, 1), code


def test_a_flood_of_errors_does_not_flood_the_log(monkeypatch):
    now, lines = [0.0], []
    monkeypatch.setattr("runners.jobs.serve.openai_server.time.monotonic", lambda: now[0])
    log = ErrorLog(lines.append)
    for _ in range(ErrorLog.LINES + 5):
        log.add("\udcff is no text")
    now[0] += 60
    log.add("later")
    assert lines[0] == "\\udcff is no text"
    assert lines[-2:] == ["5 further errors of that minute are not listed", "later"]
    assert len(lines) == ErrorLog.LINES + 2


def many(value, count: int = 5_000) -> str:
    return "[" + ",".join([value] * count) + "]"


def test_a_large_wrong_body_costs_an_error_or_two_whatever_is_wrong_in_it(monkeypatch):
    counted = []
    as_it_was = openai_requests._field_error

    def counting(error, document):
        counted.append(error.error_count())
        return as_it_was(error, document)

    monkeypatch.setattr(openai_requests, "_field_error", counting)
    turn, part = '{"role":"user","content":"a"}', '{"type":"text","text":1}'
    base = '"model":"model","max_tokens":1,'
    fields = ",".join(f'"f{at}":1' for at in range(5_000))
    biases = ",".join(f'"{at}":"x"' for at in range(5_000))
    asked = {
        COMPLETIONS: f'{{{base}"prompt":"a"',
        CHAT: f'{{{base}"messages":[{turn}]',
        "/v1/messages": f'{{{base}"messages":[{turn}]',
        "/v1/messages/count_tokens": f'{{"model":"model","messages":[{turn}]',
        "/v1/responses": '{"model":"model","input":"a"',
    }
    parts = f'[{{"role":"user","content":{many(part)}}}]'
    cases = [(path, fields) for path in asked]
    cases += [(COMPLETIONS, f'"prompt":{many(each)}') for each in ('"a"', "-1", "[1.5]", "{}")]
    cases += [(COMPLETIONS, f'"prompt":[{many("-1")}]')]
    cases += [(path, f'"stop":{many("1")}') for path in (COMPLETIONS, CHAT)]
    cases += [(path, f'"logit_bias":{{{biases}}}') for path in (COMPLETIONS, CHAT)]
    cases += [
        (path, f'"messages":{each}')
        for path in (CHAT, "/v1/messages", "/v1/messages/count_tokens")
        for each in (many("1"), many("{}", 2000), parts)
    ]
    cases += [(path, f'"system":{many(part)}') for path in list(asked)[2:4]]
    cases += [("/v1/messages", f'"stop_sequences":{many("1")}')]
    cases += [("/v1/responses", f'"input":{each}') for each in (many("1"), parts)]
    for path, sent in cases:
        counted.clear()
        answer = Door().ask("POST", path, content=f"{asked[path]},{sent}}}")
        assert answer.status_code == 400, (path, sent[:40])
        assert counted, (path, sent[:40])
        assert counted[0] <= 5, (path, sent[:40])
    for sent in (
        f'"messages":{many("1")}',
        f'"tools":{many("1")}',
        f'"stop_token_ids":{many("{}")}',
    ):
        counted.clear()
        with pytest.raises(RequestError):
            parse_request(CHAT, f"{asked[CHAT]},{sent}}}".encode(), "vllm")
        assert counted[0] <= 5, sent[:40]


def test_every_list_of_a_request_ends_at_its_first_error():
    def lists(schema):
        if isinstance(schema, dict):
            if schema.get("type") == "list":
                yield schema
            for each in schema.values():
                yield from lists(each)
        elif isinstance(schema, list | tuple):
            for each in schema:
                yield from lists(each)

    forms = (CompletionRequest, ChatRequest, RelayedCompletion, RelayedChat, MessagesRequest,
             CountRequest, ResponsesRequest, EmbeddingRequest)  # fmt: skip
    for form in forms:
        found = list(lists(form.__pydantic_core_schema__))
        assert found, form
        assert all(each.get("fail_fast") for each in found), form


def test_a_large_body_is_parsed_beside_the_event_loop(monkeypatch):
    threads = []

    def parse(body, engine):
        threads.append(threading.current_thread() is threading.main_thread())
        return parse_chat(body, engine)

    monkeypatch.setattr(openai_server, "parse_chat", parse)
    for size in (10, openai_server.LARGE_BODY_BYTES):
        assert Door().ask("POST", CHAT, content=chat(user("a" * size))).is_success
    assert threads == [True, False]


def test_a_slow_body_and_too_many_bodies_are_refused_and_leave_nothing_behind(monkeypatch):
    async def slowly():
        yield b'{"model"'
        await asyncio.sleep(60)

    door = Door()
    monkeypatch.setattr(openai_server, "BODY_SECONDS", 0.01)
    late = door.ask("POST", CHAT, content=slowly())
    assert (late.status_code, late.json()["error"]["code"]) == (408, "body_timeout")
    assert "8 bytes of it did" in late.json()["error"]["message"]
    assert late.headers["connection"] == "close"

    monkeypatch.setattr(openai_server, "MAX_BODIES_BYTES", 100)
    refused = door.ask("POST", CHAT, content=chat(user("a" * 100)))
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert door.ask("POST", CHAT, json=ASKED).is_success


def test_a_head_that_does_not_come_closes_its_connection(monkeypatch):
    monkeypatch.setattr(endpoint, "HEAD_SECONDS", 0.0)
    closed = []

    def connection(name, cycle, timer=None):
        found = Mock(cycle=cycle, timeout_keep_alive_task=timer)
        found.transport.close = lambda: closed.append(name)
        return found

    answering, answered = (SimpleNamespace(response_complete=each) for each in (False, True))
    connections = [
        connection("no head", None),
        connection("answering", answering),
        connection("idle", answered, "uvicorn's timer"),
        connection("half of the next head", answered),
    ]
    server = SimpleNamespace(server_state=SimpleNamespace(connections=connections))
    endpoint.HeadDeadline(server).close_late()
    assert closed == ["no head", "half of the next head"]

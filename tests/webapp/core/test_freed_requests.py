"""What a request took is free once it is answered, without the garbage collector."""

import gc
import json
import logging
import weakref
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.core.handlers.wsgi import WSGIHandler
from django.http import HttpRequest
from django.template.context import RequestContext
from django.test import RequestFactory

from tests.plugins.extent import sample
from tests.webapp.conftest import client_of
from tests.webapp.hosts.hostile import VALUES, messages, with_text
from tests.webapp.hosts.shapes import BODIES, heartbeat
from webapp.api import agents
from webapp.core.problems import MOST_FAULTS, invalid

pytestmark = pytest.mark.django_db(databases="__all__")
PAGES = ("/", "/plans/", "/jobs/", "/queue/", "/hosts/", "/models/", "/no-such-page/")
ENROL = {"token": "t", "protocol_version": 1, "name": "h", "sent_at_ms": 1}


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    logging.disable()  # pytest keeps log records, and those keep their requests
    gc.collect()
    gc.disable()
    gc.freeze()  # what was there before is not looked through for each count, here or later
    yield
    gc.enable()
    logging.disable(logging.NOTSET)


def answered(request: HttpRequest) -> int:
    return WSGIHandler().get_response(request).status_code


def alive(kind: type) -> int:
    return sum(issubclass(type(one), kind) for one in gc.get_objects())  # wakes no lazy one


def test_a_page_leaves_neither_its_request_nor_its_context(alice):
    for path in PAGES:
        cookies = {name: one.value for name, one in client_of(alice).cookies.items()}
        for _ in range(2):  # the first one loads what stays
            request: HttpRequest | None = RequestFactory(headers={"Host": "localhost"}).get(path)
            request.COOKIES.update(cookies)
            held = weakref.ref(request)
            before = alive(RequestContext)
            assert answered(request) in {200, 404}, path
            request = None
        assert held() is None, path
        assert alive(RequestContext) == before, path


def posted(body: str, path: str = "hosts/enroll", **headers: str) -> HttpRequest:
    content = body.encode("utf-8", "surrogatepass")
    factory = RequestFactory(headers={"Host": "localhost", **headers})
    return factory.post(f"/api/v1/{path}", content, content_type="application/json")


def test_what_the_api_refuses_leaves_no_frame():
    whole = ENROL | {"facts": heartbeat()["facts"]}
    bodies = list(messages(whole, 40, seed=1))
    bodies += [with_text(whole, place, text) for place in ((), ("facts",)) for text in VALUES]
    answered(posted(bodies[0]))
    before = alive(FrameType), alive(TracebackType), alive(HttpRequest)
    assert {answered(posted(body)) for body in bodies} <= {400, 401, 422}
    assert (alive(FrameType), alive(TracebackType), alive(HttpRequest)) == before


def test_a_batch_that_is_refused_leaves_no_frame(credential):
    def send(text: str) -> int:
        bearer = {"Authorization": f"Bearer {credential}"}
        return answered(posted(text, "attempts/01J/events", **bearer))

    # None whose number can be read, which its validator refuses by an exception of its own.
    places = ((), ("events",), ("events", 0), ("events", 0, "seq"))
    for kind, body in sample(dict(BODIES).items(), share=0.5):
        event = {"seq": 1, "t_ms": 1, "kind": kind, "body": body}
        batch = {"attempt_id": "01J", "fence": "f", "events": [event]}
        texts = list(messages(batch, 40, seed=1))
        texts += [with_text(batch, place, text) for place in places for text in VALUES]
        seen = {send(texts[0])}
        before = alive(TracebackType), alive(HttpRequest)
        seen |= {send(text) for text in texts}
        assert seen <= {400, 404, 409, 413, 422}, kind
        assert (alive(TracebackType), alive(HttpRequest)) == before, kind


def test_a_heartbeat_that_is_refused_leaves_no_frame():
    texts = list(messages(heartbeat(), 40, seed=1))
    texts += [with_text(heartbeat(), place, text) for place in ((), ("gpus",)) for text in VALUES]
    bodies = [one.encode("utf-8", "surrogatepass") for one in texts]
    seen: list[int] = []

    async def beat(body: bytes) -> None:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            seen.append(message.get("status", 0))

        headers = [(b"authorization", b"Bearer nobody")]
        scope = {
            "type": "http",
            "path": agents.PATH,
            "method": "POST",
            "headers": headers,
        }
        await agents.application(scope, receive, send)

    async def beats() -> None:
        await beat(bodies[0])
        before = alive(TracebackType)
        for body in bodies:
            await beat(body)
        assert alive(TracebackType) == before

    async_to_sync(beats)()
    assert {code for code in seen if code} <= {401, 422}


def test_thousands_of_faults_are_one():
    for field, many in [
        ("gpus", list(range(3000))),
        ("disks", [{}] * 3000),
        ("packages", {f"p{number}": 1 for number in range(3000)}),
        ("scheduler", {f"x{number}": 1 for number in range(3000)}),
    ]:
        request = posted(json.dumps(ENROL | {"facts": heartbeat()["facts"] | {field: many}}))
        document = json.loads(WSGIHandler().get_response(request).content)
        assert 1 <= len(document["errors"]) <= 10, document["errors"]
        assert f"facts.{field}" in document["detail"], field


def test_an_answer_lists_a_few_of_many_faults():
    faults = [{"loc": ("body", f"field{number}"), "msg": "Not so"} for number in range(3000)]
    problem = invalid(faults)
    assert len(problem.facts["errors"]) == MOST_FAULTS
    assert "The first 20 of 3,000 faults are listed." in problem.detail

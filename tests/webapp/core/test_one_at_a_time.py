"""The requests of one credential are answered one after another; others do not wait for them."""

import asyncio
import json

import pytest

from webapp.core.asgi_middleware import MOST_UNANSWERED, OneAtATime

MALLORY = (b"authorization", b"Bearer mallory")
ADA = (b"authorization", b"Bearer ada")


class Caller:
    """Sends requests to an application that answers when it is told to."""

    def __init__(self):
        self.application = OneAtATime(self.answer, lambda send: send)
        self.running = self.most_running = 0
        self.go_on = asyncio.Event()

    async def answer(self, _scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        await self.go_on.wait()
        self.running -= 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def call(self, *headers, body=None):
        """Return the messages of an answer; ``body`` stays away until it is set."""
        sent = []

        async def receive():
            if body is not None:
                await body.wait()
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message):
            sent.append(message)

        await self.application({"type": "http", "headers": list(headers)}, receive, send)
        return sent

    async def settle(self):
        for _ in range(3 * MOST_UNANSWERED):
            await asyncio.sleep(0)


def start(caller, num, *headers, **options):
    return [asyncio.create_task(caller.call(*headers, **options)) for _ in range(num)]


@pytest.mark.asyncio
async def test_one_credential_has_one_request_at_a_time_and_others_do_not_wait():
    caller = Caller()
    tasks = start(caller, 5, MALLORY)
    await caller.settle()
    assert caller.running == 1

    tasks += start(caller, 1, ADA) + start(caller, 3)
    await caller.settle()
    assert caller.running == 1 + 1 + 3  # hers, and pages without a credential

    caller.go_on.set()
    answers = await asyncio.gather(*tasks)
    assert [answer[0]["status"] for answer in answers] == [200] * 9
    assert caller.most_running == 5


@pytest.mark.asyncio
async def test_a_body_that_is_slow_to_come_holds_up_nothing():
    caller, body = Caller(), asyncio.Event()
    caller.go_on.set()
    (slow,) = start(caller, 1, MALLORY, body=body)
    await caller.settle()

    async with asyncio.timeout(5):
        await caller.call(MALLORY)

    assert not slow.done()
    body.set()
    assert (await slow)[0]["status"] == 200


@pytest.mark.asyncio
async def test_an_answer_that_is_slow_to_be_taken_holds_up_nothing():
    is_taken, started = asyncio.Event(), asyncio.Event()

    async def answer(_scope, receive, send):
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        started.set()
        await is_taken.wait()

    caller = Caller()
    caller.application = OneAtATime(answer, lambda send: send)
    (slow,) = start(caller, 1, MALLORY)
    await started.wait()
    started.clear()
    (other,) = start(caller, 1, MALLORY)

    async with asyncio.timeout(5):
        await started.wait()  # of the other one

    is_taken.set()
    await asyncio.gather(slow, other)


@pytest.mark.asyncio
async def test_too_many_at_once_are_refused_in_words_and_the_next_are_taken():
    caller = Caller()
    tasks = start(caller, MOST_UNANSWERED, MALLORY)
    await caller.settle()

    refused = await caller.call(MALLORY)

    assert refused[0]["status"] == 429
    assert dict(refused[0]["headers"])[b"retry-after"] == b"2"
    problem = json.loads(refused[1]["body"])
    assert (problem["code"], str(MOST_UNANSWERED) in problem["detail"]) == (
        "too_many_at_once",
        True,
    )
    caller.go_on.set()
    await asyncio.gather(*tasks)
    assert (await caller.call(MALLORY))[0]["status"] == 200


@pytest.mark.asyncio
async def test_one_that_fails_or_is_cancelled_lets_the_next_begin():
    fails = [ValueError("broken")]

    async def answer(_scope, receive, send):
        await receive()
        if fails:
            raise fails.pop()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    caller = Caller()
    (cancelled,) = start(caller, 1, MALLORY)
    await caller.settle()
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    caller.go_on.set()
    assert (await caller.call(MALLORY))[0]["status"] == 200

    caller.application = OneAtATime(answer, lambda send: send)
    with pytest.raises(ValueError, match="broken"):
        await caller.call(MALLORY)
    assert (await caller.call(MALLORY))[0]["status"] == 200
    assert len(caller.application._turns) == 0

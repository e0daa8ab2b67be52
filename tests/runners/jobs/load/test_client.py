"""What one client notes of an answer, and that every way to fail is an error by name."""

import asyncio
import json

import pytest

from tests.system.jobs.load.replies import END, HEAD, TOKEN, USAGE, WHOLE, outcome_of, seen

BUSY = json.dumps({"error": {"message": "Too many", "code": "queue_full"}}).encode()
BROKEN = b'data: {"error": {"message": "The engine ended", "code": null}}\n\n'


def refusal(status: bytes, body: bytes) -> bytes:
    return b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body)


def test_an_answer_has_its_instants_in_order_and_its_tokens_from_the_usage():
    found = seen(WHOLE)

    assert (found.error, found.output_tokens) == ("", 2)
    assert 0 <= found.ttft_seconds <= found.latency_seconds
    assert found.tpot_seconds == found.last - found.first


def test_an_answer_of_one_token_has_no_time_between_tokens():
    one = USAGE.replace(b'tokens":2', b'tokens":1')

    assert seen(HEAD + TOKEN + one + END).tpot_seconds is None


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (refusal(b"429 Busy", BUSY), "429 queue_full"),
        (refusal(b"502 Bad", b"<html>"), "502 without words"),
        (HEAD + TOKEN, "the stream was cut off"),
        (HEAD + TOKEN + BROKEN, "The engine ended"),
        (HEAD + b"data: {nonsense\n\n", "not a stream in OpenAI's form"),
        (HEAD + b'data: {"usage": {"tokens": 1}}\n\n', "not a stream in OpenAI's form"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n", "RemoteProtocolError"),
    ],
)
def test_what_is_no_whole_answer_is_an_error_in_words(reply, error):
    found = seen(reply)

    assert found.error == error
    assert found.latency_seconds >= 0


def test_nobody_who_listens_is_an_error_at_once():
    found = asyncio.run(outcome_of("http://127.0.0.1:9/v1"))

    assert found.error == "ConnectError"
    assert found.first is None

"""A load: who asks when, what a client notes of an answer, and what a point's row tells."""

import asyncio
import json
import statistics
import time

import pytest

from runners.jobs.load.job import row_of
from runners.jobspec.compress import Burst, ClosedLoop, LoadOptions, OpenLoop
from runners.shared.load_generator import Repetition, RequestOutcome, percentile, repetition
from tests.system.jobs.load.replies import END, HEAD, TOKEN, USAGE, WHOLE, outcome_of, seen

CLOSED = ClosedLoop(concurrency=(3,))
PROMPTS = [(at,) for at in range(12)]


class Counted:
    """An endpoint that counts who asks at once, and dies after so many."""

    def __init__(self, lives: int = 10**6) -> None:
        self.now = self.most = self.asked = 0
        self.dues: list[float] = []
        self.lives = lives

    async def ask(self, _prompt, due: float) -> RequestOutcome:
        self.now, self.asked = self.now + 1, self.asked + 1
        self.most = max(self.most, self.now)
        self.dues.append(due)
        await asyncio.sleep(0.001)
        self.now -= 1
        return RequestOutcome(due, due, time.monotonic(), due, 2)

    def alive(self) -> bool:
        return self.asked < self.lives


def run(arrivals, endpoint, prompts=PROMPTS, seed="s"):
    point = arrivals.points[0]
    return asyncio.run(repetition(arrivals, point, prompts, endpoint.ask, endpoint.alive, seed))


def test_a_closed_loop_keeps_its_clients_busy_and_a_burst_is_due_at_once():
    endpoint = Counted()
    found = run(CLOSED, endpoint)
    assert (endpoint.most, len(found.answered)) == (3, 12)
    assert found.ended > found.began
    endpoint = Counted()
    run(Burst(burst_requests=(12,)), endpoint)
    assert len(set(endpoint.dues)) == 1
    assert endpoint.most == 12


def test_an_open_loop_comes_at_its_rate_and_at_the_instants_of_its_seed():
    endpoint = Counted()
    run(OpenLoop(request_rate_per_second=(2000.0,)), endpoint, [(1,)] * 400)
    gaps = [b - a for a, b in zip(endpoint.dues, endpoint.dues[1:], strict=False)]
    assert statistics.fmean(gaps) == pytest.approx(1 / 2000, rel=0.25)
    assert statistics.stdev(gaps) == pytest.approx(1 / 2000, rel=0.35)  # as Poisson's have it

    def gaps(seed):
        run(OpenLoop(request_rate_per_second=(500.0,)), endpoint := Counted(), seed=seed)
        return [each - endpoint.dues[0] for each in endpoint.dues]

    first, again, other = gaps("a"), gaps("a"), gaps("b")
    assert first == pytest.approx(again, abs=1e-6)
    assert first != pytest.approx(other, abs=1e-3)


def test_once_the_endpoint_is_gone_nobody_asks_any_more():
    for arrivals in (CLOSED, OpenLoop(request_rate_per_second=(5000.0,))):
        endpoint = Counted(lives=4)
        found = run(arrivals, endpoint, [(1,)] * 500)
        assert len(found.answered) < 500, arrivals


# What one client notes of an answer, and that every way to fail is an error by name.

BUSY = json.dumps({"error": {"message": "Too many", "code": "queue_full"}}).encode()
BROKEN = b'data: {"error": {"message": "The engine ended", "code": null}}\n\n'


def refusal(status: bytes, body: bytes) -> bytes:
    return b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body)


def test_an_answer_has_its_instants_in_order_and_its_tokens_from_the_usage():
    found = seen(WHOLE)
    assert (found.error, found.output_tokens) == ("", 2)
    assert 0 <= found.ttft_seconds <= found.latency_seconds
    assert found.tpot_seconds == found.last - found.first
    one = USAGE.replace(b'tokens":2', b'tokens":1')
    assert seen(HEAD + TOKEN + one + END).tpot_seconds is None
    odd = TOKEN.replace(b'"a"', '"\u2028"'.encode())  # which ends a line for Python, not for JSON
    assert not seen(HEAD + b": waiting\n\n" + odd + USAGE + END).error


def test_what_is_no_whole_answer_is_an_error_in_words():
    for reply, error in (
        (refusal(b"429 Busy", BUSY), "answers 429: queue_full: Too many"),
        (refusal(b"502 Bad", b"<html>"), "answers 502: without words"),
        (HEAD + TOKEN, "the stream was cut off"),
        (HEAD + TOKEN + BROKEN, "The engine ended"),
        (HEAD + b"data: {nonsense\n\n", "not a stream in OpenAI's form"),
        (HEAD + b'data: {"usage": {"tokens": 1}}\n\n', "not a stream in OpenAI's form"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n", "RemoteProtocolError"),
    ):
        found = seen(reply)
        assert found.error.endswith(error), (reply, error)
        assert found.latency_seconds >= 0, (reply, error)

    found = asyncio.run(outcome_of("http://127.0.0.1:9/v1"))
    assert found.error == "ConnectError"
    assert found.first is None


# A point's row: its means, intervals and percentiles, and what it tells its reader to beware.

TWO_AT_ONCE = LoadOptions(arrivals=ClosedLoop(concurrency=(2,)))
OPEN = LoadOptions(arrivals=OpenLoop(request_rate_per_second=(40.0,)))


def answer(at=0, ttft=0.1, tokens=11, late=0.0, error="") -> RequestOutcome:
    """One that takes 10 ms a token after its first."""
    first = at + ttft
    return RequestOutcome(at, at + late, first + 0.01 * (tokens - 1), first, tokens, error)


def repeated(*lists, lags=(0.0,), seconds=2.0):
    return [Repetition(0.0, seconds, list(each), list(lags)) for each in lists]


def row(*lists, options=TWO_AT_ONCE, point=2.0, **fields):
    return row_of(options, point, repeated(*lists, **fields), 11)


def notes(*lists, **fields) -> str:
    return " | ".join(row(*lists, **fields).notes)


def test_means_have_the_planners_names_and_failures_stay_out_of_them():
    found = row([answer(at) for at in range(20)])
    assert found.measured["tokens_per_second"] == pytest.approx(110)
    assert found.measured["requests_per_second"] == pytest.approx(10)
    assert found.measured["ttft_seconds"] == pytest.approx(0.1)
    assert found.measured["tpot_seconds"] == pytest.approx(0.01)
    assert found.measured["latency_seconds"] == pytest.approx(0.2)

    bad = answer(ttft=9, error="ReadError")
    found = row([answer(), bad], [answer(), bad])
    assert (found.requests, found.failed, found.errors) == (4, 2, {"ReadError": 2})
    assert found.measured["ttft_p99_seconds"] == pytest.approx(0.1)
    assert "2 of 4 requests failed, and no figure has them: ReadError (2)" in found.notes[0]


def test_intervals_are_students_over_the_repetitions_and_percentiles_measured_values():
    found = row(*([answer(ttft=each)] * 20 for each in (0.1, 0.2, 0.3)))
    low, high = found.interval["ttft_seconds"]
    half = 1.886 * 0.1 / 3**0.5
    assert (low, high) == pytest.approx((0.2 - half, 0.2 + half))

    low, high = found.interval["ttft_p95_seconds"]
    half = 1.886 * 0.1 / 3**0.5
    assert (low, high) == pytest.approx((0.2 - half, 0.2 + half))
    assert "ttft_p95_seconds" not in row([answer()] * 20).interval

    values = [each / 100 for each in range(1, 101)]
    assert [percentile(values, each) for each in (50, 90, 99)] == [0.5, 0.9, 0.99]
    assert percentile([7.0], 99) == 7.0


def test_too_few_answers_for_a_percentile_are_told_with_how_many_it_takes():
    for count, words in ((19, "p50: 20"), (99, "p90: 100"), (999, "p99: 1,")):
        assert f"{count} answers are few for a {words}" in notes([answer()] * count), count
    assert row([answer()] * 500, [answer()] * 500).notes == ()


def test_what_a_reader_is_to_beware_of_is_told():
    assert "requests went out up to 0.300 s late" in notes([answer(late=0.3)] * 20)
    told = notes([answer()] * 20, options=OPEN, point=40.0)
    assert "did not keep up: 10 of 40 requests a second" in told
    told = notes([answer(tokens=5)] * 3)
    assert "3 answers ended before their 11 tokens" in told
    assert "one repetition has no interval" in told
    told = notes([answer(ttft=0.1)] * 20, [answer(ttft=0.4)] * 20)
    assert "repetitions differ by more than 20% in time to first token" in told

    for fields, words in (
        ({"lags": (0.5,)}, "its clock ran up to 0.500 s late"),
        ({"lags": (0.004,)}, ""),
    ):
        told = notes([answer()] * 20, **fields)
        assert words in told, (fields, words)
        assert ("fell behind" in told) == bool(words), (fields, words)

"""What a gateway is told of an answer's tokens: whole, streamed, cut, by every engine."""

import json
import re
import threading
from http.server import ThreadingHTTPServer
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from runners.jobs.serve.contract import GenerationRequest, Limits, Pending, Sampling, StreamChunk
from runners.jobs.serve.figures import EndpointMetrics
from runners.jobs.serve.llamacpp.writer import Answer
from runners.jobs.serve.relayed.relay import Engines, RelayEngine, RelayServingModel
from runners.shared.event_streams import USAGE_HEADER
from tests.runners.jobs.serve.standin.vllm.entrypoints.cli.main import Engine, Handler
from tests.runners.jobs.serve.test_event_stream import body, call
from tests.runners.jobs.serve.test_openai_server import ASKED, CHAT, COMPLETIONS, Door, Echo

COUNTED = {USAGE_HEADER: "1"}
COMMENT = re.compile(r"^: usage (\d+) (\d+) (\d+)$")
TURN = {"role": "user", "content": "one two cached"}
DIALECTS = {
    COMPLETIONS: {"model": "model", "prompt": "one two cached"},
    CHAT: ASKED | {"messages": [TURN]},
    "/v1/responses": {"model": "model", "input": "one two cached"},
    "/v1/messages": {"model": "model", "max_tokens": 8, "messages": [TURN]},
}


class Counting(Echo):
    """A model that answers in two chunks, and reports a cached token if a test says so."""

    def __init__(self, cached: int | None = None) -> None:
        super().__init__(
            StreamChunk("a", (), None, 2, None, cached), StreamChunk("b", (), "stop", 3)
        )

    async def prompt_ids(self, prompt):
        return [1] * len(prompt.split())

    async def chat_ids(self, messages, _tools=None):
        return [1] * sum(len(each["content"].split()) for each in messages)


def blocks(answer) -> list[str]:
    return answer.text.removesuffix("\n\n").split("\n\n")


def comments(found: list[str]) -> list[list[int]]:
    return [
        [int(each) for each in seen.groups()] for text in found if (seen := COMMENT.match(text))
    ]


def same(text: str) -> str:
    """Return a text without spaces, and without what differs from answer to answer."""
    return re.sub(r'"created(_at)?":\s?\d+|(msg|resp|chatcmpl|cmpl)[_-][0-9a-f]+|\s', "", text)


def check_counted(door: Door, path: str, asked: dict, used: list[int]) -> None:
    """Hold a dialect to its counts, whole and streamed, and to the same answer without them."""
    plain, whole = (door.ask("POST", path, json=asked, headers=each) for each in ({}, COUNTED))
    assert whole.headers[USAGE_HEADER] == " ".join(map(str, used)), path
    assert USAGE_HEADER not in plain.headers
    assert same(plain.text) == same(whole.text), path

    streamed = asked | {"stream": True}
    plain, counted = (
        door.ask("POST", path, json=streamed, headers=each) for each in ({}, COUNTED)
    )
    found = blocks(counted)
    assert not found[0].startswith(":")
    assert all(COMMENT.match(each) for each in found[1::2]), path
    assert comments(found)[-1] == used, path
    rising = [each[2] for each in comments(found)]
    assert rising == sorted(rising)
    assert rising[0] < rising[-1], path
    events = [each for each in found if not each.startswith(":")]
    assert same("".join(events)) == same("".join(blocks(plain))), path


def test_every_dialect_is_counted_whole_and_streamed_and_the_same_without_a_count():
    for path, asked in DIALECTS.items():
        check_counted(Door(Counting()), path, asked, [3, 0, 3])
        check_counted(Door(Counting(1)), path, asked, [3, 1, 3])
    several = {"n": 2, "prompt": ["one two", "three"]}
    check_counted(Door(Counting(1)), COMPLETIONS, DIALECTS[COMPLETIONS] | several, [3, 2, 12])
    refused = Door(Counting()).ask("POST", CHAT, json=ASKED | {"n": 99}, headers=COUNTED)
    assert USAGE_HEADER not in refused.headers


def test_cached_tokens_stand_where_each_api_has_them_if_the_engine_reports_them():
    def used(path, cached):
        return Door(Counting(cached)).ask("POST", path, json=DIALECTS[path]).json()["usage"]

    assert used(CHAT, 1)["prompt_tokens_details"] == {"cached_tokens": 1}
    assert "prompt_tokens_details" not in used(CHAT, None)
    assert used("/v1/responses", 1)["input_tokens_details"]["cached_tokens"] == 1
    found = used("/v1/messages", 1)
    assert (found["input_tokens"], found["cache_read_input_tokens"]) == (2, 1)

    got: list[StreamChunk] = []
    answer = Answer(GenerationRequest([1], Sampling(4), got.append))
    answer.take({"content": "a", "tokens_predicted": 1, "timings": {"cache_n": 7}})
    answer.take({"content": "b", "tokens_predicted": 2})
    assert [each.cached_tokens for each in got] == [7, None]


@pytest.fixture
def relayed():
    """A door on an engine with an API of its own, which counts as vLLM does."""
    Handler.engine = Engine(SimpleNamespace(kv_transfer_config=None))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    process = Mock(
        address=f"http://127.0.0.1:{server.server_port}",
        headers={"Authorization": "Bearer engine"},
    )
    engine = RelayEngine(Engines([process]), Limits(4, 4, 64, frozenset()), Mock(), lambda: False)
    figures, why = EndpointMetrics(), "it ranks none"
    yield Door(RelayServingModel(engine, figures, "vllm", lambda it: it, ranking_refusal=why))
    server.shutdown()
    server.server_close()


def test_an_engine_with_its_own_api_counts_for_the_gateway_and_the_client_sees_no_more(
    relayed, monkeypatch
):
    monkeypatch.setenv("VLLM_API_KEY", "engine")
    for path, asked in DIALECTS.items():
        check_counted(relayed, path, asked, [3, 1, 3])
        for options in ({"include_usage": True}, {"continuous_usage_stats": True},
                        {"include_usage": True, "continuous_usage_stats": True}):  # fmt: skip
            if path in (COMPLETIONS, CHAT):
                check_counted(relayed, path, asked | {"stream_options": options}, [3, 1, 3])
    check_counted(relayed, CHAT, DIALECTS[CHAT] | {"n": 2}, [3, 1, 6])


def test_a_client_that_leaves_in_the_middle_has_been_told_the_tokens_until_then():
    class Leaving(Counting):
        def submit(self, requests):
            for each in requests:
                each.deliver(self.chunks[0])
            return [Pending() for _ in requests]

    header = (USAGE_HEADER.encode(), b"1")
    sent = call(Door(Leaving()), body(stream=True), {"type": "http.disconnect"}, headers=[header])
    text = b"".join(each.get("body", b"") for each in sent).decode()
    assert comments(text.split("\n\n"))[-1] == [1, 0, 2]
    events = [each for each in text.split("\n\n") if each.startswith("data: ")]
    assert json.loads(events[-1].removeprefix("data: "))["choices"][0]["delta"] == {"content": "a"}

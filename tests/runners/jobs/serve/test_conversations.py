"""Conversations as the real packages send them: each answer is what the package's types need.

``conversations.json`` holds the requests, recorded from the packages that it names.
"""

import asyncio
import json
from pathlib import Path

import pytest
from openai.types import Completion, Model, responses
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from runners.jobs.serve.contract import (
    Choice,
    GenerationRequest,
    Pending,
    Sampling,
    StreamChunk,
    TokenLogprob,
)
from runners.jobs.serve.llamacpp.__main__ import LlamaServingModel
from runners.jobs.serve.llamacpp.writer import Answer
from runners.jobs.serve.openai_requests import RequestError
from runners.jobs.serve.relayed.relay import parse_request
from runners.jobs.serve.text import IncrementalDetokenizer
from runners.jobs.serve.translated import stop_text
from runners.jobspec.engines import ROWS, titles
from tests.runners.jobs.serve.test_event_stream import Forwarding
from tests.runners.jobs.serve.test_openai_server import ASKED, CHAT, OWN, Door, Echo

RECORDED = json.loads(Path(__file__).with_name("conversations.json").read_text())
NEEDED = RECORDED["anthropic_required"]
KEY = "sk-of-the-tests"


class Speaking(Echo):
    """A model that answers ``Hello there`` in two chunks, with logprobs if they are wanted."""

    async def prompt_ids(self, prompt):
        return [1] * len(prompt)

    def token_text(self, token):
        return ("Hello", " there")[token]

    def submit(self, requests):
        for each in requests:
            wanted = each.sampling.top_logprobs
            top = tuple((token, -1.0 - token) for token in range(2))[: wanted or 0]
            for at, reason in enumerate((None, "stop")):
                logprob = TokenLogprob(Choice(at, -1.0, top), 5 * at)
                logprobs = [] if wanted is None else [logprob]
                each.deliver(StreamChunk(self.token_text(at), logprobs, reason, at + 1))
        return [Pending() for _ in requests]


def replay(name: str, engine: str = OWN) -> list:
    """Return a conversation's requests with the answers of an endpoint of an engine."""
    (found,) = [each for each in RECORDED["conversations"] if each["name"] == name]
    door = Door(Speaking(), KEY, engine)
    answers = []
    for each in found["requests"]:
        headers = {
            name: value for name, value in each["headers"].items() if name != "accept-encoding"
        }
        content = None if each["body"] is None else json.dumps(each["body"]).encode()
        answer = door.ask(each["method"], each["path"], headers=headers, content=content)
        answers.append((each["body"], answer))
    return answers


def events(answer) -> list[tuple[str, dict]]:
    """Return the names and documents of a stream's events."""
    assert answer.headers["content-type"] == "text/event-stream"
    found = []
    for event in answer.text.removesuffix("\n\n").split("\n\n"):
        *name, data = event.split("\n")
        if data != "data: [DONE]":
            name = name[0].removeprefix("event: ") if name else ""
            found.append((name, json.loads(data.removeprefix("data: "))))
    return found


def test_every_conversation_was_recorded_from_a_named_package():
    names = [each["name"] for each in RECORDED["conversations"]]
    assert len(names) == len(set(names)) >= 10
    assert {each["package"].split()[0] for each in RECORDED["conversations"]} == {
        "openai", "anthropic",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["chat", "several turns", "logprobs"])
def test_whole_chats_are_what_openais_types_need(name):
    for body, answer in replay(name):
        assert answer.status_code == 200, answer.text
        found = ChatCompletion.model_validate(answer.json())
        choice = found.choices[0]
        assert (choice.message.content, choice.finish_reason) == ("Hello there", "stop")
        assert found.usage.completion_tokens == 2
        if body.get("logprobs"):
            assert [each.token for each in choice.logprobs.content] == ["Hello", " there"]
            assert len(choice.logprobs.content[0].top_logprobs) == body["top_logprobs"]


def test_a_streamed_chat_is_what_openais_types_need():
    ((_, answer),) = replay("chat streamed with usage")
    chunks = [ChatCompletionChunk.model_validate(data) for _, data in events(answer)]
    assert "".join(each.choices[0].delta.content or "" for each in chunks[:-1]) == "Hello there"
    assert chunks[-1].usage.completion_tokens == 2
    assert answer.text.endswith("data: [DONE]\n\n")


def test_completions_and_models_are_what_openais_types_need():
    (_, whole), (_, streamed) = replay("completions")
    found = Completion.model_validate(whole.json())
    assert [each.text for each in found.choices] == ["Hello there"] * 2
    assert found.choices[0].logprobs.text_offset == [0, 5]
    texts = ["", ""]
    for _, chunk in events(streamed):
        (choice,) = chunk["choices"]  # the type has no null, which OpenAI's own chunks have
        ended = choice | {"finish_reason": choice["finish_reason"] or "stop"}
        Completion.model_validate(chunk | {"choices": [ended]})
        texts[choice["index"]] += choice["text"]
    assert texts == ["Hello there"] * 2

    (_, listed), (_, retrieved) = replay("models")
    assert [Model.model_validate(each).id for each in listed.json()["data"]] == ["model"]
    assert Model.model_validate(retrieved.json()).owned_by == "slipway"


def test_schemas_are_refused_by_name_or_reach_the_engine_as_they_were_sent():
    engines = titles((each for each in ROWS if "response_format" in each.request_options), "or")
    for body, answer in replay("JSON schema", "llamacpp"):
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "response_format")
        assert error["message"].endswith(f"serve the model with {engines}")
        request = parse_request(CHAT, json.dumps(body).encode(), "vllm")
        forwarded = request.model_dump(mode="json", exclude_unset=True)
        assert forwarded["response_format"] == body["response_format"]


def test_tools_are_refused_with_the_reason_or_reach_the_engine_as_they_were_sent():
    (forced, refused), (chosen, without) = replay(
        "tools", "llamacpp"
    )  # of a model without a template
    for answer, param, words in (
        (refused, "tool_choice", "does not constrain what the model writes"),
        (without, "tools", "the model's chat template does not take tools"),
    ):
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param)
        assert words in error["message"]

    for body, engine in (
        (forced, "vllm"), (chosen, "vllm"), (forced, "sglang"), (chosen, "sglang"),
    ):  # fmt: skip
        sent = json.dumps(body).encode()
        with pytest.raises(RequestError, match="no parser") as caught:
            parse_request(CHAT, sent, engine, "no parser")
        assert caught.value.param == "tools"
        request = parse_request(CHAT, sent, engine)
        forwarded = request.model_dump(mode="json", exclude_unset=True)
        assert forwarded["tools"] == body["tools"]
        assert forwarded["messages"] == [
            {key: value for key, value in each.items() if value is not None}
            for each in body["messages"]
        ]


def test_responses_are_what_openais_types_need():
    (_, first), (body, second), (_, streamed) = replay("responses")
    assert body["input"][1]["content"][0]["text"] == "Hello there"  # the answer, sent back
    for answer in (first, second):
        assert answer.status_code == 200, answer.text
        found = responses.Response.model_validate(answer.json())
        assert (found.output_text, found.status) == ("Hello there", "completed")
        assert found.usage.total_tokens == found.usage.input_tokens + 2

    names = [name for name, _ in events(streamed)]
    assert names[:2] == ["response.created", "response.in_progress"]
    assert names[-1] == "response.completed"
    for at, (name, data) in enumerate(events(streamed)):
        kind = "".join(part.title() for part in name.split(".", 1)[1].replace("_", ".").split("."))
        kind = kind.removeprefix("Output") if kind.startswith("OutputText") else kind
        event = getattr(responses, f"Response{kind}Event").model_validate(data)
        assert (event.sequence_number, event.type) == (at, name)
    assert event.response.output_text == "Hello there"


def needed(kind: str, document: dict) -> None:
    """Check that a document has the fields that anthropic's type requires."""
    assert set(NEEDED[kind]) <= set(document), (kind, document)


def test_messages_are_what_anthropics_types_need():
    answers = replay("messages")
    for _, answer in answers:
        assert answer.status_code == 200, answer.text
        found = answer.json()
        needed("Message", found)
        needed("Usage", found["usage"])
        (block,) = found["content"]
        needed("TextBlock", block)
        assert (block["text"], found["stop_reason"]) == ("Hello there", "end_turn")
        assert found["usage"]["output_tokens"] == 2
    assert answers[1][0]["messages"][1]["content"][0]["text"] == "Hello there"  # sent back


def test_streamed_messages_are_what_anthropics_types_need():
    for _, answer in replay("messages streamed"):
        found = events(answer)
        for name, data in found:
            kind = "".join(part.title() for part in name.split("_"))
            needed(f"Raw{kind}Event", data)
            assert data["type"] == name
        assert [name for name, _ in found] == [
            "message_start", "content_block_start", "content_block_delta", "content_block_delta",
            "content_block_stop", "message_delta", "message_stop",
        ]  # fmt: skip
        needed("Message", found[0][1]["message"])
        needed("MessageDeltaUsage", found[-2][1]["usage"])
        text = "".join(
            data["delta"]["text"] for name, data in found if name == "content_block_delta"
        )
        assert text == "Hello there"


def test_what_carries_more_than_text_is_refused_in_the_form_of_its_api():
    door = Door(Speaking(), engine="llamacpp")
    turn = {"role": "user", "content": "a"}
    message = {"model": "model", "max_tokens": 4, "messages": [turn]}
    response = {"model": "model", "input": "a"}
    image = [{"type": "image", "source": {"type": "url", "url": "https://example.org"}}]
    for path, sent, field in (
        ("/v1/messages", message | {"tools": [{"name": "f", "input_schema": {}}]}, "tools"),
        ("/v1/messages", message | {"messages": [turn | {"content": image}]}, "messages.0.content"),
        ("/v1/messages", {"model": "model", "messages": [turn]}, "max_tokens"),
        ("/v1/responses", response | {"tools": [{"type": "file_search"}]}, "tools"),
        ("/v1/responses", response | {"previous_response_id": "resp_1"}, "previous_response_id"),
        ("/v1/responses", response | {"text": {"format": {"type": "json_object"}}}, "text.format"),
    ):  # fmt: skip
        answer = door.ask("POST", path, json=sent)
        error = answer.json()["error"]
        assert answer.status_code == 400, (path, sent)
        assert field in error["message"]
        assert error["type"] == "invalid_request_error"
        assert (answer.json().get("type") == "error") == (path == "/v1/messages")

    wrong = Door(Speaking(), KEY).ask("POST", "/v1/messages", json=message)
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (401, "authentication_error")
    ended = Door(Echo(StreamChunk("h"), StreamChunk(finish_reason="error")))
    for path, sent in (("/v1/messages", message), ("/v1/responses", response)):
        name, data = events(ended.ask("POST", path, json=sent | {"stream": True}))[-1]
        assert (name, data["type"]) == ("error", "error")
        assert "engine ended" in data["error"]["message"]


def test_a_message_that_a_stop_sequence_ended_says_so_whole_and_streamed():
    turn = {"role": "user", "content": "a"}
    message = {"model": "model", "max_tokens": 4, "messages": [turn]}
    many = [f"stop {at}" for at in range(64)]
    for stops, stopped_by, expected in (
        (["x", "END"], "END", ("stop_sequence", "END")),
        (many, many[-1], ("stop_sequence", many[-1])),
        (["x"], None, ("end_turn", None)),
        (["x"], "of the chat template", ("end_turn", None)),
    ):
        door = Door(Echo(StreamChunk("h"), StreamChunk("i", (), "stop", 2, stopped_by)))
        sent = message | {"stop_sequences": stops}
        whole = door.ask("POST", "/v1/messages", json=sent)
        streamed = events(door.ask("POST", "/v1/messages", json=sent | {"stream": True}))
        for found in (whole.json(), streamed[-2][1]["delta"]):
            assert (found["stop_reason"], found["stop_sequence"]) == expected, stops
        choice = door.ask("POST", CHAT, json=ASKED).json()["choices"][0]
        assert choice.get("stop_reason") == stopped_by
    too_many = Door().ask("POST", "/v1/messages", json=message | {"stop_sequences": [*many, "x"]})
    assert "at most 64 items" in too_many.json()["error"]["message"]


def test_each_engines_name_of_a_stop_string_is_read_and_a_stop_tokens_number_is_not():
    for choice, expected in (
        ({"stop_reason": "END"}, "END"),  # vLLM
        ({"stop_reason": 2}, None),
        ({"matched_stop": "END"}, "END"),  # SGLang
        ({"matched_stop": 2}, None),
        ({}, None),
    ):
        assert stop_text(choice) == expected, choice

    got: list[StreamChunk] = []
    answer = Answer(GenerationRequest([1], Sampling(4, stops=("END",)), got.append))
    for event in (
        {"content": "a", "tokens_predicted": 1},
        {"content": "", "tokens_predicted": 2, "stop": True, "stop_type": "word",
         "stopping_word": "END"},
    ):  # fmt: skip
        answer.take(event)
    assert (got[-1].finish_reason, got[-1].stop_text) == ("stop", "END")


def test_a_prompt_of_llama_cpp_that_begins_with_bos_already_has_one(monkeypatch):
    async def post(_path, body):
        words = body["content"].split()
        return {"tokens": [1] * body["add_special"] + [{"<s>": 1}.get(each, 5) for each in words]}

    async def post_without_bos(_path, body):
        return {"tokens": [5 for _ in body["content"].split()]}

    for fake, prompt, expected in (
        (post, "<s> a", [1, 5]),
        (post, "<s> <s> a", [1, 5]),
        (post, "a a", [1, 5, 5]),
        (post_without_bos, "a a", [5, 5]),
        (post_without_bos, "", []),
    ):
        model = LlamaServingModel(None, 10, has_template=False)
        monkeypatch.setattr(model, "_post_json", fake)
        assert asyncio.run(model.prompt_ids(prompt)) == expected, prompt


def test_an_answers_text_ends_at_the_first_stop_string_and_names_it():
    class Letters:
        def decode(self, ids, **_options):
            return "".join(map(chr, ids))

    for text, stops, shown, stopped_by in (
        ("one END two", ("two", "END"), "one ", "END"),
        ("aab", ("ab", "aab"), "", "aab"),
        ("EN and on", ("END",), "EN and on", None),
    ):
        answer = IncrementalDetokenizer(Letters(), stops)
        found = ""
        for each in text:
            found += answer.add_token(Choice(ord(each)))[0]
            if answer.stopped_by is not None:
                break
        assert (found + answer.finish()[0], answer.stopped_by) == (shown, stopped_by), text


def test_tokens_of_a_message_are_counted_and_every_error_below_it_is_anthropics():
    door, path = Door(Echo()), "/v1/messages/count_tokens"
    turn = {"role": "user", "content": "a"}
    asked = {"model": "model", "messages": [turn], "system": "b", "tools": []}
    counted = door.ask("POST", path, json=asked)
    assert (counted.status_code, counted.json()) == (200, {"input_tokens": 1})
    assert door.service.loaded.asked == [[{"role": "system", "content": "b"}, turn]]
    relayed = Door(Forwarding(None)).ask("POST", path, json=asked)
    assert relayed.json() == {"input_tokens": 1}  # its engine has the system text apart

    for method, path_below, sent, status, kind in (
        ("POST", path, asked | {"model": "x"}, 404, "not_found_error"),
        ("POST", path, asked | {"messages": []}, 400, "invalid_request_error"),
        ("POST", path, asked | {"tools": [{"name": "f"}]}, 400, "invalid_request_error"),
        ("GET", path, None, 405, "invalid_request_error"),
        ("POST", "/v1/messages/batches", asked, 404, "not_found_error"),
    ):
        answer = door.ask(method, path_below, json=sent)
        assert answer.status_code == status, (path_below, sent)
        assert answer.json()["type"] == "error"
        assert answer.json()["error"]["type"] == kind

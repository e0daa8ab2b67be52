"""Tool calls in what a model writes: their forms, whole and streamed, and the loop of an agent."""

import asyncio
import json

import anthropic
import httpx
import httpx2
import openai
import pytest

from runners.jobs.serve.anthropic_messages import MessagesRequest
from runners.jobs.serve.contract import (
    Choice,
    GenerationRequest,
    Pending,
    Sampling,
    StreamChunk,
)
from runners.jobs.serve.llamacpp.writer import completion_body
from runners.jobs.serve.openai_responses import ResponsesRequest
from runners.jobs.serve.openai_server import OpenAIServer
from runners.jobs.serve.text import RequestTokenizer
from runners.jobs.serve.tool_calls import FORMS, CallReader, call_form, tools_refusal
from runners.jobs.serve.translated import ChatChunk
from tests.hub.models import make_tokenizer
from tests.runners.jobs.serve.test_event_stream import Forwarding
from tests.runners.jobs.serve.test_openai_server import ASKED, CHAT, Door, Echo

HERMES, MISTRAL, LLAMA = FORMS
TEMPLATE = "{% if tools %}<tool_call>{'name': n, 'arguments': a}</tool_call>{% endif %}"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
NAMES = frozenset({"weather", "time"})
ROME = '{"name": "weather", "arguments": {"city": "Rome"}}'
NOW = '{"name": "time", "arguments": {}}'
BOTH = [("weather", {"city": "Rome"}), ("time", {})]


def read(form, text: str, size: int, **options):
    """Return the content and the calls of a text that comes in pieces of a size."""
    reader = CallReader(form, NAMES, **{"is_parallel": True, **options})
    found = [reader.add(text[at : at + size]) for at in range(0, len(text), size)]
    found.append(reader.finish())
    calls = [each for part in found for each in part.calls]
    assert [each.at for each in calls] == list(range(len(calls)))
    return "".join(part.content for part in found), [
        (each.name, json.loads(each.arguments)) for each in calls
    ]


def test_calls_are_read_the_same_in_pieces_of_any_size_and_what_is_none_stays_text():
    parameters = ROME.replace("arguments", "parameters")
    for form, text, content, calls in (
        (HERMES, f"See.\n<tool_call>\n{ROME}\n</tool_call>\n<tool_call>{NOW}</tool_call>\n",
         "See.", BOTH),
        (HERMES, f"<tool_call>{ROME}", "", BOTH[:1]),  # ended by the end of the text
        (HERMES, f"<tool_call>{ROME}</tool_call> Done. ", " Done.", BOTH[:1]),
        (HERMES, '<tool_call>{"name": "weather", "arguments": {"city": "a\nb"}}</tool_call>', "",
         [("weather", {"city": "a\nb"})]),
        (HERMES, "1 < 2 <tool", "1 < 2 <tool", []),
        (HERMES, "a <tool_call>{oops}</tool_call> b\n", "a <tool_call>{oops}</tool_call> b\n", []),
        (HERMES, '<tool_call>{"arguments": {}}</tool_call>',
         '<tool_call>{"arguments": {}}</tool_call>', []),
        (HERMES, "<tool_call>" + "[" * 5000, "<tool_call>" + "[" * 5000, []),
        (MISTRAL, f"[TOOL_CALLS] [{ROME}, {NOW}]", "", BOTH),
        (MISTRAL, f"See. [TOOL_CALLS][{ROME}]", "See.", BOTH[:1]),
        (MISTRAL, "[TOOL_CALLS] weather", "[TOOL_CALLS] weather", []),
        (LLAMA, parameters, "", BOTH[:1]),
        (LLAMA, f" {parameters}; {NOW}", "", BOTH),
        (LLAMA, '{"name": "Ann", "parameters": {}}', '{"name": "Ann", "parameters": {}}', []),
        (LLAMA, f"It is {ROME}", f"It is {ROME}", []),
    ):  # fmt: skip
        for size in (1, 2, 7, len(text)):
            assert read(form, text, size) == (content, calls), (text, size)
    assert read(MISTRAL, f"[TOOL_CALLS][{ROME}, {NOW}]", 5, is_parallel=False)[1] == BOTH[:1]
    twice = f"<tool_call>{ROME}</tool_call><tool_call>{NOW}</tool_call>"
    assert read(HERMES, twice, 3, is_parallel=False) == ("", BOTH[:1])
    assert len(MISTRAL.new_id()) == 9
    assert HERMES.new_id().startswith("call_")


def test_the_form_of_the_calls_is_the_templates_and_another_one_is_refused_by_name():
    for template, form in (
        (TEMPLATE, HERMES),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]", MISTRAL),
        ('{% if tools %}ipython{"name": n, "parameters": p}{% endif %}', LLAMA),
        ("{% if tools %}<tool_call><function=f>arguments", None),
        ("{% if tools %}[TOOL_CALLS]f[ARGS]{}", None),
        ("<tool_call>arguments</tool_call>", None),  # in the history alone
    ):
        assert call_form(template) is form, template
        assert bool(tools_refusal(template)) is (form is None), template


class Scripted(Echo):
    """A model whose answers are written down, each in pieces of three characters."""

    def __init__(self, *answers: str, template: str = TEMPLATE) -> None:
        super().__init__()
        self.answers, self.template, self.tools = list(answers), template, []
        self.submitted: list = []

    async def chat_ids(self, messages, tools=None):
        self.asked.append(messages)
        self.tools.append(tools)
        return [1] * (1 + len(tools or ()))

    def submit(self, requests):
        self.submitted += requests
        text = self.answers.pop(0)
        pieces = [text[at : at + 3] for at in range(0, len(text), 3)]
        for each in requests:
            for at, piece in enumerate(pieces, 1):
                reason = "stop" if at == len(pieces) else None
                each.deliver(StreamChunk(piece, (), reason, at))
        return [Pending() for _ in requests]


def of_door(client_type, door: Door, base_url: str, http=httpx):
    """Return an official client on a server within this process."""
    transport = http.ASGITransport(OpenAIServer(door.service))
    http_client = http.AsyncClient(transport=transport)
    return client_type(base_url=base_url, api_key="none", max_retries=0, http_client=http_client)


def anthropic_of(door: Door) -> anthropic.AsyncAnthropic:
    return of_door(anthropic.AsyncAnthropic, door, "http://test", httpx2)


def openai_of(door: Door) -> openai.AsyncOpenAI:
    return of_door(openai.AsyncOpenAI, door, "http://test/v1")


CALLING = f"I look.\n<tool_call>\n{ROME}\n</tool_call>\n<tool_call>\n{NOW}\n</tool_call>"


@pytest.mark.parametrize("stream", [False, True])
def test_the_official_client_offers_tools_calls_them_and_sends_their_results(stream):
    model = Scripted(CALLING, "It is sunny.")
    messages = [{"role": "user", "content": "How is Rome?"}]

    async def ask(client):
        asked = {"model": "model", "messages": messages, "tools": [WEATHER]}
        if not stream:
            return (await client.chat.completions.create(**asked)).choices[0]
        async with client.chat.completions.stream(**asked) as events:
            return (await events.get_final_completion()).choices[0]

    async def loop():
        async with openai_of(Door(model)) as client:
            first = await ask(client)
            messages.append(first.message.model_dump(exclude={"parsed"}))
            messages.extend(
                {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
                for call in first.message.tool_calls
            )
            return first, await ask(client)

    first, last = asyncio.run(loop())
    calls = first.message.tool_calls
    assert (first.message.content, first.finish_reason) == ("I look.", "tool_calls")
    assert [(each.function.name, json.loads(each.function.arguments)) for each in calls] == BOTH
    assert len({each.id for each in calls}) == 2
    assert (last.message.content, last.message.tool_calls) == ("It is sunny.", None)
    assert last.finish_reason == "stop"
    assert model.tools == [[WEATHER]] * 2
    _, called, *results = model.asked[-1]
    assert [each["function"]["name"] for each in called["tool_calls"]] == ["weather", "time"]
    assert [each["tool_call_id"] for each in results] == [each.id for each in calls]


def test_a_streamed_call_has_its_name_first_then_its_arguments_and_the_end_last():
    sent = ASKED | {"tools": [WEATHER], "stream": True, "parallel_tool_calls": False}
    answer = Door(Scripted(CALLING)).ask("POST", CHAT, json=sent)
    chunks = [json.loads(each[6:]) for each in answer.text.split("\n\n")[:-2]]
    choices = [each["choices"][0] for each in chunks]
    deltas = [call for each in choices for call in each["delta"].get("tool_calls", ())]
    named, arguments = deltas
    assert (named["index"], named["type"]) == (0, "function")
    assert named["function"] == {"name": "weather", "arguments": ""}
    assert arguments == {"index": 0, "function": {"arguments": '{"city": "Rome"}'}}
    assert "".join(each["delta"].get("content") or "" for each in choices) == "I look."
    assert [each["finish_reason"] for each in choices if each["finish_reason"]] == ["tool_calls"]
    assert choices[-1]["finish_reason"] == "tool_calls"


def test_the_list_of_models_says_whether_tools_are_taken():
    forwarding = Forwarding(None)
    forwarding.calls_refusal = "no parser"
    for model, has_tools in (
        (Scripted(), True), (Scripted(template=""), False), (Forwarding(None), True),
        (forwarding, False),
    ):  # fmt: skip
        (card,) = Door(model).ask("GET", "/v1/models").json()["data"]
        assert card["capabilities"][:3] == ["chat", "completions", "logprobs"]
        assert ("tools" in card["capabilities"]) is has_tools


def test_tools_that_are_not_to_be_called_are_not_offered_and_llama_cpp_forces_no_call():
    for fields, content in (({"tool_choice": "none", "tools": [WEATHER]}, CALLING), ({}, CALLING)):
        model = Scripted(CALLING)
        choice = Door(model).ask("POST", CHAT, json=ASKED | fields).json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (content, "stop")
        assert model.tools == [None]
    named = {"type": "function", "function": {"name": "weather"}}
    for fields, param in (
        ({"tools": [WEATHER], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": named}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools"),
    ):
        answer = Door(Scripted("a"), engine="llamacpp").ask("POST", CHAT, json=ASKED | fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), fields
    other = Door(Scripted("a", template="{% if tools %}<tool_call><function=arguments>"))
    answer = other.ask("POST", CHAT, json=ASKED | {"tools": [WEATHER]})
    assert "in a form that is not read here" in answer.json()["error"]["message"]


def test_transformers_templates_get_objects_and_mistrals_mark_stays_in_the_text(tmp_path):
    tokenizer = make_tokenizer(tmp_path)
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]"]})
    tokenizer.chat_template = (
        "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}"
        "{% for message in messages %}{% for call in message.tool_calls or [] %}"
        "{{ call.function.arguments.city }}{% endfor %}{{ message.content }}{% endfor %}"
    )
    reader = RequestTokenizer(tokenizer)
    assert reader.template == tokenizer.chat_template
    call = {"id": "1", "type": "function",
            "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}  # fmt: skip
    empty = call | {"function": {"name": "time", "arguments": ""}}
    turns = [{"role": "assistant", "content": "!", "tool_calls": [call, empty]}]
    assert tokenizer.decode(reader.chat_ids(turns, [WEATHER])) == "weather;Rome!"

    text = f"See.[TOOL_CALLS][{ROME}]"
    for shown, expected in (((), text.replace("[TOOL_CALLS]", "")), (MISTRAL.special, text)):
        answer = reader.answer((), shown)
        found = ""
        for token in tokenizer(f"{text}<|im_end|>")["input_ids"]:
            found += answer.add_token(Choice(token))[0]
        assert found + answer.finish()[0] == expected
    body = completion_body(
        GenerationRequest([1], Sampling(9, shown_tokens=MISTRAL.special), print),
        has_adapters=False,
    )
    assert body["preserved_tokens"] == ["[TOOL_CALLS]"]


# The same loop in the forms of the other APIs, with their official clients.

SCHEMA = WEATHER["function"]["parameters"]


@pytest.mark.parametrize("stream", [False, True])
def test_anthropics_client_has_calls_as_blocks_and_sends_their_results(stream):
    model = Scripted(CALLING, "It is sunny.")
    tools = [{"name": "weather", "description": "The weather.", "input_schema": SCHEMA}]
    messages = [{"role": "user", "content": "How is Rome?"}]
    asked = {"model": "model", "max_tokens": 40, "tools": tools,
             "tool_choice": {"type": "auto", "disable_parallel_tool_use": False}}  # fmt: skip

    async def ask(client):
        if not stream:
            return await client.messages.create(**asked, messages=messages)
        async with client.messages.stream(**asked, messages=messages) as events:
            return await events.get_final_message()

    async def loop():
        door = Door(model)
        async with anthropic_of(door) as client:
            first = await ask(client)
            results = [
                {"type": "tool_result", "tool_use_id": each.id, "content": "sunny"}
                for each in first.content
                if each.type == "tool_use"
            ]
            messages.append({"role": "assistant", "content": [e.to_dict() for e in first.content]})
            messages.append(
                {"role": "user", "content": [*results, {"type": "text", "text": "So?"}]}
            )
            last = await ask(client)
            count = await client.messages.count_tokens(
                model="model", messages=messages, tools=tools
            )
            return first, last, count

    first, last, count = asyncio.run(loop())
    text, *calls = first.content
    assert (text.text, first.stop_reason) == ("I look.", "tool_use")
    assert [(each.name, each.input) for each in calls] == BOTH
    assert ([each.text for each in last.content], last.stop_reason) == (
        ["It is sunny."],
        "end_turn",
    )
    assert count.input_tokens == 2  # one of the turns, one of the tool
    function = {"name": "weather", "description": "The weather.", "parameters": SCHEMA}
    assert model.tools == [[{"type": "function", "function": function}]] * 3
    _, called, *results, question = model.asked[1]
    assert [each["function"]["name"] for each in called["tool_calls"]] == ["weather", "time"]
    assert [each["tool_call_id"] for each in results] == [each.id for each in calls]
    assert question == {"role": "user", "content": "So?"}


@pytest.mark.parametrize("stream", [False, True])
def test_openais_client_has_calls_as_items_of_a_response_and_sends_their_outputs(stream):
    model = Scripted(CALLING, "It is sunny.")
    tools = [{"type": "function", "strict": False, **WEATHER["function"]}]
    items = [{"role": "user", "content": "How is Rome?"}]

    async def ask(client):
        if not stream:
            return await client.responses.create(model="model", input=items, tools=tools)
        async with client.responses.stream(model="model", input=items, tools=tools) as events:
            return await events.get_final_response()

    async def loop():
        async with openai_of(Door(model)) as client:
            first = await ask(client)
            for item in first.output:
                items.append(item.to_dict())
                items[-1].pop("parsed_arguments", None)
            items.extend(
                {"type": "function_call_output", "call_id": each.call_id, "output": "sunny"}
                for each in first.output[1:]
            )
            return first, await ask(client)

    first, last = asyncio.run(loop())
    calls = first.output[1:]
    assert (first.output_text, first.status) == ("I look.", "completed")
    assert [(each.name, json.loads(each.arguments)) for each in calls] == BOTH
    assert last.output_text == "It is sunny."
    _, called, *results = model.asked[-1]
    assert called["content"] == "I look."
    assert [each["function"]["name"] for each in called["tool_calls"]] == ["weather", "time"]
    assert [each["tool_call_id"] for each in results] == [each.call_id for each in calls]


def test_calls_that_an_engine_streams_in_pieces_are_joined_in_the_other_apis():
    def delta(**fields):
        choice = {"index": 0, "delta": fields, "finish_reason": None}
        return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"

    def call(at, **fields):
        return delta(tool_calls=[{"index": at, **fields}])

    async def events():
        yield delta(role="assistant", content="", reasoning_content="hm")
        yield call(0, id="a", type="function", function={"name": "weather"})
        yield call(0, function={"arguments": '{"city": '})
        yield call(0, function={"arguments": '"Rome"}'})
        yield call(1, id="b", type="function", function={"name": "time", "arguments": "{}"})
        end = {"index": 0, "delta": {}, "finish_reason": "tool_calls"}
        yield b"data: " + json.dumps({"choices": [end]}).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"

    async def ask():
        door = Door(Forwarding(events))
        asked = {"model": "model", "tools": [{"name": "f", "input_schema": SCHEMA}]}
        async with anthropic_of(door) as client:
            turn = {"role": "user", "content": "a"}
            async with client.messages.stream(**asked, max_tokens=9, messages=[turn]) as stream:
                message = await stream.get_final_message()
        async with openai_of(door) as client:
            async with client.responses.stream(model="model", input="a") as stream:
                return message, await stream.get_final_response()

    message, response = asyncio.run(ask())
    thought, *calls = message.content  # reasoning that the engine tells apart
    assert (thought.type, thought.thinking) == ("thinking", "hm")
    reasoned, *items = response.output
    assert (reasoned.type, [each.text for each in reasoned.content]) == ("reasoning", ["hm"])
    assert [(each.id, each.name, each.input) for each in calls] == [
        ("a", *BOTH[0]), ("b", *BOTH[1]),
    ]  # fmt: skip
    assert message.stop_reason == "tool_use"
    assert [(each.call_id, each.name, json.loads(each.arguments)) for each in items] == [
        ("a", *BOTH[0]), ("b", *BOTH[1]),
    ]  # fmt: skip


def test_reasoning_items_between_the_parts_of_an_answer_are_all_of_its_one_turn():
    def why(text):
        return {"type": "reasoning", "summary": [],
                "content": [{"type": "reasoning_text", "text": text}]}  # fmt: skip

    said = {"role": "assistant", "content": "b"}
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "1", "output": "c"}
    for items, content, reasoning in (
        ((why("x"), why("y"), said, call, result), "b", "x\n\ny"),
        ((said, why("x"), why("y"), call, result), "b", "x\n\ny"),
        ((why("x"), call, why("y"), result), "", "x\n\ny"),
    ):
        model = Scripted("ok")
        sent = {"model": "model", "input": [{"role": "user", "content": "a"}, *items]}
        answer = Door(model).ask("POST", "/v1/responses", json=sent)
        assert answer.status_code == 200, answer.text
        ((_, turn, tool),) = model.asked
        assert (turn["content"], turn["reasoning_content"]) == (content, reasoning), turn
        assert [each["id"] for each in turn["tool_calls"]] == [tool["tool_call_id"]]


def test_what_is_no_function_of_the_clients_is_refused_in_the_form_of_each_api():
    turn = {"role": "user", "content": "a"}
    message = {"model": "model", "max_tokens": 4, "messages": [turn]}
    response = {"model": "model", "input": "a"}
    use = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    tool = {"name": "f", "input_schema": {}}
    for path, sent, words in (
        ("/v1/messages", message | {"tools": [{"type": "bash_20250124", "name": "bash"}]},
         "tools.0.type: input should be 'custom'"),
        ("/v1/messages", message | {"tools": [tool], "tool_choice": {"type": "any"}},
         "llama.cpp does not constrain what the model writes"),
        ("/v1/messages", message | {"tools": [tool], "tool_choice": {"type": "tool"}},
         "name is missing"),
        ("/v1/messages", message | {"messages": [turn | {"content": [use]}]},
         "a message of the role user has no tool_use"),
        ("/v1/responses", response | {"tools": [{"type": "mcp"}]}, "tools.0: input tag 'mcp'"),
        ("/v1/responses", response | {"input": [{"type": "reasoning", "summary": []}]},
         "input: list should have at least 1 item"),
    ):  # fmt: skip
        answer = Door(Scripted("a"), engine="llamacpp").ask("POST", path, json=sent)
        assert answer.status_code == 400, (path, sent)
        assert words in answer.json()["error"]["message"], (path, sent)
        assert (answer.json().get("type") == "error") == (path == "/v1/messages")


def test_reasoning_that_an_engine_tells_apart_is_a_part_of_a_whole_answer_too():
    turn = {"role": "user", "content": "a"}
    asked = MessagesRequest.model_validate({"model": "m", "max_tokens": 4, "messages": [turn]})
    other = ResponsesRequest.model_validate({"model": "m", "input": "a"})
    for message, kinds in (
        ({"content": "b", "reasoning_content": "hm"}, ["hm", "b"]),
        ({"content": "b", "reasoning": "hm"}, ["hm", "b"]),  # vLLM's newer name
        ({"content": None, "reasoning": "hm"}, ["hm"]),  # cut off before its text
        ({"content": "b"}, ["b"]),
    ):
        choice = {"message": message, "finish_reason": "stop"}
        blocks = asked.document({"choices": [choice]})["content"]
        assert [each.get("thinking", each.get("text")) for each in blocks] == kinds, message
        items = other.document({"choices": [choice]})["output"]
        assert [each["content"][0]["text"] for each in items] == kinds, message


def test_a_response_says_how_many_of_its_tokens_were_reasoning():
    asked = ResponsesRequest.model_validate({"model": "m", "input": "a"})
    both = {"content": "b", "reasoning": "hm"}
    details = {"completion_tokens_details": {"reasoning_tokens": 5}}
    for message, reported, whole, streamed in (
        (both, details, 5, 5),  # vLLM
        (both, {"reasoning_tokens": 5}, 5, 5),  # SGLang
        (both, {}, 0, 3),  # an engine that does not say: by the counts of a stream
        (both, {"completion_tokens_details": None, "reasoning_tokens": 0}, 0, 3),
        ({"content": None, "reasoning": "hm"}, {}, 7, 7),
        ({"content": "b"}, {}, 0, 0),
    ):
        usage = {"prompt_tokens": 2, "completion_tokens": 7} | reported
        choice = {"message": message, "finish_reason": "stop"}
        document = asked.document({"choices": [choice], "usage": usage})

        async def chunks(message=message, usage=usage):
            text, reasoning = message["content"] or "", message.get("reasoning", "")
            so_far = {"completion_tokens": 3 if text else 7}
            if reasoning:
                yield ChatChunk("", None, so_far, reasoning=reasoning)
            yield ChatChunk(text, "stop", {"completion_tokens": 7})
            yield ChatChunk("", None, usage)

        async def ended(chunks=chunks):
            return [data async for _, data in asked.events(chunks())][-1]["response"]

        for found, expected in ((document, whole), (asyncio.run(ended()), streamed)):
            told = openai.types.responses.Response.model_validate(found).usage
            assert told.output_tokens_details.reasoning_tokens == expected, (message, reported)

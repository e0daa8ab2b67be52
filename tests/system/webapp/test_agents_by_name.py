"""Agents at a site's address: official clients' loops of tools, and requests of real agents."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import anthropic
import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.hub.hub_server import Hub
from tests.hub.models import make_gguf
from tests.runners.jobs.serve.test_agents import RECORDED
from tests.stack import Stack
from tests.system.webapp.caller import ARGUMENTS, TOOL, make_caller
from tests.system.webapp.test_by_name import Site, hub_variables
from tests.system.webapp.test_deployments_by_name import Deployed, settled

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
NUM_CALLS = 20
HELD = {"hold_seconds": 600}  # the first job builds its environment
LONGEST = 8192  # tokens of a request, on each engine
WORK = {"input_tokens": LONGEST // 2, "output_tokens": LONGEST // 2, "concurrency": 2}
PATHS = ("README.md", "src/main.py", "src/port.py")
READ = {
    "type": "object",
    "properties": {
        "path": {"enum": list(PATHS)},
        "line": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["path", "line"],
    "additionalProperties": False,
}
LOOK = {"type": "object", "properties": {"at": {"type": "integer"}}, "required": ["at"]}
ASKED = "Where is the port set?"
LONG_TEXT = {"type": "string", "minLength": 4000}  # an answer that does not end for a while


class Verdict(BaseModel):
    """What an answer is held to."""

    kind: Literal["bug", "feature"]
    is_urgent: bool  # Anthropic's client takes limits of numbers and lists out of the schema


class Clients:
    """The official clients of one deployment; a failed request is not sent again."""

    def __init__(self, deployed: Deployed) -> None:
        self.deployed, self.model = deployed, deployed.name
        self.openai = openai.OpenAI(
            base_url=deployed.base, api_key=deployed.key, max_retries=0, timeout=600.0
        )
        self.anthropic = anthropic.Anthropic(
            base_url=deployed.base.removesuffix("/v1"), api_key=deployed.key, max_retries=0,
            timeout=600.0,
        )  # fmt: skip

    def __enter__(self) -> "Clients":
        return self

    def __exit__(self, *_: object) -> None:
        self.openai.close()
        self.anthropic.close()


Loop = Callable[[Clients, str, dict[str, Any], Sequence[Any]], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Iterator[Site]:
    folder: Path = tmp_path_factory.mktemp("agents")
    make_gguf(folder / "hub/tiny/caller-GGUF", make_caller(folder / "hub/tiny/caller"))
    with Hub(folder / "hub") as hub:
        with Stack(folder / "site", **hub_variables(hub, folder)) as stack:
            yield Site(stack, hub)


@pytest.fixture(scope="module")
def own(site) -> Iterator[Clients]:
    with Clients(Deployed(site, "own", "tiny/caller", workload=WORK, **HELD)) as clients:
        yield clients


@pytest.fixture(scope="module")
def llamacpp(site) -> Iterator[Clients]:
    name, launch = "tiny/caller-GGUF:F16", {"engine": "llamacpp"}
    with Clients(Deployed(site, "llama", name, launch=launch, workload=WORK, **HELD)) as clients:
        yield clients


# Loops: NUM_CALLS calls, each answered, half of the answers streamed, then a text


def by_chat(
    clients: Clients, name: str, schema: dict[str, Any], choices: Sequence[Any]
) -> list[dict[str, Any]]:
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}}]
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    found = []

    def ask(at: int, choice: Any) -> Any:
        asked = {"model": clients.model, "messages": messages, "tools": tools}
        asked |= {"tool_choice": choice, "parallel_tool_calls": False}
        if at % 2:
            with clients.openai.chat.completions.stream(**asked) as events:
                return events.get_final_completion().choices[0]
        return clients.openai.chat.completions.create(**asked).choices[0]

    for at in range(NUM_CALLS):
        choice = ask(at, choices[at % len(choices)])
        assert choice.finish_reason == "tool_calls"
        messages.append(choice.message.model_dump(exclude={"parsed"}))
        for call in choice.message.tool_calls:
            assert call.function.name == name
            found.append(json.loads(call.function.arguments))
            result = {"role": "tool", "tool_call_id": call.id, "content": f"line {at}"}
            messages.append(result)
    last = ask(0, "none")
    assert (last.message.tool_calls, last.finish_reason) == (None, "stop")
    return found


def by_responses(
    clients: Clients, name: str, schema: dict[str, Any], choices: Sequence[Any]
) -> list[dict[str, Any]]:
    tools = [{"type": "function", "name": name, "parameters": schema, "strict": True}]
    items: list[Any] = [{"role": "user", "content": ASKED}]
    found = []

    def ask(at: int, choice: Any) -> Any:
        asked = {"model": clients.model, "input": items, "tools": tools}
        asked |= {"tool_choice": choice, "parallel_tool_calls": False, "store": False}
        if at % 2:
            with clients.openai.responses.stream(**asked) as events:
                return events.get_final_response()
        return clients.openai.responses.create(**asked)

    for at in range(NUM_CALLS):
        answer = ask(at, choices[at % len(choices)])
        calls = [each for each in answer.output if each.type == "function_call"]
        assert (answer.status, answer.output_text, bool(calls)) == ("completed", "", True)
        for call in calls:
            assert call.name == name
            found.append(json.loads(call.arguments))
            result = {"type": "function_call_output", "call_id": call.call_id}
            items += [
                call.model_dump(exclude={"parsed_arguments"}), {**result, "output": f"line {at}"}
            ]  # fmt: skip
    last = ask(0, "none")
    assert [each.type for each in last.output] == ["message"]
    return found


def by_messages(
    clients: Clients, name: str, schema: dict[str, Any], choices: Sequence[Any]
) -> list[dict[str, Any]]:
    tools = [{"name": name, "input_schema": schema}]
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    found = []

    def ask(at: int, choice: Any) -> Any:
        asked = {"model": clients.model, "messages": messages, "tools": tools}
        asked |= {"tool_choice": choice}
        counted = clients.anthropic.messages.count_tokens(**asked).input_tokens
        asked |= {"max_tokens": 1000}
        if at % 2:
            with clients.anthropic.messages.stream(**asked) as events:
                answer = events.get_final_message()
        else:
            answer = clients.anthropic.messages.create(**asked)
        used = answer.usage
        assert counted == used.input_tokens + (used.cache_read_input_tokens or 0)
        return answer

    for at in range(NUM_CALLS):
        answer = ask(at, choices[at % len(choices)])
        assert answer.stop_reason == "tool_use"
        calls = [each for each in answer.content if each.type == "tool_use"]
        assert {each.name for each in calls} == {name}
        found += [each.input for each in calls]
        results = [
            {"type": "tool_result", "tool_use_id": each.id, "content": f"line {at}"}
            for each in calls
        ]
        messages += [
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": results},
        ]
    last = ask(0, {"type": "none"})
    assert [each.type for each in last.content] == ["text"]
    return found


NAMED = {"type": "function", "name": "read"}
FORCED: list[tuple[Loop, list[Any]]] = [
    (by_chat, [{"type": "function", "function": {"name": "read"}}, "required"]),
    (by_responses, [NAMED, "required"]),
    (by_messages, [
        {"type": "tool", "name": "read"}, {"type": "any", "disable_parallel_tool_use": True},
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("loop", "choices"), FORCED)
def test_a_loop_of_forced_calls_has_arguments_of_the_schema_to_its_end(own, loop, choices):
    found = loop(own, "read", READ, choices)

    assert len(found) == NUM_CALLS
    for each in found:
        assert each.keys() == {"path", "line"}
        assert each["path"] in PATHS
        assert 1 <= each["line"] <= 99


@pytest.mark.parametrize("engine", ["own", "llamacpp"])
@pytest.mark.parametrize(
    ("loop", "auto"), [(by_chat, "auto"), (by_responses, "auto"), (by_messages, {"type": "auto"})]
)
def test_a_model_that_chooses_its_calls_is_followed_to_the_end_of_a_loop(
    request, engine, loop, auto
):
    found = loop(request.getfixturevalue(engine), TOOL, LOOK, [auto])

    assert found == [ARGUMENTS] * NUM_CALLS


def test_an_answer_is_of_the_class_that_each_client_asks_for(own):
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    by_completion = own.openai.chat.completions.parse(
        model="own", messages=messages, response_format=Verdict
    )
    by_response = own.openai.responses.parse(model="own", input=ASKED, text_format=Verdict)
    by_message = own.anthropic.messages.parse(
        model="own", messages=messages, max_tokens=200, output_format=Verdict
    )

    assert isinstance(by_completion.choices[0].message.parsed, Verdict)
    assert isinstance(by_response.output_parsed, Verdict)
    assert isinstance(by_message.parsed_output, Verdict)


def test_embeddings_are_the_same_in_both_encodings_and_of_unit_length(own):
    asked: dict[str, Any] = {"model": "own", "input": ["A cache", "A kernel"]}
    found = own.openai.embeddings.create(**asked)
    as_numbers = own.openai.embeddings.create(**asked, encoding_format="float")

    first, second = (each.embedding for each in found.data)
    assert first == pytest.approx(as_numbers.data[0].embedding)
    assert sum(each * each for each in first) == pytest.approx(1.0, abs=1e-5)
    assert first != pytest.approx(second)
    assert found.usage.total_tokens == found.usage.prompt_tokens > 0


# Each API's own way to ask, and its client's errors


def ask_each(clients: Clients, model: str = "", text: str = ASKED) -> list[Callable[[], Any]]:
    model = model or clients.model
    messages: list[Any] = [{"role": "user", "content": text}]
    return [
        lambda: clients.openai.chat.completions.create(model=model, messages=messages),
        lambda: clients.openai.responses.create(model=model, input=text),
        lambda: clients.anthropic.messages.create(model=model, messages=messages, max_tokens=9),
        lambda: clients.anthropic.messages.count_tokens(model=model, messages=messages),
    ]


def test_each_client_has_its_own_error_for_a_model_a_key_and_a_length_that_are_wrong(own):
    too_long = "a port " * LONGEST
    for of, ask, words in (
        *(("NotFoundError", each, "no model 'other'") for each in ask_each(own, "other")),
        *(("BadRequestError", each, "maximum context length is 8192")
          for each in ask_each(own, text=too_long)[:3]),
    ):  # fmt: skip
        with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)) as caught:
            ask()
        assert type(caught.value).__name__ == of
        assert words in str(caught.value)
    own_errors = caught.value.body
    assert isinstance(own_errors, dict)
    assert own_errors["type"] == "error"
    with Clients(own.deployed) as wrong:
        wrong.openai.api_key = wrong.anthropic.api_key = "wrong"
        for ask in ask_each(wrong):
            with pytest.raises((openai.AuthenticationError, anthropic.AuthenticationError)):
                ask()


def test_what_llama_cpp_does_not_do_is_refused_by_the_name_of_the_field(llamacpp):
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    tools: list[Any] = [{"name": "read", "input_schema": READ}]
    (ask_chat, *_), form = ask_each(llamacpp), {"type": "json_object"}
    ask_chat()
    for ask, words in (
        (lambda: llamacpp.openai.chat.completions.create(
            model="llama", messages=messages, response_format=form), "response_format"),
        (lambda: llamacpp.openai.responses.parse(
            model="llama", input=ASKED, text_format=Verdict), "text.format"),
        (lambda: llamacpp.anthropic.messages.create(
            model="llama", messages=messages, max_tokens=9, tools=tools,
            tool_choice={"type": "any"}), "tool_choice"),
        (lambda: llamacpp.openai.embeddings.create(model="llama", input="a"), "no embeddings"),
    ):  # fmt: skip
        with pytest.raises((openai.BadRequestError, anthropic.BadRequestError)) as caught:
            ask()
        assert words in str(caught.value)


# Streams


def test_a_client_that_leaves_a_stream_ends_its_answer_with_each_api(own):
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    form: Any = {"type": "json_schema", "schema": LONG_TEXT}
    streams: list[Callable[[], Any]] = [
        lambda: own.openai.chat.completions.create(
            model="own", messages=messages, stream=True, max_completion_tokens=4000,
            extra_body={"ignore_eos": True},
        ),
        lambda: own.openai.responses.create(
            model="own", input=ASKED, stream=True, text={"format": form | {"name": "text"}},
        ),
        lambda: own.anthropic.messages.create(
            model="own", messages=messages, stream=True, max_tokens=4000,
            output_config={"format": form},
        ),
    ]  # fmt: skip
    for begin in streams:
        before = settled(own.deployed)
        with begin() as events:
            for _ in range(5):
                next(iter(events))
        used = settled(own.deployed) - before
        assert (used["requests"], used["cut"]) == (1, 1)
        assert 1 <= used["completion_tokens"] < 4000


# Recorded requests


ENDS = {"/v1/responses": "event: response.completed", "/v1/messages": "event: message_stop"}


@pytest.mark.parametrize("engine", ["own", "llamacpp"])
def test_each_recorded_request_of_an_agent_is_answered_as_its_api_has_it(request, engine):
    clients: Clients = request.getfixturevalue(engine)
    before, asked, refused = settled(clients.deployed), RECORDED["requests"], 0
    for each in asked:
        path, body = each["path"], each["body"] | {"model": clients.model}
        name = "x-api-key" if "anthropic-version" in each["headers"] else "authorization"
        key = clients.deployed.key if name == "x-api-key" else f"Bearer {clients.deployed.key}"
        answer = httpx.post(
            f"{clients.deployed.base.removesuffix('/v1')}{path}", json=body, timeout=600.0,
            headers={**each["headers"], name: key}, trust_env=False,
        )  # fmt: skip
        forms = [key for key in ("output_config", "text") if "format" in body.get(key, {})]
        if engine == "llamacpp" and forms:
            assert answer.status_code == 400
            assert f"{forms[0]}.format is not supported by llama.cpp" in answer.text
            refused += 1
            continue
        assert answer.status_code == 200, (each["agent"], answer.text)
        if "count_tokens" in path:
            assert answer.json()["input_tokens"] > 0
        else:
            end = ENDS.get(path.partition("?")[0], "data: [DONE]")
            assert end in answer.text, (each["agent"], answer.text[-400:])
            assert "event: error" not in answer.text
    used = settled(clients.deployed) - before
    assert (used["requests"], used["failed"], used["cut"]) == (len(asked), 0, 0)
    assert refused == (2 if engine == "llamacpp" else 0)

"""One table says what each engine does with each field: requests, models, docs and the page."""

import json
import re
from pathlib import Path

import pytest

from runners.jobs.serve.openai_requests import (
    ChatRequest,
    RequestError,
    TextRequest,
    parse_chat,
    parse_completion,
)
from runners.jobs.serve.openai_server import OpenAIServer
from runners.jobs.serve.relayed.relay import (
    RelayedChat,
    RelayedCompletion,
    parse_request,
    prefill_body,
)
from runners.jobspec.engines import ENGINES
from runners.jobspec.request_options import OPTIONS, refusal_lines
from tests.runners.jobs.serve.test_openai_server import ASKED, CHAT, Door

DOCS = (Path(__file__).parents[4] / "templates" / "docs" / "endpoints.md").read_text()
RELAYED = [ENGINES["vllm"], ENGINES["sglang"]]
COMPLETION = {"model": "model", "prompt": "a"}


def parsed(engine: str, asked: dict):
    body, is_chat = json.dumps(asked).encode(), "messages" in asked
    if ENGINES[engine] in RELAYED:
        return parse_request(CHAT if is_chat else "/v1/completions", body, engine)
    return (parse_chat if is_chat else parse_completion)(body, engine)


def test_an_engine_refuses_what_its_column_says_and_names_those_that_do_it():
    for name, option in OPTIONS.items():
        for engine in ENGINES:
            forms = (RelayedChat, RelayedCompletion) if ENGINES[engine] in RELAYED else (
                ChatRequest, TextRequest)  # fmt: skip
            fields = {each for form in forms for each in form.model_fields}
            if engine in option.engines:
                assert name in fields, (name, engine)
                continue
            for asked in (ASKED, COMPLETION):
                for value in (None, *option.neutral):
                    assert parsed(engine, asked | {name: value}) == parsed(engine, asked), name
                with pytest.raises(RequestError) as refused:
                    parsed(engine, asked | {name: "wanted"})
                assert (refused.value.param, refused.value.code) == (name, "unsupported_parameter")
                assert all(ENGINES[each].title in str(refused.value) for each in option.engines)


def test_the_docs_print_the_table_and_the_addresses():
    rows = re.findall(r"^\| (`.*`.*?) \| ((?:yes|refused)\b.*) \|$", DOCS, re.MULTILINE)
    printed = {
        name: tuple(
            engine
            for engine, cell in zip(ENGINES, cells.split(" | "), strict=True)
            if cell == "yes"
        )
        for names, cells in rows
        for name in re.findall(r"`(\w+)`", names)
    }
    assert printed == {name: option.engines for name, option in OPTIONS.items()}
    assert f"| Fields | {' | '.join(each.title for each in ENGINES.values())} |" in DOCS

    addresses = set(re.findall(r"^\| `(?:GET|POST) (/\S+)` \|", DOCS, re.MULTILINE))
    paths = {each.path.replace(":path", "") for each in OpenAIServer(Door().service).routes}
    assert addresses == paths


def test_the_review_page_says_which_fields_its_engines_refuse():
    own, llamacpp = refusal_lines(ENGINES)
    assert own.startswith("Refused in requests to Slipway's own engine: min_tokens")
    assert llamacpp.startswith("Refused in requests to llama.cpp: response_format, min_tokens")
    assert refusal_lines(["vllm", "sglang"]) == []


def test_a_bias_for_a_token_that_the_model_has_not_is_refused_by_name():
    for bias, status in (({"5": 1.5}, 200), ({"100": 1}, 400), ({"5": 101}, 400), ({"a": 1}, 400)):
        answer = Door().ask("POST", CHAT, json=ASKED | {"logit_bias": bias})
        assert answer.status_code == status, bias
        assert status == 200 or answer.json()["error"]["param"] == "logit_bias"


def test_a_named_function_is_forced_by_the_engine_that_writes_the_answer():
    named = {"type": "function", "function": {"name": "f"}}
    for choice, sent in ((named, "none"), ("required", "none"), ("auto", "auto")):
        assert prefill_body({"tools": [named], "tool_choice": choice})["tool_choice"] == sent

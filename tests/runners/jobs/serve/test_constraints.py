"""Answers that are held to a JSON schema or to calls: masks, batches, and the three APIs."""

import json

import numpy as np
import pytest
import torch

from runners.jobs.loading import fresh_model, ready
from runners.jobs.serve.constraints import CalledTool, Constraint, called_tools
from runners.jobs.serve.contract import GenerationRequest, Limits, Sampling
from runners.jobs.serve.engine import Engine
from runners.jobs.serve.figures import EndpointMetrics
from runners.jobs.serve.grammars import (
    GrammarError,
    Grammars,
    allowed_tokens,
    unpacked_on_device,
    unpacked_on_host,
)
from runners.jobs.serve.openai_requests import schema_error
from runners.jobs.serve.own_backend import TransformersServingModel
from runners.jobs.serve.padded_decode import PaddedDecode
from runners.jobs.serve.paging import PagedCache, check_paging
from runners.jobs.serve.text import RequestTokenizer
from runners.jobs.serve.tool_calls import FORMS, CallReader
from tests.hub.models import make_tokenizer
from tests.runners.jobs.serve.test_openai_server import ASKED, CHAT, Door, Echo
from tests.runners.jobs.serve.test_tool_calls import Scripted
from tests.runners.jobs.tiny import TINY_CONFIG

CITY = {"enum": ["Rome", "Oslo"]}
PLACE = {
    "type": "object",
    "properties": {"city": CITY, "at": {"type": "array", "items": {"$ref": "#/$defs/degree"},
                                        "minItems": 2, "maxItems": 2}},
    "required": ["city", "at"],
    "additionalProperties": False,
    "$defs": {"degree": {"type": "integer", "minimum": 0, "maximum": 99}},
}  # fmt: skip
COUNT = {"type": "object", "properties": {"count": {"type": "integer", "maximum": 9}},
         "required": ["count"], "additionalProperties": False}  # fmt: skip
TOOLS = [
    {"type": "function",
     "function": {"name": 'say "é"', "parameters": PLACE | {"uniqueItems": True}}},
    {"type": "function", "function": {"name": "now", "parameters": COUNT}},
]  # fmt: skip
FORM = dict(zip(("hermes", "mistral", "llama"), FORMS, strict=True))
LONG = 400
LARGE = json.dumps({"description": "a" * 300_000})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    made = make_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    made.add_tokens(["<tool_call>", "</tool_call>"])
    made.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]"]})
    return made


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return Grammars(tokenizer, 1024, [tokenizer.eos_token_id])


def drawn(grammars, constraint, seed: int) -> list[int]:
    """Return an answer that is as random as its grammar lets it be."""
    generator = torch.Generator().manual_seed(seed)
    matcher, ids = grammars.matcher(constraint), []
    while not matcher.is_complete:
        logits = torch.randn(1, 1024, generator=generator)
        logits.masked_fill_(~allowed_tokens([matcher], logits), -torch.inf)
        ids.append(int(logits.argmax()))
        matcher.add(ids[-1])
        assert len(ids) < 10 * LONG, ids
    assert not matcher.has_failed
    return ids


def is_place(value) -> bool:
    return set(value) == {"city", "at"} and value["city"] in CITY["enum"] and len(value["at"]) == 2


def test_forced_calls_are_of_the_tools_in_the_form_that_the_template_has(grammars, tokenizer):
    names = frozenset(each["function"]["name"] for each in TOOLS)
    counts = set()
    for form in FORMS:
        for most, seed in ((1, 1), (3, 2), (3, 3), (3, 4), (3, 5)):
            held = Constraint(None, form, called_tools(TOOLS), most)
            ids = drawn(grammars, held, seed)
            text = tokenizer.decode([each for each in ids if each != tokenizer.eos_token_id])
            reader = CallReader(form, names, is_parallel=True)
            parts = (reader.add(text), reader.finish())
            calls = [call for part in parts for call in part.calls]
            assert "".join(part.content for part in parts).strip() == "", (form.name, text)
            assert 1 <= len(calls) <= most, (form.name, text)
            for each in calls:
                found = json.loads(each.arguments)
                assert is_place(found) if each.name != "now" else found["count"] <= 9, text
            counts.add(len(calls))
    assert len(counts) > 1


def test_a_schema_that_no_grammar_has_is_refused_with_the_part_and_a_tools_keyword_is_left_out(
    grammars,
):
    hermes, odd = FORM["hermes"], '{"type": "string", "not": {"const": "a"}}'
    good = CalledTool("good", json.dumps(PLACE))
    for constraint, part, words in (
        (Constraint('{"type": "objct"}'), "", "Invalid type: objct"),
        (Constraint(odd), "", 'Unimplemented keys: ["not"]'),
        (Constraint('{"$ref": "#/nowhere"}'), "", "nowhere"),
        (Constraint('{"type": "string", "pattern": "("}'), "", "regex"),
        (Constraint(None, hermes, (good, CalledTool("b", '{"type": 1}'))), "b", "type"),
        (Constraint(None, hermes, (good, CalledTool("b", odd, is_strict=True))), "b", "not"),
        (Constraint(json.dumps({"const": "a" * 300_000})), "", "13 characters as JSON"),
        (Constraint(None, hermes, (good, CalledTool("b", LARGE))), "b", "the limit is 262144"),
    ):
        with pytest.raises(GrammarError, match=r".") as caught:
            grammars.compile(constraint)
        assert (caught.value.part, words in str(caught.value)) == (part, True), caught.value
        assert "start:" not in str(caught.value)
    grammars.compile(Constraint(None, hermes, (good, CalledTool("b", odd))))


def test_grammars_are_kept_up_to_a_number_of_characters_the_newest_always(tokenizer, monkeypatch):
    monkeypatch.setattr("runners.jobs.serve.grammars.KEPT_CHARACTERS", 130)
    grammars = Grammars(tokenizer, len(tokenizer), [2])
    for size, kept in ((30, 1), (30, 2), (60, 2), (200, 1), (30, 1)):
        text = "abcdefghij"[len(grammars._compiled)] * size
        grammars.compile(Constraint(json.dumps({"const": text})))
        assert len(grammars._compiled) == kept, (size, list(grammars._compiled))


def test_masks_are_unpacked_the_same_on_host_and_device():
    words = np.random.default_rng(1).integers(-(2**31), 2**31, (3, 5), dtype=np.int32)
    found = unpacked_on_host(words, torch.device("cpu"))
    assert torch.equal(found, unpacked_on_device(words, torch.device("cpu")))
    for at in (0, 31, 32, 159):
        bit = (int(words[1, at // 32]) >> at % 32) & 1
        assert bool(found[1, at]) is bool(bit), at


# The engine: each answer of a batch has its own grammar, however the step is computed.


def written(tokenizer, grammars, wishes, *, pages: int, is_padded: bool) -> list[tuple[str, str]]:
    """Return the text and the end of an answer per wish, all in one batch of a random model."""
    torch.manual_seed(3)
    config = {**TINY_CONFIG, "vocab_size": 1024, "max_position_embeddings": 512}
    model = ready(fresh_model(config, torch.float32))
    check_paging(model, PagedCache(8), 1024)
    limits = Limits(4, 32, 256, frozenset({tokenizer.eos_token_id}))
    cache, reader = PagedCache(pages), RequestTokenizer(tokenizer)
    decode = PaddedDecode(model, cache, limits) if is_padded else None
    engine = Engine(model, cache, limits, EndpointMetrics(), decode=decode)
    served = TransformersServingModel(engine, reader, 1024, grammars)
    chunks = [[] for _ in wishes]
    for at, (wish, own) in enumerate(zip(wishes, chunks, strict=True)):
        sampling = Sampling(200, temperature=1.0, seed=at, **wish)
        prompt = reader.prompt_ids("A cache keeps")
        served.submit([GenerationRequest(prompt, sampling, own.append)])
    while not engine.is_idle:
        engine._step()
    return [("".join(each.text for each in own), own[-1].finish_reason) for own in chunks]


def test_each_answer_of_a_batch_has_its_own_grammar_however_steps_are_computed(
    tokenizer, grammars
):
    schema, form = json.dumps(PLACE), FORM["hermes"]
    wishes = [
        {"constraint": Constraint(schema)},
        {"constraint": Constraint(json.dumps(COUNT)), "top_p": 0.9, "presence_penalty": 0.5},
        {"constraint": Constraint(None, form, called_tools(TOOLS[1:]), 1), "top_logprobs": 2},
        {},
        {"constraint": Constraint(schema)},  # waits for one of the four before
    ]
    found = written(tokenizer, grammars, wishes, pages=64, is_padded=False)

    texts = [text for text, _ in found]
    assert is_place(json.loads(texts[0]))
    assert json.loads(texts[1])["count"] <= 9
    assert texts[2].startswith('<tool_call>\n{"name": "now", "arguments": {')
    assert is_place(json.loads(texts[4]))
    assert [end for _, end in found] == ["stop", "stop", "stop", "length", "stop"]
    # padded steps, and a cache in which some make room for others and are computed again
    for pages, is_padded in ((64, True), (20, False)):
        again = written(tokenizer, grammars, wishes, pages=pages, is_padded=is_padded)
        assert again == found, (pages, is_padded)
    (alone,) = written(tokenizer, grammars, wishes[:1], pages=64, is_padded=False)
    assert alone == found[0]


# The server: what each API calls it, and what is refused.


class Refusing(Echo):
    async def check_constraint(self, constraint):
        raise schema_error("now" if constraint.tools else "", "Invalid type: objct")


TURN = {"role": "user", "content": "a"}
RESPONSE = {"model": "model", "input": "a"}
MESSAGE = {"model": "model", "max_tokens": 4, "messages": [TURN]}
SCHEMA = {"type": "json_schema", "schema": COUNT}
FORMAT = {"type": "json_schema", "json_schema": {"name": "count", "schema": COUNT}}
NAMED = {"type": "function", "function": {"name": "now"}}


def test_each_api_holds_an_answer_to_a_schema_and_forces_calls():
    hermes, now = FORM["hermes"], called_tools(TOOLS[1:])
    both, any_object = called_tools(TOOLS), json.dumps({"type": "object"})
    functions = [each["function"] for each in TOOLS]
    flat = [{"type": "function", **each} for each in functions]
    anthropics = [{"name": e["name"], "input_schema": e["parameters"]} for e in functions]
    for path, sent, expected in (
        (CHAT, ASKED | {"response_format": {"type": "text"}}, None),
        (CHAT, ASKED | {"response_format": {"type": "json_object"}}, Constraint(any_object)),
        (CHAT, ASKED | {"response_format": FORMAT}, Constraint(json.dumps(COUNT))),
        (CHAT, ASKED | {"tools": TOOLS, "tool_choice": "required"}, Constraint(None, hermes, both)),
        (CHAT, ASKED | {"tools": TOOLS, "tool_choice": NAMED}, Constraint(None, hermes, now, 1)),
        (CHAT, ASKED | {"tools": TOOLS, "response_format": FORMAT, "parallel_tool_calls": False},
         Constraint(json.dumps(COUNT), hermes, both, 1)),  # JSON, or a call
        ("/v1/responses", RESPONSE | {"text": {"format": SCHEMA | {"name": "count"}}},
         Constraint(json.dumps(COUNT))),
        ("/v1/responses", RESPONSE | {"tools": flat, "tool_choice": "required"},
         Constraint(None, hermes, both)),
        ("/v1/messages", MESSAGE | {"output_config": {"format": SCHEMA, "effort": "low"}},
         Constraint(json.dumps(COUNT))),
        ("/v1/messages", MESSAGE | {"tools": anthropics, "tool_choice": {"type": "any"}},
         Constraint(None, hermes, both)),
        ("/v1/messages", MESSAGE | {"tools": anthropics, "tool_choice": {
            "type": "tool", "name": "now", "disable_parallel_tool_use": True}},
         Constraint(None, hermes, now, 1)),
    ):  # fmt: skip
        model = Scripted("ok")
        answer = Door(model).ask("POST", path, json=sent)
        assert answer.status_code == 200, (path, sent, answer.text)
        assert model.constraints == ([] if expected is None else [expected]), (path, sent)


def test_what_cannot_be_held_to_is_refused_by_the_name_that_its_api_has():
    forced = {"tools": TOOLS[1:], "tool_choice": "required"}
    for path, sent, param, words in (
        (CHAT, ASKED | {"response_format": FORMAT}, "response_format",
         "response_format: its schema cannot be held to: Invalid type: objct"),
        ("/v1/responses", RESPONSE | {"text": {"format": SCHEMA}}, "text.format",
         "text.format: its schema cannot be held to"),
        ("/v1/messages", MESSAGE | {"output_config": {"format": SCHEMA}}, None,
         "output_config.format: its schema"),
        (CHAT, ASKED | forced, "tools", "tools: the parameters of 'now' cannot be held to"),
        (CHAT, ASKED | {"response_format": {"type": "json_schema"}}, "response_format",
         "type json_schema needs json_schema"),
        (CHAT, ASKED | {"response_format": {"type": "xml"}}, "response_format", "xml"),
        (CHAT, ASKED | {"response_format": FORMAT, "ignore_eos": True}, "ignore_eos", "by itself"),
        (CHAT, ASKED | {"tool_choice": "required"}, "tool_choice", "there are no tools"),
        (CHAT, ASKED | forced | {"tool_choice": "any"}, "tool_choice", "auto, none, required"),
        (CHAT, ASKED | forced | {"tool_choice": NAMED | {"function": {"name": "x"}}},
         "tool_choice", "'x', which is none of the tools now"),
        ("/v1/completions", {"model": "model", "prompt": "a", "response_format": FORMAT},
         "response_format", "its schema cannot be held to"),
    ):  # fmt: skip
        model = Refusing()
        model.template = Scripted().template
        answer = Door(model).ask("POST", path, json=sent)
        error = answer.json()["error"]
        assert (answer.status_code, error.get("param")) == (400, param), (sent, error)
        assert words in error["message"], (sent, error)

    unread = Scripted()
    unread.constraint_refusal = "its tokenizer is odd"
    answer = Door(unread).ask("POST", CHAT, json=ASKED | {"response_format": FORMAT})
    assert "its tokenizer is odd" in answer.json()["error"]["message"]
    for model, has_it in ((unread, False), (Echo(), True)):
        (card,) = Door(model).ask("GET", "/v1/models").json()["data"]
        assert ("response_format" in card["capabilities"]) is has_it

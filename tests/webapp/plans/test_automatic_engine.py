"""A plan for catalog hardware that names no engine: the engines that sites run, compared."""

import json
import re

import pytest

from runners.jobspec.engines import ENGINES, OWN
from tests.webapp.conftest import client_of
from webapp.plans.models import Plan
from webapp.plans.planning import current_answer, is_outdated, plan_again
from webapp.wizard import engine_search
from webapp.wizard.documents import document_parse, draft_of_document

pytestmark = pytest.mark.django_db(databases="__all__")
GPT_OSS = {
    "goal": "serve",
    "model": "openai/gpt-oss-20b",
    "hardware": {"device": "rtx-4080-super"},
    "workload": {"concurrency": 1},
    "latency_target": "none",
}
LLAMA_BATCH = {
    "goal": "generate",
    "model": "meta-llama/Llama-3.3-70B-Instruct",
    "hardware": {"device": "a100-sxm4-80gb", "devices_per_node": 4},
}
SMALL = GPT_OSS | {"model": "Qwen/Qwen3-8B", "hardware": {"device": "rtx-4090"}}


@pytest.fixture
def made(alice):
    """Return what the API replies to the document of a new plan."""

    def post(document: dict, path: str = "/api/v1/plans") -> dict:
        reply = client_of(alice).post(path, json.dumps(document), content_type="application/json")
        assert reply.status_code == 201, reply.content
        return reply.json()

    return post


def page(user, plan_id: str, tab: str = "") -> str:
    return client_of(user).get(f"/plans/{plan_id}/{tab}").content.decode()


def test_what_one_engine_cannot_hold_is_planned_on_one_that_can(made):
    for document, engines in [(GPT_OSS, {"llama_cpp"}), (LLAMA_BATCH, {"vllm", "sglang"})]:
        found = made(document)
        assert found["answer"]["plans"], document["model"]
        assert found["answer"]["plans"][0]["engine"] in engines, document["model"]
        assert found["verdict_words"]["state"] in {"fits", "tight"}, document["model"]


def test_the_reply_and_the_pages_say_which_engine_it_is_and_which_were_compared(made, alice):
    found = made(SMALL)
    engines = [each["engine"] for each in found["answer"]["plans"]]
    titles = {"vllm": "vLLM", "sglang": "SGLang", "llama_cpp": "llama.cpp"}
    assert set(engines) == titles.keys()
    first, *others = dict.fromkeys([engines[0], *titles])
    words = f"Engines compared with it: {' and '.join(titles[each] for each in others)}."
    for said in (found["verdict_words"]["detail"], page(alice, found["id"])):
        assert f"Planned for {titles[first]}" in said
        assert words in said
    rows = re.findall(
        r"<td>(?:<input[^>]*> )?([\w.]+) · ", page(alice, found["id"], "alternatives/")
    )
    assert rows[: len(engines)] == [titles[each] for each in engines]
    assert set(rows) == set(titles.values())  # then the points of the frontier


def test_exports_and_limits_are_of_the_engine_that_was_chosen(made, alice):
    found = made(GPT_OSS)
    plan = Plan.objects.get(pk=found["id"])
    formats = client_of(alice).get(f"/api/v1/plans/{plan.pk}/exports").json()["formats"]
    assert formats[0]["key"] == "llama_cpp"
    limits = client_of(alice).get(f"/api/v1/plans/{plan.pk}/limits/longest_context").json()
    assert limits["limits"][0]["estimate"]["engine"] == "llama_cpp"
    assert "· llama.cpp." in page(alice, plan.pk, "limits/?question=longest_context")


def test_auto_by_name_is_automatic_where_engines_are_compared(made):
    for name in ["auto", None]:
        hardware = {**SMALL["hardware"], "engine": name}
        found = made(SMALL | {"hardware": hardware})
        assert (found["document"]["hardware"].get("engine"), found["notes"]) == (None, []), name
        request = {**found["request"], "engine": "auto"}
        again = made({"request": request}, "/api/v1/plans/from-request")
        assert again["request"]["engine"] == "auto", name
        assert not [note for note in again["notes"] if "engine" in note], name


def test_a_plan_of_before_stays_with_the_engine_it_was_made_for(made, alice):
    """Only planning again compares: what a version asked, its suggestions included, is kept."""
    asked = made(GPT_OSS | {"hardware": {"device": "rtx-4080-super", "engine": "vllm"}})
    saved = Plan.objects.get(pk=asked["id"])
    saved.draft["hardware"]["engine"] = None
    Plan.objects.filter(pk=saved.pk).update(draft=saved.draft, is_brief=True)
    saved.refresh_from_db()

    assert current_answer(saved).suggestions
    saved.refresh_from_db()
    assert (saved.request["engine"], saved.answer["plans"]) == ("vllm", [])
    assert is_outdated(saved)
    shown = page(alice, saved.pk)
    assert "Slipway chooses differently today" in shown
    assert "Engines compared" not in shown

    again = plan_again(saved, alice)
    assert again.pk != saved.pk
    assert (again.request["engine"], again.answer["plans"][0]["engine"]) == ("auto", "llama_cpp")


ENDPOINT = {
    "goal": "serve",
    "model": "HuggingFaceTB/SmolLM2-135M",
    "workload": {"input_tokens": 64, "output_tokens": 32, "concurrency": 2},
    "latency_target": "none",
    "launch": {"run": "endpoint", "engine": "auto"},
}


def test_auto_on_a_host_searches_the_engines_that_run_there(team, alice, host, monkeypatch):
    asked = document_parse(ENDPOINT | {"hardware": {"host": host.name}})
    assert (asked.hardware.engine, asked.launch.engine) == ("auto", OWN)

    def settled() -> tuple[str, str]:
        plan, notes = draft_of_document(team, alice, asked)
        chosen = plan.document.launch.engine
        assert plan.document.hardware.engine == ENGINES[chosen].planned_as
        return chosen, notes[-1]

    monkeypatch.setattr(engine_search, "TIE", 1e9)
    chosen, why = settled()
    assert chosen == OWN  # nothing else is installed
    assert why.startswith(f"Engine: {ENGINES[OWN].title}, ")
    monkeypatch.setattr(engine_search, "TIE", 0.0)
    best, why = settled()
    assert ENGINES[best].title in why
    assert "llama.cpp: " in why  # which has no file of this model, and is no candidate
    monkeypatch.setattr(
        engine_search.api, "penalty", lambda estimate, _: -float(estimate.engine == "vllm")
    )
    if "vLLM" in why:
        assert settled()[0] == "vllm"


def test_auto_where_no_engine_can_start_the_endpoint_says_why_of_each(alice, host):
    huge = ENDPOINT | {"model": "meta-llama/Llama-3.1-405B", "hardware": {"host": host.name}}
    reply = client_of(alice).post("/api/v1/jobs", json.dumps(huge), "application/json")
    assert reply.status_code == 422
    fault = reply.json()["errors"][0]
    assert fault["field"] == "hardware.engine"
    assert all(f"{each}: " in fault["message"] for each in (ENGINES[OWN].title, "llama.cpp"))

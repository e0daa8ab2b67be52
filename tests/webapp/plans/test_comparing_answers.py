"""Plans of DPO and its like: the engine, the reference in memory, what a suggestion changes."""

import json
from html import unescape

from django.urls import reverse

from runners.jobspec import TrainSpec
from tests.webapp.conftest import client_of
from webapp.core.display import TIMES, whole
from webapp.jobs.launching import launch_description
from webapp.plans.explanation import workload_words
from webapp.plans.models import Plan
from webapp.wizard.drafts import suggestion_apply

BODY = {"goal": "finetune", "model": "meta-llama/Llama-3.1-8B"}
H200S = {"device": "h200", "devices_per_node": 8}


def planned(alice, workload: dict, hardware: dict, model: str = BODY["model"]):
    body = {**BODY, "model": model, "workload": workload, "hardware": hardware}
    reply = client_of(alice).post("/api/v1/plans", json.dumps(body), "application/json")
    assert reply.status_code == 201, reply.json()
    return reply.json()


def test_a_full_dpo_plan_is_trls_and_shows_its_reference(alice):
    found = planned(alice, {"objective": "dpo", "method": "full"}, H200S)
    best = found["answer"]["plans"][0]
    assert best["engine"] == "trl"
    assert best["memory"]["breakdown_bytes"]["reference_weights"] > 0
    assert best["exports"] == []
    why = client_of(alice).get(reverse("plan-tab", args=[found["id"], "why"])).content.decode()
    assert "Reference model weights" in why
    assert "Reference forward: Matrix products" in why
    work = Plan.objects.get(pk=found["id"]).document.workload
    assert workload_words(work).startswith(f"DPO · 16 {TIMES} 2 {TIMES} {whole(2048)} tokens")


def test_adapters_on_a_small_card_are_offered_over_four_bits_and_keep_the_objective(alice):
    found = planned(alice, {"objective": "dpo", "method": "lora"}, {"device": "rtx-4060-ti-16gb"})
    assert found["answer"]["plans"] == []
    (way,) = (each for each in found["answer"]["suggestions"] if each["title"] == "method qlora")
    plan = Plan.objects.get(pk=found["id"])
    assert suggestion_apply(plan, way["changes"]) == []
    assert (plan.document.workload.method, plan.document.workload.objective) == ("qlora", "dpo")


REWARDED = {
    "objective": "grpo",
    "reward_function": "exact_match",
    "sequence_length": 128,
    "max_completion_length": 64,
    "global_batch_size": 2,
    "num_generations": 2,
    "tokens": 100_000,
}


def test_a_page_says_which_engine_generates_answers_and_why(alice, host):
    for hardware, said in [
        (H200S, "Completions by vllm: no engine is pinned, and on GPUs a server generates; a job of"),
        ({"device": "apple-m4-max-128gb"}, "the trainer's own model: no server of completions is planned on"),
        ({"host": host.pk}, "Completions by transformers, the trainer's own model: as jobs here do."),
    ]:  # fmt: skip
        found = planned(alice, REWARDED, hardware, "demo")
        best = found["answer"]["plans"][0]
        assert any(each.startswith("completions by ") for each in best["reasons"])
        page = client_of(alice).get(reverse("plan-detail", args=[found["id"]])).content.decode()
        assert said in unescape(page), hardware


def test_another_engine_than_trl_is_refused_with_the_way_out(alice):
    refused = planned(alice, {"objective": "kto"}, {**H200S, "engine": "torchtitan"})
    assert refused["verdict_words"]["state"] == "refused"
    assert "torchtitan trains supervised alone; set engine to trl" in refused["problem"]


def test_a_launch_tells_what_it_stores_of_each_objective():
    data, folder = {"source": "file", "path": "p.jsonl"}, {"source": "folder", "path": "llama"}
    for objective, lora, said in [
        ("reward", None, "is no model of your team."),
        ("reward", {}, "is no model of your team."),
        ("dpo", {}, "stores the adapter in peft's format, and the merged model as a model of"),
        ("dpo", {"is_merged": False}, "stores the adapter in peft's format."),
        ("dpo", None, "saves it as a model of your team."),
    ]:
        fields = {"objective": objective, "lora": lora, "data": data, "model": folder}
        text = launch_description(TrainSpec.model_validate({"engine": "trl", **fields}))
        assert said in text, (objective, lora)

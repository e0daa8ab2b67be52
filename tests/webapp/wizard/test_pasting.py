"""Pasted commands and files become drafts that say what became of each setting."""

import json

import pytest

from tests.webapp.conftest import client_of
from webapp.jobs.models import Job
from webapp.plans.models import Plan
from webapp.plans.places import question_of
from webapp.wizard.documents import adapter, document_of, job_document_of, yaml_of

pytestmark = pytest.mark.django_db(databases="__all__")
VLLM = (
    "vllm serve meta-llama/Llama-3.1-8B --tensor-parallel-size 2 \\\n"
    "  --max-model-len 8192 --kv-cache-dtype fp8 --enable-prefix-caching --made-up 3"
)
AXOLOTL = """
base_model: meta-llama/Llama-3.2-1B
adapter: lora
lora_r: 8
sequence_len: 1024
micro_batch_size: 2
gradient_accumulation_steps: 4
optimizer: adamw_bnb_8bit
"""


def paste(user, text: str):
    return client_of(user).post("/plans/paste/", {"text": text})


def test_a_command_becomes_a_draft_that_tells_every_setting(alice, host):
    answer = paste(alice, VLLM)
    plan = Plan.objects.get()
    assert answer["Location"] == f"/plans/{plan.pk}/edit/review/"
    request = question_of(plan).request
    assert (request.pins.tensor_parallel_size, request.pins.kv_cache_dtype) == (2, "fp8")
    assert request.workload.max_request_tokens == 8192
    assert (request.cluster.device, request.cluster.devices_per_node) == ("rtx-4090", 2)
    page = client_of(alice).get(answer["Location"]).content.decode()
    for text in (
        "--tensor-parallel-size 2",
        "--enable-prefix-caching",
        "--made-up 3",
        "unknown",
        "Choose yours",
    ):
        assert text in page, text


def test_a_plans_own_yaml_becomes_the_same_plan_or_is_refused_by_its_field(alice, host):
    paste(alice, AXOLOTL)
    first = Plan.objects.get()
    text = yaml_of(document_of(first), "http://testserver/static/schemas/job.json")
    answer = paste(alice, text)
    second = Plan.objects.exclude(pk=first.pk).get()
    assert answer["Location"] == f"/plans/{second.pk}/edit/review/"
    assert document_of(second) == document_of(first)

    client = client_of(alice)
    wrong = {"text": text.replace("lora_rank: 8", "lora_rank: 0")}
    page = client.post("/plans/paste/", wrong, follow=True).content.decode()
    assert "workload.lora_rank" in page
    assert "lora_rank: 0" in page, "what was pasted is lost"


def test_a_training_file_becomes_a_fine_tuning(alice, host):
    paste(alice, AXOLOTL)
    draft = Plan.objects.get().draft
    values = draft["workload"]
    assert draft["goal"] == "finetune"
    assert draft["model"]["catalog_id"] == "meta-llama/Llama-3.2-1B"
    assert (values["method"], values["lora_rank"], values["sequence_length"]) == ("lora", 8, 1024)
    assert values["optimizer"] == "adamw_8bit"


def test_a_data_set_of_the_hub_becomes_the_training_text_unless_its_name_is_none(alice, host):
    for name, source, words in (
        ("tatsu-lab/alpaca", "hub", "“Data set on the Hub” = tatsu-lab/alpaca"),
        ("tatsu--lab/alpaca", "host", "data set is not used: &#x27;tatsu--lab/alpaca&#x27;: "),
    ):
        answer = paste(alice, f"{AXOLOTL}datasets: [{{path: {name}, type: alpaca}}]\n")
        plan = Plan.objects.order_by("pk").last()
        values = plan.draft["workload"]
        assert values["data_source"] == source
        assert values["data_repository"] == name * (source == "hub")
        assert words in client_of(alice).get(answer["Location"]).content.decode()


def test_trls_way_to_pack_goes_into_the_draft_without_a_data_set_too(alice, host):
    for more in ("", "--dataset_name tatsu-lab/alpaca "):
        paste(
            alice,
            "trl sft --model_name_or_path meta-llama/Llama-3.2-1B --packing "
            f"{more}--packing_strategy wrapped",
        )
        values = Plan.objects.order_by("pk").last().draft["workload"]
        assert values["packing_strategy"] == "wrapped"
        assert values["data_source"] == ("hub" if more else "host")


@pytest.mark.parametrize(
    "text", ["", "hello", "rm -rf /", "vllm serve $(id)", "a: [" * 200, "\0", "vllm serve"]
)
def test_what_is_no_ones_command_is_refused_in_words(alice, host, text):
    answer = paste(alice, text)
    assert answer.status_code in {302, 400}
    if answer.status_code == 302 and not Plan.objects.exists():
        page = client_of(alice).get("/plans/new/", follow=True)
        assert page.status_code == 200
    script = client_of(alice).post(
        "/api/v1/plans/import", json.dumps({"text": text}), "application/json"
    )
    assert script.status_code in {201, 400, 422}
    assert script.status_code == 201 or script.json()["detail"]


def test_a_refused_text_stays_in_its_field(alice, host):
    client = client_of(alice)
    page = client.post("/plans/paste/", {"text": "\nrm -rf <here>"}, follow=True)
    text = page.content.decode()
    assert "\n\nrm -rf &lt;here&gt;</textarea>" in text
    assert "rm -rf" not in client.get("/plans/new/", follow=True).content.decode()


def test_a_script_is_told_what_a_text_said_and_what_is_missing(alice, host):
    answer = client_of(alice).post(
        "/api/v1/plans/import", json.dumps({"text": VLLM, "host": host.slug}), "application/json"
    )
    found = answer.json()
    assert (answer.status_code, found["kind"]) == (201, "vllm"), found
    assert found["plan"]["document"]["hardware"]["host"] == host.slug
    assert any(each["source"] == "--made-up 3" for each in found["unknown"])
    assert any("input_tokens" in each for each in found["missing"])


def test_a_job_as_yaml_launches_the_same_job_again(alice, host):
    client = client_of(alice)
    body = {
        "goal": "pretrain", "model": "demo", "hardware": {"host": host.slug},
        "workload": {"time_budget_seconds": 60}, "pins": {"micro_batch_size": 1},
    }  # fmt: skip
    plan = client.post("/api/v1/plans", json.dumps(body), "application/json").json()
    launch = {"name": "night", "max_duration_seconds": 7200, "max_retries": 1, "priority": "low"}
    client.post(f"/api/v1/plans/{plan['id']}/launch", json.dumps(launch), "application/json")
    first = Job.objects.get()
    document = job_document_of(first)
    assert document["launch"] == {"run": "job", **launch}
    planned = {name: value for name, value in document.items() if name != "launch"}
    again = client.post("/api/v1/plans", json.dumps(planned), "application/json").json()
    path = f"/api/v1/plans/{again['id']}/launch"
    client.post(path, json.dumps(document["launch"]), "application/json")
    second = Job.objects.order_by("created_at").last()
    assert first.pk != second.pk
    assert (second.spec, second.name, second.priority, second.max_retries) == (
        first.spec, first.name, first.priority, first.max_retries,
    )  # fmt: skip
    text = yaml_of(document, "http://testserver/static/schemas/job.json")
    assert text.startswith("# yaml-language-server: $schema=http://testserver/static/schemas/")
    assert text in client.get(f"/jobs/{first.pk}/config/").content.decode().replace("&#x27;", "'")
    assert adapter().validate_python(document).launch.name == "night"
    assert "slipway launch" in client.get(f"/plans/{first.plan_id}/exports/").content.decode()


def test_a_model_that_no_catalog_has_is_never_another_one_without_a_word(alice, host):
    answer = paste(alice, "vllm serve /data/my-model-9b --tensor-parallel-size 2")
    page = client_of(alice).get(answer["Location"]).content.decode()
    assert "/data/my-model-9b, which the catalog does not have: the plan is for" in page
    found = client_of(alice).post(
        "/api/v1/plans/import", json.dumps({"text": "vllm serve /data/my-model-9b"}),
        "application/json",
    ).json()  # fmt: skip
    assert any("/data/my-model-9b" in each for each in found["plan"]["notes"])


def test_a_pasted_setting_stands_in_one_list(alice, host):
    paste(alice, "python trl/scripts/rloo.py --model_name_or_path meta-llama/Llama-3.2-1B "
          "--use_peft --lora_r 8 --packing --optim paged_adamw_8bit --bf16 --made_up 3 "
          "--fp16 --max_steps ten")  # fmt: skip
    words = Plan.objects.get().wizard["imported"]
    places: dict[str, set[str]] = {}
    for name, rows in words.items():
        for source, _ in rows:
            places.setdefault(source, set()).add(name)
    places.pop("", None)
    assert {source: names for source, names in places.items() if len(names) > 1} == {}
    assert words["unused"][0][0] == "trl/scripts/rloo.py"  # what changes the work stands first
    assert "Slipway plans supervised steps" in words["unused"][0][1]


def test_flags_without_effect_on_the_plan_are_kept_for_the_engine_that_takes_them(alice, host):
    """vLLM 0.32.0 knows three of them; the others are named as not used."""
    kept = "--enable-auto-tool-choice --tool-call-parser hermes --reasoning-parser qwen3"
    answer = paste(
        alice, f"vllm serve Qwen/Qwen3-8B {kept} --api-key abc --download-dir /x --port 80"
    )
    plan = Plan.objects.get()
    launch = plan.document.launch
    assert (launch.run, launch.engine) == ("endpoint", "vllm")
    assert sorted(launch.engine_args) == sorted(kept.split())
    assert launch.idle_stop_seconds == 3600
    page = client_of(alice).get(answer["Location"]).content.decode()
    assert "“Further engine arguments” = --tool-call-parser hermes" in page
    assert "--download-dir" in page

"""A plan as a job: which program, on which model, as predicted, by which button; refusals."""

import re

import pytest

from planner.specs.workload import OffloadSpec
from runners.jobspec import (
    ArtefactModel,
    BenchmarkSpec,
    CompressSpec,
    DemoModel,
    FolderModel,
    GenerateSpec,
    RandomModel,
    TrainSpec,
)
from runners.plans.document import GOALS
from runners.plans.launch import Launch
from runners.plans.refusals import DraftProblem
from tests.webapp.conftest import client_of, enrol
from tests.webapp.plans.conftest import SOURCES, with_model
from webapp.accounts.models import Quota
from webapp.hosts.models import Host
from webapp.jobs import launching
from webapp.jobs.launching import launch_note, launchable_of, plan_launch
from webapp.jobs.models import Job, JobState
from webapp.modelhub.models import TeamModel, demo_config
from webapp.plans.models import Plan, PlanState
from webapp.plans.planning import current_answer, is_outdated, plan_compute, plan_keep
from webapp.wizard.launch_form import launch_form

pytestmark = pytest.mark.django_db(databases="__all__")


def test_the_demo_plan_trains_the_demo_model_for_two_minutes_as_predicted(demo_plan):
    spec = launchable_of(demo_plan).spec
    assert isinstance(spec, TrainSpec)
    assert isinstance(spec.model, DemoModel)
    assert spec.time_budget_seconds == 120
    assert spec.max_steps is None

    prediction = launchable_of(demo_plan).prediction
    assert set(prediction) == {"tokens_per_second", "step_seconds", "peak_memory_bytes", "mfu"}
    assert prediction["tokens_per_second"]["unit"] == "tokens_per_second"
    assert prediction["peak_memory_bytes"]["unit"] == "bytes"
    for figure in prediction.values():
        assert figure["low"] < figure["value"] < figure["high"]


def test_the_steps_of_a_batch_hold_all_its_sequences(demo_plan):
    demo_plan.draft["workload"]["global_batch_size"] = 8
    demo_plan.draft["pins"] = {"micro_batch_size": 2}
    spec = launchable_of(demo_plan).spec
    assert spec.micro_batch_size * spec.gradient_accumulation_steps == 8
    assert spec.micro_batch_size == 2


def test_serving_measures_the_plan_on_the_host_with_random_weights_and_says_so(serve_plan):
    spec = launchable_of(serve_plan).spec
    assert isinstance(spec, BenchmarkSpec)
    assert (spec.batch_size, spec.prompt_tokens, spec.output_tokens) == (16, 1024, 256)
    assert "It ends with the measurements." in launch_note(serve_plan)["text"]

    prediction = launchable_of(serve_plan).prediction
    assert {"prefill_tokens_per_second", "decode_tokens_per_second", "peak_memory_bytes"} <= set(
        prediction
    )

    assert isinstance(launchable_of(serve_plan).spec.model, RandomModel)
    assert "random" in launch_note(serve_plan)["text"]


def test_a_folder_runs_by_its_path(plan_of):
    assert launchable_of(plan_of("serve", "folder")).spec.model == FolderModel(path="tiny")


def test_compressing_quantises_the_trained_model(plan_of, trained):
    for method, written, dtype in (
        ("int8_weight_only", None, "int8"),
        ("int4_weight_only", None, "int4"),
        ("fp8", "fp8", "fp8"),
        ("int8_dynamic", "int8_dynamic", "int8"),
    ):
        plan = plan_of("compress", "team", method=method)
        spec = launchable_of(plan).spec
        assert isinstance(spec, CompressSpec), method
        assert spec.weight_dtype == dtype, method
        assert written in {None, spec.method}, method
        assert spec.model == ArtefactModel(attempt_id=trained.attempt_id, name="model"), method


def test_pinned_8_bit_floats_are_measured_and_said_to_save_memory_not_time(serve_plan):
    serve_plan.draft["pins"] = {"weight_dtype": "fp8"}
    note = launch_note(serve_plan)
    assert launchable_of(serve_plan).spec.weight_dtype == "fp8"
    assert note["can"]
    assert "half the memory of 16 bit; products are in 16 bit" in note["text"]


def test_compressing_layer_by_layer_asks_the_host_for_the_method(plan_of):
    methods = [
        "gptq", "norm_tweaking", "autoround", "quantease", "awq", "finequant", "fptq", "sparsegpt",
    ]  # fmt: skip
    for method in methods:
        plan = plan_of("compress", "team", method=method, group_size=32)
        spec = launchable_of(plan).spec
        assert (spec.kind, spec.method, spec.group_size) == ("compress", method, 32)
        assert spec.is_layerwise, method


def test_bits_and_what_goes_reach_the_host(plan_of):
    for chosen, expected in [
        ({"method": "gptq", "bits": 3}, {"bits": 3}),
        ({"method": "gptq", "bits": None}, {"bits": 4}),
        ({"method": "gguf", "bits": None}, {"gguf_type": "Q4_K_M"}),
        ({"method": "gguf", "bits": 8}, {"gguf_type": "Q8_0"}),
        ({"method": "sparsegpt", "sparsity": "60"}, {"sparsity": 0.6, "pattern": "unstructured"}),
        ({"method": "sparsegpt", "sparsity": "2:4"}, {"pattern": "2:4"}),
        ({"method": "llm_pruner", "sparsity": "20"}, {"sparsity": 0.2, "recovery_steps": 0}),
        ({"method": "llm_pruner", "recovery_steps": 50}, {"recovery_steps": 50}),
        ({"method": "gptq", "recovery_steps": 50}, {"recovery_steps": 0}),
        ({"method": "llm_pruner", "sparsity": None}, {"sparsity": 0.5}),
        ({"method": "sheared_llama", "sparsity": "20"}, {"sparsity": 0.2}),
    ]:
        plan = plan_of("compress", "team", **chosen)
        spec = launchable_of(plan).spec.model_dump()
        assert {name: spec[name] for name in expected} == expected, chosen


def test_bits_and_shares_that_no_host_writes_are_refused_by_name(plan_of):
    plan = plan_of("compress", "team", method="gguf", bits=3)
    assert "with 4 bits (Q4_K_M) or 8 (Q8_0), not 3" in refusal(plan)


def test_a_compression_is_predicted_before_and_after(demo_plan, trained):
    prediction = launchable_of(with_model(demo_plan, trained, "compress")).prediction
    for metric in ("decode_tokens_per_second", "peak_memory_bytes"):
        assert prediction[f"original_{metric}"]["value"] > 0
        assert prediction[metric]["value"] != prediction[f"original_{metric}"]["value"]


def refusal(plan) -> str:
    with pytest.raises(DraftProblem) as caught:
        launchable_of(plan)
    return caught.value.sentence


def test_fine_tuning_trains_all_weights_or_an_adapter_of_the_asked_rank(plan_of):
    spec = launchable_of(plan_of("finetune", "team", method="full")).spec
    assert isinstance(spec, TrainSpec)
    assert isinstance(spec.model, ArtefactModel)
    assert spec.lora is None

    plan = plan_of("finetune", "team", method="lora", lora_rank=24)
    lora = launchable_of(plan).spec.lora
    assert (lora.rank, lora.alpha, lora.is_merged) == (24, 48, True)
    assert "an adapter on its own text" in launch_note(plan)["text"]
    assert launchable_of(plan_of("finetune", "team", method="qlora")).spec.lora.base_dtype == "nf4"


def test_what_does_not_run_is_refused_with_the_way_out(plan_of):
    lomo = {"optimizer": "lomo", "global_batch_size": 4}
    for goal, source, changes, said in (
        ("compress", "demo", {}, "Train the demo model first"),
        ("pretrain", "catalog", {}, "Only the demo model"),
        ("pretrain", "demo", {"workload": lomo, "pins": {"micro_batch_size": 1}},
         "gradient_accumulation_steps is 4; make it 1"),
        ("pretrain", "demo", {"hardware": {"host": None}}, "only catalog hardware: RTX 4090."),
        ("serve", "catalog", {"model": {"catalog_id": "meta-llama/Llama-3.1-405B"}},
         "Nothing fits"),
    ):  # fmt: skip
        plan = plan_of(goal, source)
        for step, values in changes.items():
            for name, value in values.items():
                known = plan.draft[step].get(name)
                plan.draft[step][name] = known | value if isinstance(known, dict) else value
        assert said in refusal(plan), (goal, source, changes)


def test_a_model_on_another_host_is_refused_with_both_names(demo_plan, trained, team):
    other, _ = enrol(team, name="Elsewhere")
    trained.host = other
    trained.save()
    assert "Choose Elsewhere" in refusal(with_model(demo_plan, trained, "compress"))


def test_launching_queues_a_job_of_the_plan_and_makes_the_draft_one(demo_plan, alice, host):
    job = plan_launch(plan=demo_plan, by=alice, name="First light")

    assert job.plan_id == demo_plan.pk
    assert job.host_id == host.pk
    assert job.name == "First light"
    assert job.state in {JobState.QUEUED, JobState.PREFLIGHT, JobState.STARTING}
    assert job.estimate["strategy"]
    demo_plan.refresh_from_db()
    assert demo_plan.state == PlanState.COMPUTED


def test_pressing_twice_launches_once_and_leads_to_the_job(demo_plan, alice):
    client = client_of(alice)
    review = client.get(f"/plans/{demo_plan.pk}/edit/review/")
    data = {"run": "job", "key": review.context["launch_key"]}

    pressed = [client.post(f"/plans/{demo_plan.pk}/launch/", data) for _ in range(2)]

    job = Job.objects.get()
    assert [each["Location"] for each in pressed] == [f"/jobs/{job.pk}/"] * 2


def test_a_refused_launch_goes_back_to_the_review_with_the_reason(demo_plan, alice):
    demo_plan.draft["hardware"]["host"] = None
    demo_plan.save()
    page = client_of(alice).post(f"/plans/{demo_plan.pk}/launch/", {"run": "job"}, follow=True)
    assert "only catalog hardware" in page.content.decode()
    assert not Job.objects.exists()


def test_a_refused_launch_shows_what_was_typed_and_marks_the_wrong_field_once(demo_plan, alice):
    client, url = client_of(alice), f"/plans/{demo_plan.pk}/launch/"
    typed = {"max_retries": "2", "priority": "low", "max_duration_seconds": "2h"}
    typed["name"] = "my name"
    page = client.post(url, {"run": "job", **typed}, follow=True)

    text = page.content.decode()
    assert {name: page.context["launch"][name].value() for name in typed} == typed
    assert 'value="my name"' in text
    assert re.search(r'name="max_duration_seconds" value="2h"[^>]* aria-invalid="true"', text)
    assert text.count('aria-invalid="true"') == 1
    assert 'value="2h"' not in client.get(f"/plans/{demo_plan.pk}/edit/review/").content.decode()


def test_a_plan_longer_than_the_team_allows_can_be_given_a_shorter_limit(demo_plan, alice):
    Quota.objects.create(team=demo_plan.team, max_duration_seconds=60.0)
    note = launch_note(demo_plan)
    assert (note["can"], "Set a shorter time limit" in note["text"]) == ("yes", True)
    review = client_of(alice).get(f"/plans/{demo_plan.pk}/edit/review/").content.decode()
    assert 'name="max_duration_seconds"' in review


def test_a_plan_can_be_kept_without_launching(demo_plan, alice):
    client_of(alice).post(f"/plans/{demo_plan.pk}/launch/", {"go": "keep", "name": "For later"})
    demo_plan.refresh_from_db()
    assert demo_plan.name == "For later"
    assert demo_plan.state == PlanState.COMPUTED
    assert not Job.objects.exists()


# The buttons of a plan: who may press them, by which method, and that twice is once


def test_no_button_works_by_a_link_or_for_a_viewer_a_stranger_or_another_team(
    demo_plan, alice, charlie, vera, client
):
    owner, foreign, viewer = (client_of(one) for one in (alice, charlie, vera))
    for button in ("launch/", "compute/", "delete/"):
        url = f"/plans/{demo_plan.pk}/{button}"
        assert owner.get(url).status_code in {404, 405}, button
        assert foreign.post(url).status_code == 404, button
        assert viewer.post(url).status_code == 403, button
        assert not Job.objects.exists(), button
    for button in ("launch/", "compute/", "delete/", "", "why/"):
        status = client.post(f"/plans/{demo_plan.pk}/{button}").status_code
        assert status in {302, 404, 405}, button
        assert Plan.objects.exists(), button


def test_any_key_of_a_launch_is_taken(demo_plan, alice):
    client = client_of(alice)
    for number, key in enumerate(("", "x", "k" * 500, "'; --"), 1):
        client.post(f"/plans/{demo_plan.pk}/launch/", {"run": "job", "key": key})
        assert Job.objects.count() == number, key


def test_a_key_that_another_team_used_is_refused_in_words(demo_plan, alice, draft, other_team):
    Job.objects.filter(pk=draft.pk).update(idempotency_key="same", team=other_team)
    data = {"run": "job", "key": "same"}
    page = client_of(alice).post(f"/plans/{demo_plan.pk}/launch/", data, follow=True)
    assert "used before" in page.content.decode()
    assert Job.objects.count() == 1


def test_two_presses_at_the_same_instant_launch_once(demo_plan, alice, monkeypatch):
    """The second press looked for the key before the first one had stored its job."""
    job = plan_launch(plan=demo_plan, by=alice, idempotency_key="same")
    real, calls = Job.objects.filter, []

    def late(**fields):
        calls.append(fields)
        return Job.objects.none() if len(calls) == 1 else real(**fields)

    monkeypatch.setattr(Job.objects, "filter", late)

    assert plan_launch(plan=demo_plan, by=alice, idempotency_key="same").pk == job.pk


# Launching from every goal and model: what runs, what is refused and how, what is kept


RUNS = {  # goal -> where its model may come from, which program runs
    "serve": (set(SOURCES), BenchmarkSpec),
    "generate": (set(SOURCES), GenerateSpec),
    "finetune": ({"catalog", "folder", "team"}, TrainSpec),
    "pretrain": ({"demo"}, TrainSpec),
    "compress": ({"catalog", "folder", "team"}, CompressSpec),
}


@pytest.mark.parametrize("goal", GOALS)
def test_each_goal_runs_its_program_on_the_models_that_it_can(plan_of, alice, goal):
    sources, program = RUNS[goal]
    client, num_jobs = client_of(alice), 0
    for source in SOURCES:
        made = plan_of(goal, source)

        note = launch_note(made)
        assert bool(note["can"]) == (source in sources), source
        assert note["text"].endswith("."), source

        if source in sources:
            assert isinstance(launchable_of(made).spec, program), source
        else:
            with pytest.raises(DraftProblem) as caught:
                launchable_of(made)
            assert caught.value.field == "source", source

        page = client.post(f"/plans/{made.pk}/launch/", {"run": "job"}, follow=True)
        num_jobs += source in sources
        leads_to = "/jobs/" if source in sources else "/plans/"
        assert Job.objects.count() == num_jobs, source
        assert page.status_code == (200 if source in sources else 422), source
        assert page.request["PATH_INFO"].startswith(leads_to), source


@pytest.mark.parametrize("goal", GOALS)
def test_a_launched_job_has_every_page_and_figures_with_interval_and_unit(plan_of, alice, goal):
    made = plan_of(goal, "demo" if goal == "pretrain" else "team")
    prediction = launchable_of(made).prediction
    assert prediction
    for name, figure in prediction.items():
        assert figure["unit"] in {"bytes", "seconds", "tokens_per_second", "share"}, name
        assert figure["low"] <= figure["value"] <= figure["high"], name

    job, client = plan_launch(plan=made, by=alice), client_of(alice)
    tabs = ["", "metrics/", "logs/", "events/", "config/", "artefacts/"]
    assert {client.get(f"/jobs/{job.pk}/{tab}").status_code for tab in tabs} == {200}


def test_a_method_of_another_goal_is_refused_by_its_field(plan_of):
    made = plan_of("finetune", "team")
    made.draft["workload"]["method"] = "pretrain"
    with pytest.raises(DraftProblem, match="is not valid today") as caught:
        launchable_of(made)
    assert caught.value.field == "method"


def test_a_pinned_width_is_the_one_that_runs(plan_of):
    for dtype in ("fp32", "bf16", "fp16", "int8", "int4"):
        made = plan_of("generate", "team")
        made.draft["pins"] = {"weight_dtype": dtype}
        assert launchable_of(made).spec.weight_dtype == dtype, dtype


def test_a_run_with_a_budget_has_a_longest_duration_and_one_of_unknown_length_none(plan_of):
    for seconds in (120.0, 6.0, 3600.0):
        made = plan_of("pretrain", "demo", time_budget_seconds=seconds)
        limit = pytest.approx(seconds * 3 + 900)
        assert launchable_of(made).max_duration_seconds == limit, seconds
    assert launchable_of(plan_of("compress", "team")).max_duration_seconds is None


# Names


def test_a_job_is_called_as_its_plan(plan_of, alice):
    for name, expected in (
        ("First light", "First light"),
        ("  padded  ", "padded"),
        ("", "Pre-train Slipway demo on Box"),
        ("x" * 500, "x" * 120),
        ("<b>bold</b>", "<b>bold</b>"),
    ):
        made = plan_of("pretrain", "demo")
        made.name = ""
        job = plan_launch(plan=made, by=alice, name=name)
        assert (job.name, made.name) == (expected, expected)


def test_a_hostile_plan_name_is_text_everywhere(plan_of, alice):
    client = client_of(alice)
    for name in ("<img src=x>", "{{ 7 }}", "'\"", "%s", "a" * 120):
        made = plan_of("pretrain", "demo")
        job = plan_launch(plan=made, by=alice, name=name)
        for path in (f"/plans/{made.pk}/", "/plans/", f"/jobs/{job.pk}/", "/jobs/", "/"):
            response = client.get(path)
            assert response.status_code == 200, (name, path)
            assert "<img src=x>" not in response.content.decode(), (name, path)


def test_a_folder_with_a_long_name_can_be_launched(plan_of, alice):
    made = plan_of("generate", "folder")
    made.draft["model"]["path"] = "x" * 400
    assert len(plan_launch(plan=made, by=alice).model_name) <= 120


# What changed since


def test_a_fresh_plan_or_a_hosts_news_is_not_outdated_nor_computed_again(demo_plan):
    plan_compute(demo_plan)
    at = demo_plan.computed_at
    assert not is_outdated(demo_plan)
    Host.objects.update(last_seen_at=None)
    assert not is_outdated(demo_plan)
    current_answer(demo_plan)
    assert demo_plan.computed_at == at


@pytest.mark.parametrize(
    "change",
    [
        lambda plan: plan.draft.update(objective="memory"),
        lambda plan: plan.draft["workload"].update(method="autoround"),
        lambda plan: plan.draft["pins"].update(weight_dtype="fp32"),
        lambda _plan: TeamModel.objects.update(config={**demo_config(), "vocab_size": 8192}),
        lambda _plan: TeamModel.objects.all().delete(),
        lambda _plan: Host.objects.update(microbench={}),
        lambda plan: plan.draft["hardware"].update(host=None),
    ],
    ids=["objective", "method", "pin", "config", "model gone", "not measured", "hardware"],
)
def test_whatever_would_be_asked_otherwise_today_makes_a_plan_outdated(plan_of, change):
    made = plan_of("compress", "team")
    plan_compute(made)
    change(made)
    assert is_outdated(made)


def test_a_draft_that_cannot_be_asked_keeps_no_old_answer(demo_plan):
    plan_compute(demo_plan)
    Host.objects.all().delete()

    with pytest.raises(DraftProblem):
        plan_compute(demo_plan)
    demo_plan.refresh_from_db()
    assert (demo_plan.answer, demo_plan.computed_at) == ({}, None)


def test_a_kept_plan_is_called_as_asked_or_as_before_or_by_itself(plan_of):
    itself = "Pre-train Slipway demo on Box"
    for given, before, expected in (("new", "old", "new"), ("", "old", "old"), ("", "", itself)):
        made = plan_of("pretrain", "demo")
        made.name = before
        assert plan_keep(made, given).name == expected, (given, before)


def test_what_leaves_the_device_is_planned_and_no_endpoint(plan_of, monkeypatch):
    made = plan_of("serve", "catalog")
    answer = current_answer(made)
    offload = OffloadSpec(weights_cpu=0.5, kv_disk=0.25)
    strategy = answer.plans[0].strategy.model_copy(update={"offload": offload})
    best = answer.plans[0].model_copy(update={"strategy": strategy})
    moved = answer.model_copy(update={"plans": (best,)})
    monkeypatch.setattr(launching, "verdict_answer", lambda _: moved)

    with pytest.raises(DraftProblem) as caught:
        launchable_of(made)

    assert "weights in host memory, cache on disk" in caught.value.sentence
    assert "Choose fewer bits" in caught.value.sentence
    assert caught.value.field == "weight_dtype"


# What the launch form adds to a plan


def form_of(**posted: str):
    note = {"goal": "pretrain", "is_serving": False}
    return launch_form(Launch(), "title", note, (), {"name": "title", **posted})


def test_the_form_is_read_and_nobody_launches_with_high_priority_by_it():
    for posted, wish in [
        ({}, Launch()),
        ({"max_duration_seconds": "1.5"}, Launch(max_duration_seconds=5400.0)),
        ({"max_duration_seconds": " ", "max_retries": ""}, Launch()),
        ({"max_retries": "2"}, Launch(max_retries=2)),
        ({"priority": "low"}, Launch(priority="low")),
        ({"engine": "slipway", "points": "1, 2", "repetitions": "5"}, Launch()),  # of other runs
    ]:
        form = form_of(**posted)
        assert form.is_valid(), (posted, form.errors)
        assert form.launch == wish.model_copy(update={"name": "title"}), posted
    assert "priority" in form_of(priority="high").errors


def test_hours_and_retries_that_cannot_be_are_refused_with_the_bounds():
    for hours in ["0", "-1", "nan", "inf", "1e9", "soon"]:
        errors = form_of(max_duration_seconds=hours).errors["max_duration_seconds"]
        assert "It must be a number from 0.01 to 8,784." in errors[0], (hours, errors)
    for retries in ["-1", "many", "1.5"]:
        assert "max_retries" in form_of(max_retries=retries).errors, retries

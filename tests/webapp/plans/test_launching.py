"""A plan as a job: which program, on which model, with which prediction; refusals in words."""

import pytest

from runners.jobspec import (
    ArtefactModel,
    BenchmarkSpec,
    CompressSpec,
    DemoModel,
    FolderModel,
    RandomModel,
    TrainSpec,
)
from tests.webapp.conftest import client_of, enrol
from tests.webapp.plans.conftest import with_model
from webapp.jobs.models import Job, JobState
from webapp.plans.errors import DraftProblem
from webapp.plans.launching import launch_note, launch_of, plan_launch
from webapp.plans.models import PlanState

pytestmark = pytest.mark.django_db(databases="__all__")


def test_the_demo_plan_trains_the_demo_model_for_two_minutes_as_predicted(demo_plan):
    spec = launch_of(demo_plan).spec
    assert isinstance(spec, TrainSpec)
    assert isinstance(spec.model, DemoModel)
    assert spec.time_budget_seconds == 120
    assert spec.max_steps is None

    prediction = launch_of(demo_plan).prediction
    assert set(prediction) == {"tokens_per_second", "step_seconds", "peak_memory_bytes", "mfu"}
    assert prediction["tokens_per_second"]["unit"] == "tokens_per_second"
    assert prediction["peak_memory_bytes"]["unit"] == "bytes"
    for figure in prediction.values():
        assert figure["low"] < figure["value"] < figure["high"]


def test_a_number_of_tokens_becomes_a_number_of_steps(demo_plan):
    values = demo_plan.draft["workload"]["pretrain"]
    values |= {"million_tokens": 0.2048, "time_budget_minutes": None, "global_batch_size": 8}
    spec = launch_of(demo_plan).spec
    assert spec.max_steps == 100
    assert spec.time_budget_seconds is None


def test_the_steps_of_a_batch_hold_all_its_sequences(demo_plan):
    demo_plan.draft["workload"]["pretrain"]["global_batch_size"] = 8
    demo_plan.draft["pins"] = {"micro_batch_size": 2}
    spec = launch_of(demo_plan).spec
    assert spec.micro_batch_size * spec.gradient_accumulation_steps == 8
    assert spec.micro_batch_size == 2


def test_serving_measures_the_plan_on_the_host_with_random_weights_and_says_so(serve_plan):
    spec = launch_of(serve_plan).spec
    assert isinstance(spec, BenchmarkSpec)
    assert (spec.batch_size, spec.prompt_tokens, spec.output_tokens) == (16, 1024, 256)
    assert "It ends with the measurements." in launch_note(serve_plan)["text"]

    prediction = launch_of(serve_plan).prediction
    assert {"prefill_tokens_per_second", "decode_tokens_per_second", "peak_memory_bytes"} <= set(
        prediction
    )

    assert isinstance(launch_of(serve_plan).spec.model, RandomModel)
    assert "random" in launch_note(serve_plan)["text"]


def test_a_catalog_model_runs_with_its_published_config_and_a_folder_by_its_path(plan_of):
    assert launch_of(plan_of("serve", "catalog")).spec.model.config["hidden_size"] == 576
    assert launch_of(plan_of("serve", "folder")).spec.model == FolderModel(path="tiny")


def test_compressing_quantises_the_trained_model(plan_of, trained):
    for method, written, dtype in (
        ("int8_weight_only", None, "int8"),
        ("int4_weight_only", None, "int4"),
        ("fp8", "fp8", "fp8"),
        ("int8_dynamic", "int8_dynamic", "int8"),
    ):
        plan = plan_of("compress", "team")
        plan.draft["workload"]["compress"]["method"] = method
        spec = launch_of(plan).spec
        assert isinstance(spec, CompressSpec), method
        assert spec.weight_dtype == dtype, method
        assert written in {None, spec.method}, method
        assert spec.model == ArtefactModel(attempt_id=trained.attempt_id, name="model"), method


def test_pinned_8_bit_floats_are_measured_and_said_to_save_memory_not_time(serve_plan):
    serve_plan.draft["pins"] = {"weight_dtype": "fp8"}
    note = launch_note(serve_plan)
    assert launch_of(serve_plan).spec.weight_dtype == "fp8"
    assert note["can"]
    assert "half the memory of 16 bit; products are in 16 bit" in note["text"]


def test_compressing_layer_by_layer_asks_the_host_for_the_method(plan_of):
    methods = ["gptq", "norm_tweaking", "quantease", "awq", "finequant", "fptq", "sparsegpt"]
    for method in methods:
        plan = plan_of("compress", "team")
        plan.draft["workload"]["compress"] |= {"method": method, "group_size": 32}
        spec = launch_of(plan).spec
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
        plan = plan_of("compress", "team")
        plan.draft["workload"]["compress"] |= chosen
        spec = launch_of(plan).spec.model_dump()
        assert {name: spec[name] for name in expected} == expected, chosen


def test_bits_and_shares_that_no_host_writes_are_refused_by_name(plan_of):
    for chosen, said in (
        ({"method": "gguf", "bits": 3}, "with 4 bits (Q4_K_M) or 8 (Q8_0), not 3"),
        ({"method": "llm_pruner", "sparsity": "2:4"}, "not two of each four"),
        (
            {"method": "autoround"},
            "AutoRound is planned but does not run yet. Choose one that does",
        ),
    ):
        plan = plan_of("compress", "team")
        plan.draft["workload"]["compress"] |= chosen
        assert said in refusal(plan), chosen
    assert refusal(plan).startswith(said)


def test_a_compression_is_predicted_before_and_after(demo_plan, trained):
    prediction = launch_of(with_model(demo_plan, trained, "compress")).prediction
    for metric in ("decode_tokens_per_second", "peak_memory_bytes"):
        assert prediction[f"original_{metric}"]["value"] > 0
        assert prediction[metric]["value"] != prediction[f"original_{metric}"]["value"]


def test_fine_tuning_all_weights_starts_from_the_trained_model(demo_plan, trained):
    plan = with_model(demo_plan, trained, "finetune")
    plan.draft["workload"]["finetune"]["method"] = "full"

    spec = launch_of(plan).spec

    assert isinstance(spec, TrainSpec)
    assert isinstance(spec.model, ArtefactModel)
    assert spec.lora is None


def refusal(plan) -> str:
    with pytest.raises(DraftProblem) as caught:
        launch_of(plan)
    return caught.value.sentence


def test_fine_tuning_by_lora_trains_an_adapter_of_the_asked_rank(demo_plan, trained):
    plan = with_model(demo_plan, trained, "finetune")
    plan.draft["workload"]["finetune"] |= {"method": "lora", "lora_rank": 24}
    lora = launch_of(plan).spec.lora
    assert (lora.rank, lora.alpha, lora.is_merged) == (24, 48, True)
    assert "an adapter on its own text" in launch_note(plan)["text"]


def test_adapters_over_four_bits_reach_the_host(demo_plan, trained):
    plan = with_model(demo_plan, trained, "finetune")
    plan.draft["workload"]["finetune"] |= {"method": "qlora", "sequence_length": 256}
    assert launch_of(plan).spec.lora.base_dtype == "nf4"


def test_what_does_not_run_is_refused_with_the_way_out(plan_of):
    lomo = {"optimizer": "lomo", "global_batch_size": 4}
    for goal, source, changes, said in (
        ("compress", "demo", {}, "Train the demo model first"),
        ("pretrain", "catalog", {}, "Only the demo model"),
        ("pretrain", "demo", {"workload": {"pretrain": lomo}, "pins": {"micro_batch_size": 1}},
         "gradient_accumulation_steps is 4; make it 1"),
        ("pretrain", "demo", {"hardware": {"choice": "catalog"}}, "only thought of"),
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
    data = {"go": "launch", "key": review.context["launch_key"]}

    pressed = [client.post(f"/plans/{demo_plan.pk}/launch/", data) for _ in range(2)]

    job = Job.objects.get()
    assert [each["Location"] for each in pressed] == [f"/jobs/{job.pk}/"] * 2


def test_a_refused_launch_goes_back_to_the_review_with_the_reason(demo_plan, alice):
    demo_plan.draft["hardware"]["choice"] = "catalog"
    demo_plan.save()
    page = client_of(alice).post(f"/plans/{demo_plan.pk}/launch/", {"go": "launch"}, follow=True)
    assert "only thought of" in page.content.decode()
    assert not Job.objects.exists()


def test_a_plan_can_be_kept_without_launching(demo_plan, alice):
    client_of(alice).post(f"/plans/{demo_plan.pk}/launch/", {"go": "keep", "name": "For later"})
    demo_plan.refresh_from_db()
    assert demo_plan.name == "For later"
    assert demo_plan.state == PlanState.COMPUTED
    assert not Job.objects.exists()

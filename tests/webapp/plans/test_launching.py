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
from webapp.modelhub.shapes import demo_config
from webapp.plans.errors import DraftProblem
from webapp.plans.launching import launch_note, launch_of, plan_launch
from webapp.plans.models import PlanState

pytestmark = pytest.mark.django_db


def test_the_demo_plan_trains_the_demo_model_for_two_minutes(demo_plan):
    spec = launch_of(demo_plan).spec

    assert isinstance(spec, TrainSpec)
    assert isinstance(spec.model, DemoModel)
    assert spec.time_budget_seconds == 120
    assert spec.max_steps is None


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


def test_a_training_job_is_predicted_by_what_it_will_measure(demo_plan):
    prediction = launch_of(demo_plan).prediction

    assert set(prediction) == {"tokens_per_second", "step_seconds", "peak_memory_bytes", "mfu"}
    assert prediction["tokens_per_second"]["unit"] == "tokens_per_second"
    assert prediction["peak_memory_bytes"]["unit"] == "bytes"
    for figure in prediction.values():
        assert figure["low"] < figure["value"] < figure["high"]


def test_serving_measures_the_plan_on_the_host(serve_plan):
    spec = launch_of(serve_plan).spec

    assert isinstance(spec, BenchmarkSpec)
    assert (spec.batch_size, spec.prompt_tokens, spec.output_tokens) == (16, 1024, 256)


def test_serving_says_in_plain_words_that_a_measurement_ends(serve_plan):
    assert "It ends with the measurements." in launch_note(serve_plan)["text"]


def test_a_benchmark_is_predicted_by_prefill_decode_and_memory(serve_plan):
    prediction = launch_of(serve_plan).prediction

    assert {"prefill_tokens_per_second", "decode_tokens_per_second", "peak_memory_bytes"} <= set(
        prediction
    )


def test_a_model_without_weights_runs_with_random_ones_and_says_so(serve_plan):
    assert isinstance(launch_of(serve_plan).spec.model, RandomModel)
    assert "random" in launch_note(serve_plan)["text"]


def test_a_catalog_model_runs_with_its_published_config(serve_plan):
    serve_plan.draft["model"] = {"source": "catalog", "catalog_id": "HuggingFaceTB/SmolLM2-135M"}

    assert launch_of(serve_plan).spec.model.config["hidden_size"] == 576


def test_a_folder_is_named_by_its_path(serve_plan):
    config = demo_config()
    serve_plan.draft["model"] |= {"source": "folder", "path": "tiny", "folder_config": config}

    assert launch_of(serve_plan).spec.model == FolderModel(path="tiny")


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_compressing_quantises_the_trained_model(demo_plan, trained, dtype):
    plan = with_model(demo_plan, trained, "compress")
    plan.draft["workload"]["compress"]["method"] = f"{dtype}_weight_only"

    spec = launch_of(plan).spec

    assert isinstance(spec, CompressSpec)
    assert spec.weight_dtype == dtype
    assert spec.model == ArtefactModel(attempt_id=trained.attempt_id, name="model")


@pytest.mark.parametrize(("method", "dtype"), [("fp8", "fp8"), ("int8_dynamic", "int8")])
def test_eight_bits_of_another_kind_reach_the_host(demo_plan, trained, method, dtype):
    plan = with_model(demo_plan, trained, "compress")
    plan.draft["workload"]["compress"]["method"] = method

    spec = launch_of(plan).spec

    assert (spec.method, spec.weight_dtype) == (method, dtype)


def test_pinned_8_bit_floats_are_measured_and_said_to_save_memory_not_time(serve_plan):
    serve_plan.draft["pins"] = {"weight_dtype": "fp8"}

    note = launch_note(serve_plan)

    assert launch_of(serve_plan).spec.weight_dtype == "fp8"
    assert note["can"]
    assert "half the memory of 16 bit; products are in 16 bit" in note["text"]


@pytest.mark.parametrize(
    "method",
    [
        "gptq",
        "norm_tweaking",
        "quantease",
        "awq",
        "finequant",
        "fptq",
        "sparsegpt",
    ],
)
def test_compressing_layer_by_layer_asks_the_host_for_the_method(demo_plan, trained, method):
    plan = with_model(demo_plan, trained, "compress")
    plan.draft["workload"]["compress"] |= {"method": method, "group_size": 32}

    spec = launch_of(plan).spec

    assert (spec.kind, spec.method, spec.group_size) == ("compress", method, 32)
    assert spec.is_layerwise


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
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
    ],
)
def test_bits_and_what_goes_reach_the_host(demo_plan, trained, chosen, expected):
    plan = with_model(demo_plan, trained, "compress")
    plan.draft["workload"]["compress"] |= chosen

    spec = launch_of(plan).spec.model_dump()

    assert {name: spec[name] for name in expected} == expected


def test_bits_that_no_gguf_type_has_are_refused_by_name(demo_plan, trained):
    plan = with_model(demo_plan, trained, "compress")
    plan.draft["workload"]["compress"] |= {"method": "gguf", "bits": 3}

    assert "with 4 bits (Q4_K_M) or 8 (Q8_0), not 3" in refusal(plan)


def test_whole_channels_do_not_go_by_fours(demo_plan, trained):
    plan = with_model(demo_plan, trained, "compress")
    plan.draft["workload"]["compress"] |= {"method": "llm_pruner", "sparsity": "2:4"}

    assert "not two of each four" in refusal(plan)


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


def test_compressing_without_trained_weights_is_refused_with_the_way_out(demo_plan):
    demo_plan.draft["goal"]["goal"] = "compress"

    assert "Train the demo model first" in refusal(demo_plan)


@pytest.mark.parametrize("method", ["autoround"])
def test_a_compression_that_is_only_planned_is_refused_by_name(demo_plan, trained, method):
    plan = with_model(demo_plan, trained, "compress")
    plan.draft["workload"]["compress"]["method"] = method

    assert refusal(plan).startswith(
        "AutoRound is planned but does not run yet. Choose one that does"
    )


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


def test_pre_training_any_other_model_is_refused(demo_plan):
    demo_plan.draft["model"] |= {"source": "catalog", "catalog_id": "HuggingFaceTB/SmolLM2-135M"}

    assert "Only the demo model" in refusal(demo_plan)


def test_a_fused_optimiser_has_one_micro_batch_a_step(demo_plan):
    demo_plan.draft["workload"]["pretrain"] |= {"optimizer": "lomo", "global_batch_size": 4}
    demo_plan.draft["pins"] = {"micro_batch_size": 1}

    assert "gradient_accumulation_steps is 4; make it 1" in refusal(demo_plan)


def test_hardware_that_is_only_thought_of_is_refused(demo_plan):
    demo_plan.draft["hardware"]["choice"] = "catalog"

    assert "only thought of" in refusal(demo_plan)


def test_what_does_not_fit_is_refused(serve_plan):
    serve_plan.draft["model"] = {"source": "catalog", "catalog_id": "meta-llama/Llama-3.1-405B"}

    assert "Nothing fits" in refusal(serve_plan)


def test_a_model_on_another_host_is_refused_with_both_names(demo_plan, trained, team):
    other, _ = enrol(team, name="Elsewhere")
    trained.host = other
    trained.save()

    assert "Choose Elsewhere" in refusal(with_model(demo_plan, trained, "compress"))


def test_launching_queues_a_job_of_the_plan(demo_plan, alice, host):
    job = plan_launch(plan=demo_plan, by=alice, name="First light")

    assert job.plan_id == demo_plan.pk
    assert job.host_id == host.pk
    assert job.name == "First light"
    assert job.state in {JobState.QUEUED, JobState.PREFLIGHT, JobState.STARTING}
    assert job.estimate["strategy"]


def test_launching_makes_the_draft_a_plan(demo_plan, alice):
    plan_launch(plan=demo_plan, by=alice)

    demo_plan.refresh_from_db()
    assert demo_plan.state == PlanState.COMPUTED


def test_the_launch_button_leads_to_the_job(demo_plan, alice):
    response = client_of(alice).post(f"/plans/{demo_plan.pk}/launch/", {"go": "launch"})

    assert response["Location"] == f"/jobs/{Job.objects.get().pk}/"


def test_pressing_twice_launches_once(demo_plan, alice):
    client = client_of(alice)
    review = client.get(f"/plans/{demo_plan.pk}/edit/review/")
    data = {"go": "launch", "key": review.context["launch_key"]}

    first = client.post(f"/plans/{demo_plan.pk}/launch/", data)
    second = client.post(f"/plans/{demo_plan.pk}/launch/", data)

    assert first["Location"] == second["Location"]
    assert Job.objects.count() == 1


def test_a_refused_launch_goes_back_to_the_review_with_the_reason(demo_plan, alice):
    demo_plan.draft["hardware"]["choice"] = "catalog"
    demo_plan.save()

    page = client_of(alice).post(f"/plans/{demo_plan.pk}/launch/", {"go": "launch"}, follow=True)

    assert "only thought of" in page.content.decode()
    assert not Job.objects.exists()


def test_a_viewer_may_not_launch(demo_plan, vera):
    response = client_of(vera).post(f"/plans/{demo_plan.pk}/launch/", {"go": "launch"})

    assert response.status_code == 403
    assert not Job.objects.exists()


def test_another_team_may_not_launch(demo_plan, charlie):
    response = client_of(charlie).post(f"/plans/{demo_plan.pk}/launch/", {"go": "launch"})

    assert response.status_code == 404
    assert not Job.objects.exists()


def test_a_plan_can_be_kept_without_launching(demo_plan, alice):
    client_of(alice).post(f"/plans/{demo_plan.pk}/launch/", {"go": "keep", "name": "For later"})

    demo_plan.refresh_from_db()
    assert demo_plan.name == "For later"
    assert demo_plan.state == PlanState.COMPUTED
    assert not Job.objects.exists()

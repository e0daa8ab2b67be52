"""The spec of a document's launch: a pure function, without a database."""

import json
from contextlib import nullcontext
from functools import cache

import pytest
from pydantic import ValidationError

from planner import api
from planner.catalog.models import find_model
from planner.specs.base import NotPossibleError, location_of
from planner.specs.cluster import ClusterSpec
from planner.specs.estimate import PlannedStrategy
from planner.specs.on_policy import RolloutSpec
from planner.specs.workload import OffloadSpec
from runners.jobspec import (
    ArtefactModel,
    DemoModel,
    FileData,
    FilePrompts,
    FolderModel,
    HostText,
    HubData,
    HubModel,
    MixedData,
    NamedAdapter,
    RandomModel,
    UploadedData,
)
from runners.jobspec.base import TextSamples
from runners.jobspec.engines import with_feature
from runners.jobspec.references import hub_references
from runners.plans.document import PLANS, PlanDocument, RopeScaling
from runners.plans.job_specs import launch_spread, spec_of
from runners.plans.launch import Launch, LaunchOptionError
from runners.plans.launch_case import DraftModel, LaunchCase
from runners.plans.refusals import DraftProblem
from runners.plans.request import Surroundings, request_of
from runners.plans.rotary_scaling import scaling_args
from runners.plans.serving_spec import served_name
from tests.planner.asking import CPU

MODEL, HASHES = "HuggingFaceTB/SmolLM2-135M", ("a" * 64,)
FOLDER, RANDOM = FolderModel(path="tiny"), RandomModel(config={})
ARTEFACT = ArtefactModel(attempt_id="01H" + "A" * 23)
ADAPTERS = (NamedAdapter(name="ours", adapter=ARTEFACT),)
NAMED_AS_MODEL = (NamedAdapter(name="our-model", adapter=ARTEFACT),)
DRAFTS = (DraftModel("d1", "small one", ARTEFACT),)
UPLOAD = UploadedData(dataset_id="u1", name="t.txt", sha256="0" * 64, size_bytes=1, format="text")
MIXTURE = {
    "data_source": "mixed",
    "mixture": [{"source": "host"}, {"source": "u1", "weight": 3.0}],
    "mixture_weights": "dynamic",
}


def plan(goal: str, workload=None, **fields) -> PlanDocument:
    return PLANS[goal](goal=goal, workload=workload or {}, **fields)


@cache
def planned(goal: str) -> PlannedStrategy:
    """Return the best strategy for a goal on a host with four GPUs."""
    cluster = ClusterSpec(device="h100-sxm5-80gb", devices_per_node=4)
    whole = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1}
    document = plan(goal, pins=whole if goal != "compress" else {})
    request = request_of(document, Surroundings(MODEL, cluster, runs_jobs=True))
    return api.best_plan(request).plans[0]


def case(goal: str, model=FOLDER, strategy=None, **fields) -> LaunchCase:
    best = planned(goal)
    changed = best.strategy.model_copy(update=strategy or {})
    best = best.model_copy(update={"strategy": changed})
    shape = find_model(MODEL)
    return LaunchCase(
        best, model, "Our Model", **{"shape": shape, "gpu_vendors": ("nvidia",)} | fields
    )


def spec_for(goal: str, workload=None, launch=None, given=None, **fields):
    launch = Launch(**launch or {})
    return spec_of(plan(goal, workload, **fields), launch, given or case(goal))


def differs(spec, expected: dict) -> dict:
    """Return the fields of a spec that differ from those expected."""
    return {name: each for name in expected if (each := getattr(spec, name)) != expected[name]}


ENDPOINT = {"run": "endpoint"}


def test_each_goal_has_its_spec():
    for goal, workload, launch, given, expected in [
        (
            "serve",
            {"concurrency": 3, "input_tokens": 70, "output_tokens": 9},
            {"profile": True},
            None,
            {"kind": "benchmark", "batch_size": 3, "prompt_tokens": 70, "output_tokens": 9}
            | {"profile": True, "load": None},
        ),
        (
            "serve",
            {"concurrency": 3, "input_tokens": 70, "output_tokens": 9},
            ENDPOINT | {"idle_stop_seconds": 90.0},
            case("serve", key_hashes=HASHES),
            {"kind": "serve", "engine": "slipway", "max_concurrency": 3, "max_length": 4096}
            | {"kv_cache_tokens": 4096, "served_name": "our-model", "key_hashes": HASHES}
            | {"idle_stop_seconds": 90.0, "engine_options": None},
        ),
        (
            "serve",
            {},
            {"run": "load", "points": [4]},
            case("serve", strategy={"max_batch_tokens": 64}),
            {"max_batch_tokens": 64},
        ),
        (
            "serve",
            {},
            {},
            case("serve", strategy={"max_batch_tokens": 64}),
            {"max_batch_tokens": None, "load": None},
        ),
        (
            "serve",
            {"concurrency": 3, "input_tokens": 70, "output_tokens": 9},
            ENDPOINT | {"engine": "llamacpp"},
            None,
            {"engine": "llamacpp", "max_length": 79, "kv_cache_tokens": 237},
        ),
        (
            "generate",
            {"batch_size": 5, "prompts_path": "p.txt", "batching": "turbo", "compiled_step": True},
            {"secrets": ["TOKEN"]},
            None,
            {"kind": "generate", "batch_size": 5, "prompts": FilePrompts(path="p.txt")}
            | {"batching": "turbo", "compiled_step": True, "stop_at_end": True}
            | {"secrets": ("TOKEN",), "model": FOLDER},
        ),
        (
            "pretrain",
            {"sequence_length": 64, "global_batch_size": 8, "on_spike": "skip"},
            {},
            case("pretrain", DemoModel(), {"micro_batch_size": 2}),
            {"kind": "train", "sequence_length": 64, "micro_batch_size": 2, "max_steps": None}
            | {"gradient_accumulation_steps": 4, "time_budget_seconds": 120.0}
            | {"on_spike": "skip", "lora": None},
        ),
        (
            "finetune",
            {"data_source": "file", "data_path": "a.txt", "tokens": 2048 * 16 * 5},
            {},
            None,
            {"max_steps": 5, "data": FileData(path="a.txt"), "optimizer": "adamw"},
        ),
        (
            "finetune",
            {"method": "lomo", "global_batch_size": 1, "activation_offload": "disk"},
            {},
            None,
            {"optimizer": "lomo", "activation_offload": "disk", "lora": None},
        ),
        (
            "compress",
            {"method": "gptq", "bits": 3, "group_size": 32},
            {},
            None,
            {"kind": "compress", "method": "gptq", "bits": 3, "group_size": 32},
        ),
        ("compress", {"method": "gguf", "bits": 8}, {}, None, {"gguf_type": "Q8_0"}),
        ("compress", {"method": "sparsegpt", "sparsity": "2:4"}, {}, None, {"pattern": "2:4"}),
    ]:
        spec = spec_for(goal, workload, launch, given)
        assert differs(spec, expected) == {}, (goal, workload)


def test_every_field_of_a_training_that_its_spec_has_too_reaches_it():
    values = {
        "early_stop_validations": 3,
        "keep_best": False,
        "checkpoint_writing": "in_step",
        "attention": "eager",
        "optimizer": "sgd",
        "sequence_length": 128,
    }
    assert differs(spec_for("finetune", {"method": "full", **values}), values) == {}
    texts = spec_for("finetune", {"text_samples_every_steps": 20, "sample_prompts": "a\nb"})
    assert (texts.text_samples.every_steps, texts.text_samples.prompts) == (20, ("a", "b"))


def test_an_uploaded_file_or_a_mixture_is_read_by_what_the_site_resolved():
    given = case("finetune", uploads={"u1": UPLOAD})
    uploaded = spec_for("finetune", {"data_source": "upload", "dataset": "u1"}, given=given)
    assert uploaded.data == UPLOAD
    mixed = spec_for("finetune", MIXTURE, given=given).data
    assert isinstance(mixed, MixedData)
    assert [each.weight for each in mixed.parts] == [1.0, 3.0]
    assert (mixed.weights, mixed.update_every_steps) == ("dynamic", 50)
    for workload in ({"data_source": "upload", "dataset": "u2"}, MIXTURE):
        with pytest.raises(DraftProblem, match="or it was deleted") as caught:
            spec_for("finetune", workload)
        assert caught.value.field == "dataset"


def test_a_data_set_of_the_hub_is_read_as_its_name_and_the_fields_beside_it_say():
    name = "https://huggingface.co/datasets/acme/notes/viewer/en/test"
    for workload, expected in (
        ({"data_repository": "acme/notes"}, {"split": "train"}),
        ({"data_repository": name}, {"split": "test", "subset": "en"}),
        (
            {"data_repository": "acme/notes@v1", "data_split": "dev", "data_subset": "de"},
            {"revision": "v1", "split": "dev", "subset": "de"},
        ),
    ):
        data = spec_for("finetune", workload).data
        assert data == HubData(repository="datasets/acme/notes", **expected), workload
    own = spec_for("finetune", {"data_source": "host", "data_repository": "acme/notes"})
    assert own.data == HostText()


READ = {"data_columns": "question=prompt, answer", "data_records": 50}
NOTES = {"repository": "datasets/acme/notes", "split": "train"}


@pytest.mark.parametrize(
    ("goal", "workload", "launch", "field"),
    [
        ("finetune", {}, {}, "data"),
        ("generate", {}, {}, "prompts"),
        ("generate", {}, {"run": "evaluation"}, "text"),
        ("compress", {"method": "gptq"}, {}, "calibration_data"),
    ],
)
def test_every_kind_of_job_reads_a_data_set_by_the_same_fields(goal, workload, launch, field):
    named = {"data_repository": "acme/notes"} | READ
    read = getattr(spec_for(goal, workload | named, launch), field)
    assert read == HubData(**NOTES, columns=("question=prompt", "answer"), records=50)
    assert not isinstance(getattr(spec_for(goal, workload, launch), field), HubData)


@pytest.mark.parametrize(
    ("goal", "workload", "field"),
    [
        ("compress", {"method": "gguf", "data_repository": "acme/notes"}, "data_repository"),
        ("compress", {"method": "gptq", "data_records": 5}, "data_records"),
        ("generate", {"data_columns": "a=prompt"}, "data_columns"),
        ("generate", {"data_repository": "a/b", "data_columns": "a=nothing"}, "data_columns"),
        ("generate", {"data_repository": "a/b", "data_columns": "a=text,b=text"}, "data_columns"),
        ("generate", {"data_repository": "a/b", "prompts_path": "a.txt"}, "prompts_path"),
    ],
)
def test_what_a_job_would_not_read_of_a_data_set_is_refused_at_its_field(goal, workload, field):
    with pytest.raises((DraftProblem, ValidationError)) as caught:
        spec_for(goal, workload)
    error = caught.value
    found = error.field if isinstance(error, DraftProblem) else location_of(error.errors()[0])[-1]
    assert found == field


def test_a_mixture_has_data_sets_of_the_hub():
    rows = [{"source": "host"}, {"source": "hub", "path": "acme/notes@v1:train", "weight": 3.0}]
    mixed = spec_for("finetune", {"data_source": "mixed", "mixture": rows}).data
    assert mixed.parts[1].data == HubData(**NOTES, revision="v1")
    rows[1]["path"] = "acme"
    with pytest.raises(ValidationError, match="no owner and name"):
        spec_for("finetune", {"data_source": "mixed", "mixture": rows})


def test_adapters_and_draft_models_go_with_the_launch_that_names_them():
    given = case("generate", adapters=ADAPTERS, draft_models=DRAFTS)
    assert spec_for("generate", given=given).adapters == ()
    assert spec_for("generate", {}, {"adapter": "ours"}, given).adapters == ADAPTERS
    assert spec_for("generate", {}, {"adapter": "all"}, given).adapters == ADAPTERS
    drafted = spec_for("generate", {}, {"draft_model": "d1"}, given)
    assert drafted.speculation.model == ARTEFACT

    given = case("serve", adapters=ADAPTERS, draft_models=DRAFTS)
    assert spec_for("serve", {}, ENDPOINT | {"adapters": True}, given).adapters == ADAPTERS
    for engine in (each.name for each in with_feature("draft_model")):
        launch = ENDPOINT | {"engine": engine, "draft_model": "d1", "prefix_caching": False}
        options = spec_for("serve", {}, launch, given).engine_options
        assert (options.draft.model, options.has_prefix_cache) == (ARTEFACT, False), engine
    lookup = ENDPOINT | {"engine": "vllm", "draft_model": "lookup"}
    assert spec_for("serve", {}, lookup, given).engine_options.lookup_tokens == 4


def test_an_engine_on_gpus_takes_the_devices_of_a_divided_plan_and_ours_refuses_it():
    document = plan("serve")
    divided = case("serve", strategy={"tensor_parallel_size": 2}).best
    launch = Launch(run="endpoint", engine="vllm")
    assert launch_spread(document, launch, divided) == (1, 2)
    assert spec_of(document, launch, case("serve")).engine_options.tensor_parallel_size == 1
    with pytest.raises(DraftProblem, match="tensor parallel"):
        launch_spread(document, Launch(run="endpoint"), divided)


def test_a_plan_for_processors_starts_an_engine_there_with_the_cache_of_its_requests():
    shape = find_model(MODEL)
    document = plan("serve", {"input_tokens": 200, "output_tokens": 100, "concurrency": 8})
    around = Surroundings(MODEL, ClusterSpec.model_validate({"device": CPU}), runs_jobs=True)
    best = api.best_plan(request_of(document, around)).plans[0]
    for vendors in ((), ("amd",), ("nvidia",)):
        given = LaunchCase(best, FOLDER, "Our Model", shape=shape, gpu_vendors=vendors)
        spec = spec_of(document, Launch(run="endpoint", engine="vllm"), given)
        options = spec.engine_options
        assert (options.device, options.memory_ratio) == ("cpu", None), vendors
        token_bytes = 2 * 2 * 3 * 64 * 30  # keys and values in BF16 of the model's layers
        blocks = max(-(-spec.max_length // 128), 8 * 3) + 1
        assert options.kv_cache_bytes == pytest.approx(blocks * 128 * token_bytes, rel=0.03)
        assert launch_spread(document, Launch(run="endpoint", engine="vllm"), best) == (1, 1)
    with pytest.raises(DraftProblem, match="sglang, which runs on NVIDIA GPUs, and this plan is"):
        spec_of(document, Launch(run="endpoint", engine="sglang"), given)


def test_an_engine_of_its_own_loads_what_files_alone_have_as_it_is_stored():
    stored = find_model(MODEL).model_copy(update={"weight_dtype": "mxfp4"})
    given = case("serve", strategy={"weight_dtype": "mxfp4"}, shape=stored)
    for engine in ("vllm", "llamacpp"):
        assert (
            spec_for("serve", launch=ENDPOINT | {"engine": engine}, given=given).weight_dtype
            == "bf16"
        )
    plain = case("serve", strategy={"weight_dtype": "mxfp4"})  # files that vLLM would have to make
    for engine, of in (("slipway", given), ("vllm", plain)):
        with pytest.raises(DraftProblem, match="do not load mxfp4 weights"):
            spec_for("serve", launch=ENDPOINT | {"engine": engine}, given=of)


OFFLOADED = {"offload": OffloadSpec(weights_cpu=0.5)}


@pytest.mark.parametrize(
    ("goal", "workload", "launch", "given", "field"),
    [
        ("serve", {}, ENDPOINT, {"model": RANDOM}, "source"),
        ("serve", {}, {"run": "load", "points": [1.0]}, {"model": RANDOM}, "source"),
        ("serve", {}, ENDPOINT | {"engine": "vllm"}, {"gpu_vendors": ()}, "engine"),
        ("serve", {}, ENDPOINT | {"engine": "vllm"}, {"gpu_vendors": ("amd",)}, "engine"),
        ("serve", {}, ENDPOINT | {"engine": "llamacpp"}, {"lacks_gguf": True}, "engine"),
        ("serve", {}, ENDPOINT | {"adapters": True}, {"adapters": NAMED_AS_MODEL}, "engine"),
        ("serve", {}, ENDPOINT | {"prefix_caching": True}, {}, "prefix_caching"),
        ("serve", {}, ENDPOINT | {"engine": "llamacpp", "prefix_caching": False}, {}, "prefix_caching"),
        ("serve", {}, ENDPOINT | {"draft_model": "d1"}, {}, "draft_model"),
        ("serve", {}, ENDPOINT | {"engine": "sglang", "draft_model": "lookup"}, {}, "draft_model"),
        ("serve", {}, ENDPOINT | {"engine": "vllm", "draft_model": "no"}, {}, "draft_model"),
        ("serve", {}, ENDPOINT, {"strategy": {"kv_cache_dtype": "fp8"}}, "kv_cache_dtype"),
        ("serve", {}, {}, {"strategy": {"attention": "eager"}}, "attention"),
        ("serve", {}, {}, {"strategy": OFFLOADED}, "weight_dtype"),
        ("serve", {}, {}, {"strategy": {"weight_dtype": "mxfp4"}}, "weight_dtype"),
        ("serve", {}, {}, {"strategy": {"tensor_parallel_size": 2}}, "tensor_parallel_size"),
        ("generate", {}, ENDPOINT, {}, "goal"),
        ("generate", {"prompts_path": "p.txt"}, {}, {"model": RANDOM}, "prompts_path"),
        ("generate", {}, {}, {"strategy": {"kv_cache_dtype": "int8"}}, "kv_cache_dtype"),
        ("generate", {"kv_cache": "int2"}, {}, {"strategy": {"kv_cache_dtype": "int4"}}, "kv_cache"),
        ("generate", {}, {}, {"model": RANDOM, "strategy": OFFLOADED}, "source"),
        ("generate", {}, {"adapter": "other"}, {"adapters": ADAPTERS}, "adapter"),
        ("generate", {}, {"draft_model": "d2"}, {"draft_models": DRAFTS}, "draft_model"),
        ("pretrain", {}, {}, {"model": FOLDER}, "source"),
        ("finetune", {}, {}, {"model": DemoModel()}, "source"),
        ("finetune", {"method": "classification"}, {}, {}, "method"),
        ("finetune", {"optimizer": "lion", "optimizer_offload": "disk"}, {},
         {"strategy": {"offload": OffloadSpec(optimizer="nvme")}}, "optimizer"),
        ("finetune", {}, {}, {"strategy": OFFLOADED}, "weight_dtype"),
        ("compress", {}, {}, {"model": RANDOM}, "source"),
        ("compress", {"method": "gguf", "bits": 3}, {}, {}, "bits"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_field(goal, workload, launch, given, field):
    with pytest.raises(DraftProblem) as caught:
        spec_for(goal, workload, launch, case(goal, **given))
    assert caught.value.field == field, str(caught.value)


def test_a_plan_for_another_engine_is_not_started():
    with pytest.raises(DraftProblem, match="This plan is for the engine vLLM") as caught:
        spec_for("serve", hardware={"engine": "vllm"})
    assert caught.value.field == "engine"
    with pytest.raises(DraftProblem, match="asked of the engine slipway"):
        spec_for("serve", launch=ENDPOINT, hardware={"engine": "vllm"})
    given = {"launch": ENDPOINT | {"engine": "vllm"}, "hardware": {"engine": "vllm"}}
    assert spec_for("serve", **given).engine == "vllm"


def test_load_levels_that_do_not_rise_are_refused_by_the_launchs_field():
    with pytest.raises(LaunchOptionError, match="“Load levels” is 2, 1; give") as caught:
        spec_for("serve", {}, {"run": "load", "points": [2.0, 1.0]})
    assert caught.value.name == "points"


def test_a_models_name_becomes_one_that_clients_can_write():
    for name, served in [("My Model (v2)", "my-model-v2"), ("…", "model"), ("a/b:c", "a/b:c")]:
        assert served_name(name) == served, name


PREFERENCES = {"objective": "dpo", "data_source": "file", "data_path": "a.jsonl"}


def test_an_objective_is_trained_by_trl_with_its_usual_rate_and_batch():
    for workload, expected in [
        (PREFERENCES, {"objective": "dpo", "learning_rate": 1e-5, "beta": 0.1}),
        (
            PREFERENCES | {"method": "full", "tokens": 1_048_576, "beta": 0.3},
            {"learning_rate": 1e-6, "lora": None, "beta": 0.3, "max_steps": 16},  # pairs
        ),
        (PREFERENCES | {"objective": "kto", "global_batch_size": 2}, {"micro_batch_size": 2}),
        (PREFERENCES | {"objective": "reward", "learning_rate": 3e-5}, {"learning_rate": 3e-5}),
        (
            PREFERENCES | {"objective": "grpo", "reward_function": "a.py:f", "num_generations": 4},
            {"beta": 0.0, "micro_batch_size": 16, "prompts_per_step": 16, "max_steps": 76}
            | {"text_samples": TextSamples(every_steps=20)},
        ),
        (
            PREFERENCES
            | {"objective": "grpo", "reward_function": "exact_match", "max_completion_length": 48}
            | {"sequence_length": 64, "beta": 0.2, "text_samples_every_steps": 100},
            {"beta": 0.2, "longest_prompt": 16, "text_samples": TextSamples(every_steps=100)},
        ),
    ]:
        spec = spec_for("finetune", workload)
        assert differs(spec, expected | {"engine": "trl", "layout": None}) == {}, workload
        assert spec.data == FileData(path="a.jsonl")
    assert spec_for("finetune", PREFERENCES | {"objective": "supervised"}).engine == "slipway"


TAUGHT = PREFERENCES | {"objective": "distillation", "teacher_model": "acme/large"}


def test_a_distillation_has_the_teacher_that_its_name_stands_for_and_trls_defaults():
    large = HubModel(repository="acme/large")
    given = case("finetune", teacher=large)
    spec = spec_for("finetune", TAUGHT, given=given)
    expected = {"teacher": large, "beta": 1.0, "temperature": 1.0, "prompts_per_step": 16}
    assert differs(spec, expected | {"learning_rate": 1e-5, "text_samples": None}) == {}
    stated = {"beta": 0.5, "temperature": 0.9, "max_completion_length": 64}
    assert differs(spec_for("finetune", TAUGHT | stated, given=given), stated) == {}
    assert hub_references(spec)[-1] == large  # what the host downloads before the job
    for workload, said in (
        ({"teacher_model": " "}, "Distillation learns a teacher's probabilities"),
        ({"beta": 1.5}, "Beta is 1.5, and of distillation it lies between 0"),
        ({"max_completion_length": 2048}, "leaves none for a prompt"),
    ):
        with pytest.raises(ValidationError, match=said):
            spec_for("finetune", TAUGHT | workload, given=given)


def test_a_micro_batch_of_trl_divides_the_batch_and_has_what_the_loss_needs():
    given = case("finetune", strategy={"micro_batch_size": 1})
    for batch, expected in ((9, (3, 3)), (8, (2, 4)), (7, (7, 1))):
        work = PREFERENCES | {"objective": "kto", "global_batch_size": batch}
        spec = spec_for("finetune", work, given=given)
        assert (spec.micro_batch_size, spec.gradient_accumulation_steps) == expected


def test_the_engine_trl_launches_trls_trainer_and_no_other():
    trl, torch = {"hardware": {"engine": "trl"}}, {"hardware": {"engine": "torch"}}
    supervised = PREFERENCES | {"objective": "supervised"}
    for work in (PREFERENCES, supervised):
        spec = spec_for("finetune", work, **trl)
        assert (spec.engine, spec.keep_best, spec.samples.rows) == ("trl", False, "padded")
    assert (spec.objective, spec.learning_rate) == ("next_token", 2e-4)
    packed = supervised | {"packing_strategy": "wrapped"}
    assert spec_for("finetune", packed, **trl).samples.packing_strategy == "wrapped"
    planned = case("finetune", strategy={"packed": True})
    pinned = spec_for("finetune", supervised, **trl, given=planned).samples
    assert (pinned.rows, pinned.packing_strategy) == ("packed", "bfd")
    padded = supervised | {"rows": "padded"}
    for given in (planned, None):
        assert spec_for("finetune", padded, **trl, given=given).samples.rows == "padded"
    for more, field, said in [
        (supervised | {"too_long": "leave_out"}, "packed", "pins.packed to false, rows to padded"),
        (padded | {"packing_strategy": "bfd"}, "packing_strategy", "Leave one of them out"),
    ]:
        with pytest.raises(DraftProblem, match=said) as refused:
            spec_for("finetune", more, **trl, given=planned)
        assert refused.value.field == field
    kept = spec_for("finetune", padded | {"too_long": "leave_out"}, **trl, given=planned).samples
    assert (kept.rows, kept.too_long) == ("padded", "leave_out")
    for work, hardware, said in [
        (PREFERENCES, torch, "objective dpo is one of TRL's trainers"),
        (supervised, {"hardware": {"engine": "deepspeed"}}, "this kind of job cannot start"),
        (PREFERENCES, {"pins": {"attention": "eager"}}, "kernel eager. Leave it open"),
        (PREFERENCES, {"pins": {"checkpoint_writing": "background"}}, "background. Leave it open"),
    ]:
        with pytest.raises(DraftProblem, match=said):
            spec_for("finetune", work, **hardware)


def test_a_plan_whose_answers_another_engine_generates_is_no_job():
    work = PREFERENCES | {"objective": "grpo", "reward_function": "exact_match"}
    for engine, refused in (("transformers", False), ("vllm", True)):
        given = case("finetune", strategy={"rollout": RolloutSpec(engine=engine)})
        with (
            pytest.raises(DraftProblem, match="generates answers with vllm")
            if refused
            else (nullcontext())
        ):
            assert spec_for("finetune", work, given=given).generator == "colocated"


def test_what_trl_or_our_own_trainer_cannot_learn_is_refused_at_its_field():
    upload = UPLOAD.model_copy(update={"name": "t.jsonl", "format": "preference"})
    given = case("finetune", uploads={"u1": upload})
    sharded = case("finetune", strategy={"data_parallel_size": 2, "zero_stage": 3})
    rated = {"data_format": "kto"}
    for workload, case_given, said in [
        ({"objective": "dpo"}, None, "engine trl reads one file or data set, and data is 'host'"),
        (PREFERENCES | rated, None, "DPO learns from records of preference, and data.format"),
        (PREFERENCES | {"compiled": True}, None, "compiled is an option of the engine slipway"),
        (PREFERENCES, sharded, "TRL's jobs train on one device, and this plan has 2 copies"),
        ({"data_source": "upload", "dataset": "u1"}, given, "answers are compared; choose engine"),
        (PREFERENCES | {"objective": "supervised"} | rated, None, "answers are compared"),
    ]:
        with pytest.raises(DraftProblem, match=said):
            spec_for("finetune", workload, given=case_given)


def test_a_rotary_scaling_becomes_the_engines_arguments_or_is_refused_by_name():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    ggml = ("--rope-scaling", "yarn", "--rope-scale", "4", "--yarn-orig-ctx", "32768")
    own, inner = (
        {"rope_theta": 5e5, "partial_rotary_factor": 0.5},
        {"text_config": {"rope_theta": 7}},
    )
    for engine, scaling, config, expected in [
        ("vllm", yarn, own, {"rope_parameters": own | yarn}),
        ("vllm", yarn, {"rope_parameters": own}, {"rope_parameters": own | yarn}),
        ("vllm", yarn, inner, {"text_config": {"rope_parameters": {"rope_theta": 7, **yarn}}}),
        ("vllm", yarn | {"rope_theta": 3.0}, {}, {"rope_parameters": {**yarn, "rope_theta": 3.0}}),
        ("llamacpp", yarn, {}, ggml),
        ("llamacpp", yarn | {"rope_theta": 1e6}, {}, (*ggml, "--rope-freq-base", "1000000")),
        ("llamacpp", {"rope_type": "linear", "factor": 2}, {}, "states linear"),
        ("slipway", yarn, own, "keeps to the model's own rotary scaling"),
        ("sglang", yarn, own, "keeps to the model's own rotary scaling"),
        ("vllm", yarn, {"rope_parameters": {"full_attention": own}}, "each kind of its layers"),
    ]:
        launch = Launch(run="endpoint", engine=engine)
        given = LaunchCase(planned("serve"), FOLDER, "Our Model", config=config)
        if isinstance(expected, str):
            with pytest.raises(DraftProblem, match=expected) as refused:
                scaling_args(RopeScaling(**scaling), launch, given)
            assert refused.value.field == "rope_scaling", engine
            continue
        words = scaling_args(RopeScaling(**scaling), launch, given)
        found = json.loads(words[1]) if words[0] == "--hf-overrides" else words
        assert found == expected, (engine, scaling, config)
        twice = launch.with_values(engine_args=[words[0], words[1]])
        with pytest.raises(DraftProblem, match=r"is set by model\.rope_scaling"):
            scaling_args(RopeScaling(**scaling), twice, given)


def test_the_planned_context_follows_the_rotary_scaling():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    long = {"input_tokens": 100_000, "output_tokens": 1000, "concurrency": 1}
    given = Surroundings("Qwen/Qwen3-8B", ClusterSpec(device="h100-sxm5-80gb"))
    for scaling in (yarn, None):
        model = {"catalog_id": "Qwen/Qwen3-8B", "rope_scaling": scaling}
        document = plan("serve", long, model=model, hardware={"engine": "vllm"})
        request = request_of(document, given)
        with nullcontext() if scaling else pytest.raises(NotPossibleError, match="40960"):
            assert api.best_plan(request).plans

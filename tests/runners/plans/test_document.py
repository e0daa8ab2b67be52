"""The plan document: its fields say themselves, what is stored reads back, faults name a field."""

import json
from typing import get_args

import pytest
from pydantic import BaseModel, ValidationError

from planner.specs.base import PlannerError
from planner.specs.estimate import EstimateRequest, PlanRequest
from runners.plans.document import GOALS, PLANS, adapter, of_goal, read_stored, shared_document
from runners.plans.fields import Shown, faults_in, limits_of, shown_of
from runners.plans.launch import USED_BY, Launch, LaunchOptionError, check_used
from runners.plans.methods import COMPRESSIONS, TRAININGS
from runners.plans.old_names import read_document, with_one_trainer
from runners.plans.refusals import DraftProblem
from runners.plans.workflow import WorkflowDocument
from runners.plans.workloads import WORKLOADS, CompressWork, FinetuneWork


@pytest.mark.parametrize("goal", GOALS)
def test_a_document_of_its_defaults_reads_back_as_it_was_stored_and_as_it_was_sent(goal):
    document = PLANS[goal](goal=goal)
    stored = json.loads(json.dumps(document.model_dump(mode="json")))
    assert read_stored({**stored, "wizard": {"preset": "demo"}}) == document
    assert adapter().validate_python(shared_document(document)) == document
    other = next(each for each in GOALS if each != goal)
    assert of_goal(of_goal(document, other), goal) == document


def test_every_field_of_a_workload_and_a_launch_has_words_and_every_choice_its_own():
    for part in (*WORKLOADS.values(), Launch):
        for name, info in part.model_fields.items():
            shown = shown_of(info)
            assert isinstance(shown, Shown), (part, name)
            assert shown.title, (part, name)
            allowed = [each for each in get_args(info.annotation) if isinstance(each, str)]
            if shown.choices and allowed and all(isinstance(each, str) for each in shown.choices):
                assert set(shown.choices) == set(allowed), (part, name)
            if {int, float} & set(get_args(info.annotation) or (info.annotation,)):
                assert shown.choices or None not in limits_of(info), (part, name)


def test_every_method_has_a_row_with_its_words():
    compressions = get_args(CompressWork.model_fields["method"].annotation)
    trainings = get_args(FinetuneWork.model_fields["method"].annotation)
    assert set(compressions) == set(COMPRESSIONS)
    assert set(trainings) == set(TRAININGS)


def test_two_fields_that_do_not_go_together_are_refused_by_one_of_them():
    for goal, values, field in [
        ("serve", {"input_tokens": 5, "max_request_tokens": 3}, "max_request_tokens"),
        ("generate", {"kv_cache": "int4", "speculation": "lookup"}, "kv_cache"),
        ("generate", {"prompts_path": "../a"}, "prompts_path"),
        ("pretrain", {"time_budget_seconds": None}, "time_budget_seconds"),
        ("pretrain", {"length_schedule": "grow"}, "tokens"),
        ("pretrain", {"sample_prompts": "x" * 5000}, "sample_prompts"),
        ("finetune", {"data_source": "file"}, "data_path"),
        ("finetune", {"data_source": "hub"}, "data_repository"),
        ("finetune", {"data_source": "hub", "data_repository": "squad"}, "data_repository"),
        ("finetune", {"data_repository": "a/b", "data_subset": "a/b"}, "data_subset"),
        ("finetune", {"data_source": "mixed"}, "mixture"),
        ("finetune", {"objective": "dpo", "method": "lomo"}, "objective"),
        ("finetune", {"objective": "orpo", "precompute_reference": True}, "precompute_reference"),
        ("compress", {"method": "llm_pruner", "sparsity": "2:4"}, "sparsity"),
    ]:
        with pytest.raises(ValidationError) as caught:
            WORKLOADS[goal].model_validate(values)
        assert faults_in(caught.value)[0].field == field, values
        with pytest.raises(DraftProblem, match=f"workload.{field} is not valid today"):
            read_stored({"goal": goal, "workload": values})


def test_the_names_of_before_the_first_release_are_read_as_those_of_today():
    for goal, old, new in [
        ("serve", {"prefix_share_percent": 25}, {"prefix_share_ratio": 0.25}),
        ("generate", {"guessing": "lookup", "decode_step": "compiled"},
         {"speculation": "lookup", "compiled_step": True}),
        ("generate", {"guessing": "", "decode_step": ""},
         {"speculation": None, "compiled_step": False}),
        ("pretrain", {"million_tokens": 2.5, "time_budget_minutes": None, "lengths": "grow"},
         {"tokens": 2_500_000, "time_budget_seconds": None, "length_schedule": "grow"}),
        ("pretrain", {"rounding": "4", "products": "fp8", "training_step": "compiled"},
         {"qat_bits": 4, "compute_dtype": "fp8", "compiled": True}),
        ("pretrain", {"rounding": "none", "early_stop": "never", "text_samples": "none"},
         {"qat_bits": None, "early_stop_validations": None, "text_samples_every_steps": None}),
        ("finetune", {"exported_weights": "last", "early_stop": "3", "text_samples": "20"},
         {"keep_best": False, "early_stop_validations": 3, "text_samples_every_steps": 20}),
        ("finetune", {"mix_every": 7, "mixture": [{"source": "host", "reference": 2.0}]},
         {"mixture_update_every_steps": 7,
          "mixture": [{"source": "host", "reference_loss": 2.0}]}),
    ]:  # fmt: skip
        read = read_document({"goal": goal, "workload": old})
        assert adapter().validate_python(read) == PLANS[goal](goal=goal, workload=new), old
    launch = {"hours": 2, "retries": 1, "idle_minutes": 5, "prefix_cache": True, "requests": 9}
    read = read_document({"goal": "serve", "launch": launch})
    assert adapter().validate_python(read).launch == Launch(
        max_duration_seconds=7200.0,
        max_retries=1,
        idle_stop_seconds=300.0,
        prefix_caching=True,
        requests_per_repetition=9,
    )


def test_a_trainer_of_the_workload_is_read_as_the_engine_unless_the_two_contradict():
    for trainer, engine, read in [
        ("trl", None, "trl"), ("slipway", None, "torch"), (None, None, None),
        (None, "megatron", "megatron"), ("trl", "trl", "trl"), ("trl", "vllm", "trl"),
    ]:  # fmt: skip
        old = {"goal": "finetune", "workload": {"engine": trainer}, "hardware": {"engine": engine}}
        assert adapter().validate_python(read_document(old)).hardware.engine == read, old
        assert old["workload"] == {"engine": trainer}
    for goal, trainer, engine in [
        ("finetune", "trl", "torch"), ("finetune", "slipway", "trl"), ("finetune", "ours", None),
        ("finetune", "trl", "trll"), ("serve", "trl", None),
    ]:  # fmt: skip
        old = {"goal": goal, "workload": {"engine": trainer}, "hardware": {"engine": engine}}
        with pytest.raises(ValidationError) as refused:
            adapter().validate_python(read_document(old))
        (fault,) = faults_in(refused.value)
        beside = f", and hardware.engine is '{engine}'" if engine else ""
        assert fault.path == (goal, "workload", "engine")
        assert f"workload.engine is '{trainer}'{beside}: state the engine as" in fault.sentence
        with pytest.raises(DraftProblem, match=rf"engine is '{trainer}'.* out\. Choose Edit"):
            read_stored(with_one_trainer(old))  # a migration drops neither
    # The trainer of a goal that is not chosen says nothing of the engine of the chosen one.
    work = {"method": "lora", "engine": "trl"}
    stored = {"goal": "serve", "workload": {}, "wizard": {"others": {"finetune": work}}}
    moved = with_one_trainer(stored)
    assert moved == {**stored, "wizard": {"others": {"finetune": {"method": "lora"}}}}
    assert with_one_trainer(moved) == moved


def test_an_option_that_a_launch_would_not_use_is_refused_by_its_name():
    values = {
        "engine": "vllm", "idle_stop_seconds": 60.0, "prefix_caching": True, "adapters": True,
        "engine_args": "--foo 'a b'",
        "draft_model": "lookup", "adapter": "all", "profile": True, "arrivals": "open",
        "points": [1.0], "requests_per_repetition": 5, "repetitions": 2, "weights": "random",
        "levels": "search", "max_search_seconds": 60.0, "tracker": "mlflow",
        "tracker_project": "p", "tracker_run": "r", "tracker_url": "http://h",
        "original": "acme/tiny",
    }  # fmt: skip
    assert set(values) == set(USED_BY)
    for name, value in values.items():
        for goal in GOALS:
            runs = {"serve": ("job", "endpoint", "load"), "generate": ("job", "evaluation")}.get(
                goal, ("job",)
            )
            for run in runs:
                kind = run if goal == "serve" or run == "evaluation" else goal
                launch = Launch(run=run, **{name: value})
                if kind in USED_BY[name]:
                    check_used(goal, launch)
                    continue
                with pytest.raises(LaunchOptionError, match=f"The field {name} is of"):
                    check_used(goal, launch)
    with pytest.raises(LaunchOptionError, match="Leave run out"):
        check_used("compress", Launch(run="endpoint"))


ODD = (
    *(None, [], [None], [["a"]], {}, {"": None}, {"a": [{}]}, True, "", "\0", "[]", [1, "a"]),
    *(5e-324, 1e308, -0.0, float("inf"), float("nan"), 10**40),
)


def models_in(annotation):
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from models_in(part)


def odd_documents(kind, base, wrap, depth=4):
    """Yield a document for every field below ``kind``, at any depth, and every odd value in it."""
    for name, field in kind.model_fields.items():

        def inside(value, name=name):
            return wrap({**base, name: value})

        yield from ((name, inside(value)) for value in ODD)
        if depth:
            for part in models_in(field.annotation):
                yield from odd_documents(part, {}, inside, depth - 1)


def test_a_value_of_any_type_in_any_field_is_read_or_refused():
    # schemathesis, as a person: pins.quantization [null, null] was a TypeError, status 500.
    cluster = {"device": "h100-sxm5-80gb"}
    question = {"model": "x", "cluster": cluster, "workload": {"kind": "serve"}}
    kinds = [(kind, {"goal": goal, "model": "x"}) for goal, kind in PLANS.items()]
    kinds += [(PlanRequest, question), (EstimateRequest, question)]
    kinds += [(WorkflowDocument, {"steps": [{"goal": "finetune", "model": "x"}]})]
    tried = 0
    for kind, base in kinds:
        for name, document in odd_documents(kind, base, dict):
            tried += 1
            try:
                kind.model_validate(document)
            except (ValidationError, PlannerError):
                continue
            except Exception as error:
                raise AssertionError(f"{kind.__name__}: {name} in {document}") from error
    assert tried > 10_000

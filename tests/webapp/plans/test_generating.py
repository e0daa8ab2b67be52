"""The batch-generate goal as a job: prompts, batches, what calibrates, and guesses ahead."""

import itertools

import pytest

from planner.specs.workload import OffloadSpec
from runners.jobspec import (
    ArtefactModel,
    DemoPrompts,
    DraftModelSpeculation,
    FilePrompts,
    GenerateSpec,
    PromptLookup,
    RandomModel,
)
from runners.jobspec.engines import with_feature
from runners.jobspec.generate import PolicyOffload
from runners.plans.launch import Launch
from runners.plans.refusals import DraftProblem
from runners.shared.facts import GpuFacts
from tests.webapp.conftest import client_of
from tests.webapp.plans.conftest import with_model
from webapp.jobs import launching
from webapp.jobs.calibration import is_as_planned
from webapp.jobs.launching import launch_note, launchable_of, plan_launch
from webapp.modelhub.models import TeamModel, demo_config
from webapp.plans.places import draft_shape
from webapp.plans.planning import current_answer, plan_compute
from webapp.plans.team_models import draft_models_for
from webapp.wizard.workload_forms import workload_form

pytestmark = pytest.mark.django_db(databases="__all__")


@pytest.fixture
def pile_plan(demo_plan, trained):
    plan = with_model(demo_plan, trained, "generate")
    values = {"batch_size": 4, "input_tokens": 32, "output_tokens": 16}
    plan.draft["workload"] |= values
    return plan


def test_without_a_file_one_batch_is_generated_and_predicted_as_it_was_planned(pile_plan):
    spec = launchable_of(pile_plan).spec
    assert spec.prompts == DemoPrompts(count=4, input_tokens=32)
    assert (spec.batch_size, spec.output_tokens, spec.stop_at_end) == (4, 16, False)
    assert is_as_planned(spec)

    prediction = launchable_of(pile_plan).prediction
    wanted = {"tokens_per_second", "ttft_seconds", "tpot_seconds", "peak_memory_bytes"}
    assert wanted <= set(prediction)
    assert "writes the answers to a file" in launch_note(pile_plan)["text"]


def test_a_prompts_file_and_a_policy_reach_the_job_and_may_be_unknown_to_an_old_draft(pile_plan):
    pile_plan.draft["workload"] |= {"prompts_path": "p.jsonl", "batching": "turbo"}
    spec = launchable_of(pile_plan).spec
    assert spec.prompts == FilePrompts(path="p.jsonl")
    assert (spec.batching, spec.stop_at_end) == ("turbo", True)
    assert not is_as_planned(spec)

    for name in ("prompts_path", "batching"):
        del pile_plan.draft["workload"][name]
    assert launchable_of(pile_plan).spec.batching == "given"


def test_a_file_for_a_model_without_weights_is_refused_with_the_way_out(pile_plan):
    pile_plan.draft["model"] |= {"source": "demo"}
    pile_plan.draft["workload"]["prompts_path"] = "p.txt"
    with pytest.raises(DraftProblem, match="A prompts file needs trained weights") as caught:
        launchable_of(pile_plan)
    assert caught.value.field == "prompts_path"


def test_guessing_and_a_narrow_cache_reach_the_job(pile_plan):
    values = pile_plan.draft["workload"]
    values |= {"speculation": "lookup"}
    assert launchable_of(pile_plan).spec.speculation == PromptLookup()
    values |= {"speculation": None, "kv_cache": "int4"}
    assert launchable_of(pile_plan).spec.kv_cache == "int4"


def test_what_does_not_run_together_or_climbs_is_refused_beside_its_field():
    for changes in [{"speculation": "lookup"}, {"batching": "continuous"}]:
        values = {"batch_size": 1, "input_tokens": 1, "output_tokens": 1, "kv_cache": "fp8"}
        assert "kv_cache" in workload_form("generate", data=values | changes).errors, changes

    for path in ["../p.txt", "a/../../p.txt", "p\x00.txt"]:
        values = {"batch_size": 1, "input_tokens": 1, "output_tokens": 1, "prompts_path": path}
        assert "prompts_path" in workload_form("generate", data=values).errors, path


def test_a_pile_that_is_not_the_plans_calibrates_nothing():
    for changes in [
        {"prompts": DemoPrompts(count=4, shortest=2)},
        {"prompts": DemoPrompts(count=5)},
        {"stop_at_end": True},
        {"batching": "turbo"},
        {"kv_cache": "fp8"},
        {"speculation": PromptLookup()},
    ]:
        spec = GenerateSpec(
            model=RandomModel(config={}),
            prompts=DemoPrompts(count=4),
            batch_size=4,
            stop_at_end=False,
        )

        assert is_as_planned(spec), changes
        assert not is_as_planned(spec.model_copy(update=changes)), changes


@pytest.fixture
def offloaded(monkeypatch):
    """Let the best plan keep half of the weights in host memory, as this dtype."""

    def change(plan, dtype, **shares):
        answer = current_answer(plan)
        away = OffloadSpec(**(shares or {"weights_cpu": 0.5}))
        update = {"weight_dtype": dtype, "offload": away}
        strategy = answer.plans[0].strategy.model_copy(update=update)
        best = answer.plans[0].model_copy(update={"strategy": strategy})
        moved = answer.model_copy(update={"plans": (best,)})
        monkeypatch.setattr(launching, "verdict_answer", lambda _: moved)

    return change


def test_a_plan_with_weights_in_host_memory_brings_half_of_its_layers_from_there(
    pile_plan, offloaded
):
    offloaded(pile_plan, "bf16")
    spec = launchable_of(pile_plan).spec
    assert spec.offload.layers_from == "host_memory"
    assert 0 < spec.offload.layers_resident < 8
    assert not is_as_planned(spec)


def test_quantised_layers_are_not_streamed_and_the_way_out_is_told(pile_plan, offloaded):
    offloaded(pile_plan, "int8")
    with pytest.raises(
        DraftProblem, match="only fp32, bf16, fp16 and, of dense models, int4 layers"
    ):
        launchable_of(pile_plan)


def test_a_whole_policy_reaches_the_job_and_is_predicted_by_its_own_names(pile_plan, offloaded):
    shares = {"weights_cpu": 0.5, "kv_disk": 0.25, "activations_cpu": 1.0}
    offloaded(pile_plan, "int4", **shares)

    launch = launchable_of(pile_plan)

    assert launch.spec.offload == PolicyOffload(**shares)
    assert launch.spec.weight_dtype == "int4"
    predicted = {name: launch.prediction[name]["value"] for name in shares}
    assert predicted == shares
    assert launch.prediction["kv_cpu"]["unit"] == "share"
    assert {"host_bytes", "offloaded_disk_bytes"} <= set(launch.prediction)


def test_a_policy_that_does_not_run_with_the_batches_is_refused_in_words(pile_plan, offloaded):
    pile_plan.draft["workload"]["batching"] = "continuous"
    offloaded(pile_plan, "bf16", kv_cpu=0.5)
    with pytest.raises(DraftProblem, match=r"offload policy runs with .* batching continuous"):
        launchable_of(pile_plan)


def test_layers_of_a_model_without_weights_on_the_host_are_not_streamed(pile_plan, offloaded):
    pile_plan.draft["model"] |= {"source": "demo"}
    offloaded(pile_plan, "bf16")
    with pytest.raises(DraftProblem, match=r"streams layers .* has no weights on the host"):
        launchable_of(pile_plan)


def pinned(plan, **pins):
    """The plan, to be planned anew with these pins."""
    plan.draft["pins"], plan.answer = pins, {}
    return plan


def test_the_cache_and_the_attention_that_are_pinned_reach_the_job(pile_plan):
    for dtype, kept in (("fp8", "fp8"), ("fp32", "plain"), ("bf16", "plain")):
        width = dtype if kept == "plain" else "bf16"
        plan = pinned(pile_plan, weight_dtype=width, kv_cache_dtype=dtype)
        assert launchable_of(plan).spec.kv_cache == kept, dtype
    for pins, used in (
        ({}, "flash"),
        ({"attention": "flash"}, "flash"),
        ({"attention": "eager"}, "eager"),
    ):
        assert launchable_of(pinned(pile_plan, **pins)).spec.attention == used, pins


def test_a_pinned_cache_that_no_job_keeps_or_runs_with_the_rest_is_refused(pile_plan):
    for dtype in ("int8", "fp16"):
        with pytest.raises(DraftProblem, match=r"which no job supports.*Pin the KV cache"):
            launchable_of(pinned(pile_plan, weight_dtype="bf16", kv_cache_dtype=dtype))

    plan, values = pinned(pile_plan, kv_cache_dtype="fp8"), pile_plan.draft["workload"]
    usual = values["kv_cache"]
    values["kv_cache"] = "int4"
    with pytest.raises(
        DraftProblem, match="KV cache format is fp8 in the plan and int4 in the workload step"
    ):
        launchable_of(plan)
    values |= {"kv_cache": usual, "batching": "continuous"}
    with pytest.raises(DraftProblem, match="kv_cache fp8 runs neither with speculation"):
        launchable_of(plan)


def test_a_compiled_step_reaches_the_job_and_is_no_plain_plan(pile_plan):
    pile_plan.draft["workload"]["compiled_step"] = True
    spec = launchable_of(pile_plan).spec
    assert spec.compiled_step
    assert not is_as_planned(spec)


# A smaller model that guesses ahead, and earlier prompts reused: who is told, who cannot be


SMALL = ArtefactModel(attempt_id="01H" + "B" * 23)
TRAINED = ArtefactModel(attempt_id="01H" + "A" * 23)


@pytest.fixture
def small(team, host):
    """A smaller model of the same tokens beside the trained one."""
    return TeamModel.objects.create(
        team=team,
        name="small one",
        source="job",
        config=demo_config() | {"num_hidden_layers": 1},
        host=host,
        attempt_id=SMALL.attempt_id,
        artefact_name="model",
    )


@pytest.fixture
def generation(demo_plan, trained, small):
    return with_model(demo_plan, trained, "generate")


@pytest.fixture
def serving(serve_plan, trained, small, host):
    gpu = GpuFacts(index=0, uuid="GPU-0", name="NVIDIA A100-SXM4-80GB", memory_bytes=80 * 2**30)
    host.facts["gpus"] = [gpu.model_dump(mode="json")]
    host.save()
    plan = with_model(serve_plan, trained, "serve")
    plan.draft["workload"] |= {"concurrency": 4, "input_tokens": 64, "output_tokens": 32}
    plan.save()
    plan_compute(plan)
    return plan


def page_of(plan, who):
    return client_of(who).get(f"/plans/{plan.pk}/edit/review/").content.decode()


def test_a_generation_is_guessed_by_the_model_that_was_chosen(generation, small, alice):
    page = page_of(generation, alice)
    job = plan_launch(plan=generation, by=alice, launch=Launch(draft_model=str(small.pk)))
    assert f'<option value="{small.pk}">small one</option>' in page
    assert job.spec["speculation"] == DraftModelSpeculation(model=SMALL).model_dump(mode="json")
    assert launchable_of(generation).spec.speculation is None


def test_only_other_models_of_the_same_host_and_tokens_guess(generation, small, trained, host):
    shape = draft_shape(generation)
    (found,) = draft_models_for(host, TRAINED, shape)
    assert found == (small.pk, "small one", SMALL)
    (found,) = draft_models_for(host, SMALL, shape)
    assert (found.id, found.model) == (trained.pk, TRAINED)

    for changes in (
        {"config": demo_config() | {"vocab_size": 7}},
        {"config": demo_config(), "host": None},
        {"host": host, "source": "config"},
    ):
        TeamModel.objects.filter(pk=small.pk).update(**changes)

        assert draft_models_for(host, TRAINED, shape) == (), changes


def test_a_guessing_model_that_is_not_offered_or_does_not_go_with_the_rest_is_refused(
    generation, trained, small
):
    with pytest.raises(DraftProblem, match="available: small one") as caught:
        launchable_of(generation, Launch(draft_model=str(trained.pk)))
    assert caught.value.field == "draft_model"

    generation.draft["workload"]["kv_cache"] = "int4"
    generation.save()
    with pytest.raises(
        DraftProblem, match="is incompatible with the other options: kv_cache int4 runs neither"
    ):
        launchable_of(generation, Launch(draft_model=str(small.pk)))


def test_an_engine_on_gpus_is_told_of_both(serving, small, alice):
    drafting = [each.name for each in with_feature("draft_model")]
    for told, engine in itertools.product([None, True, False], drafting):
        launch = Launch(
            run="endpoint", engine=engine, prefix_caching=told, draft_model=str(small.pk)
        )
        options = launchable_of(serving, launch).spec.engine_options
        assert (options.draft.model, options.has_prefix_cache) == (SMALL, told), (told, engine)
        assert 'name="prefix_caching"' in page_of(serving, alice), (told, engine)
        plain = launchable_of(serving, Launch(run="endpoint", engine=engine))
        assert plain.spec.engine_options.draft is None, (told, engine)


def test_an_engine_that_takes_no_guessing_model_refuses_it_by_name(serving, small):
    for engine in ["slipway", "llamacpp"]:
        wish = Launch(run="endpoint", engine=engine, draft_model=str(small.pk))
        with pytest.raises(
            DraftProblem, match=f"is for vllm.* sglang, and the engine is {engine}"
        ):
            launchable_of(serving, wish)


def test_without_gpus_an_endpoint_is_offered_what_vllm_takes_on_processors(
    serve_plan, trained, small, alice
):
    plan = with_model(serve_plan, trained, "serve")
    note, page = launch_note(plan), page_of(plan, alice)
    assert "drafts" not in note
    assert 'name="engine"' in page
    assert 'name="prefix_caching"' in page
    assert 'value="lookup"' in page
    assert f'value="{small.pk}"' not in page  # no model that guesses was seen there

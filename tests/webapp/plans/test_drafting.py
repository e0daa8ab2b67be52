"""A smaller model that guesses ahead, and earlier prompts reused: who is told, who cannot be."""

import itertools

import pytest

from runners.facts import GpuFacts
from runners.jobspec import ArtefactModel, DraftGuess
from runners.jobspec.serve import ON_GPUS
from tests.webapp.conftest import client_of
from tests.webapp.plans.conftest import with_model
from webapp.core.problems import InvalidProblem
from webapp.modelhub.models import TeamModel
from webapp.modelhub.shapes import demo_config
from webapp.plans.drafting import drafts_for
from webapp.plans.errors import DraftProblem
from webapp.plans.launching import launch_note, launch_of, launch_options_of, plan_launch
from webapp.plans.planning import plan_compute
from webapp.plans.questions import draft_shape
from webapp.plans.serving import EndpointOptions, endpoint_options_of

pytestmark = pytest.mark.django_db(databases="__all__")
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
    plan.draft["workload"]["serve"] |= {"concurrency": 4, "input_tokens": 64, "output_tokens": 32}
    plan.save()
    plan_compute(plan)
    return plan


def page_of(plan, who):
    return client_of(who).get(f"/plans/{plan.pk}/edit/review/").content.decode()


def test_a_generation_is_guessed_by_the_model_that_was_chosen(generation, small, alice):
    page = page_of(generation, alice)
    job = plan_launch(plan=generation, by=alice, wish=launch_options_of({"draft": str(small.pk)}))
    assert f'<option value="{small.pk}">small one</option>' in page
    assert job.spec["speculation"] == DraftGuess(model=SMALL).model_dump(mode="json")
    assert launch_of(generation).spec.speculation is None


def test_only_other_models_of_the_same_host_and_tokens_guess(generation, small, trained, host):
    shape = draft_shape(generation)
    assert drafts_for(host, TRAINED, shape) == [small]
    assert drafts_for(host, SMALL, shape) == [trained]

    for changes in (
        {"config": demo_config() | {"vocab_size": 7}},
        {"config": demo_config(), "host": None},
        {"host": host, "source": "config"},
    ):
        TeamModel.objects.filter(pk=small.pk).update(**changes)

        assert drafts_for(host, TRAINED, shape) == [], changes


def test_a_guessing_model_that_is_not_offered_or_does_not_go_with_the_rest_is_refused(
    generation, trained, small
):
    with pytest.raises(DraftProblem, match="there is small one") as caught:
        launch_of(generation, draft=str(trained.pk))
    assert caught.value.field == "draft"

    generation.draft["workload"]["generate"]["kv_cache"] = "int4"
    generation.save()
    with pytest.raises(DraftProblem, match="does not go with the rest: kv_cache int4 runs in"):
        launch_of(generation, draft=str(small.pk))


def test_an_engine_on_gpus_is_told_of_both(serving, small, alice):
    for (reuse, told), engine in itertools.product(
        [("", None), ("yes", True), ("no", False)], ON_GPUS
    ):
        posted = {"engine": engine, "reuse": reuse, "draft": str(small.pk)}
        options = launch_of(serving, endpoint_options_of(posted, ())).spec.engine_options
        assert (options.draft.model, options.has_prefix_cache) == (SMALL, told), (
            reuse,
            told,
            engine,
        )
        assert 'name="reuse"' in page_of(serving, alice), (reuse, told, engine)
        assert (
            launch_of(serving, EndpointOptions(engine=engine)).spec.engine_options.draft is None
        ), (reuse, told, engine)


def test_another_word_or_an_engine_that_cannot_be_told_of_earlier_prompts_is_refused():
    for engine, words in [
        ("slipway", "own engine has no prefix cache"),
        ("llamacpp", "reuses what a slot read"),
    ]:
        with pytest.raises(InvalidProblem, match=words):
            endpoint_options_of({"engine": engine, "reuse": "no"}, ())

    with pytest.raises(InvalidProblem, match="is maybe; it can be yes, no or empty"):
        endpoint_options_of({"engine": "vllm", "reuse": "maybe"}, ())


def test_an_engine_that_takes_no_guessing_model_refuses_it_by_name(serving, small):
    for engine in ["slipway", "llamacpp"]:
        wish = EndpointOptions(engine=engine, draft=str(small.pk))
        with pytest.raises(
            DraftProblem, match=f"is for vllm and sglang, and the engine is {engine}"
        ):
            launch_of(serving, wish)


def test_without_gpus_an_endpoint_is_offered_nothing_that_only_vllm_takes(
    serve_plan, trained, small, alice
):
    plan = with_model(serve_plan, trained, "serve")
    note, page = launch_note(plan), page_of(plan, alice)
    assert not {"drafts", "can_reuse"} & set(note)
    assert 'name="engine"' in page
    assert 'name="reuse"' not in page

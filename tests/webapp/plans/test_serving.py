"""A serve plan that stays up: what the host is asked, which keys are kept, what is refused."""

import re
from pathlib import Path

import pytest

from planner.specs.strategy import Strategy
from runners.endpoint_spec import key_hash
from runners.engines import ENGINES
from runners.jobspec import ArtefactModel, ServeSpec
from tests.webapp.conftest import client_of
from tests.webapp.plans.conftest import with_model
from webapp.accounts.models import Team
from webapp.core.problems import InvalidProblem
from webapp.jobs.endpoints import playground_key
from webapp.jobs.models import Artefact, Attempt, Job
from webapp.plans.errors import DraftProblem
from webapp.plans.launching import launch_note, launch_of, plan_launch
from webapp.plans.options import check_serving
from webapp.plans.serving import EndpointWish, adapters_of, endpoint_wish_of, served_name

pytestmark = pytest.mark.django_db(databases="__all__")
WISH = EndpointWish(("a" * 64,), 90.0)
TRAINED = ArtefactModel(attempt_id="01H" + "A" * 23)


@pytest.fixture
def plan(serve_plan, trained):
    plan = with_model(serve_plan, trained, "serve")
    plan.draft["workload"]["serve"] |= {"concurrency": 4, "input_tokens": 64, "output_tokens": 32}
    plan.save()
    return plan


def test_an_endpoint_takes_the_plans_concurrency_and_the_models_length(plan):
    spec = launch_of(plan, WISH).spec

    assert isinstance(spec, ServeSpec)
    assert (spec.max_concurrency, spec.max_length, spec.kv_cache_tokens) == (4, 256, 384)
    assert (spec.host, spec.port, spec.served_name) == ("127.0.0.1", 0, "trained-demo")
    assert (spec.key_hashes, spec.idle_stop_seconds) == (("a" * 64,), 90.0)


def test_an_endpoint_has_no_end_and_is_predicted_under_the_names_of_its_charts(plan):
    launch = launch_of(plan, WISH)

    assert launch.max_duration_seconds is None
    assert {"ttft_seconds", "tpot_seconds", "peak_memory_bytes"} <= set(launch.prediction)


def test_the_review_offers_both_ways(plan, alice):
    page = client_of(alice).get(f"/plans/{plan.pk}/edit/review/").content.decode()

    assert "Start endpoint" in page
    assert launch_note(plan)["can_serve"] == "yes"


@pytest.mark.parametrize(
    ("preset", "primary"), [("endpoint", "endpoint"), ("benchmark", "launch")]
)
def test_what_was_asked_for_is_the_first_button(plan, alice, preset, primary):
    plan.draft["preset"] = preset
    plan.save()

    page = client_of(alice).get(f"/plans/{plan.pk}/edit/review/").content.decode()

    assert re.findall(r'class="button primary" name="go" value="(\w+)"', page) == [primary]


def test_a_model_without_weights_is_not_offered_as_an_endpoint(serve_plan):
    note = launch_note(serve_plan)

    assert "An endpoint needs trained weights" in note["endpoint"]
    assert "can_serve" not in note
    with pytest.raises(DraftProblem, match="needs trained weights"):
        launch_of(serve_plan, WISH)


@pytest.fixture
def adapter(plan, trained, host, alice):
    base = {"source": "artefact", "attempt_id": trained.attempt_id, "name": "model"}
    job = plan_launch(plan=plan, by=alice)
    attempt = Attempt.objects.create(job=job, host=host, number=2)
    return Artefact.objects.create(
        attempt=attempt, name="adapter", kind="adapter", total_bytes=1, facts={"base": base}
    )


def test_an_endpoint_takes_the_adapters_that_were_trained_on_its_model(plan, adapter, alice):
    page = client_of(alice).get(f"/plans/{plan.pk}/edit/review/").content.decode()

    spec = launch_of(plan, WISH._replace(has_adapters=True)).spec

    assert 'name="adapters"' in page
    name = f"{served_name(adapter.attempt.job.name)}-{adapter.attempt_id[-6:].lower()}"
    assert [each.name for each in spec.adapters] == [name]
    assert spec.adapters[0].adapter.attempt_id == adapter.attempt_id
    assert launch_of(plan, WISH).spec.adapters == ()


def test_adapters_of_another_team_or_base_are_never_offered(plan, adapter, trained):
    base = {**adapter.facts["base"], "name": "other"}
    Artefact.objects.filter(pk=adapter.pk).update(facts={"base": base})

    assert "adapters" not in launch_note(plan)
    assert adapters_of(Team.objects.create(name="else"), TRAINED) == ()


def test_the_launch_form_asks_for_adapters_by_a_tick():
    assert endpoint_wish_of({"adapters": "yes"}, ()).has_adapters
    assert not endpoint_wish_of({"idle": "5"}, ()).has_adapters


def test_only_a_serve_plan_becomes_an_endpoint(demo_plan):
    assert "endpoint" not in launch_note(demo_plan)
    with pytest.raises(DraftProblem, match="Only a plan to serve"):
        launch_of(demo_plan, WISH)


def test_the_key_is_shown_once_and_only_hashes_of_it_are_kept(plan, alice):
    client = client_of(alice)
    posted = {"go": "endpoint", "idle": "1.5", "name": "Ours", "key": "k1"}

    client.post(f"/plans/{plan.pk}/launch/", posted)

    job = Job.objects.get()
    first = client.get(f"/jobs/{job.pk}/").content.decode()
    key = first.partition('id="endpoint-key">')[2].partition("<")[0]
    assert key.startswith("sk-slipway-")
    assert job.spec["key_hashes"] == [
        key_hash(key),
        key_hash(playground_key(key_hash(key))),
    ]
    assert job.spec["idle_stop_seconds"] == 90.0
    assert "endpoint-key" not in client.get(f"/jobs/{job.pk}/").content.decode()
    assert key not in str(Job.objects.values())


def test_the_same_press_twice_shows_no_key_that_opens_nothing(plan, alice):
    client = client_of(alice)
    posted = {"go": "endpoint", "idle": "", "key": "k2"}
    client.post(f"/plans/{plan.pk}/launch/", posted)
    client.get(f"/jobs/{Job.objects.get().pk}/")

    client.post(f"/plans/{plan.pk}/launch/", posted)

    assert "endpoint-key" not in client.get(f"/jobs/{Job.objects.get().pk}/").content.decode()


@pytest.mark.parametrize("text", ["0", "-1", "nan", "soon", "1e9"])
def test_minutes_that_are_none_are_refused_with_the_limits(text):
    with pytest.raises(InvalidProblem, match=r"0\.1 to 10080 minutes, or empty"):
        endpoint_wish_of({"idle": text}, ())


@pytest.mark.parametrize(
    ("name", "served"), [("My Model (v2)", "my-model-v2"), ("…", "model"), ("a/b:c", "a/b:c")]
)
def test_a_models_name_becomes_one_that_clients_can_write(name, served):
    assert served_name(name) == served


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_a_narrow_cache_is_refused_by_name_with_the_way_out(plan, dtype):
    plan.draft["pins"] = {"kv_cache_dtype": dtype}

    with pytest.raises(DraftProblem, match=dtype) as caught:
        launch_of(plan, WISH)
    assert "Pin the KV cache" in caught.value.sentence


def test_a_draft_model_is_refused_by_name():
    draft = {"draft_model": "meta-llama/Llama-3.2-1B", "tokens": 4}

    with pytest.raises(DraftProblem, match=r"Llama-3\.2-1B is planned only"):
        check_serving(Strategy.model_validate({"weight_dtype": "bf16", "speculative": draft}))


def test_eager_attention_is_refused_by_name(plan):
    plan.draft["pins"] = {"attention": "eager"}

    with pytest.raises(DraftProblem, match="eager attention is planned only"):
        launch_of(plan, WISH)


@pytest.mark.parametrize(("pins", "tokens"), [({}, 512), ({"max_batch_tokens": 1024}, 1024)])
def test_the_plans_tokens_of_a_step_reach_the_engine(plan, pins, tokens):
    plan.draft["pins"] = pins

    assert launch_of(plan, WISH).spec.max_batch_tokens == tokens


def test_the_engine_that_was_chosen_stands_in_the_spec():
    wish = endpoint_wish_of({"engine": "llamacpp"}, ())

    assert wish.engine == "llamacpp"
    assert EndpointWish().engine == "slipway"


def test_llama_cpp_gets_a_place_of_the_plans_length_for_each_of_its_requests(plan):
    spec = launch_of(plan, EndpointWish(engine="llamacpp")).spec

    assert (spec.engine, spec.max_length, spec.kv_cache_tokens) == ("llamacpp", 96, 4 * 96)


def test_an_engine_that_there_is_not_is_refused_with_those_there_are():
    with pytest.raises(InvalidProblem, match="“Engine” is vllm; choose slipway or llamacpp"):
        endpoint_wish_of({"engine": "vllm"}, ())


def test_the_page_offers_every_engine_in_its_words():
    page = Path("templates/wizard/review.html").read_text()

    for name, engine in ENGINES.items():
        assert f'<option value="{name}">{engine.words}</option>' in page


def test_llama_cpp_with_adapters_is_refused_by_name():
    with pytest.raises(InvalidProblem, match=r"llama\.cpp serves no adapters here"):
        endpoint_wish_of({"engine": "llamacpp", "adapters": "yes"}, ())

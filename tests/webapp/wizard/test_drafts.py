"""How a draft begins: presets, and what a newcomer starts from."""

import pytest

from tests.webapp.conftest import client_of
from webapp.jobs.models import Job, JobState
from webapp.modelhub.models import TeamModel
from webapp.modelhub.shapes import demo_config
from webapp.plans.models import Plan
from webapp.wizard.drafts import MODEL_PRESETS

pytestmark = pytest.mark.django_db


@pytest.fixture
def team_model(team, host) -> TeamModel:
    return TeamModel.objects.create(
        team=team,
        name="demo of today",
        source="job",
        config=demo_config(),
        host=host,
        attempt_id="01H" + "A" * 23,
        artefact_name="model",
    )


def test_a_newcomer_starts_from_training_the_demo_model_here(walk, host):
    draft = walk().plan.draft

    assert draft["goal"]["goal"] == "pretrain"
    assert draft["model"]["source"] == "demo"
    assert draft["workload"]["pretrain"]["time_budget_minutes"] == 2
    assert draft["hardware"]["choice"] == f"host:{host.pk}"


def test_after_a_finished_job_a_plan_starts_from_serving(walk, job):
    Job.objects.filter(pk=job.pk).update(state=JobState.SUCCEEDED)

    draft = walk().plan.draft

    assert draft["goal"]["goal"] == "serve"
    assert draft["model"]["catalog_id"] == "meta-llama/Llama-3.1-8B"


def test_without_a_host_a_plan_starts_from_catalog_hardware(alice):
    client_of(alice).get("/plans/new/")

    assert Plan.objects.get().draft["hardware"]["choice"] == "catalog"


def test_the_demo_preset_opens_at_its_review(walk):
    assert walk("?preset=demo").first_step == "review"


def test_the_quantize_preset_chooses_the_model_and_its_host(walk, team_model, host):
    draft = walk(f"?preset=quantize&model={team_model.pk}").plan.draft

    assert draft["goal"]["goal"] == "compress"
    assert draft["model"]["team_model"] == team_model.pk
    assert draft["hardware"]["choice"] == f"host:{host.pk}"


@pytest.mark.parametrize(
    ("preset", "goal"),
    [("benchmark", "serve"), ("endpoint", "serve"), ("generate", "generate")],
)
def test_what_a_models_page_offers_begins_with_that_model(walk, team_model, preset, goal):
    found = walk(f"?preset={preset}&model={team_model.pk}")

    assert found.first_step == "review"
    assert found.plan.draft["goal"]["goal"] == goal
    assert found.plan.draft["model"]["team_model"] == team_model.pk


def test_fine_tuning_a_teams_model_begins_where_its_data_is_chosen(walk, team_model):
    team_model.config = {**team_model.config, "max_position_embeddings": 256}
    team_model.save()

    found = walk(f"?preset=tune&model={team_model.pk}")

    assert found.first_step == "workload"
    assert found.plan.draft["goal"]["goal"] == "finetune"
    assert found.plan.draft["model"]["team_model"] == team_model.pk
    assert found.plan.draft["workload"]["finetune"]["sequence_length"] == 256


def test_a_plan_with_a_short_model_asks_no_more_tokens_than_it_has_positions(walk, team_model):
    team_model.config = {**team_model.config, "max_position_embeddings": 256}
    team_model.save()

    asked = walk(f"?preset=generate&model={team_model.pk}").plan.draft["workload"]["generate"]

    assert (asked["input_tokens"], asked["output_tokens"]) == (192, 64)


def test_another_teams_model_cannot_be_a_preset(charlie, team_model):
    response = client_of(charlie).get(f"/plans/new/?preset=quantize&model={team_model.pk}")

    assert response.status_code == 404


def test_an_untouched_draft_is_used_again(walk):
    assert walk().plan_id == walk().plan_id


def test_a_touched_draft_is_left_alone(walk):
    first = walk()
    first.press("workload", global_batch_size=4)

    assert walk().plan_id != first.plan_id


@pytest.mark.parametrize("preset", sorted(MODEL_PRESETS))
def test_a_preset_about_a_model_opens_at_the_goal_without_one(alice, host, preset):
    response = client_of(alice).get(f"/plans/new/?preset={preset}")

    plan = Plan.objects.get(owner=alice)
    assert response["Location"] == f"/plans/{plan.pk}/edit/goal/"

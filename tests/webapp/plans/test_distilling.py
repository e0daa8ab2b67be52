"""A distillation from the page to the job: the teacher's names, its memory, its weights."""

import pytest

from runners.jobspec import ArtefactModel, HubModel
from runners.plans.launch import Launch
from runners.plans.refusals import DraftProblem
from tests.webapp.conftest import client_of
from webapp.hosts.models import Host
from webapp.jobs.launching import launch_description, launchable_of, plan_launch
from webapp.modelhub.models import TeamModel, demo_config
from webapp.plans.places import question_of
from webapp.plans.planning import current_answer
from webapp.plans.repositories import RepositoryProblem
from webapp.plans.teachers import teacher_ref, team_teacher

TAUGHT = {
    "objective": "distillation",
    "sequence_length": 64,
    "max_completion_length": 32,
    "global_batch_size": 4,
    "tokens": 100_000,
    "data_source": "file",
    "data_path": "a.jsonl",
}


@pytest.fixture
def large(team, host) -> TeamModel:
    """A model in a folder of the host with the demo's vocabulary, twice as deep."""
    config = demo_config()
    config |= {"num_hidden_layers": 2 * config["num_hidden_layers"]}
    return TeamModel.objects.create(
        team=team, name="large one", source="folder", path="large", config=config, host=host
    )


def test_a_teacher_of_the_team_is_planned_and_its_folder_goes_with_the_job(plan_of, large, alice):
    for name in (large.name, large.pk):
        plan = plan_of("finetune", "folder", teacher_model=name, **TAUGHT)
        best = current_answer(plan).plans[0]
        assert best.memory.breakdown_bytes["reference_weights"] > 0
        spec = plan_launch(plan=plan, by=alice).spec
        assert (spec["objective"], spec["beta"], spec["temperature"]) == ("distillation", 1.0, 1.0)
        assert spec["teacher"] == {"source": "folder", "path": "large"}
        assert spec["model"]["path"] == "tiny"
        page = client_of(alice).get(f"/plans/{plan.pk}/edit/review/").content.decode()
        assert "DistillationTrainer" in page


def test_a_teacher_may_be_a_jobs_model_or_the_catalogs_repository(plan_of, trained, host):
    for name, expected in (
        (trained.name, ArtefactModel(attempt_id=trained.attempt_id)),
        ("qwen3-8b", HubModel(repository="Qwen/Qwen3-8B")),
        ("HuggingFaceTB/SmolLM2-1.7B", None),
    ):
        question = question_of(plan_of("finetune", "catalog", teacher_model=name, **TAUGHT))
        found = teacher_ref(question.document, question.teacher, host, None)
        assert expected in {None, found}, name
    assert found.repository == "HuggingFaceTB/SmolLM2-1.7B"
    spec = launchable_of(
        plan_of("finetune", "catalog", teacher_model=name, **TAUGHT), Launch()
    ).spec
    assert "lacks of the teacher, HuggingFaceTB/SmolLM2-1.7B" in launch_description(spec)


def test_unlike_vocabularies_unknown_names_and_weights_elsewhere_are_refused_by_field(
    plan_of, large, team, alice
):
    elsewhere = TeamModel.objects.create(
        team=team, name="a shape", source="config", config=large.config
    )
    for name, said in (
        ("Qwen/Qwen3-0.6B", "has 151936 tokens in its vocabulary"),
        ("nobody/nothing", "is no model of your team and none of the catalog"),
        (elsewhere.name, "has no weights that a job could load"),
    ):
        plan = plan_of("finetune", "folder", teacher_model=name, **TAUGHT)
        with pytest.raises(DraftProblem, match=said) as refused:
            plan_launch(plan=plan, by=alice)
        assert refused.value.field in {"teacher_model", "workload.teacher_model"}, name


def test_of_two_teachers_of_one_name_the_plans_host_has_the_first_choice(plan_of, large, team):
    elsewhere = Host.objects.create(team=team, name="far", slug="far", pool=large.host.pool)
    fields = {"source": "folder", "path": "large", "config": large.config}
    newest = TeamModel.objects.create(team=team, name=large.name, host=elsewhere, **fields)
    plan = plan_of("finetune", "folder", teacher_model=large.name, **TAUGHT)
    assert question_of(plan).teacher == large
    assert team_teacher(plan.document, team) == newest
    assert team_teacher(plan.document, team, {elsewhere.pk}) == newest


def test_a_teacher_that_the_hub_has_not_is_refused_by_its_field(
    plan_of, large, team, alice, own_hub
):
    TeamModel.objects.create(
        team=team, name="gone", source="hub", repository="acme/none", config=large.config
    )
    plan = plan_of("finetune", "folder", teacher_model="gone", **TAUGHT)
    with pytest.raises(RepositoryProblem, match="acme/none") as refused:
        plan_launch(plan=plan, by=alice)
    assert refused.value.facts["errors"][0]["field"] == "workload.teacher_model"

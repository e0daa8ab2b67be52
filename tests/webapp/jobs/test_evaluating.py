"""The button that judges a model against its original: what it queues, for whom, and when not."""

import pytest

from runners.engines import environment_of
from runners.jobspec import ArtefactModel, CompressSpec, EvaluateSpec, FolderModel, TrainSpec
from runners.jobspec.benchmark import EvaluationTasks
from tests.webapp.conftest import client_of, make_job
from webapp.core.problems import InvalidProblem
from webapp.jobs.evaluating import evaluation_of, evaluation_submit, left_model, tasks_of
from webapp.jobs.models import Event, Job, JobState
from webapp.modelhub.models import TeamModel
from webapp.modelhub.shapes import demo_config

pytestmark = pytest.mark.django_db(databases="__all__")
ORIGINAL = ArtefactModel(attempt_id="01TRAINED")


@pytest.fixture
def make_model(team, alice, host):
    """Return a function that registers what a job of the given spec left on the host."""

    def make(spec, **changes) -> TeamModel:
        job = make_job(team, alice, host, spec=spec)
        fields = {
            "team": team,
            "name": "demo, int8",
            "source": "job",
            "config": demo_config(),
            "host": host,
            "attempt_id": "01COMPRESSED",
            "artefact_name": "model",
            "weight_dtype": "int8",
            "facts": {"job": job.pk},
        }
        return TeamModel.objects.create(**fields | changes)

    return make


@pytest.fixture
def compressed(make_model) -> TeamModel:
    return make_model(CompressSpec(model=ORIGINAL, method="int8"))


def press(user, model):
    return client_of(user).post(f"/models/{model.pk}/evaluate/", follow=True)


def test_a_compressed_model_is_judged_against_what_was_compressed(compressed):
    assert evaluation_of(compressed) == EvaluateSpec(
        model=ArtefactModel(attempt_id="01COMPRESSED"), weight_dtype="int8", original=ORIGINAL
    )


def test_a_tuned_model_is_judged_against_the_folder_that_was_tuned(make_model):
    model = make_model(TrainSpec(model=FolderModel(path="llama")), weight_dtype="bf16")

    assert evaluation_of(model).original == FolderModel(path="llama")


def test_a_model_trained_from_nothing_is_judged_alone(make_model):
    model = make_model(TrainSpec(), weight_dtype="bf16")

    assert evaluation_of(model).original is None
    assert left_model(model).evaluation == "Evaluate it"


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"facts": {}}, "no_original"),
        ({"source": "config"}, "no_original"),
        ({"host": None}, "no_host"),
    ],
)
def test_what_no_job_can_judge_is_refused_and_has_no_button(make_model, changes, code):
    model = make_model(CompressSpec(model=ORIGINAL), **changes)

    with pytest.raises(InvalidProblem) as refused:
        evaluation_submit(model=model, by=Job.objects.get().owner)
    assert (refused.value.code, left_model(model).evaluation) == (code, "")


def test_a_gguf_file_is_refused_by_name(make_model):
    model = make_model(CompressSpec(model=ORIGINAL, method="gguf"))

    with pytest.raises(InvalidProblem, match="GGUF file for llama"):
        evaluation_of(model)


def test_pressing_the_button_queues_the_job_where_the_weights_lie(bob, compressed):
    page = press(bob, compressed).content.decode()

    job = Job.objects.get(kind="evaluate")
    assert (job.owner, job.requested_host, job.state) == (bob, compressed.host, JobState.PREFLIGHT)
    assert Event.objects.filter(subject=job.pk, to_state=JobState.QUEUED).exists()
    assert "Evaluate demo, int8" in page


def test_pressing_it_for_a_model_without_an_original_says_what_to_do(bob, make_model):
    page = press(bob, make_model(TrainSpec(), facts={})).content.decode()

    assert "Compress or train a model here and evaluate the result" in page
    assert not Job.objects.filter(kind="evaluate").exists()


def test_a_viewer_may_not_press_it_and_sees_no_button(vera, bob, compressed):
    path = f"/models/{compressed.pk}/"

    assert press(vera, compressed).status_code == 403
    assert "Evaluate against the original" not in client_of(vera).get(path).content.decode()
    assert "Evaluate against the original" in client_of(bob).get(path).content.decode()


def test_for_another_team_the_model_does_not_exist(charlie, compressed):
    assert press(charlie, compressed).status_code == 404


@pytest.mark.parametrize(
    ("posted", "tasks"),
    [
        ({}, None),
        ({"tasks": "", "task_folder": "x"}, None),
        ({"tasks": "held_out", "task_folder": "left over"}, EvaluationTasks()),
        (
            {"tasks": "folder", "task_folder": " t ", "task_names": "a, b", "documents": "9"},
            EvaluationTasks(folder="t", names=("a", "b"), documents=9),
        ),
    ],
)
def test_the_form_asks_for_tasks(posted, tasks):
    assert tasks_of(posted) == tasks


@pytest.mark.parametrize(
    ("posted", "message"),
    [
        ({"tasks": "folder"}, "“Folder of tasks” is empty"),
        ({"tasks": "folder", "task_folder": "x" * 1001}, "longer than 1000"),
        ({"tasks": "held_out", "task_names": "../up"}, "“Names” holds one that no task has"),
        ({"tasks": "held_out", "documents": "0"}, "“Documents of each” is not a whole number"),
        ({"tasks": "held_out", "documents": "many"}, "“Documents of each” is not a whole number"),
    ],
)
def test_a_field_that_names_no_tasks_is_refused_by_its_label(posted, message):
    with pytest.raises(InvalidProblem, match=message):
        tasks_of(posted)


def test_tasks_that_were_asked_for_reach_the_job_and_its_environment(bob, compressed):
    path = f"/models/{compressed.pk}/evaluate/"

    client_of(bob).post(path, {"tasks": "held_out", "documents": "5"})

    spec = Job.objects.get(kind="evaluate").spec
    assert spec["tasks"] == {"names": [], "folder": None, "documents": 5}
    assert environment_of(spec) == "lm_eval"

"""What a training plan reads: from the wizard's step to the document that the host runs."""

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile

from runners.jobspec import HostText
from tests.webapp.conftest import client_of
from tests.webapp.plans.conftest import with_model
from webapp.datasets.models import Dataset
from webapp.datasets.services import dataset_store
from webapp.jobs.calibration import is_as_planned
from webapp.plans.errors import DraftProblem
from webapp.plans.launching import launch_note, launch_of

pytestmark = pytest.mark.django_db(databases="__all__")
CONTENT = b"".join(
    b'{"instruction": "Say %d.", "output": "It is %d."}\n' % (n, n) for n in range(9)
)


def upload(content=CONTENT):
    return SimpleUploadedFile("asked.jsonl", content)


@pytest.fixture(autouse=True)
def _folder(settings, tmp_path):
    settings.DATASETS_DIR = tmp_path / "datasets"


@pytest.fixture
def dataset(team, alice) -> Dataset:
    return dataset_store(team=team, by=alice, upload=upload())


@pytest.fixture
def plan(demo_plan, trained):
    found = with_model(demo_plan, trained, "finetune")
    return choose(found, sequence_length=64, million_tokens=0.01)


def choose(plan, **values):
    plan.draft["workload"]["finetune"] |= values
    plan.save()
    return plan


def test_the_hosts_own_text_a_chosen_file_or_a_path_reaches_the_job(plan, dataset):
    spec = launch_of(plan).spec
    assert spec.data == HostText()
    assert is_as_planned(spec)
    assert "on its own text" in launch_note(plan)["text"]

    choose(plan, data_source="upload", dataset=dataset.pk, rows="padded", too_long="leave_out")
    spec = launch_of(plan).spec
    assert (spec.data.dataset_id, spec.data.sha256) == (dataset.pk, dataset.sha256)
    assert spec.data.format == "instruction"
    assert (spec.samples.rows, spec.samples.too_long) == ("padded", "leave_out")
    assert "on the uploaded asked.jsonl" in launch_note(plan)["text"]

    choose(plan, data_source="file", data_path="data/mine.jsonl", data_format="chat")
    spec = launch_of(plan).spec
    assert (spec.data.path, spec.data.format) == ("data/mine.jsonl", "chat")
    assert is_as_planned(spec)  # once it has read them: its rows have lengths of their own
    assert not is_as_planned(spec.model_copy(update={"objective": "classification"}))


def test_what_was_chosen_and_is_gone_or_foreign_is_the_plans_problem(plan, dataset, other_team):
    for values in [
        {"data_source": "upload", "dataset": "gone"},
        {"data_source": "file", "data_path": ""},
    ]:
        with pytest.raises(DraftProblem, match=r"it was deleted|cannot be read"):
            launch_of(choose(plan, **values))

    Dataset.objects.filter(pk=dataset.pk).update(team=other_team)
    with pytest.raises(DraftProblem, match="it was deleted"):
        launch_of(choose(plan, data_source="upload", dataset=dataset.pk))


def test_an_upload_in_the_wizard_is_chosen_and_shown(plan, alice):
    client = client_of(alice)

    answer = client.post(f"/plans/{plan.pk}/upload/", {"file": upload()})

    plan.refresh_from_db()
    values = plan.draft["workload"]["finetune"]
    assert answer["Location"] == f"/plans/{plan.pk}/edit/workload/"
    assert values["data_source"] == "upload"
    assert values["dataset"] == Dataset.objects.get().pk
    html = client.get(answer["Location"]).content.decode()
    assert "9 records · instruction" in html
    assert "It is 2." in html


MIXTURE = {
    "data_source": "mixed", "mix_source_1": "host", "mix_weight_1": "3", "mix_source_3": "file",
    "mix_path_3": " notes/a.txt ", "mix_weight_3": "0.5",
}  # fmt: skip


def saved(client, plan, changes):
    """Post the workload step as a browser would, with some controls changed."""
    url = f"/plans/{plan.pk}/edit/workload/"
    form = client.get(url).context["form"]
    shown = {each.html_name: each.value() for each in form if each.value() is not None}
    return client.post(url, {**shown, **changes})


def test_sources_that_are_mixed_by_weight_reach_the_job(plan, alice, dataset):
    client = client_of(alice)
    third = {"mix_source_4": dataset.pk, "mix_weight_4": "1.5"}

    assert saved(client, plan, MIXTURE | third).status_code == 302

    plan.refresh_from_db()
    spec = launch_of(plan).spec
    assert [part.weight for part in spec.data.parts] == [3.0, 0.5, 1.5]
    own, file, uploaded = (part.data for part in spec.data.parts)
    assert (own, file.path, uploaded.sha256) == (HostText(), "notes/a.txt", dataset.sha256)
    words = launch_note(plan)["text"].replace("\N{NO-BREAK SPACE}", " ")
    assert "on 60 % its own text and 10 % its file notes/a.txt and 30 % the uploaded" in words
    page = client.get(f"/plans/{plan.pk}/edit/workload/").content.decode()
    assert 'value="mixed" checked' in page
    assert 'value="notes/a.txt"' in page


MOVING = {"mix_weights": "dynamic", "mix_every": "25", "mix_reference_3": "2.5"}


def test_weights_that_follow_the_losses_reach_the_job_and_its_words(plan, alice):
    client = client_of(alice)

    assert saved(client, plan, MIXTURE | MOVING).status_code == 302

    plan.refresh_from_db()
    data = launch_of(plan).spec.data
    assert (data.weights, data.update_every_steps) == ("dynamic", 25)
    assert [part.reference_loss for part in data.parts] == [None, 2.5]
    words = launch_note(plan)["text"].replace("\N{NO-BREAK SPACE}", " ")
    assert "on at first 86 % its own text and 14 % its file notes/a.txt by weights that" in words
    page = client.get(f"/plans/{plan.pk}/edit/workload/").content.decode()
    assert 'name="mix_weights" value="dynamic" checked' in page
    # Fixed ones follow nothing, whatever still stands in the fields that are folded away then.
    assert saved(client, plan, {"mix_weights": "fixed"}).status_code == 302
    plan.refresh_from_db()
    assert launch_of(plan).spec.data.parts[1].reference_loss is None


def test_a_mixture_that_cannot_be_is_refused_by_its_field(plan, alice):
    for changes, field, said in [
        (MOVING | {"mix_every": ""}, "mix_every", "Say after how many steps they move"),
        (MOVING | {"mix_every": "0"}, "mix_every", "Steps between two moves is 0. It must be"),
        (
            MOVING | {"mix_reference_3": "-1"},
            "mix_reference_3",
            "Reference loss of source 3 is -1.0. It must be a number from 0 to 20.",
        ),
        (MOVING | {"mix_weights": "fast"}, "mix_weights", "not one of the available choices"),
        ({"mix_source_3": ""}, "mix_source_1", "1 of these rows name a source. Choose at least 2"),
        ({"mix_weight_3": ""}, "mix_weight_3", "Give it a weight, for example 1."),
        ({"mix_weight_3": "0"}, "mix_weight_3", "Weight of source 3 is 0.0. It must be"),
        ({"mix_weight_1": "much"}, "mix_weight_1", "It must be a number from 0.001 to 1000."),
        ({"mix_path_3": ""}, "mix_path_3", "Name the file."),
        ({"mix_path_3": "../a.txt"}, "mix_path_3", "may not climb"),
        ({"mix_path_3": "a.csv"}, "mix_path_3", "end in .jsonl, .parquet or .txt"),
        ({"mix_source_3": "gone"}, "mix_source_3", "not one of the available"),
        ({"mix_source_2": "host", "mix_weight_2": "1"}, "mix_source_2", "is already listed"),
    ]:
        answer = saved(client_of(alice), plan, MIXTURE | changes)
        assert answer.status_code == 422, (changes, field)
        assert said in " ".join(answer.context["form"].errors[field]), (changes, field)


def test_a_bad_upload_in_the_wizard_changes_no_plan(plan, alice):
    answer = client_of(alice).post(f"/plans/{plan.pk}/upload/", {"file": upload(b"{\n")})
    plan.refresh_from_db()
    assert answer.status_code == 422
    assert plan.draft["workload"]["finetune"].get("data_source", "host") == "host"


def test_the_step_says_what_is_missing(plan, alice):
    for changes, field, said in [
        ({"data_source": "file"}, "data_path", "Name the file."),
        ({"data_source": "file", "data_path": "../a.jsonl"}, "data_path", "may not climb"),
        (
            {"data_source": "file", "data_path": "a.feather"},
            "data_path",
            "end in .jsonl, .parquet or .txt",
        ),
        (
            {"data_source": "file", "data_path": "a.csv"},
            "data_path",
            "end in .jsonl, .parquet or .txt",
        ),
        ({"data_source": "upload"}, "dataset", "Choose a file, or upload one."),
        ({"data_source": "upload", "dataset": "other"}, "dataset", "not one of the available"),
    ]:
        answer = saved(client_of(alice), plan, changes)
        assert answer.status_code == 422, (changes, field)
        assert said in " ".join(answer.context["form"].errors[field]), (changes, field)

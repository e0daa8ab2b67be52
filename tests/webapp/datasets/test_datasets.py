"""Uploaded training data: looked through, kept once, for its team and its hosts alone."""

import hashlib
import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from asgiref.sync import async_to_sync
from django.core.files.uploadedfile import SimpleUploadedFile
from django.test import Client

from runners.jobspec import ArtefactModel, TrainSpec
from runners.plans.document import PLANS
from runners.plans.training_data import data_fields
from runners.plans.workloads import FinetuneWork
from tests.webapp.conftest import claim, client_of, make_job, new_attempt
from webapp.audit.models import Event
from webapp.core.problems import BusyProblem, ConflictProblem
from webapp.datasets import services
from webapp.datasets.models import Dataset
from webapp.datasets.services import ConcurrentChecks, dataset_store, path_of
from webapp.jobs.artefacts import dataset_delete
from webapp.jobs.services import job_submit
from webapp.plans.places import uploads_of

pytestmark = pytest.mark.django_db
ASKED = [{"instruction": f"Say {n}.", "output": f"It is {n}."} for n in range(12)]


def lines(documents) -> bytes:
    return "".join(f"{json.dumps(each)}\n" for each in documents).encode()


def upload(content=None, name="asked.jsonl"):
    return SimpleUploadedFile(name, lines(ASKED) if content is None else content)


@pytest.fixture(autouse=True)
def _folder(settings, tmp_path):
    settings.DATASETS_DIR = tmp_path / "datasets"


@pytest.fixture
def dataset(team, alice) -> Dataset:
    return dataset_store(team=team, by=alice, upload=upload())


@pytest.fixture
def reader(team, alice, host, dataset):
    """An attempt of a job that reads the dataset, claimed by its host."""
    chosen = FinetuneWork(data_source="upload", dataset=dataset.pk)
    document = PLANS["finetune"](goal="finetune", workload=chosen)
    data = data_fields(chosen, uploads_of(document, team))
    spec = TrainSpec(model=ArtefactModel(attempt_id="a"), **data)
    job = make_job(team, alice, host, spec=spec)
    job_submit(job=job, by="alice")
    attempt = new_attempt(job)
    claim(attempt)
    return attempt


# Uploads


def test_a_file_is_kept_once_with_what_is_in_it(dataset, team, alice):
    content = lines(ASKED)
    assert path_of(dataset).read_bytes() == content
    assert dataset.sha256 == hashlib.sha256(content).hexdigest()
    assert (dataset.num_records, dataset.format) == (12, "instruction")
    assert dataset.size_bytes == len(content)
    assert dataset.samples[0] == [["user", "Say 0."], ["assistant", "It is 0."]]
    event = Event.objects.get(kind="dataset.upload")
    assert (event.actor, event.subject, event.detail["records"]) == ("alice", dataset.pk, 12)
    assert dataset_store(team=team, by=alice, upload=upload()) == dataset
    assert [each.name for each in path_of(dataset).parent.iterdir()] == [dataset.pk]


def test_what_is_wrong_is_shown_with_what_could_be_read(alice, settings):
    content = lines(ASKED[:4]) + b'{"instruction": "cut\n' + lines([{"output": "x"}])
    page = client_of(alice).post("/data/upload/", {"file": upload(content)})
    html = page.content.decode()
    assert page.status_code == 422
    assert "asked.jsonl: line 5: it is not valid JSON" in html
    assert "line 6: “instruction” is missing; its fields are output" in html
    assert "4 records could be read" in html
    assert "It is 2." in html
    assert list(Path(settings.DATASETS_DIR).iterdir()) == []


def test_another_kind_of_file_or_none_is_refused_by_its_name(alice):
    for content, name, said in [
        (b"a,b\n", "table.xls", "files of training data end in .jsonl, .json, .parquet, .csv"),
        (b"PAR1", "table.parquet", "cannot be read as Parquet"),
    ]:
        page = client_of(alice).post("/data/upload/", {"file": upload(content, name)}, follow=True)
        assert said in page.content.decode(), content
        assert not Dataset.objects.exists(), content
    page = client_of(alice).post("/data/upload/", follow=True)
    assert "No file was chosen" in page.content.decode()


def test_a_table_is_kept_and_its_first_rows_are_shown(alice):
    written = io.BytesIO()
    pq.write_table(pa.Table.from_pylist([{"text": f"row {n}"} for n in range(9)]), written)
    client = client_of(alice)
    page = client.post(
        "/data/upload/", {"file": upload(written.getvalue(), "t.parquet")}, follow=True
    )
    assert "t.parquet is uploaded: 9 records" in page.content.decode()
    assert Dataset.objects.get().format == "text"


def test_a_preview_says_what_jobs_do_not_learn_from(alice):
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": ""}]
    empty = {"messages": turns, "id": 0}
    whole = [{"messages": [*turns, {**turns[1], "content": f"{n}"}], "id": n} for n in range(3)]
    page = client_of(alice).post(
        "/data/upload/", {"file": upload(lines([*whole, empty]))}, follow=True
    )
    said = "Left out in training: 1 record without an answer to learn; fields that are left out, "
    assert page.content.decode().count(f"{said}with their records: “id” (3).") == 2


def test_one_part_of_a_data_set_and_several_files_at_once_are_told(alice):
    client = client_of(alice)
    part = upload(name="train-00000-of-00003.jsonl")
    page = client.post("/data/upload/", {"file": part}, follow=True).content.decode()
    assert page.count("train-00000-of-00003.jsonl is part 1 of 3 of its data set; the others") == 2
    two = {"file": [upload(name="a.jsonl"), upload(name="b.jsonl")]}
    page = client.post("/data/upload/", two, follow=True).content.decode()
    assert "2 files were sent. Upload them one at a time." in page
    assert Dataset.objects.count() == 1


def test_a_long_name_of_a_file_keeps_its_ending(team, alice):
    for name, stored in [
        ("n" * 250 + ".jsonl", "n" * 194 + ".jsonl"),
        ("é" * 250 + ".parquet", "é" * 192 + ".parquet"),
        ("a/b\\c.jsonl", "c.jsonl"),
        ("n" * 250, "n" * 200),
        ("." + "n" * 250, "." + "n" * 199),
        ("cafe\u0301.jsonl", "caf\u00e9.jsonl"),  # as macOS sends it
    ]:
        assert services.stored_name(name) == stored, name
    assert dataset_store(team=team, by=alice, upload=upload(name="n" * 250 + ".jsonl")).name


def test_what_is_too_large_is_refused_with_the_limit(alice, monkeypatch, dataset):
    client = client_of(alice)
    monkeypatch.setattr(services, "MAX_TEAM_FILES", 1)
    full = client.post("/data/upload/", {"file": upload(name="b.jsonl")}, follow=True)
    monkeypatch.setattr(services, "MAX_UPLOAD_BYTES", 100)
    large = client.post("/data/upload/", {"file": upload(name="b.jsonl")}, follow=True)
    assert "1 files and 2,048 MiB are the limits" in full.content.decode()
    assert "Divide the file, or copy it to the host" in large.content.decode()
    assert Dataset.objects.get() == dataset


# Who sees them, and how they go


def test_so_many_files_are_checked_at_once_of_one_person_and_of_all(
    alice, bob, team, monkeypatch, dataset
):
    checks = ConcurrentChecks()
    monkeypatch.setattr(services, "_CHECKS", checks)
    monkeypatch.setattr(ConcurrentChecks, "MOST", 3)
    with checks.of(alice), checks.of(alice):
        answer = client_of(alice).post("/data/upload/", {"file": upload()}, follow=True)
        assert "2 uploads of yours are being checked" in answer.content.decode()
        with pytest.raises(BusyProblem) as refused:
            dataset_store(team=team, by=alice, upload=upload())
        assert (refused.value.code, refused.value.facts["retry_after_seconds"]) == (
            "uploads_busy", 30,
        )  # fmt: skip
        assert dataset_store(team=team, by=bob, upload=upload()) == dataset
        with checks.of(bob), pytest.raises(BusyProblem, match="3 uploads are being checked"):
            dataset_store(team=team, by=bob, upload=upload())
    assert dataset_store(team=team, by=alice, upload=upload()) == dataset
    assert not checks._running


def test_another_team_sees_nothing_of_them(dataset, charlie, bob):
    seen, hidden = (client_of(each).get("/data/").content.decode() for each in (bob, charlie))
    assert "asked.jsonl" in seen
    assert "Say 0." in seen
    assert "asked.jsonl" not in hidden
    assert client_of(charlie).post(f"/data/{dataset.pk}/delete/").status_code == 404


def test_a_viewer_reads_and_changes_nothing(dataset, vera):
    client = client_of(vera)
    assert "Delete asked.jsonl" not in client.get("/data/").content.decode()
    assert client.post("/data/upload/", {"file": upload()}).status_code == 403
    assert client.post(f"/data/{dataset.pk}/delete/").status_code == 403


def test_a_deleted_file_is_gone_from_the_disk_and_told(dataset, bob):
    path = path_of(dataset)
    client_of(bob).post(f"/data/{dataset.pk}/delete/")
    assert not path.exists()
    assert not Dataset.objects.exists()
    assert Event.objects.get(kind="dataset.delete").actor == "bob"


def test_what_a_job_still_needs_is_not_deleted(reader, dataset, alice):
    with pytest.raises(
        ConflictProblem, match=r"asked\.jsonl cannot be deleted while the job .* uses it"
    ):
        dataset_delete(dataset=dataset, by=alice)
    assert path_of(dataset).exists()


# The host


async def whole(answer) -> bytes:
    return b"".join([piece async for piece in answer.streaming_content])


def fetched(credential, attempt, dataset):
    client = Client(headers={"Authorization": f"Bearer {credential}"})
    return client.get(f"/api/v1/attempts/{attempt.pk}/data/{dataset.pk}")


def test_only_the_host_of_the_job_gets_the_file_that_it_names(
    credential, reader, dataset, team, alice, other_team
):
    answer = fetched(credential, reader, dataset)
    assert answer.status_code == 200
    assert async_to_sync(whole)(answer) == lines(ASKED)
    assert int(answer["Content-Length"]) == dataset.size_bytes
    other = dataset_store(team=team, by=alice, upload=upload(lines(ASKED[:4]), "b.jsonl"))
    assert fetched(credential, reader, other).status_code == 404
    assert fetched("not-a-credential", reader, dataset).status_code == 401
    path = f"/api/v1/attempts/{reader.pk}/data/{dataset.pk}"
    assert client_of(alice).get(path).status_code == 401
    path_of(dataset).unlink()
    answer = fetched(credential, reader, dataset)
    assert answer.status_code == 404
    assert "was deleted on the server" in answer.json()["detail"]
    Dataset.objects.filter(pk=dataset.pk).update(team=other_team)
    assert fetched(credential, reader, dataset).status_code == 404


def test_a_full_disk_keeps_no_half_of_an_upload(team, alice, settings, monkeypatch):
    def fail(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("webapp.datasets.services.os.fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        dataset_store(team=team, by=alice, upload=upload())

    assert list(Path(settings.DATASETS_DIR).iterdir()) == []

"""What ended jobs keep on hosts: reported, shown, and deleted by order; models of the team."""

import json

import pytest

from runners.shared.messages import StoredFiles
from tests.webapp.conftest import client_of, make_beat, make_job
from webapp.agents.heartbeats import host_beat
from webapp.audit.models import Event
from webapp.core.problems import InvalidProblem
from webapp.hosts.models import Host
from webapp.jobs.models import Attempt, Job
from webapp.jobs.services import is_resumable
from webapp.jobs.stored_files import free_name, model_rename
from webapp.modelhub.models import TeamModel

pytestmark = pytest.mark.django_db(databases=["default", "metrics"])
CHECKPOINT, OUTPUT = 3 * 2**30, 5 * 2**30


@pytest.fixture
def stopped(running) -> Job:
    """A stopped training, of which its host keeps checkpoint and model."""
    Job.objects.filter(pk=running.pk).update(state="stopped")
    report(running, (CHECKPOINT, OUTPUT))
    running.refresh_from_db()
    return running


@pytest.fixture
def model(stopped, team) -> TeamModel:
    return TeamModel.objects.create(
        team=team, name="Mine", source="job", attempt_id=stopped.current_attempt_id,
        host=stopped.host, config={"model_type": "llama"},
    )  # fmt: skip


def report(job: Job, kept: tuple[int, int] | None):
    """Send a heartbeat with the host's files: the job's, or none at all; return the orders."""
    sizes = () if kept is None else (kept,)
    files = tuple(
        StoredFiles(attempt_id=job.current_attempt_id, checkpoint_bytes=one, output_bytes=other)
        for one, other in sizes
    )
    reply = host_beat(host=Host.objects.get(pk=job.host_id), beat=make_beat(files=files))
    return [(each.attempt_id, each.part) for each in reply.delete_files]


def delete(user, job: Job, part: str):
    return client_of(user).delete(f"/api/v1/jobs/{job.pk}/files?part={part}")


def listed(user, path: str) -> list[tuple[int, int, str]]:
    items = client_of(user).get(f"/api/v1/{path}").json()["items"]
    return [(each["checkpoint_bytes"], each["output_bytes"], each["pending"]) for each in items]


def test_an_order_is_repeated_until_a_report_shows_it_done(alice, stopped):
    attempt, host = stopped.current_attempt_id, stopped.host
    assert listed(alice, f"jobs/{stopped.pk}/files") == [(CHECKPOINT, OUTPUT, "")]
    assert listed(alice, f"hosts/{host.slug}/files") == [(CHECKPOINT, OUTPUT, "")]
    assert is_resumable(stopped)
    answer = delete(alice, stopped, "checkpoint")
    assert answer.json()["items"][0]["pending"] == "checkpoint"
    assert not is_resumable(stopped)  # it is as good as gone
    assert report(stopped, (CHECKPOINT, OUTPUT)) == [(attempt, "checkpoint")]
    reply = host_beat(host=host, beat=make_beat())  # nothing new of files
    assert [each.attempt_id for each in reply.delete_files] == [attempt]
    assert report(stopped, (0, OUTPUT)) == []
    assert listed(alice, f"jobs/{stopped.pk}/files") == [(0, OUTPUT, "")]
    assert not is_resumable(stopped)
    event = Event.objects.get(kind="job.files_deleted")
    assert (event.actor, event.detail) == (
        "alice",
        {"parts": ["checkpoint"], "hosts": [host.slug]},
    )


def test_what_a_complete_report_leaves_out_is_gone(alice, stopped):
    delete(alice, stopped, "all")
    assert report(stopped, None) == []
    assert listed(alice, f"jobs/{stopped.pk}/files") == []
    assert delete(alice, stopped, "all").json()["code"] == "no_files"


def test_a_host_reports_of_its_own_attempts_only(alice, stopped, other_host):
    files = (StoredFiles(attempt_id=stopped.current_attempt_id, checkpoint_bytes=1),)
    host_beat(host=other_host, beat=make_beat(files=files))
    assert listed(alice, f"jobs/{stopped.pk}/files") == [(CHECKPOINT, OUTPUT, "")]


def test_who_may_not_delete_a_job_may_not_delete_its_files(
    alice, bob, olga, vera, charlie, stopped
):
    for user, status in ((bob, 403), (vera, 403), (charlie, 404)):
        assert delete(user, stopped, "all").status_code == status, user
        posted = client_of(user).post(f"/jobs/{stopped.pk}/files/delete/", {"part": "all"})
        assert posted.status_code == status, user
    assert delete(olga, stopped, "logs").status_code == 422
    assert delete(olga, stopped, "all").status_code == 200
    Job.objects.filter(pk=stopped.pk).update(state="running")
    assert delete(alice, stopped, "all").json()["code"] == "still_live"


def test_nothing_is_deleted_that_a_job_still_needs(alice, stopped, team, host, model):
    live = make_job(team, alice, host)
    for spec in (
        {**live.spec, "resume_from": stopped.pk},
        {"kind": "evaluate", "model": {"source": "artefact", "attempt_id": model.attempt_id}},
    ):
        Job.objects.filter(pk=live.pk).update(spec=spec, state="queued", name="Needs it")
        answer = delete(alice, stopped, "all")
        assert (answer.status_code, answer.json()["code"]) == (409, "in_use"), spec
        assert "Needs it uses these files and is queued" in answer.json()["detail"]
    assert client_of(alice).delete(f"/api/v1/models/{model.pk}").json()["code"] == "in_use"
    assert delete(alice, stopped, "checkpoint").status_code == 200  # the weights are used, not it
    Job.objects.filter(pk=live.pk).update(state="failed")
    assert delete(alice, stopped, "all").status_code == 200
    assert not TeamModel.objects.exists()  # its weights are deleted


def test_a_deleted_job_leaves_nothing_but_models_of_the_team(alice, stopped, model):
    page = client_of(alice)
    page.post(f"/jobs/{stopped.pk}/delete/")
    assert report(stopped, (CHECKPOINT, OUTPUT)) == [(model.attempt_id, "checkpoint")]
    assert report(stopped, (0, OUTPUT)) == []
    text = page.get(f"/hosts/{stopped.host.slug}/").content.decode()
    assert f"{stopped.name}, deleted" in text
    page.post(f"/jobs/{stopped.pk}/files/delete/", {"part": "all", "host": stopped.host.slug})
    assert report(stopped, (0, OUTPUT)) == [(model.attempt_id, "all")]
    TeamModel.objects.all().delete()
    assert report(stopped, None) == []


def test_the_pages_show_sizes_and_whoever_may_deletes(alice, vera, stopped, model):
    for path in (f"/jobs/{stopped.pk}/artefacts/", f"/hosts/{stopped.host.slug}/"):
        page = client_of(alice).get(path).content.decode()
        assert ("3.0" in page, "5.0" in page, "Delete everything" in page) == (True,) * 3, path
        assert "Delete everything" not in client_of(vera).get(path).content.decode(), path
    page = client_of(alice).post(
        f"/jobs/{stopped.pk}/files/delete/", {"part": "checkpoint"}, follow=True
    )
    assert "The checkpoint is being deleted." in page.content.decode()
    assert "Resume</button>" not in page.content.decode()


def test_a_model_is_renamed_and_deleted_with_its_weights_if_that_is_said(
    alice, vera, charlie, stopped, model
):
    path, client = f"/api/v1/models/{model.pk}", client_of(alice)
    for user, status in ((vera, 403), (charlie, 404)):
        assert client_of(user).delete(path).status_code == status, user
        posted = client_of(user).post(f"/models/{model.pk}/rename/", {"name": "theirs"})
        assert posted.status_code == status, user
    changed = client.patch(path, json.dumps({"name": "alpaca 3"}), "application/json")
    assert changed.json()["name"] == "alpaca 3"
    client.post(f"/models/{model.pk}/rename/", {"name": "alpaca 4"})
    page = client.get(f"/models/{model.pk}/").content.decode()
    assert ("alpaca 4</h1>" in page, "Also delete what its job keeps on Box" in page) == (
        True,
        True,
    )
    assert client.delete("/api/v1/models/meta-llama/Llama-3.1-8B").status_code == 404
    said = client.post(f"/models/{model.pk}/delete/", {}, follow=True).content.decode()
    assert "alpaca 4 is deleted. Its files stay on Box" in said
    assert report(stopped, (CHECKPOINT, OUTPUT)) == []
    again = TeamModel.objects.create(team=model.team, name="x", attempt_id=model.attempt_id)
    assert client.delete(f"/api/v1/models/{again.pk}?files=true").status_code == 204
    assert report(stopped, (CHECKPOINT, OUTPUT)) == [(model.attempt_id, "all")]


def test_names_of_a_teams_models_tell_them_apart(model, team):
    other = TeamModel(team=team, name="new")
    assert (free_name("Mine", other), free_name("Mine", model)) == ("Mine (2)", "Mine")
    other.save()
    for name, words in (("", "Give the model"), ("Mine", "is called Mine"), ("a" * 121, "120")):
        with pytest.raises(InvalidProblem, match=words):
            model_rename(model=other, name=name, by="alice")
    TeamModel.objects.create(team=team, name="n" * 120)
    assert free_name("n" * 120, other) == "n" * 116 + " (2)"


def test_a_resumed_job_of_a_deleted_checkpoint_is_refused_with_the_way_out(alice, stopped):
    report(stopped, (0, OUTPUT))
    page = client_of(alice).post(f"/jobs/{stopped.pk}/resume/", follow=True).content.decode()
    assert "keeps no checkpoint on Box. Run it again from the start." in page
    Attempt.objects.update(checkpoint_bytes=None)  # of a host that does not report files yet
    assert is_resumable(stopped)

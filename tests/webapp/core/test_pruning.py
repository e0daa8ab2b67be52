"""What goes by retention, what never does, and what the command says before."""

from datetime import timedelta

import pytest
import time_machine
from django.contrib.sessions.models import Session
from django.core.management import CommandError, call_command

from tests.webapp.conftest import EXIT_OK, batch_of, client_of
from tests.webapp.jobs.test_uploads import body_of
from webapp.accounts.models import LoginTry, OpenSession
from webapp.audit import chain
from webapp.core.clock import now
from webapp.core.pruning import Lifetimes, heaps
from webapp.hosts.models import EnrolmentToken
from webapp.jobs.artefacts import folder_of
from webapp.jobs.ingest import events_accept
from webapp.jobs.models import Artefact, AttemptEvent, Event, Job
from webapp.metrics.models import MetricChunk
from webapp.modelhub.models import TeamModel

pytestmark = pytest.mark.django_db(databases="__all__")
LINE = ("log", {"stream": "stdout", "text": "x" * 1000})


@pytest.fixture
def ended(attempt, settings, tmp_path):
    """An attempt that wrote lines, left a model and ended."""
    settings.ARTEFACTS_DIR = tmp_path
    events = [LINE, LINE, ("artefact", body_of()), ("exited", EXIT_OK)]
    events_accept(host=attempt.host, batch=batch_of(attempt, *events))
    folder = folder_of(Artefact.objects.get())
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(b"w" * 5000)
    return attempt


def heap(name: str, lifetimes: Lifetimes | None = None):
    return next(each for each in heaps(lifetimes or Lifetimes()) if each.name == name)


def later(**span):
    return time_machine.travel(now() + timedelta(**span))


def test_lines_of_an_old_job_go_and_how_it_ended_stays(ended):
    with later(days=181):
        found = heap("lines of logs")
        assert found.num_things == 2
        assert found.num_bytes > 2000
        assert found.remove() == 2
    assert [row.kind for row in AttemptEvent.objects.all()] == ["artefact", "exited"]


def test_lines_of_a_job_that_still_runs_are_never_old(attempt):
    events_accept(host=attempt.host, batch=batch_of(attempt, LINE))
    with later(days=9999):
        assert heap("lines of logs").num_things == 0


def test_young_lines_stay(ended):
    with later(days=179):
        assert heap("lines of logs").num_things == 0


def test_points_go_by_their_lifetimes(db):
    for step_ms in (0, 15_000):
        MetricChunk.objects.create(
            attempt_id="a", source="job", metric="loss", step_ms=step_ms, t0_ms=0, t1_ms=1, n=1,
            body=b"x" * 300,
        )  # fmt: skip
    assert heap("raw points").num_bytes == 400
    heap("raw points").remove()
    assert [chunk.step_ms for chunk in MetricChunk.objects.all()] == [15_000]
    heap("rolled-up points").remove()
    assert not MetricChunk.objects.exists()


def test_files_of_a_deleted_job_go_with_their_bytes(ended):
    TeamModel.objects.all().delete()
    Job.objects.update(deleted_at=now())
    folder = folder_of(Artefact.objects.get())
    with later(days=31):
        found = heap("artefacts of deleted jobs")
        assert (found.num_things, found.num_bytes) == (1, 5000)
        found.remove()
    assert not folder.exists()
    assert not Artefact.objects.exists()


def test_a_model_that_the_team_lists_stays_though_its_job_is_deleted(ended):
    assert TeamModel.objects.count() == 1
    Job.objects.update(deleted_at=now())
    with later(days=9999):
        assert heap("artefacts of deleted jobs").num_things == 0


def test_files_of_a_job_that_nobody_deleted_stay(ended):
    TeamModel.objects.all().delete()
    with later(days=9999):
        assert heap("artefacts of deleted jobs").num_things == 0


def test_sessions_that_ran_out_go_and_open_ones_stay(alice, bob):
    client_of(alice)
    with later(hours=13):
        client_of(bob)
        heap("ended sessions").remove()
        heap("browsers without a session").remove()
        assert Session.objects.count() == 1
        assert [row.user for row in OpenSession.objects.all()] == [bob]


def test_tokens_and_tries_go(host):
    LoginTry.objects.create(account="a" * 64, address="::1", at=now())
    with later(days=32):
        heap("tokens").remove()
        heap("tried passwords").remove()
    assert not EnrolmentToken.objects.exists()
    assert not LoginTry.objects.exists()


def test_the_dry_run_says_what_would_go_and_deletes_nothing(ended, capsys):
    chain.events_seal()
    before = (Event.objects.count(), AttemptEvent.objects.count())
    with later(days=2000):
        call_command("prune", "--dry-run")
    told = capsys.readouterr().out
    assert "lines of logs" in told
    assert "about, in all" in told
    assert (Event.objects.count(), AttemptEvent.objects.count()) == before


def test_yes_deletes_and_the_chain_still_holds(ended, capsys):
    chain.events_seal()
    with later(days=2000):
        call_command("prune", "--yes")
        call_command("audit", "verify")
    assert "events of the history" in capsys.readouterr().out
    assert [event.kind for event in Event.objects.all()] == ["audit.cut"]
    assert not AttemptEvent.objects.filter(kind="log").exists()


def test_a_second_run_finds_nothing_more(ended, capsys):
    with later(days=2000):
        call_command("prune", "--yes")
        capsys.readouterr()
        call_command("prune", "--yes")
    assert "\ndeleted " not in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["--dry-run", "--yes"]])
def test_it_does_nothing_without_being_told_which(words):
    with pytest.raises(CommandError):
        call_command("prune", *words)


def test_a_lifetime_of_no_day_is_refused_by_its_name(db):
    with pytest.raises(CommandError, match="--logs-days is 0"):
        call_command("prune", "--yes", "--logs-days", "0")

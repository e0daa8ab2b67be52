"""A job changes state in one place, and only as the table allows."""

import pytest

from tests.webapp.conftest import claim, new_attempt
from webapp.jobs import transitions
from webapp.jobs.models import FINAL_STATES, Attempt, Event, Job, JobState
from webapp.jobs.transitions import ALLOWED, sources_of, transition

pytestmark = pytest.mark.django_db


def test_every_state_has_a_row_in_the_table():
    assert set(ALLOWED) == set(JobState)


@pytest.mark.parametrize("state", sorted(FINAL_STATES))
def test_a_final_state_leads_nowhere(state):
    assert not ALLOWED[state]


def test_every_state_but_draft_can_be_reached():
    assert [state for state in JobState if not sources_of(state)] == [JobState.DRAFT]


@pytest.mark.parametrize("source", list(JobState))
@pytest.mark.parametrize("target", list(JobState))
def test_a_job_moves_exactly_where_the_table_says(draft, source, target):
    Job.objects.filter(pk=draft.pk).update(state=source)
    moved = transition(draft, target, actor="alice")
    state = Job.objects.get(pk=draft.pk).state
    assert moved == (target in ALLOWED[source])
    assert state == (target if moved else source)


def test_a_transition_writes_who_from_to_and_why(job):
    transition(job, JobState.ERROR, actor="alice", reason="internal", detail={"note": 1})
    event = Event.objects.filter(subject=job.pk).last()
    assert (event.actor, event.from_state, event.to_state) == ("alice", "preflight", "error")
    assert (event.reason, event.detail) == ("internal", {"note": 1})


def test_a_refused_transition_writes_no_event(draft):
    transition(draft, JobState.RUNNING, actor="alice")
    assert not Event.objects.filter(subject=draft.pk).exists()


def test_an_old_attempt_cannot_move_the_job(job):
    old = job.current_attempt
    new_attempt(job)
    assert not transition(job, JobState.STARTING, actor="host:box", attempt=old)


def test_a_stale_report_is_counted_on_its_attempt(job):
    old = job.current_attempt
    new_attempt(job)
    transition(job, JobState.STARTING, actor="host:box", attempt=old)
    assert Attempt.objects.get(pk=old.pk).stale_transitions == 1


def test_a_wrong_fence_cannot_move_the_job(job):
    attempt = job.current_attempt
    attempt.fence = "0" * 32
    assert not transition(job, JobState.STARTING, actor="host:box", attempt=attempt)


def test_running_notes_when_it_began(job):
    claim(job.current_attempt)
    transition(job, JobState.RUNNING, actor="host:box")
    assert job.started_at is not None


def test_an_end_notes_when_and_clears_the_estimate(job):
    Job.objects.filter(pk=job.pk).update(eta_seconds=9.0)
    transition(job, JobState.STOPPED, actor="alice")
    assert (job.ended_at is not None, job.eta_seconds) == (True, None)


def test_the_page_hears_of_a_transition_after_its_commit(
    job, monkeypatch, django_capture_on_commit_callbacks
):
    heard = []
    monkeypatch.setattr(transitions, "publish_job_state", lambda job: heard.append(job.state))
    with django_capture_on_commit_callbacks(execute=True):
        transition(job, JobState.ERROR, actor="alice")
        assert heard == []
    assert heard == ["error"]

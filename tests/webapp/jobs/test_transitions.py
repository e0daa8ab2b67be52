"""A job's states, what each reason says, and how often a job is tried again."""

from itertools import product

import pytest

from runners.shared.reasons import ERROR, FAILED, STOPPED, Reason
from tests.webapp.conftest import EXIT_OK, STARTED, batch_of, claim, make_job, new_attempt
from tests.webapp.jobs.gangs import end as end_part
from tests.webapp.jobs.gangs import make_gang, make_hosts, members
from tests.webapp.jobs.gangs import start as start_together
from tests.webapp.jobs.undone import undone
from webapp.agents.dispatch import GRACE_BEATS, end_unknown_attempts
from webapp.agents.ingest import events_accept
from webapp.audit.models import Event
from webapp.core.problems import InvalidProblem
from webapp.jobs import transitions
from webapp.jobs.allocation import allocate_pool
from webapp.jobs.models import FINAL_STATES, Allocation, Attempt, AttemptEvent, Job, JobState
from webapp.jobs.reason_words import WORDS, words_for
from webapp.jobs.services import job_clone, job_stop, job_submit
from webapp.jobs.transitions import ALLOWED, RETRYABLE, final_state, sources_of, transition
from webapp.jobs.waiting import waiting_sentence

pytestmark = pytest.mark.django_db(databases="__all__")


def test_every_state_has_a_row_final_ones_lead_nowhere_and_all_but_draft_are_reached():
    assert set(ALLOWED) == set(JobState)
    assert [state for state in FINAL_STATES if ALLOWED[state]] == []
    assert [state for state in JobState if not sources_of(state)] == [JobState.DRAFT]


def test_a_job_moves_exactly_where_the_table_says(draft):
    wrong = []
    for source, target in product(JobState, JobState):
        Job.objects.filter(pk=draft.pk).update(state=source)
        moved = transition(draft, target, actor="alice")
        found = (moved, Job.objects.get(pk=draft.pk).state)
        may = target in ALLOWED[source]
        if found != (may, target if may else source):
            wrong.append((source, target, found))
    assert not wrong, wrong


def test_a_transition_writes_who_from_to_and_why(job):
    transition(job, JobState.ERROR, actor="alice", reason="internal", detail={"note": 1})
    event = Event.objects.filter(subject=job.pk).last()
    assert (event.actor, event.from_state, event.to_state) == ("alice", "preflight", "error")
    assert (event.reason, event.detail) == ("internal", {"note": 1})


def test_a_refused_transition_writes_no_event(draft):
    transition(draft, JobState.RUNNING, actor="alice")
    assert not Event.objects.filter(subject=draft.pk).exists()


def test_an_old_attempt_cannot_move_the_job_and_its_report_is_counted(job):
    old = job.current_attempt
    new_attempt(job)
    assert not transition(job, JobState.STARTING, actor="host:box", attempt=old)
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


# A job from submit to its end, through the services that the API calls.


def test_a_job_gets_its_free_host_at_once_starts_when_claimed_and_succeeds_with_its_events(job):
    assert job.state == "preflight"
    claim(job.current_attempt)
    job.refresh_from_db()
    assert job.state == "starting"
    attempt = Attempt.objects.get(pk=job.current_attempt_id)
    batch = batch_of(
        attempt, ("started", STARTED), ("phase", {"name": "Training"}), ("exited", EXIT_OK)
    )
    ack = events_accept(host=attempt.host, batch=batch)
    job.refresh_from_db()
    assert (ack.acked_seq, job.state, job.reason) == (3, "succeeded", "ok")
    assert AttemptEvent.objects.filter(attempt=attempt).count() == 3


# Every reason code speaks.


def test_every_code_has_a_sentence_of_its_own_and_a_next_step():
    said = [(reason, words_for(reason)) for reason in Reason]
    wrong = [
        (reason, words)
        for reason, words in said
        if not (words.sentence.endswith(".") and words.next_step.endswith("."))
    ]
    assert not wrong, wrong
    assert len({words.sentence for words in WORDS.values()}) == len(Reason)


def test_every_code_belongs_to_one_class_which_decides_the_final_state():
    for reasons, state in [
        (FAILED, JobState.FAILED),
        (STOPPED, JobState.STOPPED),
        (ERROR, JobState.ERROR),
        ({Reason.OK}, JobState.SUCCEEDED),
        ({Reason.QUEUE_TIMEOUT}, JobState.EXPIRED),
    ]:
        assert {final_state(reason) for reason in reasons} == {state}, (reasons, state)

    classes = [FAILED, STOPPED, ERROR, {Reason.OK, Reason.QUEUE_TIMEOUT}]
    assert sorted(reason for group in classes for reason in group) == sorted(Reason)


# A job that its host failed tries again, as often as it was told to, and no other does.


@pytest.fixture
def running(team, alice, host) -> Job:
    """A running job that may be tried twice again."""
    job = job_submit(job=make_job(team, alice, host, max_retries=2), by="alice")
    return start(job)


def start(job: Job) -> Job:
    attempt = Attempt.objects.get(pk=Job.objects.get(pk=job.pk).current_attempt_id)
    claim(attempt)
    events_accept(host=attempt.host, batch=batch_of(attempt, ("started", STARTED)))
    return Job.objects.get(pk=job.pk)


def end(job: Job, reason: Reason) -> Job:
    """Have the host report that the job's attempt ended so."""
    attempt = job.current_attempt
    record = {**EXIT_OK, "exit_code": 1, "reason": reason}
    events_accept(host=attempt.host, batch=batch_of(attempt, ("exited", record), first=2))
    return Job.objects.get(pk=job.pk)


def test_only_a_job_that_its_host_failed_is_queued_again(running):
    assert not {Reason.OOM_GPU, Reason.OOM_HOST} & RETRYABLE
    wrong = []
    for reason in sorted(set(Reason) - {Reason.QUEUE_TIMEOUT}):
        with undone(reason):
            job = end(running, reason)
            found = (job.state, job.num_retries, job.reason, job.ended_at is not None)
        if reason in RETRYABLE:
            is_right = found == ("queued", 1, reason, False)
        else:
            is_right = found[1::2] == (0, True)
        if not is_right:
            wrong.append((reason, found))
    assert not wrong, wrong


def test_the_failed_attempt_lets_go_and_the_next_try_is_a_new_one_on_record(running):
    first = running.current_attempt
    job = end(running, Reason.HOST_REBOOTED)
    first.refresh_from_db()
    assert first.exit_record["reason"] == "host_rebooted"
    assert first.ended_at is not None
    assert not Allocation.objects.filter(released_at=None).exists()
    event = Event.objects.filter(subject=job.pk, to_state="queued").last()
    assert (event.reason, event.detail["retry"], event.detail["of"]) == ("host_rebooted", 1, 2)
    assert waiting_sentence(job).startswith("Retry 1 of 2. ")
    # a late word of the failed attempt changes nothing
    events_accept(host=first.host, batch=batch_of(first, ("started", STARTED), first=3))
    assert Job.objects.get(pk=running.pk).state == "queued"
    allocate_pool(running.pool)
    again = Job.objects.get(pk=running.pk)
    assert (again.state, again.current_attempt.number) == ("preflight", 2)
    assert again.current_attempt.fence != first.fence


def test_after_the_last_retry_the_job_ends(running):
    job = running
    for _ in range(2):
        end(job, Reason.HOST_REBOOTED)
        allocate_pool(job.pool)
        job = start(job)
    job = end(job, Reason.HOST_REBOOTED)
    assert (job.state, job.reason, job.num_retries) == ("error", "host_rebooted", 2)


def test_a_job_without_retries_ends_at_once(attempt):
    events_accept(host=attempt.host, batch=batch_of(attempt, ("started", STARTED)))
    assert end(attempt.job, Reason.HOST_REBOOTED).state == "error"


def test_an_attempt_that_its_host_no_longer_knows_counts_too(running):
    for _ in range(GRACE_BEATS + 1):
        end_unknown_attempts({running.host_id: []})
    job = Job.objects.get(pk=running.pk)
    assert (job.state, job.reason) == ("queued", "supervisor_lost")


def test_a_job_that_is_being_stopped_is_not_tried_again(running):
    job_stop(job=running, by="alice")
    assert end(Job.objects.get(pk=running.pk), Reason.HOST_REBOOTED).state == "error"


def test_a_job_between_two_tries_can_be_stopped(running):
    job = end(running, Reason.HOST_REBOOTED)
    assert job_stop(job=job, by="alice").state == "stopped"


def test_a_copy_may_try_as_often_as_its_original(running, bob):
    assert job_clone(job=running, owner=bob).max_retries == 2


def test_a_number_of_retries_out_of_bounds_is_refused(team, alice, host):
    for retries in [-1, 6]:
        with pytest.raises(InvalidProblem, match=f"retries is {retries}; it can be 0 to 5"):
            make_job(team, alice, host, max_retries=retries)


@pytest.fixture
def together(team, alice) -> Job:
    """A running job over two hosts that may be tried once again."""
    job = make_gang(team, alice, make_hosts(team, 2, first=7), retries=1)
    start_together(job)
    return job


def test_a_job_on_several_hosts_is_queued_again_once_all_its_parts_have_ended(together):
    first, second = members(together)

    end_part(second, "killed_externally")
    together.refresh_from_db()
    assert (together.state, together.num_retries) == ("stopping", 0)
    end_part(first, "peer_ended")

    together.refresh_from_db()
    assert (together.num_retries, together.reason) == (1, "killed_externally")
    allocate_pool(together.pool)
    again = members(together)
    assert [each.number for each in again] == [2, 2]
    assert [each.host for each in again] == [first.host, second.host]


def test_a_job_on_several_hosts_that_a_person_stops_is_not_tried_again(together):
    job_stop(job=together, by="alice")
    for member in members(together):
        end_part(member, "rank_lost")
    together.refresh_from_db()
    assert (together.state, together.num_retries) == ("stopped", 0)

"""The preflight on the job page: every check, and what to do about those that failed."""

import pytest

from tests.webapp.conftest import claim, client_of
from tests.webapp.jobs.test_host_preflight import FIT, UNFIT, refuse, try_again

pytestmark = pytest.mark.django_db(databases="__all__")


def page(user, job, tab: str = "") -> str:
    return client_of(user).get(f"/jobs/{job.pk}/{tab}").content.decode()


def test_a_job_in_preflight_shows_the_first_look(job, alice):
    text = page(alice, job)

    assert "By its last heartbeat Box passes. The host now runs its own checks" in text
    assert "50.0 GiB of disk are free" in text


def test_a_job_that_was_given_back_shows_check_by_check_what_the_host_found(job, alice):
    refuse(job)

    text = page(alice, job)

    assert "Try 1 of 3 failed; the next attempt is in half a minute." in text
    assert text.index(UNFIT.sentence) < text.index(UNFIT.remedy) < text.index(FIT.sentence)


def test_a_job_that_ended_for_it_keeps_the_last_look(job, alice):
    for _ in range(2):
        refuse(job)
        try_again(job)
    refuse(job)

    assert "3 tries failed, so the job ended." in page(alice, job)


def test_the_events_keep_the_checks_of_every_try(job, alice):
    refuse(job)

    text = page(alice, job, "events/")

    assert "1 of 2 checks failed" in text
    assert UNFIT.remedy in text


@pytest.mark.parametrize("remedy", ["", "Plan with the other config.json."])
def test_passed_checks_are_unfolded_where_one_has_advice(job, alice, remedy):
    own = {"sentence": "The files hold more.", "remedy": remedy}
    claim(job.current_attempt, checks=(FIT.model_copy(update=own),))

    text = page(alice, job, "events/")
    fold = text[: text.index(own["sentence"])].rpartition("<details")[2]

    assert ("open" in fold.partition(">")[0]) == bool(remedy)
    assert remedy in text


def test_a_running_job_shows_no_preflight_on_its_overview(attempt, alice):
    assert "preflight-title" not in page(alice, attempt.job)


def test_what_a_host_says_is_text(job, alice):
    evil = UNFIT.model_copy(update={"sentence": "<script>alert(1)</script>"})
    refuse(job, checks=(evil,))

    assert "<script>alert(1)" not in page(alice, job)

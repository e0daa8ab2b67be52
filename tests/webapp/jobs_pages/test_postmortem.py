"""The post-mortem page: why a job failed, and the ways on from there."""

import pytest

from tests.runners.test_classification import MAIN
from tests.webapp.conftest import claim, client_of
from tests.webapp.jobs.test_memory_terms import tell
from webapp.jobs.models import Attempt, Job
from webapp.jobs.services import job_stop
from webapp.plans.launching import plan_launch
from webapp.plans.models import Plan
from webapp.plans.planning import plan_compute
from webapp.wizard.drafts import draft_begin

pytestmark = pytest.mark.django_db(databases="__all__")

MIB = 2**20
HELD = {"held_weights_bytes": 48.0 * MIB, "held_runtime_overhead_bytes": 350.0 * MIB}


@pytest.fixture
def launched(team, alice, host) -> Job:
    """A demo training that was planned and launched, and that its host claimed."""
    plan = draft_begin(team=team, owner=alice, preset="demo", model=None)
    plan_compute(plan)
    job = plan_launch(plan=plan, by=alice)
    claim(job.current_attempt)
    return job


@pytest.fixture
def starved(launched) -> Job:
    """The same, refused an allocation at three times its predicted peak."""
    attempt = Attempt.objects.get(pk=launched.current_attempt_id)
    peak = 3.0 * launched.estimate["memory"]["per_device_peak_bytes"]
    tell(attempt, "job", HELD)
    tell(attempt, "host", {"rss_bytes": peak / 2}, {"rss_bytes": peak})
    conditions = {"memory_available_bytes": 40 * MIB, "xids": ["Xid 79 on PCI: fallen"]}
    attempt.exit_record = {
        "exit_code": 1,
        "last_lines": ["Training", MAIN["torch elsewhere"].replace("1981808640", "1048576")],
        "conditions": conditions,
    }
    attempt.save()
    Job.objects.filter(pk=launched.pk).update(state="failed", reason="oom_host")
    return Job.objects.get(pk=launched.pk)


def page(user, job, tab: str = "post-mortem/") -> str:
    text = client_of(user).get(f"/jobs/{job.pk}/{tab}").content.decode()
    return text.replace("\N{NO-BREAK SPACE}", " ")


def test_the_page_says_what_happened_and_which_term_grew(starved, alice):
    text = page(alice, starved)

    assert "The host ran out of main memory" in text
    assert "Exit code 1: an error that the program did not handle." in text
    assert "Activations measured" in text


def test_the_page_shows_last_words_allocator_and_host(starved, alice):
    text = page(alice, starved)

    assert "DefaultCPUAllocator: not enough memory" in text
    assert "1.00 MiB" in text  # what it was refused
    assert "40.0 MiB" in text  # what was free then
    assert "Xid 79 on PCI: fallen" in text


def test_the_chart_is_drawn_without_javascript_too(starved, alice):
    text = page(alice, starved)

    assert 'class="layer term-activations"' in text
    assert 'class="capacity"' in text
    assert 'id="figure-memory-timeline-0"' in text


def test_the_tab_is_there_only_for_what_failed(starved, launched, alice, job):
    link = "post-mortem/"

    assert f"/jobs/{starved.pk}/{link}" in page(alice, starved, "")
    assert f"/jobs/{job.pk}/{link}" not in page(alice, job, "")
    assert "Nothing to explain" in page(alice, job)


def test_a_job_that_never_ran_has_a_page_too(job, alice):
    Job.objects.filter(pk=job.pk).update(
        state="error", reason="preflight_failed", host=None, current_attempt=None
    )

    assert "did not meet what the job needs" in page(alice, job)


def test_a_job_that_reached_its_limit_says_which(attempt, alice):
    Job.objects.filter(pk=attempt.job_id).update(
        state="failed", reason="max_duration", max_duration_seconds=3600
    )

    assert "1 h was the longest that it was allowed" in page(alice, attempt.job)


def test_the_changes_that_would_have_fitted_are_proven(starved, alice):
    text = page(alice, starved, "post-mortem/changes/")

    assert "fits, " in text
    assert "Plan this" in text
    assert "no limit on" not in text.lower()


def test_the_changes_come_without_javascript_too(starved, alice):
    assert "fits, " in page(alice, starved, "post-mortem/?changes=1")


def test_a_job_that_did_not_fail_has_no_changes(job, alice):
    assert "found no smaller change" in page(alice, job, "post-mortem/changes/")


def test_planning_again_keeps_to_what_was_measured(starved, bob):
    answer = client_of(bob).post(f"/jobs/{starved.pk}/replan/", {"how": "memory"})
    plan = Plan.objects.exclude(pk=starved.plan_id).get()
    limit = plan.request["constraints"]["per_device_peak_bytes"]["max"]

    assert answer.headers["Location"] == f"/plans/{plan.pk}/"
    assert (plan.owner, limit) == (
        bob,
        pytest.approx(plan.draft["hardware"]["memory_limit_gib"] * 2**30),
    )
    best = plan.answer["plans"][0]["memory"]["per_device_peak_bytes"]
    assert best <= limit


def test_a_change_is_planned_by_one_press(starved, alice):
    client = client_of(alice)
    changes = client.get(f"/jobs/{starved.pk}/post-mortem/changes/").context["changes"]
    at = next(at for at, each in enumerate(changes) if "workload" in each.changes)

    client.post(f"/jobs/{starved.pk}/replan/", {"how": "memory", "change": str(at)})

    draft = Plan.objects.exclude(pk=starved.plan_id).get().draft
    wanted = changes[at].changes["workload"]["sequence_length"]
    assert draft["workload"]["pretrain"]["sequence_length"] == wanted


def test_a_clone_with_changes_opens_the_wizard_on_a_copy(starved, alice):
    answer = client_of(alice).post(f"/jobs/{starved.pk}/replan/", {"how": "edit"})
    copy = Plan.objects.exclude(pk=starved.plan_id).get()

    assert answer.headers["Location"] == f"/plans/{copy.pk}/edit/workload/"
    assert copy.draft["workload"] == starved.plan.draft["workload"]
    assert "memory_limit_gib" not in copy.draft["hardware"]


def test_a_job_without_a_plan_is_not_planned_again(attempt, alice):
    job_stop(job=attempt.job, by="alice")

    client_of(alice).post(f"/jobs/{attempt.job_id}/replan/", {"how": "memory"})

    assert not Plan.objects.exists()


def test_a_viewer_sees_no_buttons(starved, vera):
    assert "/replan/" not in page(vera, starved)


def test_lines_of_a_job_are_text(starved, alice):
    record = starved.current_attempt.exit_record | {"last_lines": ["<script>alert(1)</script>"]}
    Attempt.objects.filter(pk=starved.current_attempt_id).update(exit_record=record)

    assert "<script>alert(1)" not in page(alice, starved)

"""The first page: what needs a person, what runs, how good the predictions are."""

from datetime import timedelta

import pytest

from tests.webapp.conftest import client_of
from webapp.core.clock import now
from webapp.home.attention import attention_for
from webapp.home.views import accuracy_for
from webapp.jobs.models import Job, JobState, Measurement

pytestmark = pytest.mark.django_db


def home(user) -> str:
    response = client_of(user).get("/")
    assert response.status_code == 200
    return response.content.decode()


def test_a_fresh_installation_offers_the_demo_in_one_press(alice):
    html = home(alice)

    assert html.count("Watch the two-minute demo") == 1
    assert "/plans/new/?preset=demo" in html


def test_a_waiting_job_is_shown(alice, job):
    assert f"/jobs/{job.pk}/" in home(alice)


def test_another_teams_job_is_not_shown(charlie, job):
    assert job.name not in home(charlie)
    assert "Watch the two-minute demo" in home(charlie)


def fail(job: Job, **changes) -> None:
    fields = {"state": JobState.FAILED, "reason": "oom_host", "ended_at": now(), **changes}
    Job.objects.filter(pk=job.pk).update(**fields)


def test_a_failed_job_comes_first_with_its_reason(alice, job):
    fail(job)

    found = attention_for(alice)

    assert [item.tone for item in found] == ["bad"]
    assert "ran out of main memory" in found[0].text
    assert "One thing needs you" in home(alice)


def test_an_old_failure_needs_nobody(alice, job):
    fail(job, ended_at=now() - timedelta(days=5))

    assert attention_for(alice) == []


def test_a_silent_host_needs_somebody(alice, host):
    host.last_seen_at = now() - timedelta(minutes=5)
    host.save()

    found = attention_for(alice)

    assert found[0].title == f"{host.name} has been silent for 5 min"
    assert found[0].url == f"/hosts/{host.slug}/"


def test_a_job_that_waits_too_long_needs_somebody(alice, job):
    waited = now() - timedelta(minutes=20)
    Job.objects.filter(pk=job.pk).update(state=JobState.QUEUED, queued_at=waited)

    assert "has waited for 20 min" in attention_for(alice)[0].title


def test_nothing_of_another_team_needs_me(charlie, job, host):
    fail(job)

    assert attention_for(charlie) == []


def measure(job: Job, metric: str, ratio: float, **changes) -> Measurement:
    return Measurement.objects.create(
        job=job,
        attempt=job.current_attempt,
        host=job.host,
        metric=metric,
        unit="bytes",
        predicted=100,
        measured=100 * ratio,
        ratio=ratio,
        measured_at=now(),
        **changes,
    )


def test_the_accuracy_is_the_median_error_of_what_was_measured(alice, job):
    measure(job, "peak_memory_bytes", 1.1)
    measure(job, "tokens_per_second", 0.7)
    measure(job, "step_seconds", 1.2)

    found = accuracy_for(alice)

    assert found.error == pytest.approx(0.2)
    assert (found.num_figures, found.num_jobs) == (3, 1)
    assert dict(found.by_kind)["memory"] == pytest.approx(0.1)


def test_excluded_measurements_do_not_count(alice, job):
    measure(job, "tokens_per_second", 0.5, is_excluded=True)

    assert accuracy_for(alice) is None


def test_another_teams_measurements_do_not_count(charlie, job):
    measure(job, "tokens_per_second", 0.5)

    assert accuracy_for(charlie) is None


def test_before_the_first_measurement_the_page_says_so(alice, job):
    assert "Nothing has been measured yet" in home(alice)


def test_home_asks_the_database_no_more_than_a_bound(alice, job, django_assert_max_num_queries):
    client = client_of(alice)

    with django_assert_max_num_queries(17):
        client.get("/")


def found(user, query: str) -> str:
    return client_of(user).get("/search/", {"q": query}).content.decode()


def test_search_finds_a_job_a_host_a_model_and_a_technique(alice, job):
    assert f"/jobs/{job.pk}/" in found(alice, "demo")
    assert f"/hosts/{job.host.slug}/" in found(alice, job.host.name.lower())
    assert "/models/meta-llama/Llama-3.1-8B/" in found(alice, "llama 3.1 8b")
    assert "/techniques/lora/" in found(alice, "lora")


def test_search_finds_nothing_of_another_team(charlie, job):
    assert f"/jobs/{job.pk}/" not in found(charlie, "demo")


def test_a_search_without_a_result_says_where_it_looked(alice):
    assert "No plan, job, host, model or technique has" in found(alice, "zzzz")


def test_a_search_for_one_letter_asks_for_more(alice):
    assert "at least two letters" in found(alice, "l")


def test_a_hostile_search_is_escaped(alice):
    assert "<script>" not in found(alice, "<script>alert(1)</script>").split("</head>")[1]


def test_the_running_jobs_come_back_alone_when_htmx_asks(alice, job):
    response = client_of(alice).get("/", headers={"HX-Request": "true"})

    assert (
        response.content.decode().lstrip().startswith('<section class="card flush" id="jobs-now"')
    )
    assert "HX-Request" in response["Vary"]

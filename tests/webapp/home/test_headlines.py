"""The first page's one sentence, what needs a person, how good predictions were, the search."""

from datetime import timedelta

import pytest

from tests.webapp.conftest import client_of, enrol, make_job
from webapp.core.clock import now
from webapp.home.attention import FAILED_FOR, MOST, QUEUED_TOO_LONG, attention_for
from webapp.home.views import WINDOW_DAYS, accuracy_for, headline
from webapp.hosts.models import Host
from webapp.jobs.lookup import JobCounts
from webapp.jobs.models import Attempt, Job, Measurement
from webapp.modelhub.models import TeamModel
from webapp.plans.models import Plan

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize(
    ("needs", "runs", "words"),
    [
        (0, 0, "All is well; nothing is running"),
        (0, 1, "All is well; one job is running"),
        (0, 8, "All is well; eight jobs are running"),
        (1, 0, "One thing needs you; nothing is running"),
        (2, 1, "Two things need you; one job is running"),
        (6, 3, "Six things need you; three jobs are running"),
        (9, 12, "9 things need you; 12 jobs are running"),
    ],
)
def test_the_headline_counts_in_words(needs, runs, words):
    assert headline(needs, JobCounts(running=runs)) == words


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        (JobCounts(running=1, queued=1), "one job is running, one is queued"),
        (JobCounts(running=2, queued=3), "two jobs are running, three are queued"),
        (JobCounts(queued=2), "nothing is running, two are queued"),
        (JobCounts(starting=1), "nothing is running, one is starting"),
        (
            JobCounts(running=12, starting=1, stopping=2, queued=9),
            "12 jobs are running, one is starting, two are stopping and 9 are queued",
        ),
    ],
)
def test_a_job_that_waits_is_not_counted_as_running(counts, words):
    assert headline(0, counts) == f"All is well; {words}"


def test_home_queue_and_hosts_count_the_same_jobs(alice, team, host):
    states = ["running"] * 9 + ["queued"] * 2 + ["preflight", "stopping", "succeeded", "draft"]
    for number, name in enumerate(states):
        where = {} if name == "queued" else {"host": host}
        state(make_job(team, alice, host, name=f"job {number}"), name, **where)
    deleted = make_job(team, alice, host, name="deleted")
    state(deleted, "running", host=host, deleted_at=now())
    client = client_of(alice)
    expected = JobCounts(running=9, starting=1, stopping=1, queued=2)

    assert client.get("/").context["counts"] == expected
    assert "9 jobs are running, one is starting" in client.get("/").context["headline"]
    listed = client.get("/hosts/").context
    assert listed["counts"] == expected
    assert [row.counts for row in listed["rows"]] == [expected]
    assert client.get(f"/hosts/{host.slug}/").context["counts"] == expected
    (section,) = client.get("/queue/").context["sections"]
    assert section.counts == expected
    assert len(section.rows) == expected.queued


def state(job: Job, name: str, **fields) -> Job:
    Job.objects.filter(pk=job.pk).update(state=name, **fields)
    return job


@pytest.mark.parametrize(
    ("name", "words"), [("failed", "failed"), ("error", "ended with an error")]
)
def test_a_failure_says_how_it_ended(alice, draft, name, words):
    state(draft, name, ended_at=now(), reason="oom_host")

    (one,) = attention_for(alice)

    assert one.title == f"Train the demo model {words}"
    assert "main memory" in one.text


@pytest.mark.parametrize(("days", "count"), [(-0.01, 1), (0.01, 0)])
def test_a_failure_needs_somebody_for_days_only(alice, draft, days, count):
    state(draft, "failed", ended_at=now() - FAILED_FOR - timedelta(days=days))

    assert len(attention_for(alice)) == count


@pytest.mark.parametrize(("minutes", "count"), [(-1, 0), (1, 1)])
def test_waiting_needs_somebody_after_a_while(alice, draft, minutes, count):
    queued = now() - QUEUED_TOO_LONG - timedelta(minutes=minutes)
    state(draft, "queued", queued_at=queued)

    assert len(attention_for(alice)) == count


@pytest.mark.parametrize(
    ("seconds", "count"), [(5, 0), (40, 0), (85, 0), (100, 1), (86_400 * 3, 1)]
)
def test_a_host_needs_somebody_once_it_is_unreachable(alice, host, seconds, count):
    Host.objects.update(last_seen_at=now() - timedelta(seconds=seconds))

    assert len(attention_for(alice)) == count


@pytest.mark.parametrize("name", ["draining", "maintenance", "retired"])
def test_a_host_out_of_use_may_be_silent(alice, host, name):
    Host.objects.update(last_seen_at=now() - timedelta(days=1), state=name)

    assert attention_for(alice) == []


def test_what_needs_a_person_is_no_endless_list(alice, team, host):
    for number in range(MOST + 4):
        state(make_job(team, alice, host, name=f"job {number}"), "failed", ended_at=now())

    assert len(attention_for(alice)) == MOST


def test_every_address_of_what_needs_a_person_answers(alice, draft, host):
    state(draft, "failed", ended_at=now())
    Host.objects.update(last_seen_at=now() - timedelta(days=1))
    client = client_of(alice)

    assert {client.get(one.url).status_code for one in attention_for(alice)} == {200}


def measure(job: Job, metric: str, ratio: float, days: float = 0.0, **fields) -> None:
    attempt = Attempt.objects.create(
        job=job, number=job.attempts.count() + 1, host=job.shown_host, fence="f"
    )
    Measurement.objects.create(
        job=job,
        attempt=attempt,
        host=job.shown_host,
        metric=metric,
        unit="",
        predicted=1.0,
        measured=ratio,
        ratio=ratio,
        measured_at=now() - timedelta(days=days),
        **fields,
    )


@pytest.mark.parametrize(
    ("ratios", "error"),
    [([1.0], 0.0), ([1.1], 0.1), ([0.9], 0.1), ([1.1, 1.3], 0.2), ([0.5, 1.0, 2.0], 0.5)],
)
def test_too_much_and_too_little_count_alike(alice, draft, ratios, error):
    for ratio in ratios:
        measure(draft, "tokens_per_second", ratio)

    assert accuracy_for(alice).error == pytest.approx(error)


def test_the_kinds_of_figures_are_told_apart(alice, draft):
    measure(draft, "peak_memory_bytes", 1.02)
    measure(draft, "step_seconds", 1.4)

    assert dict(accuracy_for(alice).by_kind) == pytest.approx({"memory": 0.02, "time": 0.4})


def test_what_was_measured_long_ago_does_not_count(alice, draft):
    measure(draft, "tokens_per_second", 9.0, days=WINDOW_DAYS + 1)

    assert accuracy_for(alice) is None


def test_a_deleted_jobs_figures_do_not_count(alice, draft):
    measure(draft, "tokens_per_second", 9.0)
    Job.objects.update(deleted_at=now())

    assert accuracy_for(alice) is None


def test_figures_and_jobs_are_counted_apart(alice, draft):
    measure(draft, "tokens_per_second", 1.0)
    measure(draft, "peak_memory_bytes", 1.0)

    assert accuracy_for(alice)[1:3] == (2, 1)


def found(user, query: str) -> dict:
    groups = client_of(user).get("/search/", {"q": query}).context["groups"]
    return {name: [words for _, words in rows] for name, _, rows in groups}


def test_the_search_takes_every_word(alice):
    assert all("70b" in one.lower() for one in found(alice, "llama 70b")["Catalog"])


@pytest.mark.parametrize("query", ["%", "_", "'; --", "x" * 5000, "(?:", "\\"])
def test_a_strange_search_is_answered(alice, query):
    assert client_of(alice).get("/search/", {"q": query}).status_code == 200


def test_every_result_of_a_search_leads_somewhere(alice, team, host, draft):
    Plan.objects.create(team=team, owner=alice, name="a demo plan", draft={})
    TeamModel.objects.create(team=team, name="a demo model", config={})
    client = client_of(alice)
    page = client.get("/search/", {"q": "demo"})

    assert {"Plans", "Jobs", "Models of your team"} <= {
        name for name, _, _ in page.context["groups"]
    }
    assert page.content.decode().count("<a ") > 10


def test_the_search_finds_nothing_of_another_team(charlie, team, alice, host):
    enrol(team, name="Secret box")
    TeamModel.objects.create(team=team, name="secret model", config={})
    Plan.objects.create(team=team, owner=alice, name="secret plan", draft={})
    make_job(team, alice, host, name="secret job")

    assert found(charlie, "secret") == {}


def test_a_search_shows_few_of_many(alice, team):
    for number in range(30):
        TeamModel.objects.create(team=team, name=f"many {number}", config={})

    assert len(found(alice, "many")["Models of your team"]) == 8

"""The first page: numbers, what needs somebody, search, and no dead end."""

import re
from datetime import timedelta
from urllib.parse import quote

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from tests.webapp.conftest import client_of, enrol, make_beat, make_job, new_attempt
from webapp.core.clock import now
from webapp.core.display import NBSP, TIMES
from webapp.core.templatetags.components import NAVIGATION
from webapp.deployments.models import Deployment
from webapp.hosts.models import Host
from webapp.hosts.use import HostUse
from webapp.jobs.accuracy import WINDOW_DAYS, accuracy_for
from webapp.jobs.busy_hosts import busy_words
from webapp.jobs.lookup import JobCounts
from webapp.jobs.models import Attempt, Job, JobState, Measurement
from webapp.modelhub.models import TeamModel
from webapp.pages.home import (
    FAILED_FOR,
    MOST_JOBS,
    OF_PALETTE,
    QUEUED_TOO_LONG,
    attention_for,
    headline,
)
from webapp.plans.models import Plan
from webapp.settings import BASE_DIR
from webapp.wizard.drafts import draft_begin

# The first page: what needs a person, what runs, how good the predictions are.


pytestmark = pytest.mark.django_db


def home(user) -> str:
    response = client_of(user).get("/")
    assert response.status_code == 200
    return response.content.decode()


def test_a_fresh_installation_offers_the_demo_in_one_press(alice):
    html = home(alice)
    assert html.count("Watch the two-minute demo") == 1
    assert "/plans/new/?preset=demo" in html


def test_a_running_job_is_shown_alone_when_htmx_asks(alice, job):
    assert f"/jobs/{job.pk}/" in home(alice)
    assert "Nothing has been measured yet" in home(alice)
    response = client_of(alice).get("/", headers={"HX-Request": "true"})
    assert (
        response.content.decode().lstrip().startswith('<section class="card flush" id="jobs-now"')
    )
    assert "HX-Request" in response["Vary"]


def test_nothing_of_another_team_is_shown_found_or_counted(charlie, job, host):
    assert job.name not in home(charlie)
    assert "Watch the two-minute demo" in home(charlie)
    fail(job)
    assert attention_for(charlie) == []
    measure(job, "tokens_per_second", 0.5)
    assert accuracy_for(charlie) is None
    assert f"/jobs/{job.pk}/" not in found(charlie, "demo")


def fail(job: Job, **changes) -> None:
    fields = {"state": JobState.FAILED, "reason": "oom_host", "ended_at": now(), **changes}
    Job.objects.filter(pk=job.pk).update(**fields)


def test_a_failed_job_comes_first_with_its_reason_until_it_is_old(alice, job):
    fail(job, ended_at=now() - timedelta(days=5))
    assert attention_for(alice) == []
    fail(job)
    found = attention_for(alice)
    assert [item.tone for item in found] == ["bad"]
    assert "ran out of main memory" in found[0].text
    assert "One thing needs you" in home(alice)


def test_a_silent_host_needs_somebody(alice, host):
    host.last_seen_at = now() - timedelta(minutes=5)
    host.save()
    found = attention_for(alice)
    assert found[0].title == f"{host.name} has been unreachable for 5 min"
    assert found[0].url == f"/hosts/{host.slug}/"


def test_a_host_that_other_programs_keep_busy_is_said_on_home_and_before_a_launch(alice, host):
    plan = draft_begin(team=host.team, owner=alice, preset="demo")
    effect = "expect a run that starts now to be several times slower"
    running = {"attempt_id": "01H" + "A" * 23, "fence": "01H" + "B" * 23, "phase": "running"}
    for load, attempts, at_home, at_review in [
        (0.1, (), False, False),
        (0.9, (), True, True),
        (0.9, ({**running, "last_seq": 1, "acked_seq": 1},), False, True),  # of a job: no problem
    ]:
        beat = make_beat(cpu_utilization=load, attempts=attempts).model_dump(mode="json")
        Host.objects.filter(pk=host.pk).update(last_beat=beat, last_seen_at=now())
        words = [item.title for item in attention_for(alice)]
        said = f"90\xa0% of the processor of {host.name} is in use now"
        assert words == ([said] if at_home else []), (load, attempts)
        review = client_of(alice).get(f"/plans/{plan.pk}/edit/review/").content.decode()
        assert (said in review, effect in review) == (at_review, at_review), (load, attempts)
    Host.objects.update(last_seen_at=now() - timedelta(minutes=5))  # an old figure says nothing
    assert not [item for item in attention_for(alice) if "processor" in item.title]


def test_another_program_on_a_gpu_is_busy_and_a_working_processor_beside_gpus_is_not(host):
    gpu = {"uuid": "GPU-1", "memory_used_bytes": 2**30, "utilization": 0.5}
    host.facts = {**host.facts, "gpus": [{"memory_bytes": 4 * 2**30}]}
    for foreign, load, words in [
        ((), 0.5, ""),
        ((), 0.9, f"90\xa0% of the processor of {host.name} is in use now"),
        ((41,), 0.1, f"Other programs use 1 GPU of {host.name} now"),
    ]:
        beat = make_beat(cpu_utilization=load, gpus=({**gpu, "foreign_pids": foreign},))
        host.last_beat, host.last_seen_at = beat.model_dump(mode="json"), now()
        use = HostUse.of(host)
        assert busy_words(host, use) == words, (foreign, load)
        assert (use.gpus, use.gpu_memory) == (0.5, 0.25)


def test_a_job_that_waits_too_long_needs_somebody(alice, job):
    waited = now() - timedelta(minutes=20)
    Job.objects.filter(pk=job.pk).update(state=JobState.QUEUED, queued_at=waited)
    assert "has waited for 20 min" in attention_for(alice)[0].title


def measure(job: Job, metric: str, ratio: float, **changes) -> Measurement:
    return Measurement.objects.create(
        job=job, attempt=job.current_attempt, host=job.host, metric=metric, unit="bytes",
        predicted=100, measured=100 * ratio, ratio=ratio, measured_at=now(), **changes,
    )  # fmt: skip


def test_the_accuracy_is_the_median_error_of_what_counts(alice, job):
    measure(job, "ttft_seconds", 0.5, is_excluded=True)
    assert accuracy_for(alice) is None
    measure(job, "peak_memory_bytes", 1.1)
    measure(job, "tokens_per_second", 0.7)
    measure(job, "step_seconds", 1.2)
    found = accuracy_for(alice)
    assert found.error == pytest.approx(0.2)
    assert (found.num_figures, found.num_jobs) == (3, 1)
    assert dict(found.by_kind)["memory"] == pytest.approx(0.1)


def test_home_asks_the_database_no_more_than_a_bound(alice, job, django_assert_max_num_queries):
    client = client_of(alice)
    with django_assert_max_num_queries(23):  # with what ended, deployments and the user's drafts
        client.get("/")


def test_home_shows_what_ended_the_hosts_use_and_the_drafts_to_resume(alice, bob, job, host):
    ended = make_job(host.team, alice, host, name="Yesterday's run")
    old = make_job(host.team, alice, host, name="Last week's run")
    for each, hours in ((ended, 3), (old, 200)):
        at = now() - timedelta(hours=hours)
        Job.objects.filter(pk=each.pk).update(state=JobState.SUCCEEDED, ended_at=at)
    ended.current_attempt = new_attempt(ended)
    measure(ended, "tokens_per_second", 0.5)
    beat = make_beat(cpu_utilization=0.25).model_dump(mode="json")
    Host.objects.filter(pk=host.pk).update(last_beat=beat, last_seen_at=now())
    for owner, name, is_touched in [
        (alice, "Mine", True),
        (alice, "Seen", False),
        (bob, "His", True),
        (alice, "", True),
    ]:
        draft = draft_begin(team=host.team, owner=owner, preset="serve", model="gpt2")
        draft.wizard["is_touched"] = is_touched
        draft.name = name
        draft.save()
    html = home(alice)
    assert "Ended since yesterday" in html
    assert "Yesterday&#x27;s run" in html
    assert "2\N{MULTIPLICATION SIGN} slower" in html
    assert "Last week" not in html.split("Ended since yesterday")[1]
    assert "processor 25\xa0%" in html
    drafts = html.split("Your drafts")[1].split("</section>")[0]
    assert (">Mine<" in drafts, ">Seen<" in drafts, ">His<" in drafts) == (True, False, False)
    assert ">Serve gpt2<" in drafts


def test_home_shows_the_deployments_the_last_used_first(alice, charlie, things):
    first = Deployment.objects.get(pk=things["<slug:deployment_id>"])
    Deployment.objects.create(
        team=first.team, owner=alice, name="busy", plan=first.plan,
        last_used_at=now() - timedelta(minutes=5),
    )  # fmt: skip
    shown = home(alice).split("<h2>Deployments</h2>")[1].split("</section>")[0]
    assert re.findall(r">(busy|small)</a>|(used 5 min ago|not used yet)|(Asleep)", shown) == [
        ("", "", "Asleep"), ("busy", "", ""), ("", "used 5 min ago", ""),
        ("", "", "Asleep"), ("small", "", ""), ("", "not used yet", ""),
    ]  # fmt: skip
    assert "<h2>Deployments</h2>" not in home(charlie)


def test_figures_that_do_not_count_are_counted_beside_the_error(alice, job):
    measure(job, "peak_memory_bytes", 1.1)
    for name in ("tokens_per_second", "decode_tokens_per_second"):
        measure(job, name, 0.1, is_excluded=True)
    assert accuracy_for(alice).left_out == [("speed", 2)]
    assert "Not counted, because something disturbed the run: 2 of speed." in home(alice)


def found(user, query: str) -> str:
    return client_of(user).get("/search/", {"q": query}).content.decode()


def test_search_finds_a_job_a_host_a_model_and_a_technique(alice, job):
    assert f"/jobs/{job.pk}/" in found(alice, "demo")
    assert f"/hosts/{job.host.slug}/" in found(alice, job.host.name.lower())
    assert "/models/meta-llama/Llama-3.1-8B/" in found(alice, "llama 3.1 8b")
    assert "/techniques/lora/" in found(alice, "lora")


@pytest.mark.django_db(databases="__all__")
def test_the_palette_offers_pages_plans_objects_and_docs(alice, job):
    def entries(query: str) -> dict[str, str]:
        answer = client_of(alice).get("/search/", {"q": query}, headers={"HX-Request": "true"})
        assert "<html" not in answer.content.decode()
        assert "HX-Request" in answer["Vary"]
        return {each.words: each.url for each in answer.context["found"]}

    model = "meta-llama/Llama-3.1-70B"
    for query, words, url in [
        ("queue", "Queue", "/queue/"),
        ("demo", "Run the demo", "/plans/new/?preset=demo"),
        ("demo", job.name, f"/jobs/{job.pk}/"),
        (
            "llama 3.1 70b",
            f"Serve {model}",
            f"/plans/new/?preset=serve&model={quote(model, safe='')}",
        ),
        (
            "plan llama 3.1 70b",
            f"Serve {model}",
            f"/plans/new/?preset=serve&model={quote(model, safe='')}",
        ),
        (
            "plan llama 3.1 70b on 4x a100 sxm4 80",
            f"Serve {model} on 4 {TIMES} NVIDIA A100 SXM4 80GB · 80.0{NBSP}GiB",
            f"/plans/new/?preset=serve&model={quote(model, safe='')}&hardware=4x+a100-sxm4-80gb",
        ),
    ]:
        assert entries(query).get(words) == url, (query, entries(query))
        assert client_of(alice).get(url, follow=True).status_code == 200, url
    assert any(url.startswith("/docs/slurm#") for url in entries("slurm").values())
    assert entries("zzzz") == {}
    for words, url in OF_PALETTE:
        assert client_of(alice).get(url, follow=True).status_code in {200, 403}, words
    page = home(alice)
    jumps = dict(re.findall(r'(\w): "(/[^"]*)"', (BASE_DIR / "static/js/app.js").read_text()))
    assert set(jumps.values()) == {url for url, _ in NAVIGATION}
    assert all(f"<kbd>{key}</kbd>" in page.split('id="keys"')[1] for key in jumps)


@pytest.mark.django_db(databases="__all__")
def test_the_palette_leaves_out_what_a_viewer_may_not_open(alice, vera):
    def urls(user, query: str) -> list[str]:
        answer = client_of(user).get("/search/", {"q": query}, headers={"HX-Request": "true"})
        return [each.url for each in answer.context["found"]]

    for query in ("plan", "add a host", "demo", "secrets", "tokens", "plan llama 3.1 70b"):
        shown = urls(vera, query)
        answers = {url: client_of(vera).get(url).status_code for url in shown}
        assert set(answers.values()) <= {200}, answers
        hidden = {*urls(alice, query)} - {*shown}
        assert {client_of(vera).get(url).status_code for url in hidden} <= {403}, hidden
    assert "/plans/new/" in urls(alice, "new plan")
    assert "/plans/new/" not in urls(vera, "new plan")


@pytest.mark.django_db
def test_of_words_after_plan_only_models_are_sought_again(alice):
    client = client_of(alice)

    def num_queries(query: str) -> int:
        with CaptureQueriesContext(connection) as found:
            client.get("/search/", {"q": query}, headers={"HX-Request": "true"})
        return len(found)

    num_queries("llama")  # what is read once
    assert num_queries("plan llama") == num_queries("llama") + 1  # the models of the teams


def test_a_search_takes_every_word_and_says_where_it_looked(alice):
    assert "No plan, job, host, model or technique has" in found(alice, "zzzz")
    assert "at least two letters" in found(alice, "l")
    assert "<script>" not in found(alice, "<script>alert(1)</script>").split("</head>")[1]
    assert all("70b" in one.lower() for one in groups_found(alice, "llama 70b")["Catalog"])
    for query in ["%", "_", "'; --", "x" * 5000, "(?:", "\\"]:
        assert client_of(alice).get("/search/", {"q": query}).status_code == 200, query


# The first page's one sentence, what needs a person, how good predictions were, the search.


def test_the_headline_counts_in_words_and_by_state():
    for needs, runs, words in [
        (0, 0, "No problems; nothing is running"),
        (0, 1, "No problems; one job is running"),
        (0, 8, "No problems; eight jobs are running"),
        (1, 0, "One thing needs you; nothing is running"),
        (2, 1, "Two things need you; one job is running"),
        (6, 3, "Six things need you; three jobs are running"),
        (9, 12, "9 things need you; 12 jobs are running"),
    ]:
        assert headline(needs, JobCounts(running=runs)) == words, needs
    for counts, words in [
        (JobCounts(running=1, queued=1), "one job is running, one is queued"),
        (JobCounts(running=2, queued=3), "two jobs are running, three are queued"),
        (JobCounts(queued=2), "nothing is running, two are queued"),
        (JobCounts(starting=1), "nothing is running, one is starting"),
        (
            JobCounts(running=12, starting=1, stopping=2, queued=9),
            "12 jobs are running, one is starting, two are stopping and 9 are queued",
        ),
    ]:
        assert headline(0, counts) == f"No problems; {words}", counts


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


def test_a_failure_needs_somebody_for_days_and_waiting_after_a_while(alice, draft):
    for name, words in [("failed", "failed"), ("error", "ended with an error")]:
        state(draft, name, ended_at=now(), reason="oom_host")
        (one,) = attention_for(alice)
        assert one.title == f"Train the demo model {words}", name
        assert "main memory" in one.text, name
    for days, count in [(-0.01, 1), (0.01, 0)]:
        state(draft, "failed", ended_at=now() - FAILED_FOR - timedelta(days=days))
        assert len(attention_for(alice)) == count, days
    for minutes, count in [(-1, 0), (1, 1)]:
        queued = now() - QUEUED_TOO_LONG - timedelta(minutes=minutes)
        state(draft, "queued", queued_at=queued)
        assert len(attention_for(alice)) == count, minutes


def test_a_host_needs_somebody_once_it_is_unreachable_unless_out_of_use(alice, host):
    for seconds, count in [(5, 0), (40, 0), (85, 0), (100, 1), (86_400 * 3, 1)]:
        Host.objects.update(last_seen_at=now() - timedelta(seconds=seconds))
        assert len(attention_for(alice)) == count, seconds
    for name in ["draining", "maintenance", "retired"]:
        Host.objects.update(last_seen_at=now() - timedelta(days=1), state=name)
        assert attention_for(alice) == [], name


def test_what_needs_a_person_is_no_endless_list(alice, team, host):
    for number in range(MOST_JOBS + 4):
        state(make_job(team, alice, host, name=f"job {number}"), "failed", ended_at=now())
    assert len(attention_for(alice)) == MOST_JOBS


def test_every_address_of_what_needs_a_person_answers(alice, draft, host):
    state(draft, "failed", ended_at=now())
    Host.objects.update(last_seen_at=now() - timedelta(days=1))
    client = client_of(alice)
    assert {client.get(one.url).status_code for one in attention_for(alice)} == {200}


def measure_before(job: Job, metric: str, ratio: float, days: float = 0.0, **fields) -> None:
    attempt = Attempt.objects.create(
        job=job, number=job.attempts.count() + 1, host=job.shown_host, fence="f"
    )
    Measurement.objects.create(
        job=job, attempt=attempt, host=job.shown_host, metric=metric, unit="", predicted=1.0,
        measured=ratio, ratio=ratio, measured_at=now() - timedelta(days=days), **fields,
    )  # fmt: skip


def test_too_much_and_too_little_count_alike(alice, draft):
    for ratios, error in (
        ([1.0], 0.0), ([1.1], 0.1), ([0.9], 0.1), ([1.1, 1.3], 0.2), ([0.5, 1.0, 2.0], 0.5),
    ):  # fmt: skip
        Measurement.objects.all().delete()
        for ratio in ratios:
            measure_before(draft, "tokens_per_second", ratio)
        assert accuracy_for(alice).error == pytest.approx(error), ratios


def test_the_kinds_of_figures_are_told_apart(alice, draft):
    measure_before(draft, "peak_memory_bytes", 1.02)
    measure_before(draft, "step_seconds", 1.4)
    assert dict(accuracy_for(alice).by_kind) == pytest.approx({"memory": 0.02, "time": 0.4})


def test_what_was_measured_long_ago_does_not_count_and_that_of_a_deleted_job_does(alice, draft):
    measure_before(draft, "tokens_per_second", 9.0, days=WINDOW_DAYS + 1)
    assert accuracy_for(alice) is None
    measure_before(draft, "tokens_per_second", 9.0)
    Job.objects.update(deleted_at=now())
    assert accuracy_for(alice).error == pytest.approx(8.0)  # as on the page of its host


def test_figures_and_jobs_are_counted_apart(alice, draft):
    measure_before(draft, "tokens_per_second", 1.0)
    measure_before(draft, "peak_memory_bytes", 1.0)
    assert accuracy_for(alice)[1:3] == (2, 1)


def groups_found(user, query: str) -> dict:
    groups = client_of(user).get("/search/", {"q": query}).context["groups"]
    return {name: [words for _, words in rows] for name, _, rows in groups}


def test_every_result_of_a_search_leads_somewhere(alice, team, host, draft):
    Plan.objects.create(team=team, owner=alice, name="a demo plan", draft={})
    TeamModel.objects.create(team=team, name="a demo model", config={})
    client = client_of(alice)
    page = client.get("/search/", {"q": "demo"})
    assert {"Plans", "Jobs", "Models of your team"} <= {
        name for name, _, _ in page.context["groups"]
    }
    assert page.content.decode().count("<a ") > 10


def test_a_result_says_what_it_is_and_a_full_group_where_the_others_are(alice, job):
    page = found(alice, "demo")
    assert "Train · demo · Box" in page
    assert "Preflight" in page
    page = found(alice, "chat")
    assert "parameters · reads" in page
    assert 'href="/models/?q=chat"' in page
    assert 'href="/docs/?q=chat"' in page


def test_the_search_finds_nothing_of_another_team(charlie, team, alice, host):
    enrol(team, name="Secret box")
    TeamModel.objects.create(team=team, name="secret model", config={})
    Plan.objects.create(team=team, owner=alice, name="secret plan", draft={})
    make_job(team, alice, host, name="secret job")
    assert groups_found(charlie, "secret") == {}


def test_a_search_finds_what_has_the_query_as_its_id(alice, charlie, job, host):
    for user, found in ((alice, {"Jobs": [job.name]}), (charlie, {})):
        assert groups_found(user, job.pk.lower()) == found
    assert groups_found(alice, host.pk) == {"Hosts": [host.name]}


def test_a_search_shows_few_of_many(alice, team):
    for number in range(30):
        TeamModel.objects.create(team=team, name=f"many {number}", config={})
    assert len(groups_found(alice, "many")["Models of your team"]) == 8


# No page sends somebody where their role ends: hosts are added by operators alone.


ADD = 'href="/hosts/add/"'
PAGES = ["/", "/queue/", "/hosts/", "/plans/new/?preset=serve", "/models/meta-llama/Llama-3.1-8B/"]


def texts(client, paths=PAGES):
    return {path: client.get(path, follow=True).content.decode() for path in paths}


def test_a_practitioner_is_shown_no_way_to_add_a_host(alice):
    found = texts(client_of(alice))
    assert [path for path, text in found.items() if ADD in text] == []
    assert "Ask an operator" in found["/models/meta-llama/Llama-3.1-8B/"]


def test_an_operator_is_shown_the_way(olga):
    found = texts(client_of(olga), ["/", "/queue/", "/hosts/"])
    assert [path for path, text in found.items() if ADD not in text] == []

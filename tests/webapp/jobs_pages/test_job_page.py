"""The page of one job through its life, live and in its preflight."""

import json
import re
from datetime import timedelta

import pytest
import time_machine

from runners.jobspec import HubModel, TrainSpec
from runners.shared.messages import PreflightCheck
from runners.shared.reasons import Reason
from tests.webapp.conftest import batch_of, claim, client_of
from tests.webapp.jobs.test_claims import FIT, UNFIT, refuse, try_again
from tests.webapp.jobs.undone import undone
from webapp.agents.ingest import events_accept
from webapp.audit.models import Event
from webapp.core.clock import now, now_ms
from webapp.core.display import THIN, clock
from webapp.hosts.models import HostModel
from webapp.jobs import preflight_checks
from webapp.jobs.gangs import devices_release
from webapp.jobs.models import Artefact, Job

pytestmark = pytest.mark.django_db(databases="__all__")
TABS = ["", "metrics/", "logs/", "events/", "config/", "artefacts/"]


def text_of(client, job, tab="", **headers):
    response = client.get(f"/jobs/{job.pk}/{tab}", headers=headers)
    assert response.status_code == 200
    return response.content.decode()


def plain(html):
    return " ".join(re.sub(r"<[^>]+>", " ", html).split())


@pytest.mark.parametrize(
    "stages", [("draft", "job", "attempt", "running", "finished"), ("failed",)]
)
def test_every_tab_answers_at_every_stage(request, as_alice, stages):
    for stage in stages:
        found = request.getfixturevalue(stage)
        for tab in TABS:
            assert text_of(as_alice, getattr(found, "job", found), tab), (stage, tab)


def test_a_running_job_says_how_far_it_is_and_what_is_left_as_its_own_stream_tells(
    as_alice, running
):
    page = text_of(as_alice, running)
    shown = plain(page)
    assert "33 %" in shown
    assert "40 of 120 steps" in shown
    assert "about 1 min left" in shown
    assert "starts within seconds" not in shown
    assert re.search(r"<title>33 % · Train the demo model", page)
    assert f'data-live-topics="job:{running.pk}"' in page
    now = re.search(r'<li class="now" aria-current="step">\s*(\w+)', page)
    assert now[1] == "Running"


def test_a_finished_training_compares_measured_with_predicted_and_offers_what_it_left(
    as_alice, finished
):
    page = text_of(as_alice, finished)
    shown = plain(page)
    assert "1 of 2 measured figures lie inside their 80 % interval." in shown
    assert "1.05" in shown
    assert "Perplexity 61.5 measured here" in shown
    assert re.search(r'<form method="post" action="/models/\w+/evaluate/"', page)
    assert "Evaluate this model" in page
    state = page.split('data-region="trouble"')[0]  # the first card: outcome and reason together
    assert "Tokens per second of steps 5\xa0% faster than predicted, inside its interval" in state
    assert "Peak memory 19\xa0% more than predicted, above its interval." in state.replace(
        "&nbsp;", " "
    )
    assert page.index("Next steps") < page.index("Predicted against measured")
    assert page.index("Predicted against measured") < page.index('id="artefacts-title"')
    assert re.search(r"preset=quantize&amp;model=\w{26}", page)
    assert "still uploading from Box" in page
    for absent in ("/download/", "data-live-topics", "live.js"):
        assert absent not in page


def test_an_endpoint_that_takes_requests_is_a_service_and_not_a_job_that_turns(
    as_alice, running, report
):
    Job.objects.filter(pk=running.pk).update(kind="serve", phase="Loading the model")
    page = text_of(as_alice, running)
    assert "Running" in page
    assert 'class="turn"' in page
    Job.objects.filter(pk=running.pk).update(
        phase="Serving", started_at=now() - timedelta(minutes=72)
    )
    page = text_of(as_alice, running)
    state = page.split('data-region="state"')[1].split('data-region="trouble"')[0]
    assert re.search(r"Serving.*for 1 h 12 min", plain(state))
    assert 'class="turn"' not in state.split("<details")[0]
    assert "<summary>How it got there</summary>" in state
    assert "Serving" in as_alice.get("/jobs/").content.decode()


def test_a_chart_carries_its_figure_its_picture_its_prediction_its_sentence_and_its_table(
    as_alice, running
):
    page = text_of(as_alice, running)
    figure = json.loads(
        re.search(r'<script id="figure-loss" type="application/json">(.*?)</script>', page)[1]
    )
    assert figure["data"][-1]["y"] == [8.0, 7.0, 6.0, 5.0, 4.0]
    assert 'class="meas"' in page
    assert "Loss at the last step 4.00" in page
    assert '<tbody data-region="table-loss">' in page
    chart = page.split('data-chart="tokens_per_second"')[1].split("</figure>")[0]
    assert 'class="pred"' in chart
    assert 'class="band"' in chart
    shown = plain(page).replace(THIN, " ")
    assert re.search(r"Tokens per second of steps 3 ?003", shown)
    assert "not compared yet: warm-up, 5 of 20 steps" in shown


def test_the_log_shows_output_with_time_escapes_it_and_filters_by_a_word(as_alice, running):
    page = text_of(as_alice, running)
    assert "step 2 loss 7.9" in page
    assert "&lt;slow&gt; disk" in page
    assert re.search(r'<span class="t">\d\d:\d\d:\d\d', page)
    assert re.search(r'class="line stderr warn"', page)
    log = text_of(as_alice, running, "logs/")
    assert "process 7 started" in log
    assert ">Training</div>" in re.sub(r"<span.*?</span>", "", log)
    response = as_alice.get(f"/jobs/{running.pk}/logs/", {"q": "LOSS 7.9"})
    shown = plain(response.content.decode())
    assert "step 2" in shown
    assert "step 1" not in shown


def test_a_page_opened_before_the_upload_looks_again_until_everything_arrived(as_alice, finished):
    url = f"/jobs/{finished.pk}/artefacts/"
    for tab in ("", "artefacts/"):
        page = text_of(as_alice, finished, tab)
        assert f'hx-get="{url}" hx-trigger="every 3s"' in page, tab
    part = as_alice.get(url, headers={"HX-Request": "true"}).content.decode()
    assert '<ul class="artefacts" id="artefacts" hx-get' in part
    assert "<body" not in part
    Artefact.objects.update(is_complete=True)
    page = text_of(as_alice, finished)
    assert "Download .tar" in page
    assert "every 3s" not in page


def test_an_artefact_that_never_arrived_is_said_to_lie_on_the_host(as_alice, finished):
    finished.ended_at -= timedelta(hours=2)
    finished.save()
    page = text_of(as_alice, finished)
    assert "not uploaded; stored on Box" in page
    assert "every 3s" not in page


@pytest.fixture
def queued(job):
    """A job that goes back to wait."""
    devices_release(job.current_attempt)
    Job.objects.filter(pk=job.pk).update(state="queued", current_attempt=None)
    return Job.objects.get(pk=job.pk)


def test_a_queued_job_says_what_it_waits_for(as_alice, queued):
    shown = plain(text_of(as_alice, queued))
    assert "The job starts within seconds." in shown
    queued.host.last_seen_at -= timedelta(minutes=10)
    queued.host.save()
    shown = plain(text_of(as_alice, queued))
    assert "Box has sent no heartbeat for 10" in shown
    assert "the job starts when it is back" in shown


def test_a_failed_job_says_why_what_to_do_and_its_last_lines_escaped(as_alice, failed):
    page = text_of(as_alice, failed)
    shown = plain(page)
    assert "The host ran out of main memory" in shown
    assert "Plan again with a smaller batch" in shown
    assert "Exit code 137" in shown
    assert "Killed &lt;here&gt;" in page


def test_a_silent_host_is_said_to_be_silent_and_for_how_long(as_alice, running):
    host = running.host
    host.last_seen_at = host.last_seen_at.replace(year=host.last_seen_at.year - 1)
    host.save()
    shown = plain(text_of(as_alice, running))
    assert "No heartbeat from Box for" in shown
    assert "Last known: running host unreachable" in shown


def test_htmx_gets_only_the_regions_that_change_and_caches_tell_them_apart(as_alice, running):
    region = text_of(as_alice, running, **{"HX-Request": "true"})
    assert "<html" not in region
    assert {"actions", "state", "figures", "words-loss"} <= set(
        re.findall(r'data-region="([\w-]+)"', region)
    )
    response = as_alice.get(f"/jobs/{running.pk}/")
    assert "HX-Request" in response["Vary"]
    assert response["Cache-Control"] == "no-store"


def test_events_name_who_did_what_and_no_page_carries_a_style_attribute(as_alice, finished):
    shown = plain(text_of(as_alice, finished, "events/"))
    assert "Queued alice" in shown
    assert "Succeeded host box" in shown
    assert all(' style="' not in text_of(as_alice, finished, tab) for tab in TABS)


def test_the_config_is_what_the_host_was_asked_to_run(as_alice, running):
    page = text_of(as_alice, running, "config/")
    assert "&quot;kind&quot;: &quot;train&quot;" in page
    assert "Test CPU" in page


def test_a_name_with_markup_is_shown_as_text(as_alice, running):
    running.name = "<script>alert(1)</script>"
    running.save()
    assert "<script>alert(1)" not in text_of(as_alice, running)


def test_the_number_of_queries_does_not_grow_with_the_log(
    as_alice, running, report, django_assert_max_num_queries
):
    report(*(("log", {"stream": "stdout", "text": f"line {i}\n"}) for i in range(150)))
    with django_assert_max_num_queries(30):
        text_of(as_alice, running)


def test_a_running_job_that_says_nothing_more_is_shown_as_quiet_and_not_as_nearly_done(
    as_alice, running, report
):
    def said() -> tuple[str, str, dict]:
        found = as_alice.get(f"/api/v1/jobs/{running.pk}").json()["progress"]
        return text_of(as_alice, running), as_alice.get("/jobs/").content.decode(), found

    began = now()
    Job.objects.update(started_at=began - timedelta(seconds=40), progress_at=began)
    for seconds, is_quiet in [(0, False), (29, False), (45, True), (3600, True)]:
        with time_machine.travel(began + timedelta(seconds=seconds), tick=False):
            page, rows, found = said()
            words = f"no news for {clock(seconds)}"
            assert [words in text for text in (page, rows, found["words"])] == [is_quiet] * 3, (
                seconds
            )
            assert ("left" in found["words"], found["eta_seconds"]) == (
                (False, None) if is_quiet else (True, 66.0 - seconds)
            )
            assert (found["quiet_seconds"] is not None) == is_quiet
    Job.objects.update(
        started_at=began - timedelta(hours=8)
    )  # 12 min a step: half an hour is usual
    for minutes, is_quiet in [(30, False), (40, True)]:
        with time_machine.travel(began + timedelta(minutes=minutes), tick=False):
            assert ("no news for" in said()[0]) == is_quiet, minutes
    report(("progress", {"done": 41.0, "total": 120.0, "unit": "steps", "eta_seconds": 60.0}))
    assert "no news" not in said()[0]


def test_thousands_of_files_are_listed_by_pages(as_alice, finished):
    files = {f"part-{number:05}.bin": 2**60 for number in range(20_000)}
    Artefact.objects.filter(attempt=finished.current_attempt_id).update(files=files)
    address, seen = f"/jobs/{finished.pk}/artefacts/", []
    for number in (1, 2, 100):
        page = as_alice.get(f"{address}?page={number}").content.decode()
        assert len(page) < 200_000
        seen += re.findall(r"part-\d+\.bin", page)
    assert len(seen) == len(set(seen)) == 600
    assert (seen[0], seen[-1]) == ("part-00000.bin", "part-19999.bin")
    assert "of 20000" in page


# A live page changes as one: state line, cards, captions, tables and points of one answer.


FRESH = re.compile(r'<script id="fresh-points" type="application/json">(.*?)</script>')
BASE_MS = 1_700_000_000_000


def refreshed(client, job: Job, tab: str = "", since: object = 0) -> str:
    address = f"/jobs/{job.pk}/{tab}?since={since}"
    return client.get(address, headers={"HX-Request": "true"}).content.decode()


def points(page: str) -> dict[str, list[list[float]]]:
    return json.loads(FRESH.search(page)[1])


def region(page: str, name: str) -> str:
    found = re.search(
        rf'data-region="{name}"[^>]*>(.*?)</(?:p|div|section|tbody)>', page, re.DOTALL
    )
    return " ".join(
        re.sub(r"<[^>]+>", " ", found[1]).replace("\N{NARROW NO-BREAK SPACE}", "").split()
    )


@pytest.fixture
def go_on(running, attempt):
    """Let the running job report more steps, each of another speed, and its progress."""

    def more(step: int, speed: float) -> None:
        values = {"loss": float(step), "tokens_per_second": speed}
        progress = {"done": float(step), "total": 120.0, "unit": "steps", "eta_seconds": 9.0}
        events = (
            ("metric", {"source": "job", "values": values, "step": step}),
            ("progress", progress),
        )
        attempt.refresh_from_db()
        batch = batch_of(attempt, *events, first=attempt.acked_seq + 1)
        events_accept(host=attempt.host, batch=batch)

    return more


def test_one_answer_carries_the_state_the_cards_the_captions_and_the_points(
    as_alice, running, go_on
):
    before = refreshed(as_alice, running)
    last = max(t for column in points(before).values() for t, _ in column)
    for step in range(50, 70):
        go_on(step, 9000.0)

    after = refreshed(as_alice, running, since=last)

    assert "69 of 120 steps" in after
    assert "9000 tok/s" in region(after, "words-tokens_per_second")
    assert "9000" in region(after, "table-tokens_per_second")
    assert re.search(r"<dt>Tokens per second of steps</dt>\s*<dd class=\"value\">9.000<", after)
    speeds = [value for _, value in points(after)["tokens_per_second"]]
    assert speeds[-20:] == [9000.0] * 20


def test_a_card_follows_each_batch_of_the_stream(as_alice, running, go_on):
    shown = set()
    for step in range(50, 90, 10):
        for at in range(10):
            go_on(step + at, 100.0 * step)
        shown.add(region(refreshed(as_alice, running), "words-loss"))
    assert len(shown) == 4


def test_an_answer_says_of_which_instant_it_is_and_sends_no_points_again(as_alice, running):
    before = now_ms()
    as_of = int(re.search(r'data-page-as-of="(\d+)"', refreshed(as_alice, running))[1])
    assert before <= as_of <= now_ms()

    everything = points(refreshed(as_alice, running))["loss"]
    rest = points(refreshed(as_alice, running, since=int(everything[2][0])))["loss"]
    assert rest == everything[2:]

    page = refreshed(as_alice, running, since="")
    assert (FRESH.search(page), 'data-region="figures"' in page) == (None, True)
    assert not points(refreshed(as_alice, running, since="9" * 40)).get("loss")
    for since in ["x", "-1", "1e9", "1;drop"]:
        assert "“since”" in refreshed(as_alice, running, since=since), since


def test_the_captions_of_the_metrics_tab_change_with_its_points(as_alice, running, go_on):
    for step in range(50, 70):
        go_on(step, 9000.0)
    page = refreshed(as_alice, running, "metrics/")
    assert "9000 tok/s" in region(page, "words-tokens_per_second")
    assert points(page)["tokens_per_second"][-1][1] == 9000.0


# The preflight on the job page: every check, and what to do about those that failed.


def page(user, job, tab: str = "") -> str:
    return client_of(user).get(f"/jobs/{job.pk}/{tab}").content.decode()


def test_a_job_in_preflight_shows_the_first_look_and_then_what_the_host_found(job, alice):
    text = page(alice, job)
    assert "Box passes the checks by its last heartbeat. The host now runs its own checks" in text
    assert "50.0 GiB of disk are free" in text
    refuse(job)
    text = page(alice, job)
    assert "Try 1 of 3 failed; the next attempt is in half a minute." in text
    assert text.index(UNFIT.sentence) < text.index(UNFIT.remedy) < text.index(FIT.sentence)
    text = page(alice, job, "events/")
    assert "1 of 2 checks failed" in text
    assert UNFIT.remedy in text


def test_a_model_out_of_reach_is_offered_from_a_host_that_has_it(job, alice, other_host):
    spec = TrainSpec(model=HubModel(repository="acme/tiny", revision="a" * 40))
    Job.objects.filter(pk=job.pk).update(spec=spec.model_dump(mode="json"))
    lacking = PreflightCheck(
        name="model", ok=False, sentence="Out of reach.", remedy="Connect it."
    )
    refuse(job, checks=(lacking,))
    assert "slipway models copy" not in page(alice, job)
    HostModel.objects.create(
        host=other_host, repository="acme/tiny", commit="a" * 40, size_bytes=5, num_files=3,
        is_complete=True,
    )  # fmt: skip
    command = f"slipway models copy acme/tiny box --from {other_host.slug}"
    assert command in page(alice, job)


def test_a_job_that_ended_for_it_keeps_the_last_look(job, alice):
    for _ in range(2):
        refuse(job)
        try_again(job)
    refuse(job)
    assert "3 tries failed, so the job ended." in page(alice, job)
    one = preflight_checks._outcome(job, [Event(reason=Reason.PREFLIGHT_FAILED)])
    assert one.startswith("1 try failed, so the job ended.")


def test_passed_checks_are_unfolded_where_one_has_advice(job, alice):
    for remedy in ["", "Plan with the other config.json."]:
        with undone(remedy):
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

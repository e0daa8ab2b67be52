"""The page of one job, through its life."""

import json
import re
from datetime import timedelta

import pytest

from webapp.core.units import THIN
from webapp.jobs.models import Artefact, Job
from webapp.jobs.reservations import devices_release

pytestmark = pytest.mark.django_db(databases=["default", "metrics"])
TABS = ["", "metrics/", "logs/", "events/", "config/", "artefacts/"]


def text_of(client, job, tab="", **headers):
    response = client.get(f"/jobs/{job.pk}/{tab}", headers=headers)
    assert response.status_code == 200
    return response.content.decode()


def plain(html):
    return " ".join(re.sub(r"<[^>]+>", " ", html).split())


@pytest.mark.parametrize("tab", TABS)
@pytest.mark.parametrize("stage", ["draft", "job", "attempt", "running", "finished", "failed"])
def test_every_tab_answers_at_every_stage(stage, tab, request, as_alice):
    found = request.getfixturevalue(stage)
    assert text_of(as_alice, getattr(found, "job", found), tab)


def test_a_running_job_says_how_far_it_is_and_what_is_left(as_alice, running):
    shown = plain(text_of(as_alice, running))
    assert "33 %" in shown
    assert "40 of 120 steps" in shown
    assert "about 1 min left" in shown


def test_the_tab_title_says_the_state(as_alice, running):
    assert re.search(r"<title>33 % · Train the demo model", text_of(as_alice, running))


def test_a_running_job_asks_for_the_stream_of_its_own_topic(as_alice, running):
    assert f'data-live-topics="job:{running.pk}"' in text_of(as_alice, running)


def test_a_finished_job_opens_no_stream(as_alice, finished):
    page = text_of(as_alice, finished)
    assert "data-live-topics" not in page
    assert "live.js" not in page


def test_the_timeline_marks_where_the_job_is(as_alice, running):
    now = re.search(r'<li class="now" aria-current="step">\s*(\w+)', text_of(as_alice, running))
    assert now[1] == "Running"


def test_a_chart_carries_its_figure_its_picture_its_sentence_and_its_table(as_alice, running):
    page = text_of(as_alice, running)
    figure = json.loads(
        re.search(r'<script id="figure-loss" type="application/json">(.*?)</script>', page)[1]
    )
    assert figure["data"][-1]["y"] == [8.0, 7.0, 6.0, 5.0, 4.0]
    assert 'class="meas"' in page
    assert "Loss at the last step 4.00" in page
    assert '<tbody data-region="table-loss">' in page


def test_a_predicted_chart_shows_dashed_line_and_band(as_alice, running):
    page = text_of(as_alice, running)
    chart = page.split('data-chart="tokens_per_second"')[1].split("</figure>")[0]
    assert 'class="pred"' in chart
    assert 'class="band"' in chart


def test_while_it_runs_the_figures_so_far_stand_beside_the_prediction(as_alice, running):
    shown = plain(text_of(as_alice, running)).replace(THIN, " ")
    assert re.search(r"Tokens per second 3 ?003", shown)
    assert "not compared yet: warm-up, 5 of 20 steps" in shown


def test_the_log_shows_output_with_time_and_escapes_it(as_alice, running):
    page = text_of(as_alice, running)
    assert "step 2 loss 7.9" in page
    assert "&lt;slow&gt; disk" in page
    assert re.search(r'<span class="t">\d\d:\d\d:\d\d', page)


def test_the_log_marks_warnings(as_alice, running):
    assert re.search(r'class="line stderr warn"', text_of(as_alice, running))


def test_the_log_holds_what_the_supervisor_noted(as_alice, running):
    log = text_of(as_alice, running, "logs/")
    assert "process 7 started" in log
    assert ">Training</div>" in re.sub(r"<span.*?</span>", "", log)


def test_the_log_filters_by_a_word(as_alice, running):
    response = as_alice.get(f"/jobs/{running.pk}/logs/", {"q": "LOSS 7.9"})
    shown = plain(response.content.decode())
    assert "step 2" in shown
    assert "step 1" not in shown


def test_a_finished_job_compares_measured_with_predicted(as_alice, finished):
    shown = plain(text_of(as_alice, finished))
    assert "1 of 2 measured figures lie inside their 80 % interval." in shown
    assert "1.05" in shown


def test_a_figure_without_prediction_is_said_to_be_measured(as_alice, finished):
    shown = plain(text_of(as_alice, finished))
    assert "Perplexity 61.5 measured here" in shown


def test_a_finished_training_offers_to_evaluate_what_it_left(as_alice, finished):
    page = text_of(as_alice, finished)

    assert re.search(r'<form method="post" action="/models/\w+/evaluate/"', page)
    assert "Evaluate it" in page


def test_a_finished_training_offers_its_model_and_what_next(as_alice, finished):
    page = text_of(as_alice, finished)
    assert "Artefacts and next steps" in page
    assert re.search(r"preset=quantize&amp;model=\w{26}", page)


def test_an_artefact_that_is_still_arriving_has_no_download(as_alice, finished):
    page = text_of(as_alice, finished)
    assert "still arriving from Box" in page
    assert "/download/" not in page


@pytest.mark.parametrize("tab", ["", "artefacts/"])
def test_a_page_opened_before_the_upload_looks_again_by_itself(as_alice, finished, tab):
    page = text_of(as_alice, finished, tab)
    assert f'hx-get="/jobs/{finished.pk}/artefacts/" hx-trigger="every 3s"' in page


def test_what_it_looks_for_is_in_the_short_answer_too(as_alice, finished):
    url = f"/jobs/{finished.pk}/artefacts/"
    part = as_alice.get(url, headers={"HX-Request": "true"}).content.decode()
    assert '<ul class="artefacts" id="artefacts" hx-get' in part
    assert "<body" not in part


def test_a_page_with_everything_arrived_looks_no_more(as_alice, finished):
    Artefact.objects.update(is_complete=True)
    page = text_of(as_alice, finished)
    assert "Download .tar" in page
    assert "every 3s" not in page


def test_an_artefact_that_never_arrived_is_said_to_lie_on_the_host(as_alice, finished):
    finished.ended_at -= timedelta(hours=2)
    finished.save()
    page = text_of(as_alice, finished)
    assert "not uploaded; it lies on Box" in page
    assert "every 3s" not in page


@pytest.fixture
def queued(job):
    """A job that goes back to wait."""
    devices_release(job.current_attempt)
    Job.objects.filter(pk=job.pk).update(state="queued", current_attempt=None)
    return Job.objects.get(pk=job.pk)


def test_a_queued_job_says_what_it_waits_for(as_alice, queued):
    shown = plain(text_of(as_alice, queued))
    assert "It starts within seconds." in shown


def test_a_queued_job_names_the_silent_host_that_it_waits_for(as_alice, queued):
    queued.host.last_seen_at -= timedelta(minutes=10)
    queued.host.save()
    shown = plain(text_of(as_alice, queued))
    assert "Box has been silent for 10" in shown
    assert "the job starts when it is back" in shown


def test_a_job_that_runs_waits_for_nothing(as_alice, running):
    assert "starts within seconds" not in plain(text_of(as_alice, running))


def test_a_failed_job_says_why_and_what_to_do(as_alice, failed):
    shown = plain(text_of(as_alice, failed))
    assert "The host ran out of main memory" in shown
    assert "Plan again with a smaller batch" in shown
    assert "Exit code 137" in shown


def test_a_failed_job_shows_its_last_lines_escaped(as_alice, failed):
    assert "Killed &lt;here&gt;" in text_of(as_alice, failed)


def test_a_silent_host_is_said_to_be_silent_and_for_how_long(as_alice, running):
    host = running.host
    host.last_seen_at = host.last_seen_at.replace(year=host.last_seen_at.year - 1)
    host.save()
    shown = plain(text_of(as_alice, running))
    assert "No heartbeat from Box for" in shown
    assert "Last known: running host silent" in shown


def test_htmx_gets_only_the_regions_that_change(as_alice, running):
    region = text_of(as_alice, running, **{"HX-Request": "true"})
    assert "<html" not in region
    assert {"actions", "state", "figures", "words-loss"} <= set(
        re.findall(r'data-region="([\w-]+)"', region)
    )


def test_page_and_regions_are_told_apart_by_caches(as_alice, running):
    response = as_alice.get(f"/jobs/{running.pk}/")
    assert "HX-Request" in response["Vary"]
    assert response["Cache-Control"] == "no-store"


def test_events_name_who_did_what(as_alice, finished):
    shown = plain(text_of(as_alice, finished, "events/"))
    assert "Queued alice" in shown
    assert "Succeeded host box" in shown


def test_the_config_is_what_the_host_was_asked_to_run(as_alice, running):
    page = text_of(as_alice, running, "config/")
    assert "&quot;kind&quot;: &quot;train&quot;" in page
    assert "Test CPU" in page


def test_no_page_carries_a_style_attribute(as_alice, finished):
    assert all(' style="' not in text_of(as_alice, finished, tab) for tab in TABS)


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

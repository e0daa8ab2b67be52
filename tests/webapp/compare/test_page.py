"""The comparison: which jobs it takes, what it says of them, and to whom."""

import re

import pytest

from tests.webapp.conftest import client_of, make_job
from webapp.jobs.models import Job

pytestmark = pytest.mark.django_db(databases="__all__")


def get(user, *jobs: Job, more: str = ""):
    query = "&".join(f"job={job.pk}" for job in jobs)
    return client_of(user).get(f"/compare/?{query}{more}")


def page(user, *jobs: Job, more: str = "") -> str:
    text = get(user, *jobs, more=more).content.decode()
    text = text.replace("\N{NO-BREAK SPACE}", " ").replace("\N{NARROW NO-BREAK SPACE}", " ")
    return re.sub(r"\s+", " ", text)


# What it says


def test_it_says_first_which_is_faster_and_by_how_much(slow, fast, alice):
    text = page(alice, slow, fast)

    assert "B is fastest with 3 000 tok/s (tokens per second); A reached 2 000 tok/s" in text
    assert "1.50 times apart" in text


def test_only_settings_that_differ_are_shown(slow, fast, alice):
    text = page(alice, slow, fast)

    assert "Micro batch size" in text
    assert "Sequence length" not in text
    assert "They differ in 1 of" in text


def test_all_settings_are_one_link_away(slow, fast, alice):
    text = page(alice, slow, fast, more="&all=1")

    assert "Sequence length" in text
    assert '<tr class="chosen"><th scope="row">Micro batch size</th>' in text


def test_each_figure_has_prediction_ratio_and_distance_from_the_first(slow, fast, alice):
    row = page(alice, slow, fast).split('<th scope="row">Tokens per second</th>')[1]

    assert "predicted 3 000 tok/s, 0.667 of it" in row
    assert "+50 %" in row
    assert "below the interval" in row


def test_joules_and_money_of_a_token_stand_side_by_side(make_run, host, alice):
    host.labels = {"usd_per_kwh": "0.36"}
    host.save()
    jobs = [make_run(name, 2000.0, 4) for name in ("Thirsty", "Frugal")]
    for job, joules in zip(jobs, (4.0, 2.0), strict=True):
        job.result["measured"] |= {"energy_joules_per_token": joules, "gpu0_energy_joules": 900.0}
        job.save()

    text = page(alice, *jobs)
    row = text.split('<th scope="row">Energy per token</th>')[1].partition("</tr>")[0]

    assert '<strong>4.00</strong><span class="unit">J/token</span>' in row
    assert "\N{MINUS SIGN}50 %" in row
    assert '<th scope="row">Energy of gpu0</th>' in text
    assert '<th scope="row">Electricity per million tokens</th>' in text


def test_metrics_lie_over_each_other_without_javascript_too(slow, fast, alice):
    text = page(alice, slow, fast)

    for number in (1, 2):
        assert f'<path class="series-{number}"' in text
        assert f'<path class="series-{number} expected"' in text


def test_each_chart_has_its_words_and_its_table(slow, fast, alice):
    text = page(alice, slow, fast)

    assert "A: tokens per second 2 000 tok/s · B: tokens per second 3 000 tok/s" in text
    assert "B: peak memory 5.00 GiB" in text
    assert text.count("<summary>Table</summary>") == text.count("<figure")


def test_jobs_of_different_kinds_are_told_apart(slow, alice, make_run):
    other = make_run("Bench", 10.0, 4)
    Job.objects.filter(pk=other.pk).update(kind="benchmark")

    assert "of different kinds (Train, Benchmark)" in page(alice, slow, other)


def test_two_that_are_alike_are_said_to_be(slow, alice, make_run):
    same = make_run("Again", 2000.0, 4)

    text = page(alice, slow, same)

    assert "All are alike" in text
    assert "Every setting is the same." in text


def test_a_job_that_waits_has_empty_cells(slow, team, alice, host):
    waiting = make_job(team, alice, host)

    text = page(alice, slow, waiting)

    assert "No figure was measured by all of them yet." in text
    assert "never ran" in text


# Which jobs it takes


def test_four_is_the_most_and_too_many_says_the_way_out(slow, fast, alice, make_run):
    more = [make_run(f"Run {at}", 2500.0, 8) for at in range(3)]

    assert get(alice, slow, fast, *more[:2]).status_code == 200
    answer = get(alice, slow, fast, *more)
    assert answer.status_code == 422
    assert b"Take the tick from those that you can do without" in answer.content


def test_one_alone_is_offered_others_those_like_it_first(slow, alice, make_run):
    make_run("Other kind", 10.0, 4)
    Job.objects.filter(name="Other kind").update(kind="benchmark")
    make_run("Like it", 10.0, 4)

    text = page(alice, slow)

    assert f'value="{slow.pk}" id="pick-{slow.pk}" checked' in text
    assert text.index("Like it") < text.index("Other kind")


def test_named_twice_it_counts_once(slow, alice):
    assert "Which jobs side by side?" in page(alice, slow, slow)


def test_a_job_can_be_left_out_and_another_added(slow, fast, alice):
    text = page(alice, slow, fast)

    assert f'href="/compare/?job={fast.pk}" aria-label="leave out Small batch"' in text
    assert f"/compare/?job={slow.pk}&amp;job={fast.pk}&amp;choose=1" in text
    assert "Which jobs side by side?" in page(alice, slow, fast, more="&choose=1")


@pytest.mark.parametrize("query", ["", "?job=", "?x=1"])
def test_without_jobs_it_offers_the_latest(slow, alice, query):
    text = client_of(alice).get(f"/compare/{query}").content.decode()

    assert "Small batch" in text


@pytest.mark.parametrize("name", ["nothing", "01ARZ3NDEKTSV4RRFFQ69G5FAV", "' OR 1=1"])
def test_a_job_that_is_not_there_is_not_found(slow, alice, name):
    assert client_of(alice).get("/compare/", {"job": [slow.pk, name]}).status_code == 404


def test_another_teams_job_is_as_if_it_did_not_exist(slow, fast, charlie):
    assert get(charlie, slow, fast).status_code == 404


def test_a_deleted_job_is_gone_here_too(slow, fast, alice):
    Job.objects.filter(pk=fast.pk).update(deleted_at="2026-01-01T00:00Z")

    assert get(alice, slow, fast).status_code == 404


def test_names_and_settings_are_text(slow, alice, make_run):
    hostile = make_run("<script>alert(1)</script>", 1.0, 4, model_name="<b>x</b>")

    text = page(alice, slow, hostile)

    assert "<script>alert(1)" not in text
    assert "<b>x</b>" not in text


# The ways there


def test_the_list_lets_rows_be_ticked(slow, fast, alice):
    text = client_of(alice).get("/jobs/").content.decode()

    assert text.count('form="compare"') == 2
    assert '<form id="compare"' in text


def test_a_job_page_leads_there(slow, alice):
    assert f"/compare/?job={slow.pk}" in client_of(alice).get(f"/jobs/{slow.pk}/").content.decode()

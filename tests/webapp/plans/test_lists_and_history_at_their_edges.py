"""A team's plans when there are none or many, and what became of a plan."""

import json
from html import unescape

import pytest

from tests.webapp.conftest import client_of, new_attempt
from webapp.core.clock import now
from webapp.jobs.models import Job, Measurement
from webapp.plans.launching import plan_launch
from webapp.plans.models import Plan, PlanState
from webapp.plans.planning import current_answer, plan_keep

pytestmark = pytest.mark.django_db
PAGE_SIZE = 50
DASH = "\u2013"  # en dash


@pytest.fixture
def job(kept, alice) -> Job:
    return plan_launch(plan=kept, by=alice)


def shown(user, path: str):
    response = client_of(user).get(path)
    assert response.status_code == 200
    return response


def html(user, path: str) -> str:
    return shown(user, path).content.decode()


def add_plans(team, owner, count: int, **fields) -> None:
    """Plans named "plan 0" on, saved in this order."""
    for number in range(count):
        known = {"name": f"plan {number}", "state": PlanState.COMPUTED, **fields}
        Plan.objects.create(team=team, owner=owner, **known)


def names(response) -> list[str]:
    return [plan.name for plan, *_ in response.context["rows"]]


# The list


def test_one_plan_more_than_a_page_holds_is_on_the_second(alice, team):
    add_plans(team, alice, PAGE_SIZE)
    full = shown(alice, "/plans/")
    assert len(names(full)) == PAGE_SIZE
    assert "Older" not in full.content.decode()

    add_plans(team, alice, 1, name="one more")
    assert f"1{DASH}50 of 51" in html(alice, "/plans/")
    for number in ("1", "abc", "", "1.5"):  # what is no number is the first page
        assert names(shown(alice, f"/plans/?page={number}"))[0] == "one more", number
    for number in ("2", "0", "-1", "3", str(10**30)):  # what is not there is the last
        assert names(shown(alice, f"/plans/?page={number}")) == ["plan 0"], number


def test_the_second_page_keeps_a_filter_with_special_characters(alice, team):
    add_plans(team, alice, PAGE_SIZE + 1, name="a & b = 100 %")
    text = html(alice, "/plans/?q=a+%26+b+%3D+100+%25")
    assert 'href="?page=2&amp;q=a%20%26%20b%20%3D%20100%20%25"' in text


def test_a_filter_is_text_that_matches_itself_without_the_blanks_around_it(alice, team):
    add_plans(team, alice, 2)
    for query in ("%25", "_", "plan%25", "%5C"):  # a database matches anything with some of them
        assert names(shown(alice, f"/plans/?q={query}")) == [], query
    assert names(shown(alice, "/plans/?q=%20%20plan%201%20")) == ["plan 1"]
    text = html(alice, "/plans/?q=%3Cscript%3Ealert(1)%3C/script%3E")
    assert "<script>alert" not in text
    assert "No plan has “&lt;script&gt;" in text


def test_each_plan_of_the_list_says_how_far_it_came(alice, team):
    for fields, word in (
        ({"state": PlanState.DRAFT, "answer": {"plans": [{}]}}, "draft"),
        ({"state": PlanState.COMPUTED, "answer": {}}, "incomplete"),
        ({"state": PlanState.COMPUTED, "answer": {"plans": []}}, "does-not-fit"),
        ({"state": PlanState.COMPUTED, "answer": {"plans": [{}]}}, "computed"),
    ):
        Plan.objects.all().delete()
        add_plans(team, alice, 1, **fields)
        rows = shown(alice, "/plans/").context["rows"]
        assert [verdict for _, verdict, _ in rows] == [word], fields


def test_a_draft_without_a_name_leads_back_into_the_wizard_until_it_is_deleted(alice, demo_plan):
    Plan.objects.filter(pk=demo_plan.pk).update(name="")
    text = html(alice, "/plans/")
    assert "Unfinished plan" in text
    assert f'href="/plans/{demo_plan.pk}/edit/goal/"' in text

    Plan.objects.filter(pk=demo_plan.pk).update(name="")
    answer = client_of(alice).post(f"/plans/{demo_plan.pk}/delete/", follow=True)
    assert "The draft is deleted; its jobs stay." in answer.content.decode()
    assert client_of(alice).get(f"/plans/{demo_plan.pk}/").status_code == 404


def test_a_plan_whose_owner_is_gone_stays_with_a_dash(bob, alice, kept):
    alice.delete()
    text = html(bob, "/plans/")
    assert "Demo of today" in text
    assert '<td class="quiet hide-s">—</td>' in text


# What became of a plan


def measure(job: Job, measured: float, **changes) -> Measurement:
    fields = {
        "metric": "step_seconds",
        "unit": "seconds",
        "predicted": 2.0,
        "predicted_low": 1.5,
        "predicted_high": 2.5,
        **changes,
    }
    return Measurement.objects.create(
        job=job,
        attempt=job.current_attempt,
        host=job.host,
        measured=measured,
        ratio=measured / fields["predicted"],
        measured_at=now(),
        **fields,
    )


def history(user, plan):
    return shown(user, f"/plans/{plan.pk}/history/")


def test_a_plan_that_was_never_launched_has_an_empty_history(alice, kept):
    text = history(alice, kept).content.decode()
    assert "Nothing has been launched from this plan yet." in text
    assert "Predicted and measured" not in text


def test_both_ends_of_an_interval_are_inside_and_without_one_nothing_was_hit(alice, kept, job):
    for measured, is_inside in ((1.49, False), (1.5, True), (2.5, True), (2.51, False)):
        made = measure(job, measured)
        met = history(alice, kept).context["measured"]
        assert [each.is_inside for each in met] == [is_inside], measured
        made.delete()
    measure(job, 2.0, predicted_low=None, predicted_high=None)
    met = history(alice, kept).context["measured"][0]
    assert (met.is_inside, met.ratio) == (False, 1.0)


def test_figures_are_named_and_in_their_units_even_if_nobody_listed_them(alice, kept, job):
    measure(job, 0.25)
    met = history(alice, kept).context["measured"][0]
    assert (met.metric, met.predicted, met.measured) == ("Step time", "2.0\u00a0s", "250\u00a0ms")

    measure(job, 3.0, metric="cache_hit_ratio", unit="")
    found = {each.metric for each in history(alice, kept).context["measured"]}
    assert found == {"Step time", "Cache hit ratio"}


def test_a_deleted_job_leaves_the_history_with_its_figures(alice, kept, job):
    measure(job, 2.0)
    Job.objects.filter(pk=job.pk).update(deleted_at=now())
    context = history(alice, kept).context
    assert (list(context["jobs"]), context["measured"]) == ([], [])


def test_the_last_job_of_a_plan_is_shown_first(alice, kept, job):
    second = plan_launch(plan=kept, by=alice)
    new_attempt(second)
    measure(job, 2.0)
    measure(second, 2.2)

    context = history(alice, kept).context

    assert [one.pk for one in context["jobs"]] == [second.pk, job.pk]
    assert [met.job.pk for met in context["measured"]] == [second.pk, job.pk]


def test_a_hostile_job_name_is_text_in_the_history(alice, kept, job):
    Job.objects.filter(pk=job.pk).update(name="<img src=x>")
    assert "<img src=x>" not in history(alice, kept).content.decode()


# What can be copied


def test_what_is_shown_of_an_export_is_what_is_downloaded(alice, kept):
    text = html(alice, f"/plans/{kept.pk}/exports/")
    file = shown(alice, f"/plans/{kept.pk}/exports/torchrun/").content.decode()
    copied = text.split('id="export-torchrun"')[1].split(">", 1)[1].split("</pre>")[0]
    assert unescape(copied) == file


def test_a_file_is_read_by_whoever_may_read_and_by_no_stranger(alice, vera, client, kept):
    for key in ("torchrun", "measure"):
        assert shown(vera, f"/plans/{kept.pk}/exports/{key}/").content, key
    url = f"/plans/{kept.pk}/exports/torchrun/"
    answer = client.get(url)
    assert answer.status_code == 302
    assert answer["Location"].startswith("/login/")
    assert client_of(alice).post(url).status_code == 405


def test_the_texts_that_can_be_copied_are_those_that_are_stored(alice, kept):
    answer = current_answer(kept)
    context = shown(alice, f"/plans/{kept.pk}/exports/").context
    texts = {key: json.loads(text) for key, _, _, text in context["exports"]}
    assert texts["question"] == kept.request
    assert texts["strategy"] == answer.plans[0].strategy.model_dump(mode="json")


def test_hardware_that_is_only_thought_of_has_a_question_but_no_job(alice, kept):
    kept.draft["hardware"] |= {"choice": "catalog", "device": "rtx-4090"}
    kept.answer = {}
    kept.save()
    context = shown(alice, f"/plans/{kept.pk}/exports/").context
    assert [key for key, *_ in context["exports"]] == ["question", "strategy"]

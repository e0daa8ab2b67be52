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
def kept(demo_plan) -> Plan:
    return plan_keep(demo_plan, "Demo of today")


@pytest.fixture
def job(kept, alice) -> Job:
    return plan_launch(plan=kept, by=alice)


def page(user, path: str):
    response = client_of(user).get(path)
    assert response.status_code == 200
    return response


def html(user, path: str) -> str:
    return page(user, path).content.decode()


def add_plans(team, owner, count: int, **fields) -> None:
    """Plans named "plan 0" on, saved in this order."""
    for number in range(count):
        known = {"name": f"plan {number}", "state": PlanState.COMPUTED, **fields}
        Plan.objects.create(team=team, owner=owner, **known)


def names(response) -> list[str]:
    return [plan.name for plan, *_ in response.context["rows"]]


# The list


def test_a_full_page_has_no_second(alice, team):
    add_plans(team, alice, PAGE_SIZE)

    response = page(alice, "/plans/")

    assert len(names(response)) == PAGE_SIZE
    assert "Older" not in response.content.decode()


def test_one_plan_more_than_a_page_holds_is_on_the_second(alice, team):
    add_plans(team, alice, PAGE_SIZE + 1)

    first, second = page(alice, "/plans/"), page(alice, "/plans/?page=2")

    assert f"1{DASH}50 of 51" in first.content.decode()
    assert names(first)[0] == f"plan {PAGE_SIZE}"
    assert names(second) == ["plan 0"]


@pytest.mark.parametrize("number", ["abc", "", "1.5"])
def test_a_page_that_is_no_number_is_the_first(alice, team, number):
    add_plans(team, alice, PAGE_SIZE + 1)

    assert names(page(alice, f"/plans/?page={number}"))[0] == f"plan {PAGE_SIZE}"


@pytest.mark.parametrize("number", ["0", "-1", "3", str(10**30)])
def test_a_page_that_is_not_there_is_the_last(alice, team, number):
    add_plans(team, alice, PAGE_SIZE + 1)

    assert names(page(alice, f"/plans/?page={number}")) == ["plan 0"]


def test_the_second_page_keeps_a_filter_with_special_characters(alice, team):
    add_plans(team, alice, PAGE_SIZE + 1, name="a & b = 100 %")

    text = html(alice, "/plans/?q=a+%26+b+%3D+100+%25")

    assert 'href="?page=2&amp;q=a%20%26%20b%20%3D%20100%20%25"' in text


@pytest.mark.parametrize("query", ["%25", "_", "plan%25", "%5C"])
def test_a_character_that_databases_match_with_anything_matches_itself(alice, team, query):
    add_plans(team, alice, 2)

    assert names(page(alice, f"/plans/?q={query}")) == []


def test_blanks_around_a_filter_do_not_matter(alice, team):
    add_plans(team, alice, 2)

    assert names(page(alice, "/plans/?q=%20%20plan%201%20")) == ["plan 1"]


def test_a_hostile_filter_is_shown_as_text(alice, team):
    text = html(alice, "/plans/?q=%3Cscript%3Ealert(1)%3C/script%3E")

    assert "<script>alert" not in text
    assert "No plan has “&lt;script&gt;" in text


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"state": PlanState.DRAFT, "answer": {"plans": [{}]}}, "draft"),
        ({"state": PlanState.COMPUTED, "answer": {}}, "incomplete"),
        ({"state": PlanState.COMPUTED, "answer": {"plans": []}}, "does-not-fit"),
        ({"state": PlanState.COMPUTED, "answer": {"plans": [{}]}}, "computed"),
    ],
)
def test_each_plan_of_the_list_says_how_far_it_came(alice, team, fields, word):
    add_plans(team, alice, 1, **fields)

    assert [verdict for _, verdict, _ in page(alice, "/plans/").context["rows"]] == [word]


def test_a_draft_without_a_name_leads_back_into_the_wizard(alice, demo_plan):
    Plan.objects.filter(pk=demo_plan.pk).update(name="")

    text = html(alice, "/plans/")

    assert "Unfinished plan" in text
    assert f'href="/plans/{demo_plan.pk}/edit/goal/"' in text


def test_a_plan_whose_owner_is_gone_stays_with_a_dash(bob, alice, kept):
    alice.delete()

    text = html(bob, "/plans/")

    assert "Demo of today" in text
    assert '<td class="quiet hide-s">—</td>' in text


def test_deleting_a_draft_without_a_name_says_what_is_gone(alice, demo_plan):
    Plan.objects.filter(pk=demo_plan.pk).update(name="")

    answer = client_of(alice).post(f"/plans/{demo_plan.pk}/delete/", follow=True)

    assert "The draft is deleted; its jobs stay." in answer.content.decode()
    assert client_of(alice).get(f"/plans/{demo_plan.pk}/").status_code == 404


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
    return page(user, f"/plans/{plan.pk}/history/")


def test_a_plan_that_was_never_launched_has_an_empty_history(alice, kept):
    text = history(alice, kept).content.decode()

    assert "Nothing has been launched from this plan yet." in text
    assert "Predicted and measured" not in text


@pytest.mark.parametrize(
    ("measured", "is_inside"), [(1.49, False), (1.5, True), (2.5, True), (2.51, False)]
)
def test_both_ends_of_an_interval_are_inside(alice, kept, job, measured, is_inside):
    measure(job, measured)

    assert [met.is_inside for met in history(alice, kept).context["measured"]] == [is_inside]


def test_a_prediction_without_an_interval_was_not_hit(alice, kept, job):
    measure(job, 2.0, predicted_low=None, predicted_high=None)

    met = history(alice, kept).context["measured"][0]

    assert (met.is_inside, met.ratio) == (False, 1.0)


def test_a_figure_that_nobody_listed_is_called_by_its_own_name(alice, kept, job):
    measure(job, 3.0, metric="cache_hit_ratio", unit="")

    assert history(alice, kept).context["measured"][0].metric == "Cache hit ratio"


def test_predicted_and_measured_are_said_in_their_units(alice, kept, job):
    measure(job, 0.25)

    met = history(alice, kept).context["measured"][0]

    assert (met.metric, met.predicted, met.measured) == ("Step time", "2.0\u00a0s", "250\u00a0ms")


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
    file = page(alice, f"/plans/{kept.pk}/exports/torchrun/").content.decode()

    shown = text.split('id="export-torchrun"')[1].split(">", 1)[1].split("</pre>")[0]

    assert unescape(shown) == file


@pytest.mark.parametrize("key", ["torchrun", "measure"])
def test_whoever_may_only_read_takes_every_file(vera, kept, key):
    assert page(vera, f"/plans/{kept.pk}/exports/{key}/").content


def test_a_file_is_not_given_to_a_stranger(client, kept):
    answer = client.get(f"/plans/{kept.pk}/exports/torchrun/")

    assert answer.status_code == 302
    assert answer["Location"].startswith("/login/")


def test_a_file_is_only_read(alice, kept):
    assert client_of(alice).post(f"/plans/{kept.pk}/exports/torchrun/").status_code == 405


def test_the_texts_that_can_be_copied_are_those_that_are_stored(alice, kept):
    answer = current_answer(kept)
    context = page(alice, f"/plans/{kept.pk}/exports/").context

    texts = {key: json.loads(text) for key, _, _, text in context["exports"]}

    assert texts["question"] == kept.request
    assert texts["strategy"] == answer.plans[0].strategy.model_dump(mode="json")


def test_hardware_that_is_only_thought_of_has_a_question_but_no_job(alice, kept):
    kept.draft["hardware"] |= {"choice": "catalog", "device": "rtx-4090"}
    kept.answer = {}
    kept.save()

    context = page(alice, f"/plans/{kept.pk}/exports/").context

    assert [key for key, *_ in context["exports"]] == ["question", "strategy"]

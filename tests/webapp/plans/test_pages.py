"""The list and the pages of a plan."""

import pytest

from planner.specs.estimate import PlanRequest
from tests.webapp.conftest import client_of
from webapp.core.clock import now
from webapp.jobs.models import Measurement
from webapp.plans.launching import plan_launch
from webapp.plans.models import Plan, PlanState
from webapp.plans.planning import plan_keep

pytestmark = pytest.mark.django_db
TABS = ["", "alternatives/", "why/", "exports/", "history/"]


@pytest.fixture
def kept(demo_plan) -> Plan:
    return plan_keep(demo_plan, "Demo of today")


def page(user, plan, tab: str = "") -> str:
    response = client_of(user).get(f"/plans/{plan.pk}/{tab}")
    assert response.status_code == 200
    return response.content.decode()


def test_every_tab_answers_the_team_without_a_style_attribute(alice, kept, charlie):
    for tab in TABS:
        assert "Demo of today" in page(alice, kept, tab), tab

    for tab in TABS:
        assert client_of(charlie).get(f"/plans/{kept.pk}/{tab}").status_code == 404, tab
    assert client_of(alice).get(f"/plans/{kept.pk}/price/").status_code == 404
    assert all(" style=" not in page(alice, kept, tab) for tab in TABS)


def test_the_summary_answers_first_in_one_sentence_and_draws_memory_in_words(alice, kept):
    html = page(alice, kept)
    assert html.index("to spare") < html.index("Memory on each device")
    assert 'aria-label="Memory: ' in page(alice, kept)


def test_the_why_tab_shows_equations_and_the_alternatives_a_reason_for_each_loser(alice, kept):
    html = page(alice, kept, "why/")
    assert html.count('class="eq"') >= 10
    assert "rates measured on this host" in html
    html = page(alice, kept, "alternatives/")
    assert "Needs at least 2 devices" in html


def test_the_exported_question_is_one_that_the_planner_reads(alice, kept):
    context = client_of(alice).get(f"/plans/{kept.pk}/exports/").context
    texts = {key: text for key, _, _, text in context["exports"]}
    assert PlanRequest.model_validate_json(texts["question"]).workload.kind == "train"
    assert '"kind": "train"' in texts["job"]


def test_the_history_sets_measured_beside_predicted(alice, kept, host):
    job = plan_launch(plan=kept, by=alice)
    Measurement.objects.create(
        job=job,
        attempt=job.current_attempt,
        host=host,
        metric="tokens_per_second",
        unit="tokens_per_second",
        predicted=2000,
        predicted_low=1500,
        predicted_high=2600,
        measured=2200,
        ratio=1.1,
        measured_at=now(),
    )

    html = page(alice, kept, "history/")

    assert "1.10" in html
    assert "inside" in html


def test_a_plan_whose_host_was_measured_again_says_so_until_it_is_planned_again(alice, kept, host):
    page(alice, kept)
    for rates in ("memory_bandwidth_bytes_per_second", "flops_per_second"):
        device = host.microbench["devices"][0]
        known = device[rates]
        device[rates] = known | {"fp32": 2 * known["fp32"]} if rates[0] == "f" else 2 * known
        host.save()
        assert "Something has changed since this was planned" in page(alice, kept), rates
    client_of(alice).post(f"/plans/{kept.pk}/compute/")
    assert "Something has changed" not in page(alice, kept)


def test_a_plan_whose_host_is_gone_shows_what_was_said_and_what_to_do(alice, kept, host):
    page(alice, kept)
    host.delete()
    html = page(alice, kept)
    assert "Something has changed since this was planned" in html
    assert "to spare" in html
    html = client_of(alice).post(f"/plans/{kept.pk}/compute/", follow=True).content.decode()
    assert "no longer part of your team" in html


def test_a_deleted_plan_leaves_the_list_and_its_jobs_still_show_it(alice, kept):
    job = plan_launch(plan=kept, by=alice)
    client = client_of(alice)

    client.post(f"/plans/{kept.pk}/delete/", follow=True)

    assert kept.name not in client.get("/plans/").content.decode()
    assert kept.pk not in client.get("/search/", {"q": kept.name}).content.decode()
    job.refresh_from_db()
    assert job.plan == kept
    assert "This plan is deleted" in page(alice, kept)


def test_a_viewer_reads_and_a_deleted_plan_that_no_job_ran_is_gone(vera, kept, alice):
    assert page(vera, kept)
    assert client_of(vera).post(f"/plans/{kept.pk}/delete/").status_code == 403

    client_of(alice).post(f"/plans/{kept.pk}/delete/")
    assert not Plan.objects.exists()


def test_the_list_shows_the_teams_plans_by_name_and_nothing_of_another(bob, kept, charlie, alice):
    assert "Demo of today" in client_of(bob).get("/plans/").content.decode()
    assert "Demo of today" not in client_of(charlie).get("/plans/").content.decode()
    client = client_of(alice)
    assert "Demo of today" in client.get("/plans/?q=TODAY").content.decode()
    assert "No plan has" in client.get("/plans/?q=yesterday").content.decode()


def test_an_empty_list_teaches_and_a_colleagues_draft_is_not_in_it(alice, bob, demo_plan):
    assert "It needs no hardware" in client_of(alice).get("/plans/").content.decode()

    assert demo_plan.state == PlanState.DRAFT
    assert "Make a plan" in client_of(bob).get("/plans/").content.decode()


def test_the_list_asks_the_database_as_often_for_many_plans(
    alice, kept, django_assert_max_num_queries
):
    client = client_of(alice)
    for number in range(30):
        kept.pk, kept.name = None, f"plan {number}"
        kept.pk = kept.series = f"01J{number:023d}"
        kept.save(force_insert=True)

    with django_assert_max_num_queries(9):
        client.get("/plans/")


def test_no_tab_asks_the_database_more_often_than_a_bound(
    alice, kept, django_assert_max_num_queries
):
    for tab in TABS:
        client = client_of(alice)
        client.get(f"/plans/{kept.pk}/{tab}")
        with django_assert_max_num_queries(12):
            client.get(f"/plans/{kept.pk}/{tab}")


def test_a_hostile_plan_name_is_escaped(alice, kept):
    plan_keep(kept, "<img src=x onerror=alert(1)>")
    assert "<img" not in page(alice, kept)

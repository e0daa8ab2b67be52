"""A limit on what the planner may fill of each device: asked for, kept, lifted."""

import pytest

from tests.webapp.conftest import client_of
from webapp.plans.planning import plan_compute
from webapp.plans.questions import question_of
from webapp.wizard.drafts import draft_begin, suggestion_apply

pytestmark = pytest.mark.django_db(databases="__all__")


@pytest.fixture
def plan(team, alice, host):
    return draft_begin(team=team, owner=alice, preset="demo", model=None)


def test_without_one_the_planner_may_fill_the_device(plan):
    assert question_of(plan).request.constraints == {}


def test_a_limit_is_a_constraint_on_the_peak(plan):
    plan.draft["hardware"]["memory_limit_gib"] = 0.5

    answer = plan_compute(plan)

    assert all(each.memory.per_device_peak_bytes <= 2**29 for each in answer.plans)
    assert plan.request["constraints"] == {"per_device_peak_bytes": {"max": 2**29}}


def test_the_hardware_step_asks_for_it(plan, alice):
    sent = {"choice": plan.draft["hardware"]["choice"], "device": "rtx-4090"}
    sent |= {"devices_per_node": 1, "nodes": 1, "memory_limit_gib": "1.5"}

    client_of(alice).post(f"/plans/{plan.pk}/edit/hardware/", sent)

    plan.refresh_from_db()
    assert plan.draft["hardware"]["memory_limit_gib"] == 1.5


def test_a_limit_that_is_no_size_is_refused_by_name(plan, alice):
    sent = {"choice": "catalog", "device": "rtx-4090", "devices_per_node": 1, "nodes": 1}

    answer = client_of(alice).post(
        f"/plans/{plan.pk}/edit/hardware/", {**sent, "memory_limit_gib": "-1"}
    )

    assert (answer.status_code, b"Fill at most is -1" in answer.content) == (422, True)


def test_the_suggestion_to_lift_it_lifts_it(plan):
    plan.draft["hardware"]["memory_limit_gib"] = 0.5

    left = suggestion_apply(plan.draft, {"constraints": {}})

    assert (left, plan.draft["hardware"]["memory_limit_gib"]) == ([], None)

"""A limit on what the planner may fill of each device: asked for, kept, lifted."""

import pytest

from tests.webapp.conftest import client_of
from webapp.plans.planning import plan_compute
from webapp.plans.questions import question_of
from webapp.wizard.drafts import draft_begin, suggestion_apply

pytestmark = pytest.mark.django_db(databases="__all__")


@pytest.fixture
def limited(team, alice, host):
    return draft_begin(team=team, owner=alice, preset="demo", model=None)


def test_a_limit_is_a_constraint_on_the_peak_until_it_is_lifted(limited):
    assert question_of(limited).request.constraints == {}

    limited.draft["hardware"]["memory_limit_gib"] = 0.5
    answer = plan_compute(limited)
    assert all(each.memory.per_device_peak_bytes <= 2**29 for each in answer.plans)
    assert limited.request["constraints"] == {"per_device_peak_bytes": {"max": 2**29}}

    limited.draft["hardware"]["memory_limit_gib"] = 0.5
    left = suggestion_apply(limited.draft, {"constraints": {}})
    assert (left, limited.draft["hardware"]["memory_limit_gib"]) == ([], None)


def test_the_hardware_step_asks_for_it_and_refuses_what_is_no_size(limited, alice):
    sent = {"choice": limited.draft["hardware"]["choice"], "device": "rtx-4090"}
    sent |= {"devices_per_node": 1, "nodes": 1, "memory_limit_gib": "1.5"}
    client_of(alice).post(f"/plans/{limited.pk}/edit/hardware/", sent)
    limited.refresh_from_db()
    assert limited.draft["hardware"]["memory_limit_gib"] == 1.5

    sent = {"choice": "catalog", "device": "rtx-4090", "devices_per_node": 1, "nodes": 1}
    answer = client_of(alice).post(
        f"/plans/{limited.pk}/edit/hardware/", {**sent, "memory_limit_gib": "-1"}
    )
    assert (answer.status_code, b"Fill at most is -1" in answer.content) == (422, True)

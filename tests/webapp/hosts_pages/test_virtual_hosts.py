"""Hosts that are only planned for: made in the browser, offered, never launched on."""

import pytest

from tests.webapp.conftest import client_of
from webapp.home.attention import attention_for
from webapp.hosts.device import (
    cluster_for_host,
    device_for_host,
    planned_words,
    virtual_host_create,
)
from webapp.hosts.models import Host
from webapp.jobs.models import Event, Job
from webapp.plans.errors import DraftProblem
from webapp.plans.launching import launch_note, launch_of
from webapp.plans.models import Plan
from webapp.wizard.drafts import draft_begin
from webapp.wizard.steps import options_for

pytestmark = pytest.mark.django_db(databases="__all__")
FORM = {"name": "Next rack", "device": "h100-sxm5-80gb", "num_devices": "8", "memory_gib": "2048"}


@pytest.fixture
def rack(team) -> Host:
    return virtual_host_create(
        team=team,
        name="Next rack",
        device="h100-sxm5-80gb",
        num_devices=8,
        memory_bytes=2 * 1024**4,
        by="olga",
    )


@pytest.fixture
def plan(rack, team, alice) -> Plan:
    """A plan of the demo on the planned host."""
    plan = draft_begin(team=team, owner=alice, preset="demo", model=None)
    plan.draft["hardware"]["choice"] = f"host:{rack.pk}"
    plan.save()
    return plan


def test_an_operator_makes_one_by_a_form(olga, team):
    answer = client_of(olga).post("/hosts/virtual/new/", FORM, follow=True)
    host = Host.objects.get(kind="virtual")
    assert (host.team, host.slug, host.planned["num_devices"]) == (team, "next-rack", 8)
    assert "Nothing runs on it." in answer.content.decode()
    assert Event.objects.get(kind="host.planned").actor == "olga"


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("device", "h100-of-the-moon", "is not one of the available choices"),
        ("num_devices", "0", "greater than or equal to 1"),
        ("num_devices", "99999", "less than or equal to 1024"),
        ("memory_gib", "nan", "Enter a number"),
        ("name", "", "This field is required"),
        ("name", "x" * 81, "at most 80 characters"),
    ],
)
def test_a_machine_that_cannot_be_is_refused_in_words(olga, field, value, words):
    answer = client_of(olga).post("/hosts/virtual/new/", {**FORM, field: value})
    assert answer.status_code == 422
    assert words in answer.content.decode()
    assert not Host.objects.exists()


def test_two_of_one_name_have_addresses_of_their_own(olga):
    for _ in range(2):
        client_of(olga).post("/hosts/virtual/new/", FORM)
    assert set(Host.objects.values_list("slug", flat=True)) == {"next-rack", "next-rack-2"}


def test_the_planner_sees_the_data_sheet(rack):
    cluster = cluster_for_host(rack)
    assert (cluster.devices_per_node, cluster.host_memory_bytes) == (8, 2 * 1024**4)
    assert device_for_host(rack).id == "h100-sxm5-80gb"
    assert planned_words(rack).startswith("8 ")


def test_the_wizard_offers_it_after_the_hosts_that_run(rack, host, plan):
    assert [one.name for one in options_for(plan).hosts] == ["Box", "Next rack"]


def test_the_wizard_says_that_it_is_only_planned_for(alice, plan):
    page = client_of(alice).get(f"/plans/{plan.pk}/edit/hardware/").content.decode()
    assert "only planned for" in page
    assert "Next rack" in page


def test_a_launch_is_refused_by_name(plan):
    with pytest.raises(DraftProblem, match="Next rack is only planned for, so nothing can run"):
        launch_of(plan)
    assert launch_note(plan)["can"] == ""


def test_the_launch_button_makes_no_job(alice, plan):
    client_of(alice).post(f"/plans/{plan.pk}/launch/", {"go": "launch"})
    assert not Job.objects.exists()


@pytest.mark.parametrize("path", ["/hosts/", "/hosts/next-rack/", "/queue/", "/models/", "/"])
def test_every_page_shows_or_leaves_it_without_fault(alice, rack, path):
    assert client_of(alice).get(path).status_code == 200


def test_nobody_is_alarmed_by_its_silence(alice, rack):
    assert attention_for(alice) == []


def test_it_is_taken_off_the_list(olga, rack):
    client_of(olga).post("/hosts/next-rack/retire/")
    assert "Next rack" not in client_of(olga).get("/hosts/").content.decode().split("toast")[0]
    rack.refresh_from_db()
    assert rack.state == "retired"

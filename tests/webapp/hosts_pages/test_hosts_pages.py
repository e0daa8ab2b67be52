"""The pages of hosts: list, cordons, labels, virtual machines."""

import re
from datetime import timedelta

import pytest
from django.urls import reverse

from runners.plans.refusals import DraftProblem
from tests.webapp.conftest import client_of, enrol, make_job
from webapp.audit.models import Event
from webapp.core.clock import now
from webapp.core.problems import InvalidProblem
from webapp.hosts.machines import (
    cluster_for_host,
    device_for_host,
    planned_words,
    virtual_host_create,
)
from webapp.hosts.models import Device, Host, HostState
from webapp.hosts.services import device_cordon, device_uncordon
from webapp.jobs.launching import launch_note, launchable_of
from webapp.jobs.models import Job, Measurement
from webapp.jobs.services import job_stop, job_submit
from webapp.pages.home import attention_for
from webapp.plans.models import Plan
from webapp.wizard.drafts import draft_begin, options_for

# The list of hosts and the page of one.


pytestmark = pytest.mark.django_db(databases="__all__")


def plain(response) -> str:
    assert response.status_code == 200
    return " ".join(re.sub(r"<[^>]+>", " ", response.content.decode()).split())


def page_of(user, host):
    return plain(client_of(user).get(f"/hosts/{host.slug}/"))


@pytest.fixture
def silent(host) -> Host:
    host.last_seen_at = now() - timedelta(seconds=34)
    host.save()
    return host


@pytest.fixture
def measured(host, team, alice) -> Host:
    """A host with ten measurements, nine of them inside their interval."""
    job = make_job(team, alice, host)
    attempt = job.attempts.create(number=1, host=host, fence="f")
    for i in range(10):
        value = 130.0 if i == 0 else 104.0
        Measurement.objects.create(
            job=job, attempt=attempt, host=host, metric=f"m{i}", unit="seconds", predicted=100.0,
            predicted_low=90.0, predicted_high=110.0, measured=value, ratio=value / 100,
            measured_at=now(),
        )  # fmt: skip
    host.calibration = {
        "host": host.pk,
        "factors": {"compute": {"factor": 1.25, "n": 4, "spread": 0.1}},
    }
    host.save()
    return host


# The list


def test_the_list_shows_each_role_its_hosts_with_state_machine_and_speed(
    alice, host, olga, charlie
):
    assert "1 host, 1 in contact, nothing is running." in plain(client_of(alice).get("/hosts/"))
    shown = plain(client_of(alice).get("/hosts/"))
    assert "Ready" in shown
    assert "Test CPU" in shown
    assert "12.0 GB/s" in shown
    assert "Add a host" not in plain(client_of(alice).get("/hosts/"))
    assert "Add a host" in plain(client_of(olga).get("/hosts/"))
    assert "Box" not in plain(client_of(charlie).get("/hosts/"))
    response = client_of(alice).get("/hosts/", headers={"HX-Request": "true"})
    assert b"<html" not in response.content
    assert b'data-region="rows"' in response.content


def test_jobs_count_in_the_list_and_stand_on_the_page_until_they_are_deleted(alice, host, job):
    assert "nothing is running, one is starting" in plain(client_of(alice).get("/hosts/"))
    assert "Train the demo model" in page_of(alice, host)
    Job.objects.update(deleted_at=now())
    assert "No job has run on this host yet" in page_of(alice, host)


def test_a_silent_host_says_for_how_long_and_a_retired_one_leaves_the_list(alice, silent, host):
    assert "No heartbeat for 34 s" in plain(client_of(alice).get("/hosts/"))
    Host.objects.update(state=HostState.RETIRED)
    assert "No host is enrolled yet" in plain(client_of(alice).get("/hosts/"))


def test_without_hosts_each_role_hears_its_next_step(alice, olga):
    assert "ask an operator" in plain(client_of(alice).get("/hosts/"))
    assert "One command enrols it" in plain(client_of(olga).get("/hosts/"))


def test_the_number_of_queries_does_not_depend_on_the_hosts(
    alice, team, host, django_assert_max_num_queries, django_assert_num_queries
):
    client = client_of(alice)
    with django_assert_max_num_queries(15) as one:
        client.get("/hosts/")
    for i in range(5):
        enrol(team, name=f"Box {i}")
    with django_assert_num_queries(len(one.captured_queries)):
        client.get("/hosts/")


# One host


def test_the_page_shows_inventory_measured_figures_and_what_happened(alice, host, charlie):
    shown = page_of(alice, host)
    assert "Test CPU, 2 logical CPUs, x86_64" in shown
    assert "16.0 GiB" in shown
    assert "none found" in shown
    shown = page_of(alice, host)
    assert "measured here, 14 Nov 2023" in shown
    assert "30.0 GFLOP/s" in shown
    assert "8.0 µs" in shown
    shown = page_of(alice, host)
    assert "Enrolled" in shown
    assert "Now ready" in shown
    for address in ["/hosts/box/", "/hosts/nowhere/"]:
        assert client_of(charlie).get(address).status_code == 404, address


def test_a_host_without_benchmark_says_what_plans_use_instead(alice, enrolled):
    assert "plans use data-sheet figures" in page_of(alice, enrolled[0])


def test_the_page_names_gpus_their_parts_other_vendors_and_complaints(alice, host):
    gpu = {"index": 0, "uuid": "u", "name": "RTX 4090", "memory_bytes": 24 * 2**30}
    host.facts = {**host.facts, "gpus": [gpu]}
    host.save()
    assert "RTX 4090, 24.0 GiB each" in page_of(alice, host)
    gpu = {"index": 0, "uuid": "u", "name": "MI300X", "memory_bytes": 24 * 2**30, "vendor": "amd"}
    gpu |= {"partition": "CPX/NPS4", "architecture": "gfx942", "unread": ["clocks: no answer"]}
    arc = {"index": 0, "uuid": "intel-0", "name": "Arc A770", "memory_bytes": 16 * 2**30}
    host.facts = {
        **host.facts, "gpus": [gpu], "other_gpus": [arc], "rocm_version": "7.0.2",
        "driver_version": "6.12", "device_problems": ["xpu-smi is not installed"],
        "topology": [["X", "XGMI"], ["XGMI", "X"]], "peer_access": [[None, False], [False, None]],
    }  # fmt: skip
    host.save()
    shown = page_of(alice, host)
    for words in (
        "CPX/NPS4", "gfx942", "not readable: clocks: no answer", "Arc A770 (16.0 GiB)",
        "xpu-smi is not installed", "6.12, ROCm 7.0.2",
    ):  # fmt: skip
        assert words in shown
    host.last_beat = {**host.last_beat, "problems": ["The disk is <nearly> full."]}
    host.save()
    response = client_of(alice).get(f"/hosts/{host.slug}/")
    assert "The disk is &lt;nearly&gt; full." in response.content.decode()


def test_the_page_says_how_well_plans_hold_by_measurements_that_count(alice, measured, olga):
    shown = page_of(alice, measured)
    assert "is 4.0 % off its prediction" in shown
    assert "90 % of the measurements lie inside the 80 % interval" in shown
    assert re.search(r"Arithmetic 1\.25 4 10 %", page_of(alice, measured))
    for path in ("/hosts/", f"/hosts/{measured.slug}/", "/hosts/add/"):
        assert b' style="' not in client_of(olga).get(path).content
    Measurement.objects.update(is_excluded=True)
    assert "No job with a prediction has finished here yet" in page_of(alice, measured)


# What operators do


def test_an_operator_drains_a_host_brings_it_back_and_locks_it_out(olga, host):
    client = client_of(olga)
    client.post(f"/hosts/{host.slug}/drain/")
    assert Host.objects.get(pk=host.pk).state == HostState.DRAINING
    client.post(f"/hosts/{host.slug}/undrain/")
    assert Host.objects.get(pk=host.pk).state == HostState.READY
    page = plain(client_of(olga).post(f"/hosts/{host.slug}/drain/", follow=True))
    assert "accepts no new job" in page
    assert "Accept jobs again" in page
    client_of(olga).post(f"/hosts/{host.slug}/revoke/")
    assert Host.objects.get(pk=host.pk).credential_hash == ""


def test_lower_roles_other_teams_and_links_cannot_change_a_host(
    alice, vera, olga, other_team, charlie, host
):
    charlie.memberships.update(role="admin")
    for action in ("drain", "undrain", "revoke"):
        url = f"/hosts/{host.slug}/{action}/"
        answers = [client_of(user).post(url) for user in (alice, vera, charlie)]
        statuses = [answer.status_code for answer in (*answers, client_of(olga).get(url))]
        assert statuses == [403, 403, 404, 405], action


# Devices out of use, and hosts that are opened or leave.


@pytest.fixture
def device(host) -> Device:
    return host.devices.get()


def press(user, device: Device, action: str, **sent) -> str:
    url = f"/hosts/{device.host.slug}/devices/{device.pk}/{action}/"
    return client_of(user).post(url, sent, follow=True).content.decode()


def page(user, host: Host) -> str:
    return client_of(user).get(f"/hosts/{host.slug}/").content.decode()


def test_a_cordon_keeps_who_when_and_why(olga, device):
    assert "The processor accepts no new job." in press(olga, device, "cordon", reason=" ECC  up ")
    device.refresh_from_db()
    assert (device.cordoned_by, device.cordon_reason) == ("olga", "ECC up")
    assert device.cordoned_at is not None


def test_a_cordoned_device_gets_no_job_until_it_is_given_free(olga, alice, team, host, device):
    device_cordon(device=device, by="olga", reason="Fan is loud")
    job = job_submit(job=make_job(team, alice, host), by="alice")
    assert job.state == "queued"
    assert "cordoned by olga" in page(alice, host)
    assert "Fan is loud" in page(alice, host)
    press(olga, device, "uncordon")
    assert Job.objects.get(pk=job.pk).state == "preflight"


def test_the_job_on_a_cordoned_device_goes_on(olga, job, device):
    press(olga, device, "cordon", reason="Maintenance on Friday")
    job.refresh_from_db()
    assert job.state == "preflight"


def test_a_cordon_needs_a_reason_of_a_host_of_ones_own(olga, device, enrolled):
    assert "reason is empty" in press(olga, device, "cordon", reason="  ")
    device.refresh_from_db()
    assert device.cordoned_at is None
    with pytest.raises(InvalidProblem, match="201 characters; the limit is 200"):
        device_cordon(device=device, by="olga", reason="x" * 201)
    device_uncordon(device=device, by="olga")
    assert not Event.objects.filter(kind="device.uncordoned").exists()
    for action in ["cordon", "uncordon"]:
        url = f"/hosts/{device.host.slug}/devices/01ARZ3NDEKTSV4RRFFQ69G5FAV/{action}/"
        assert client_of(olga).post(url, {"reason": "x"}).status_code == 404, action


def test_the_page_tells_what_happened_to_a_device(olga, host, device):
    device_cordon(device=device, by="olga", reason="ECC errors")
    device_uncordon(device=device, by="olga")
    assert "The processor cordoned: ECC errors" in page(olga, host)
    assert "The processor uncordoned" in page(olga, host)


def test_the_page_names_the_job_that_holds_a_device_and_gives_operators_buttons(
    alice, job, host, olga
):
    assert f'allocated to <a href="/jobs/{job.pk}/">' in page(alice, host)
    assert "Cordon the device" in page(olga, host)
    assert "Cordon the device" not in page(alice, host)


# Maintenance and retirement


def act(user, host: Host, action: str) -> str:
    answer = client_of(user).post(f"/hosts/{host.slug}/{action}/", follow=True)
    host.refresh_from_db()
    return answer.content.decode()


@pytest.mark.parametrize(
    ("action", "state"), [("maintenance", "maintenance"), ("retire", "retired")]
)
def test_a_host_without_jobs_is_taken_out(olga, host, action, state):
    act(olga, host, action)
    assert host.state == state


@pytest.mark.parametrize("action", ["maintenance", "retire"])
def test_a_host_that_runs_jobs_is_drained_first(olga, host, job, action):
    assert "Box still runs 1 job. Drain it and wait" in act(olga, host, action)
    assert host.state == "ready"
    act(olga, host, "drain")
    job_stop(job=job, by="alice")
    act(olga, host, action)
    assert host.state in {"maintenance", "retired"}


def test_a_retired_host_speaks_no_more(olga, host):
    act(olga, host, "retire")
    assert host.credential_hash == ""


# A host's labels, its prices among them, are changed on its page by operators.


def save(host: Host, user, labels: str, *, follow: bool = True):
    url = reverse("host-labels", args=[host.slug])
    return client_of(user).post(url, {"labels": labels}, follow=follow)


def labels_of(host: Host) -> dict[str, str]:
    return Host.objects.get(pk=host.pk).labels


def test_an_operator_gives_a_host_labels_and_prices(host, olga):
    page = save(host, olga, "gpu=4090, usd_per_hour=2.50 usd_per_kwh=0.30").content.decode()
    assert labels_of(host) == {"gpu": "4090", "usd_per_hour": "2.50", "usd_per_kwh": "0.30"}
    assert "usd_per_hour=2.50 usd_per_kwh=0.30. The prices apply from now on." in page
    assert "Labels: gpu=4090 usd_per_hour=2.50 usd_per_kwh=0.30" in page  # among its events
    assert 'name="labels" value="gpu=4090"' in page
    assert 'name="hourly" value="2.50"' in page


def test_the_planner_reckons_with_the_new_price(host, olga):
    before = cluster_for_host(host).electricity_usd_per_kwh
    save(host, olga, "usd_per_kwh=0.30")
    host.refresh_from_db()
    assert (before, cluster_for_host(host).electricity_usd_per_kwh) == (None, 0.30)


def test_prices_are_fields_of_their_own_and_a_wrong_one_is_refused_beside_its_own(host, olga):
    url, client = reverse("host-labels", args=[host.slug]), client_of(olga)
    client.post(url, {"labels": "room=b12", "hourly": "2.50", "per_kwh": ""})
    assert labels_of(host) == {"room": "b12", "usd_per_hour": "2.50"}
    page = client.get(f"/hosts/{host.slug}/").content.decode()
    fields = dict(re.findall(r'name="(labels|hourly|per_kwh)" value="([^"]*)"', page))
    assert fields == {"labels": "room=b12", "hourly": "2.50"}
    wrong = client.post(url, {"labels": "room=b12", "hourly": "free"})
    assert wrong.status_code == 400
    assert "is not a valid price" in wrong.content.decode().split('id="id_hourly_error"')[1][:80]
    client.post(url, {"labels": "room=b12", "hourly": ""})
    assert labels_of(host) == {"room": "b12"}


def test_the_page_has_its_parts_as_tabs_that_are_links_without_scripts(host, olga, alice):
    for user, names in [(olga, 6), (alice, 5)]:
        page = client_of(user).get(f"/hosts/{host.slug}/").content.decode()
        links = re.findall(r'<a href="#(\w+)">', page.split("data-tabs>")[1].split("</nav>")[0])
        assert links == re.findall(r'id="(\w+)" data-tab>', page)
        assert len(links) == names


def test_the_event_says_who_changed_what(host, olga):
    save(host, olga, "room=b12")
    save(host, olga, "")
    first, second = Event.objects.filter(kind="host.labels").order_by("id")
    assert (first.actor, first.detail) == ("olga", {"labels": {"room": "b12"}, "before": {}})
    assert second.detail == {"labels": {}, "before": {"room": "b12"}}
    assert labels_of(host) == {}


def test_the_same_labels_again_are_no_event(host, olga):
    for _ in range(2):
        save(host, olga, "room=b12")
    assert Event.objects.filter(kind="host.labels").count() == 1


def test_what_is_no_label_is_refused_and_stays_typed(host, olga):
    for typed, said in [
        ("room", "“room” is not key=value; write it as gpu=4090."),
        ("usd_per_hour=free", "usd_per_hour=free is not a valid price"),
        ("usd_per_kwh=-1", "usd_per_kwh=-1 is not a valid price"),
        (" ".join(f"k{n}=1" for n in range(13)), "13 labels; the limit is 12."),
        ("a=" + "x" * 400, "at most 400 characters"),
        ("<script>=1", "is not key=value"),
    ]:
        Host.objects.filter(pk=host.pk).update(labels={"room": "b12"})
        answer = save(host, olga, typed)
        page = answer.content.decode()
        assert answer.status_code == 400, typed
        assert said in page, typed
        assert f'value="{typed.replace("<", "&lt;").replace(">", "&gt;")}"' in page, typed
        assert labels_of(host) == {"room": "b12"}, typed


def test_who_does_not_operate_sees_labels_without_a_form(host, olga, alice):
    save(host, olga, "room=b12")
    page = client_of(alice).get(f"/hosts/{host.slug}/").content.decode()
    assert "room=b12" in page
    assert "Labels and prices" not in page
    assert save(host, alice, "room=c3").status_code == 403
    assert labels_of(host) == {"room": "b12"}


# Planning-only hosts: made in the browser, offered, never launched on.


FORM = {"name": "Next rack", "device": "h100-sxm5-80gb", "num_devices": "8", "memory_gib": "2048"}


@pytest.fixture
def rack(team) -> Host:
    return virtual_host_create(
        team=team, name="Next rack", device="h100-sxm5-80gb", num_devices=8,
        memory_bytes=2 * 1024**4, by="olga",
    )  # fmt: skip


@pytest.fixture
def plan(rack, team, alice) -> Plan:
    """A plan of the demo on the planned host."""
    plan = draft_begin(team=team, owner=alice, preset="demo", model=None)
    plan.draft["hardware"]["host"] = rack.pk
    plan.save()
    return plan


def test_an_operator_makes_one_by_a_form(olga, team):
    answer = client_of(olga).post("/hosts/virtual/new/", FORM, follow=True)
    host = Host.objects.get(kind="virtual")
    assert (host.team, host.slug, host.planned["num_devices"]) == (team, "next-rack", 8)
    assert "no job runs on it." in answer.content.decode()
    assert Event.objects.get(kind="host.planned").actor == "olga"
    client_of(olga).post("/hosts/virtual/new/", FORM)
    assert set(Host.objects.values_list("slug", flat=True)) == {"next-rack", "next-rack-2"}


def test_a_machine_that_cannot_be_is_refused_in_words(olga):
    for field, value, words in [
        ("device", "h100-of-the-moon", "is not one of the available choices"),
        ("num_devices", "0", "is 0. It must be at least 1"),
        ("num_devices", "99999", "at most 1,024"),
        ("memory_gib", "nan", "Enter a number"),
        ("name", "", "This field is required"),
        ("name", "x" * 81, "at most 80 characters"),
    ]:
        answer = client_of(olga).post("/hosts/virtual/new/", {**FORM, field: value})
        assert answer.status_code == 422, field
        assert words in answer.content.decode(), field
        assert not Host.objects.exists(), field


def test_the_wizard_offers_it_after_the_hosts_that_run_as_only_planned_for(
    rack, host, plan, alice
):
    assert [one.name for one in options_for(plan).hosts] == ["Box", "Next rack"]
    page = client_of(alice).get(f"/plans/{plan.pk}/edit/hardware/").content.decode()
    assert "planning only" in page
    assert "Next rack" in page


def test_a_launch_is_refused_by_name_and_makes_no_job(plan, alice):
    with pytest.raises(DraftProblem, match="Next rack is a planning-only host, so no job can run"):
        launchable_of(plan)
    assert launch_note(plan)["can"] == ""
    client_of(alice).post(f"/plans/{plan.pk}/launch/", {"run": "job"})
    assert not Job.objects.exists()


def test_every_page_shows_or_leaves_it_and_nobody_is_alarmed(alice, rack):
    for path in ["/hosts/", "/hosts/next-rack/", "/queue/", "/models/", "/"]:
        assert client_of(alice).get(path).status_code == 200, path
    assert attention_for(alice) == []
    cluster = cluster_for_host(rack)
    assert (cluster.devices_per_node, cluster.host_memory_bytes) == (8, 2 * 1024**4)
    assert device_for_host(rack).id == "h100-sxm5-80gb"
    assert planned_words(rack).startswith("8 ")


def test_it_is_taken_off_the_list(olga, rack):
    client_of(olga).post("/hosts/next-rack/retire/")
    assert "Next rack" not in client_of(olga).get("/hosts/").content.decode().split("toast")[0]
    rack.refresh_from_db()
    assert rack.state == "retired"

"""The list of hosts and the page of one."""

import re
from datetime import timedelta

import pytest

from tests.webapp.conftest import client_of, enrol, make_job
from webapp.core.clock import now
from webapp.hosts.models import Host, HostState
from webapp.jobs.models import Job, Measurement

pytestmark = pytest.mark.django_db(databases=["default", "metrics"])


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


def test_the_list_answers_first(alice, host):
    assert "1 host, 1 in contact, nothing is running." in plain(client_of(alice).get("/hosts/"))


def test_the_list_shows_state_machine_and_measured_speed(alice, host):
    shown = plain(client_of(alice).get("/hosts/"))
    assert "Ready" in shown
    assert "Test CPU" in shown
    assert "12.0 GB/s" in shown


def test_the_list_counts_jobs_at_work(alice, host, job):
    assert "nothing is running, one is starting" in plain(client_of(alice).get("/hosts/"))


def test_a_silent_host_says_for_how_long(alice, silent):
    assert "Silent 34 s" in plain(client_of(alice).get("/hosts/"))


def test_retired_hosts_leave_the_list(alice, host):
    Host.objects.update(state=HostState.RETIRED)
    assert "No host is enrolled yet" in plain(client_of(alice).get("/hosts/"))


def test_only_operators_are_offered_to_add_a_host(alice, olga, host):
    assert "Add a host" not in plain(client_of(alice).get("/hosts/"))
    assert "Add a host" in plain(client_of(olga).get("/hosts/"))


def test_without_hosts_each_role_hears_its_next_step(alice, olga):
    assert "ask an operator" in plain(client_of(alice).get("/hosts/"))
    assert "One command enrols it" in plain(client_of(olga).get("/hosts/"))


def test_another_teams_hosts_are_not_there(charlie, host):
    assert "Box" not in plain(client_of(charlie).get("/hosts/"))


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


def test_live_updates_ask_only_for_the_rows(alice, host):
    response = client_of(alice).get("/hosts/", headers={"HX-Request": "true"})
    assert b"<html" not in response.content
    assert b'data-region="rows"' in response.content


# One host


def test_the_page_shows_the_inventory(alice, host):
    shown = page_of(alice, host)
    assert "Test CPU, 2 logical CPUs, x86_64" in shown
    assert "16.0 GiB" in shown
    assert "none found" in shown


def test_measured_figures_say_where_and_when(alice, host):
    shown = page_of(alice, host)
    assert "measured here, 14 Nov 2023" in shown
    assert "30.0 GFLOP/s" in shown
    assert "8.0 µs" in shown


def test_a_host_without_benchmark_says_what_plans_use_instead(alice, enrolled):
    assert "plans use data-sheet figures" in page_of(alice, enrolled[0])


def test_a_gpu_stands_in_the_inventory_and_in_the_headline(alice, host):
    gpu = {"index": 0, "uuid": "u", "name": "RTX 4090", "memory_bytes": 24 * 2**30}
    host.facts = {**host.facts, "gpus": [gpu]}
    host.save()
    assert "RTX 4090, 24.0 GiB each" in page_of(alice, host)


def test_the_page_names_parts_of_gpus_other_vendors_and_what_was_not_read(alice, host):
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
        "CPX/NPS4", "gfx942", "not read: clocks: no answer", "Arc A770 (16.0 GiB)",
        "xpu-smi is not installed", "6.12, ROCm 7.0.2",
    ):  # fmt: skip
        assert words in shown


def test_the_page_says_how_well_plans_hold(alice, measured):
    shown = page_of(alice, measured)
    assert "within 4.0 % of what was then measured" in shown
    assert "90 % of the measurements lie inside the 80 % interval" in shown


def test_calibration_factors_come_with_their_number_of_runs(alice, measured):
    assert re.search(r"Arithmetic 1\.25 4 10 %", page_of(alice, measured))


def test_an_excluded_measurement_does_not_count(alice, measured):
    Measurement.objects.update(is_excluded=True)
    assert "No job with a prediction has finished here yet" in page_of(alice, measured)


def test_the_page_lists_the_newest_jobs_there(alice, host, job):
    assert "Train the demo model" in page_of(alice, host)


def test_a_deleted_job_leaves_the_hosts_page(alice, host, job):
    Job.objects.update(deleted_at=now())
    assert "Nothing has run here yet" in page_of(alice, host)


def test_what_the_agent_complains_about_is_shown(alice, host):
    host.last_beat = {**host.last_beat, "problems": ["The disk is <nearly> full."]}
    host.save()
    response = client_of(alice).get(f"/hosts/{host.slug}/")
    assert "The disk is &lt;nearly&gt; full." in response.content.decode()


def test_what_happened_is_told_in_words(alice, host):
    shown = page_of(alice, host)
    assert "Enrolled" in shown
    assert "Now ready" in shown


@pytest.mark.parametrize("address", ["/hosts/box/", "/hosts/nowhere/"])
def test_for_another_team_no_host_exists(charlie, host, address):
    assert client_of(charlie).get(address).status_code == 404


def test_no_host_page_carries_a_style_attribute(olga, measured):
    for path in ("/hosts/", f"/hosts/{measured.slug}/", "/hosts/add/"):
        assert b' style="' not in client_of(olga).get(path).content


# What operators do


def test_an_operator_drains_a_host_and_brings_it_back(olga, host):
    client = client_of(olga)
    client.post(f"/hosts/{host.slug}/drain/")
    assert Host.objects.get(pk=host.pk).state == HostState.DRAINING
    client.post(f"/hosts/{host.slug}/undrain/")
    assert Host.objects.get(pk=host.pk).state == HostState.READY


def test_a_drained_host_says_that_it_takes_nothing_new(olga, host):
    page = plain(client_of(olga).post(f"/hosts/{host.slug}/drain/", follow=True))
    assert "takes no new job" in page
    assert "Take jobs again" in page


def test_a_locked_out_host_has_no_credential(olga, host):
    client_of(olga).post(f"/hosts/{host.slug}/revoke/")
    assert Host.objects.get(pk=host.pk).credential_hash == ""


@pytest.mark.parametrize("action", ["drain", "undrain", "revoke"])
def test_lower_roles_cannot_change_a_host(alice, vera, host, action):
    for user in (alice, vera):
        assert client_of(user).post(f"/hosts/{host.slug}/{action}/").status_code == 403


@pytest.mark.parametrize("action", ["drain", "undrain", "revoke"])
def test_for_another_teams_operator_there_is_nothing_to_change(other_team, charlie, host, action):
    charlie.memberships.update(role="admin")
    assert client_of(charlie).post(f"/hosts/{host.slug}/{action}/").status_code == 404


@pytest.mark.parametrize("action", ["drain", "undrain", "revoke"])
def test_hosts_are_never_changed_by_following_a_link(olga, host, action):
    assert client_of(olga).get(f"/hosts/{host.slug}/{action}/").status_code == 405

"""Devices out of use, and hosts that are opened or leave."""

import pytest

from tests.webapp.conftest import client_of, make_job
from webapp.core.problems import InvalidProblem
from webapp.hosts.cordons import device_cordon, device_uncordon
from webapp.hosts.models import Device, Host
from webapp.jobs.models import Event, Job
from webapp.jobs.services import job_stop, job_submit

pytestmark = pytest.mark.django_db(databases="__all__")


@pytest.fixture
def device(host) -> Device:
    return host.devices.get()


def press(user, device: Device, action: str, **sent) -> str:
    url = f"/hosts/{device.host.slug}/devices/{device.pk}/{action}/"
    return client_of(user).post(url, sent, follow=True).content.decode()


def page(user, host: Host) -> str:
    return client_of(user).get(f"/hosts/{host.slug}/").content.decode()


def test_a_cordon_keeps_who_when_and_why(olga, device):
    assert "The processor takes no new job." in press(olga, device, "cordon", reason=" ECC  up ")
    device.refresh_from_db()
    assert (device.cordoned_by, device.cordon_reason) == ("olga", "ECC up")
    assert device.cordoned_at is not None


def test_a_cordoned_device_gets_no_job_and_says_so(olga, alice, team, host, device):
    device_cordon(device=device, by="olga", reason="Fan is loud")
    job = job_submit(job=make_job(team, alice, host), by="alice")
    assert job.state == "queued"
    assert "cordoned by olga" in page(alice, host)
    assert "Fan is loud" in page(alice, host)


def test_the_job_on_a_cordoned_device_goes_on(olga, job, device):
    press(olga, device, "cordon", reason="Maintenance on Friday")
    job.refresh_from_db()
    assert job.state == "preflight"


def test_what_waits_starts_as_soon_as_the_device_is_given_free(olga, alice, team, host, device):
    device_cordon(device=device, by="olga", reason="Fan is loud")
    job = job_submit(job=make_job(team, alice, host), by="alice")
    press(olga, device, "uncordon")
    assert Job.objects.get(pk=job.pk).state == "preflight"


def test_a_cordon_without_a_reason_is_refused(olga, device):
    assert "reason is empty" in press(olga, device, "cordon", reason="  ")
    device.refresh_from_db()
    assert device.cordoned_at is None


def test_a_reason_has_an_end(device):
    with pytest.raises(InvalidProblem, match="201 characters; at most 200"):
        device_cordon(device=device, by="olga", reason="x" * 201)


def test_the_page_tells_what_happened_to_a_device(olga, host, device):
    device_cordon(device=device, by="olga", reason="ECC errors")
    device_uncordon(device=device, by="olga")
    assert "The processor cordoned: ECC errors" in page(olga, host)
    assert "The processor given free" in page(olga, host)


def test_giving_free_what_is_free_is_no_event(device):
    device_uncordon(device=device, by="olga")
    assert not Event.objects.filter(kind="device.uncordoned").exists()


@pytest.mark.parametrize("action", ["cordon", "uncordon"])
def test_a_device_of_another_host_is_not_there(olga, device, enrolled, action):
    url = f"/hosts/{device.host.slug}/devices/01ARZ3NDEKTSV4RRFFQ69G5FAV/{action}/"
    assert client_of(olga).post(url, {"reason": "x"}).status_code == 404


def test_the_page_names_the_job_that_holds_a_device(alice, job, host):
    assert f'held by <a href="/jobs/{job.pk}/">' in page(alice, host)


def test_only_operators_see_the_buttons(alice, olga, host):
    assert "Cordon it" in page(olga, host)
    assert "Cordon it" not in page(alice, host)


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

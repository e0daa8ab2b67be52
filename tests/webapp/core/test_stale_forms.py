"""Two people on one object: the later form is refused with who changed it, on every such form."""

import re

import pytest

from tests.webapp.conftest import client_of
from webapp.accounts.models import Membership, Quota, Role, Secret
from webapp.accounts.secrets import secrets_open
from webapp.hosts.models import Host
from webapp.jobs.models import Job

pytestmark = pytest.mark.django_db(databases="__all__")


@pytest.fixture
def otto(team, django_user_model):
    """A second operator of the team."""
    user = django_user_model.objects.create_user("otto", password="x")
    Membership.objects.create(user=user, team=team, role=Role.OPERATOR)
    return user


def seen_in(text: str, action: str) -> str:
    """The mark that the form of an address carries."""
    form = text.split(f'action="{action}')[1] if action else text.rsplit("<form", maxsplit=1)[-1]
    return re.search(r'name="seen" value="([^"]*)"', form)[1]


def page(user, path: str) -> str:
    return client_of(user).get(path).content.decode()


def test_labels(host, olga, otto):
    path, action = f"/hosts/{host.slug}/", f"/hosts/{host.slug}/labels/"
    seen = seen_in(page(olga, path), action)
    client_of(otto).post(action, {"labels": "usd_per_hour=2", "seen": seen})

    answer = client_of(olga).post(action, {"labels": "room=b12", "seen": seen}, follow=True)

    text = answer.content.decode()
    assert "The labels of Box were changed by otto" in text
    assert "You had typed: room=b12" in text
    assert Host.objects.get(pk=host.pk).labels == {"usd_per_hour": "2"}


def test_labels_that_were_not_changed_are_taken(host, olga):
    action = f"/hosts/{host.slug}/labels/"
    seen = seen_in(page(olga, f"/hosts/{host.slug}/"), action)

    client_of(olga).post(action, {"labels": "room=b12", "seen": seen})

    assert Host.objects.get(pk=host.pk).labels == {"room": "b12"}


def test_the_address(host, olga, otto):
    host.facts["addresses"] = ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
    host.save()
    action = f"/hosts/{host.slug}/address/"
    seen = seen_in(page(olga, f"/hosts/{host.slug}/"), action)
    client_of(otto).post(action, {"address": "10.0.0.2", "seen": seen})

    answer = client_of(olga).post(action, {"address": "10.0.0.3", "seen": seen}, follow=True)

    assert "was changed by otto" in answer.content.decode()
    assert Host.objects.get(pk=host.pk).address == "10.0.0.2"


def test_the_limits_of_a_team(team, olga, otto):
    seen = re.search(r'name="seen" value="([^"]*)"', page(olga, "/queue/limits/"))[1]
    values = {"max_devices": "8", "max_queued_per_user": "50", "share": "1", "seen": seen}
    client_of(otto).post("/queue/limits/", values)

    answer = client_of(olga).post("/queue/limits/", values | {"max_devices": "2"}, follow=True)

    assert "The limits of Alice&#x27;s team were changed by otto" in answer.content.decode()
    assert Quota.objects.get(team=team).max_devices == 8


def test_a_secret(team, olga, otto):
    seen = seen_in(page(olga, "/settings/secrets/"), "/settings/secrets/save/")
    values = {"name": "HF_TOKEN", "seen": seen}
    client_of(otto).post("/settings/secrets/save/", values | {"value": "of otto 1"})

    answer = client_of(olga).post(
        "/settings/secrets/save/", values | {"value": "of olga 1"}, follow=True
    )

    assert "HF_TOKEN was changed by otto" in answer.content.decode()
    assert secrets_open(team_id=team.pk, names=["HF_TOKEN"]) == {"HF_TOKEN": "of otto 1"}


def test_a_secret_that_was_stored_anew_is_not_forgotten_unseen(team, olga, otto):
    client_of(otto).post("/settings/secrets/save/", {"name": "HF_TOKEN", "value": "first one"})
    secret = Secret.objects.get()
    action = f"/settings/secrets/{secret.pk}/delete/"
    seen = seen_in(page(olga, "/settings/secrets/"), "")
    client_of(otto).post("/settings/secrets/save/", {"name": "HF_TOKEN", "value": "second one"})

    client_of(olga).post(action, {"seen": seen})

    assert Secret.objects.filter(pk=secret.pk).exists()


def test_a_cordon_keeps_its_first_reason(host, olga, otto):
    device = host.devices.get()
    action = f"/hosts/{host.slug}/devices/{device.pk}"
    client_of(otto).post(f"{action}/cordon/", {"reason": "ECC errors"})

    answer = client_of(olga).post(f"{action}/cordon/", {"reason": "mine"}, follow=True)

    assert "cordoned already, by otto: ECC errors" in answer.content.decode()
    device.refresh_from_db()
    assert device.cordon_reason == "ECC errors"


def test_another_cordon_is_not_lifted_unseen(host, olga, otto):
    device = host.devices.get()
    action = f"/hosts/{host.slug}/devices/{device.pk}"
    client_of(otto).post(f"{action}/cordon/", {"reason": "ECC errors"})
    seen = seen_in(page(olga, f"/hosts/{host.slug}/"), f"{action}/uncordon/")
    client_of(otto).post(f"{action}/uncordon/")
    client_of(otto).post(f"{action}/cordon/", {"reason": "fan is broken"})

    client_of(olga).post(f"{action}/uncordon/", {"seen": seen})

    device.refresh_from_db()
    assert device.cordon_reason == "fan is broken"


def test_the_priority_of_a_waiting_job(job, olga, otto):
    Job.objects.filter(pk=job.pk).update(state="queued", current_attempt=None)
    action = f"/queue/{job.pool_id}/priority/"
    seen = seen_in(page(olga, f"/queue/{job.pool_id}/"), action)
    client_of(otto).post(action, {"job": job.pk, "priority": "-1", "seen": seen})
    Job.objects.filter(pk=job.pk).update(state="queued")

    client_of(olga).post(action, {"job": job.pk, "priority": "1", "seen": seen})

    assert Job.objects.get(pk=job.pk).priority == -1

"""The Django admin: everything to see, little to change."""

import pytest
from django.apps import apps
from django.contrib import admin
from django.urls import reverse

from tests.webapp.conftest import EXIT_OK, batch_of, client_of
from webapp.hosts.models import EnrolmentToken, Host
from webapp.hosts.services import digest
from webapp.jobs.ingest import events_accept
from webapp.jobs.models import AttemptEvent, Event

pytestmark = pytest.mark.django_db(databases="__all__")
READ_ONLY = ["job", "attempt", "attemptevent", "event", "command", "artefact", "measurement"]
OURS = [model for model in admin.site._registry if model.__module__.startswith("webapp.")]


@pytest.fixture
def root(admin_user):
    return client_of(admin_user)


def test_every_table_of_a_person_or_a_job_is_registered():
    hidden = {"metricbatch", "metricchunk", "secret"}
    models = {m for m in apps.get_models() if m.__module__.startswith("webapp.")}
    assert {m._meta.model_name for m in models - set(OURS)} == hidden


@pytest.mark.parametrize("model", OURS, ids=lambda model: model._meta.model_name)
def test_every_list_opens(root, attempt, model):
    events_accept(host=attempt.host, batch=batch_of(attempt, ("exited", EXIT_OK)))
    name = f"admin:{model._meta.app_label}_{model._meta.model_name}_changelist"
    assert root.get(reverse(name)).status_code == 200


@pytest.mark.parametrize("name", READ_ONLY)
def test_what_happened_cannot_be_added(root, name):
    assert root.get(reverse(f"admin:jobs_{name}_add")).status_code == 403


def test_an_event_can_be_read_but_not_deleted(root, attempt):
    events_accept(host=attempt.host, batch=batch_of(attempt, ("exited", EXIT_OK)))
    row = AttemptEvent.objects.get()
    assert root.get(reverse("admin:jobs_attemptevent_change", args=[row.pk])).status_code == 200
    assert root.post(reverse("admin:jobs_attemptevent_delete", args=[row.pk])).status_code == 403


def test_adding_a_host_leads_to_the_page_with_the_check_list(root):
    answer = root.get(reverse("admin:hosts_host_add"))
    assert answer.headers["Location"] == reverse("host-add")


def test_the_new_tokens_text_is_shown_once_and_enrols(root, team):
    form = {"team": team.pk, "name": "Box", "pool": "default", "labels": "{}"}
    answer = root.post(reverse("admin:hosts_enrolmenttoken_add"), form, follow=True)
    words = next(str(m) for m in answer.context["messages"] if "--token" in str(m))
    text = words.split("--token ")[1].strip()
    assert EnrolmentToken.objects.get().token_hash == digest(text)


def test_a_token_can_be_revoked_from_the_list(root, team):
    form = {"team": team.pk, "name": "Box", "pool": "default", "labels": "{}"}
    root.post(reverse("admin:hosts_enrolmenttoken_add"), form)
    chosen = {"action": "revoke", "_selected_action": EnrolmentToken.objects.get().pk}
    root.post(reverse("admin:hosts_enrolmenttoken_changelist"), chosen)
    assert EnrolmentToken.objects.get().revoked_at is not None


def test_a_hosts_page_shows_no_secret(root, enrolled):
    host, _ = enrolled
    text = root.get(reverse("admin:hosts_host_change", args=[host.pk])).content.decode()
    assert host.credential_hash not in text
    assert host.command_salt not in text


def test_a_state_set_here_is_recorded(root, host):
    form = {"name": "Box", "pool": host.pool_id, "labels": "{}", "state": "maintenance"}
    root.post(reverse("admin:hosts_host_change", args=[host.pk]), form)
    assert Host.objects.get().state == "maintenance"
    assert Event.objects.filter(kind="host.state").last().to_state == "maintenance"


def test_only_staff_gets_in(alice):
    assert client_of(alice).get("/admin/").status_code == 302

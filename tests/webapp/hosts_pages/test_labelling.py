"""A host's labels, its prices among them, are changed on its page by operators."""

import pytest
from django.urls import reverse

from tests.webapp.conftest import client_of
from webapp.hosts.device import cluster_for_host
from webapp.hosts.models import Host
from webapp.jobs.models import Event

pytestmark = pytest.mark.django_db(databases="__all__")


def save(host: Host, user, labels: str, *, follow: bool = True):
    url = reverse("host-labels", args=[host.slug])
    return client_of(user).post(url, {"labels": labels}, follow=follow)


def labels_of(host: Host) -> dict[str, str]:
    return Host.objects.get(pk=host.pk).labels


def test_an_operator_gives_a_host_labels_and_prices(host, olga):
    page = save(host, olga, "gpu=4090, usd_per_hour=2.50 usd_per_kwh=0.30").content.decode()

    assert labels_of(host) == {"gpu": "4090", "usd_per_hour": "2.50", "usd_per_kwh": "0.30"}
    assert "usd_per_hour=2.50 usd_per_kwh=0.30. Its prices count from now on." in page
    assert "Labels: gpu=4090 usd_per_hour=2.50 usd_per_kwh=0.30" in page  # among its events
    assert 'value="gpu=4090 usd_per_hour=2.50 usd_per_kwh=0.30"' in page


def test_the_planner_reckons_with_the_new_price(host, olga):
    before = cluster_for_host(host).electricity_usd_per_kwh

    save(host, olga, "usd_per_kwh=0.30")

    host.refresh_from_db()
    assert (before, cluster_for_host(host).electricity_usd_per_kwh) == (None, 0.30)


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


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("room", "“room” is not key=value; write it as gpu=4090."),
        ("usd_per_hour=free", "usd_per_hour=free is no price"),
        ("usd_per_kwh=-1", "usd_per_kwh=-1 is no price"),
        (" ".join(f"k{n}=1" for n in range(13)), "13 labels; at most 12 are kept."),
        ("a=" + "x" * 400, "at most 400 characters"),
        ("<script>=1", "is not key=value"),
    ],
)
def test_what_is_no_label_is_refused_and_stays_typed(host, olga, typed, said):
    Host.objects.filter(pk=host.pk).update(labels={"room": "b12"})

    answer = save(host, olga, typed)
    page = answer.content.decode()

    assert answer.status_code == 400
    assert said in page
    assert f'value="{typed.replace("<", "&lt;").replace(">", "&gt;")}"' in page
    assert labels_of(host) == {"room": "b12"}


def test_who_does_not_operate_sees_labels_without_a_form(host, olga, alice):
    save(host, olga, "room=b12")

    page = client_of(alice).get(f"/hosts/{host.slug}/").content.decode()

    assert "room=b12" in page
    assert "Labels and prices" not in page
    assert save(host, alice, "room=c3").status_code == 403
    assert labels_of(host) == {"room": "b12"}

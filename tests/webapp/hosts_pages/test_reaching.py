"""Which address of a host the others of a job use."""

import pytest
from django.urls import reverse

from tests.webapp.conftest import client_of
from tests.webapp.jobs.gangs import make_gang, make_hosts, members
from webapp.core.problems import InvalidProblem
from webapp.hosts.actions import address_choose
from webapp.hosts.models import Host
from webapp.jobs.models import Event

pytestmark = pytest.mark.django_db(databases="__all__")


@pytest.fixture
def hosts(team):
    made = make_hosts(team, 2)
    facts = made[0].facts | {"addresses": ["10.0.0.1", "192.168.7.1"]}
    Host.objects.filter(pk=made[0].pk).update(facts=facts)
    made[0].refresh_from_db()
    return made


def choose(host: Host, user, address: str):
    url = reverse("host-address", args=[host.slug])
    return client_of(user).post(url, {"address": address}, follow=True).content.decode()


def test_an_operator_chooses_one_of_the_hosts_addresses(hosts, olga):
    text = choose(hosts[0], olga, "192.168.7.1")

    assert "Later jobs reach Box 1 at 192.168.7.1." in text
    assert Event.objects.get(kind="host.address").actor == "olga"


def test_later_jobs_meet_there(hosts, olga, alice, team):
    choose(hosts[0], olga, "192.168.7.1")

    job = make_gang(team, alice, hosts)

    assert {member.address for member in members(job)} == {"10.0.0.2", "192.168.7.1"}


@pytest.mark.parametrize("address", ["", "8.8.8.8", "--rdzv-id=x", "<script>"])
def test_an_address_that_the_host_does_not_have_is_refused(hosts, address):
    with pytest.raises(InvalidProblem, match=r"10\.0\.0\.1, 192\.168\.7\.1"):
        address_choose(host=hosts[0], address=address, by="olga")


def test_the_page_shows_the_addresses_and_marks_the_chosen_one(hosts, olga):
    text = choose(hosts[0], olga, "192.168.7.1")

    assert '<option value="192.168.7.1" selected>' in text
    assert '<option value="10.0.0.1" >' in text


def test_who_may_not_operate_sees_the_addresses_without_a_choice(hosts, alice):
    text = client_of(alice).get(f"/hosts/{hosts[0].slug}/").content.decode()

    assert "10.0.0.1, 192.168.7.1" in text
    assert 'name="address"' not in text


def test_a_host_lists_the_jobs_that_it_only_takes_part_in(hosts, alice, team):
    job = make_gang(team, alice, hosts)
    second = members(job)[1].host

    text = client_of(alice).get(f"/hosts/{second.slug}/").content.decode()

    assert f"/jobs/{job.pk}/" in text

"""The administration opens from the networks that the site names, and from no other."""

import pytest
from django.contrib import admin
from django.contrib.auth.models import User

from tests.webapp.accounts.test_matrix import addresses
from tests.webapp.accounts.test_writing_doors import filled
from tests.webapp.conftest import client_of
from webapp.accounts.networks import NetworksError, lies_in, networks

OFFICE = networks("192.0.2.0/24, 2001:db8::/32")


@pytest.mark.parametrize("address", ["192.0.2.7", "2001:db8::1", "::ffff:192.0.2.7"])
def test_an_address_of_the_list_comes_in(address):
    assert lies_in(address, OFFICE)


@pytest.mark.parametrize("address", ["192.0.3.7", "::1", "", "unknown", "192.0.2.7, 10.0.0.1"])
def test_any_other_does_not(address):
    assert not lies_in(address, OFFICE)


def test_without_a_list_everybody_may_try():
    assert lies_in("203.0.113.9", networks(""))


@pytest.mark.parametrize("text", ["office", "10.0.0.1/8", "10.0.0.0/99", "10.0.0.0/8;192.0.2.1"])
def test_a_list_that_is_none_is_refused_with_an_example(text):
    with pytest.raises(NetworksError, match=r"such as 10\.0\.0\.0/8,192\.0\.2\.7"):
        networks(text)


@pytest.mark.django_db(databases="__all__")
def test_from_elsewhere_no_address_of_the_administration_is_there(settings):
    settings.ADMIN_NETWORKS = OFFICE
    client = client_of(User.objects.create_superuser("root"))
    routes = sorted(set(addresses(admin.site.get_urls())))
    assert len(routes) > 100
    for route in routes:
        for method in (client.get, client.post):
            answer = method(f"/admin{filled(route)}", REMOTE_ADDR="203.0.113.9")
            assert answer.status_code == 404, route


@pytest.mark.django_db(databases="__all__")
def test_from_the_office_it_opens(settings):
    settings.ADMIN_NETWORKS = OFFICE
    client = client_of(User.objects.create_superuser("root"))
    assert client.get("/admin/", REMOTE_ADDR="192.0.2.7").status_code == 200


@pytest.mark.django_db(databases="__all__")
def test_the_rest_of_the_site_opens_from_everywhere(settings, alice):
    settings.ADMIN_NETWORKS = OFFICE
    assert client_of(alice).get("/jobs/", REMOTE_ADDR="203.0.113.9").status_code == 200

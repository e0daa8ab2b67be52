"""No page sends somebody where their role ends: hosts are added by operators alone."""

import pytest

from tests.webapp.conftest import client_of

pytestmark = pytest.mark.django_db
ADD = 'href="/hosts/add/"'
PAGES = ["/", "/queue/", "/hosts/", "/plans/new/?preset=serve", "/models/meta-llama/Llama-3.1-8B/"]


def texts(client, paths=PAGES):
    return {path: client.get(path, follow=True).content.decode() for path in paths}


def test_a_practitioner_is_shown_no_way_to_add_a_host(alice):
    found = texts(client_of(alice))

    assert [path for path, text in found.items() if ADD in text] == []
    assert "Ask an operator" in found["/models/meta-llama/Llama-3.1-8B/"]


def test_an_operator_is_shown_the_way(olga):
    found = texts(client_of(olga), ["/", "/queue/", "/hosts/"])

    assert [path for path, text in found.items() if ADD not in text] == []

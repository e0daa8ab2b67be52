"""The published schema is complete, and its page loads nothing from elsewhere."""

import pytest

from tests.webapp.conftest import client_of
from webapp.api.urls import api

pytestmark = pytest.mark.django_db


def operations():
    schema = api.get_openapi_schema()
    return [
        (f"{method} {path}", operation)
        for path, methods in schema["paths"].items()
        for method, operation in methods.items()
    ]


@pytest.mark.parametrize(("name", "operation"), operations())
def test_every_operation_declares_its_refusals(name, operation):
    assert {"401", "404", "409", "422"} <= {str(code) for code in operation["responses"]}


@pytest.mark.parametrize(("name", "operation"), operations())
def test_every_operation_says_what_it_does(name, operation):
    assert operation["description"].endswith(".")


def test_the_docs_page_loads_only_from_here(alice):
    text = client_of(alice).get("/api/v1/docs").content.decode()
    assert "https://cdn" not in text


@pytest.mark.parametrize(
    "path", ["attempts/a/artefacts/b/c%0Ad", "nothing", "attempts/a/artefacts//"]
)
def test_an_address_that_the_api_does_not_have_is_a_problem_and_no_page(path, client):
    answer = client.put(f"/api/v1/{path}", b"")

    assert answer.status_code == 404
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert answer.json()["code"] == "no_such_address"


def test_a_page_that_does_not_exist_stays_a_page(client):
    assert client.get("/nothing/here/").headers["Content-Type"].startswith("text/html")

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

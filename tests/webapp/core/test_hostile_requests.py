"""No address, query or form is a fault of the server: on every address, with every field it reads.

The addresses come from the URL configuration (``RULES`` is held equal to it); the fields that a
page knows are those that it asks its query or form for. ``tests/system/faults`` runs this file on
PostgreSQL, which keeps less than SQLite does.
"""

import copy
import re
from collections.abc import Callable
from itertools import cycle, product
from urllib.parse import quote

import pytest
from django.db import transaction
from django.http import QueryDict
from django.test import Client
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.plugins.extent import sample
from tests.webapp.accounts.test_matrix import HOST, MEMBER, QUERY, Rule
from tests.webapp.accounts.test_matrix import RULES as OF_PAGES
from tests.webapp.api.operations import operations
from tests.webapp.conftest import client_of
from webapp.accounts.models import Membership, Role
from webapp.core import readiness

pytestmark = pytest.mark.django_db(databases="__all__")
# The operations of the API too, one of each address: the methods share its arguments.
RULES = {
    re.sub(r"\{(path:)?(\w+)\}", r"<\2>", f"api/v1{each.path}"): Rule(each.method.lower(), MEMBER)
    for each in operations()
} | OF_PAGES
PAGES = [route for route, rule in RULES.items() if rule.method == "get" and rule.needs != HOST]
FORMS = [
    route
    for route, rule in RULES.items()
    if rule.method == "post" and rule.needs != HOST and not route.startswith("api/")
]
NUL = "a%00b"
# Percent-encoded, because some of it no Python text can say.
UNREADABLE = ("%00", NUL, "%00%00")
STRANGE = (
    *UNREADABLE, "", "0", "-1", str(10**30), str(-(10**30)), "9" * 400, "9" * 5000, "1e400", "nan",
    "inf", "-inf", "1.5", "null", "true", "[]", "%7B%7D", "x" * 3000, "%25", "_", "'%3B--", "..",
    "%2F", "%5C", "%ED%A0%80", "%FF%FE", "%F0%9F%9A%A2", "%C2%B2", "%D9%A1%D9%A2", "2026-13-45",
    "0001-01-01", "9999-12-31", "00000000000000000000000000", "%2B2AA-", "<b>", "%7B%7B7%7D%7D",
)  # fmt: skip
IN_PATHS = tuple(value for value in STRANGE if value not in {"", "..", "%2F"} and "<" not in value)
CHARSETS = (None, "text/plain; charset=utf-7", "text/plain; charset=utf-16", "x; charset=no-such")
# What these hand to a form of their own as a plain dict.
MORE_FIELDS = {
    "limits/": (
        "goal",
        "model",
        "hardware",
        "devices_per_node",
        "nodes",
        "output_tokens",
        "prices",
    )
}
BOUNDED = settings(
    max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)


@pytest.fixture
def client(olga) -> Client:
    """Somebody who may open everything of the team."""
    Membership.objects.filter(user=olga).update(role=Role.ADMIN)
    found = client_of(olga)
    found.raise_request_exception = False
    return found


def fresh(client: Client) -> Client:
    """The same visitor, whatever cookies an address has taken or set since."""
    found = Client()
    found.raise_request_exception = False
    found.cookies = copy.deepcopy(client.cookies)
    return found


def filled(route: str, known: dict[str, str]) -> str:
    """Return the address of a thing that exists."""
    path = route + QUERY.get(route, "")
    for argument, value in known.items():
        path = path.replace(argument, quote(str(value))) if argument.startswith("<") else path
    return f"/{path}"


def status_of(client: Client, method: str, path: str, form: str | None = None, **headers) -> int:
    """Return how an address answers; what it changed is rolled back."""
    with transaction.atomic():
        kind = "application/x-www-form-urlencoded"
        if method == "get":
            extra = {"CONTENT_TYPE": headers["kind"]} if headers.get("kind") else {}
            answer = client.get(path, **extra)
        elif method == "post":
            answer = client.post(path, form or "", content_type=kind)
        else:
            answer = client.generic(method.upper(), path, "{}", content_type="application/json")
        transaction.set_rollback(True)
    if answer.status_code == 400:
        assert re.search(rb"<h1|\"detail\"", answer.content), answer.content[:300]
    return answer.status_code


@pytest.fixture
def known_of(monkeypatch, client, things) -> Callable[[str], list[str]]:
    """A function that returns the fields that an address asks its query or form for."""
    asked: set[str] = set()
    found: dict[str, list[str]] = {}
    for method in ("__getitem__", "getlist", "__contains__", "get"):
        original = getattr(QueryDict, method)

        def noted(self, key, *rest, original=original):
            asked.add(key)
            return original(self, key, *rest)

        monkeypatch.setattr(QueryDict, method, noted)

    def known(route: str) -> list[str]:
        if route not in found:
            asked.clear()
            status_of(fresh(client), RULES[route].method, filled(route, things))
            names = {*asked, *MORE_FIELDS.get(route, ())} - {"csrfmiddlewaretoken"}
            found[route] = sorted(names) or ["q"]
        return found[route]

    return known


def test_no_query_is_a_fault(client, things, known_of, monkeypatch):
    monkeypatch.setattr(readiness, "is_prepared", lambda: True)  # else /readyz is 503, rightly

    @BOUNDED
    @given(data=st.data())
    def answers(route, visitor, data):
        path = filled(route, things)
        sent = data.draw(some_of(known_of(route)))
        kind = data.draw(st.sampled_from(CHARSETS))
        query = "&".join(f"{name}={value}" for name, value in sent.items())
        address = f"{path}{'&' if '?' in path else '?'}{query}"
        status = status_of(visitor, "get", address, kind=kind)
        assert status < 500, address
        if kind is None and set(sent.values()) & set(UNREADABLE):
            assert status == 400, address

    for route in sample(PAGES, kind=area_of):
        answers(route, fresh(client))


def test_no_form_is_a_fault(client, things, known_of):
    @BOUNDED
    @given(data=st.data())
    def answers(route, visitor, data):
        sent = data.draw(some_of(known_of(route)))
        form = "&".join(f"{name}={value}" for name, value in sent.items())
        status = status_of(visitor, "post", filled(route, things), form)
        assert status < 500, (route, form)
        if set(sent.values()) & set(UNREADABLE):
            assert status == 400, (route, form)

    for route in sample(FORMS, kind=area_of):
        answers(route, fresh(client))


def area_of(route: str) -> str:
    """Return the first part of an address, as `jobs` or `api`."""
    return route.partition("/")[0]


def some_of(known: list[str]) -> st.SearchStrategy[dict[str, str]]:
    """Return some of the fields that an address knows, with strange values."""
    return st.dictionaries(
        st.sampled_from(known), st.sampled_from(STRANGE), min_size=1, max_size=6
    )


def test_a_nul_is_refused_in_every_field(client, things, known_of):
    wrong = []
    for route in sample((*PAGES, *FORMS), kind=area_of):
        path, method, visitor = filled(route, things), RULES[route].method, fresh(client)
        for name in known_of(route):
            field = f"{name}={NUL}"
            if method == "get":
                found = status_of(visitor, "get", f"{path}{'&' if '?' in path else '?'}{field}")
            else:
                found = status_of(visitor, "post", path, field)
            wrong += [] if found == 400 else [(route, name, found)]
    assert not wrong, wrong


PLACES = [(route, name) for route in RULES for name in re.findall(r"<[^>]+>", route)]


def faults_of(client, things, cases) -> list[tuple[str, int]]:
    """Return the addresses whose answer to a value in one of their places is a fault."""
    wrong = []
    for (route, name), value in cases:
        others = {other: thing for other, thing in things.items() if other != name}
        path = filled(route, others).replace(name, value)
        found = status_of(fresh(client), RULES[route].method, path)
        wrong += [] if found < 500 else [(path, found)]
    return wrong


def test_an_argument_of_each_address_is_no_fault(client, things):
    assert not faults_of(client, things, zip(PLACES, cycle(sample(IN_PATHS)), strict=False))


@pytest.mark.slow
def test_no_argument_of_an_address_is_a_fault(client, things):
    assert not faults_of(client, things, product(PLACES, IN_PATHS))


def test_a_cookie_that_cannot_be_read_is_none(client):
    for name in list(client.cookies):
        client.cookies[name] = "a\x00b" * 10
    for name in ("theme", "messages"):
        client.cookies[name] = "a\x00b"
    assert client.get("/jobs/")["Location"].startswith("/login/")


def test_an_anonymous_visitor_is_told_too(db):
    answer = Client().get("/jobs/?q=%00")
    assert answer.status_code == 400
    assert "Field “q” of the query holds a NUL character" in answer.content.decode()


def test_the_api_answers_with_a_problem_document(client):
    answer = client.get("/api/v1/tickets?topics=%00")
    assert answer.status_code == 400
    assert answer.json()["code"] == "unreadable_text"


def test_the_name_of_a_file_is_looked_at(client):
    body = (
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="a\x00.txt"\r\n'
        b"Content-Type: text/plain\r\n\r\nx\r\n--b--\r\n"
    )
    answer = client.post("/data/upload/", body, content_type="multipart/form-data; boundary=b")
    assert answer.status_code < 500

"""The documentation pages: every file renders, nothing else does, no link is dead."""

import re

import pytest

from tests.webapp.conftest import client_of
from webapp.docs.views import DOCS_ROOT, find_page, page_paths, page_title

pytestmark = pytest.mark.django_db
PATHS = page_paths()


@pytest.mark.parametrize("path", PATHS)
def test_every_page_answers_with_its_title(alice, path):
    response = client_of(alice).get(f"/docs/{path}/")

    assert response.status_code == 200
    assert f"<h1>{page_title(path)}</h1>" in response.content.decode()


@pytest.mark.parametrize("path", PATHS)
def test_no_link_of_a_page_is_dead(alice, path):
    client = client_of(alice)
    links = re.findall(r'href="(/docs/[^"#]*)', find_page(path).html)

    assert [link for link in links if client.get(link).status_code != 200] == []


def test_the_first_page_is_the_index(alice):
    assert "How Slipway works" in client_of(alice).get("/docs/").content.decode()


@pytest.mark.parametrize(
    "path", ["../base", "page.html", "decisions/../index", "nothing", "%2e%2e"]
)
def test_what_is_no_page_is_not_found(alice, path):
    assert client_of(alice).get(f"/docs/{path}").status_code == 404


def test_the_architecture_page_has_its_picture():
    assert '<svg viewBox="0 0 900 330" role="img"' in find_page("architecture").html


@pytest.mark.parametrize("path", [path for path in PATHS if path.startswith("decisions/")])
def test_every_decision_says_why_what_else_and_what_follows(path):
    headings = re.findall(r"^## (.*)$", (DOCS_ROOT / f"{path}.md").read_text(), re.MULTILINE)

    assert headings == ["Context", "Choice", "Rejected", "Consequence"]


def test_decisions_are_numbered_without_a_gap():
    numbers = [int(path.split("/")[1][:3]) for path in PATHS if path.startswith("decisions/")]

    assert numbers == list(range(1, len(numbers) + 1))

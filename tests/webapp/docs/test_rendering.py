"""How Markdown becomes a page: links, pictures, tables, names that are no pages."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.webapp.conftest import client_of
from webapp.docs.views import DOCS_ROOT, _finish, find_page, page_paths, page_title
from webapp.figures.registry import REGISTRY

PATHS = page_paths()


@pytest.mark.parametrize(
    ("link", "folder", "address"),
    [
        ("hosts.md", "index", "/docs/hosts"),
        ("hosts.md#keys", "index", "/docs/hosts#keys"),
        ("../hosts.md", "decisions/001-x", "/docs/hosts"),
        ("002-y.md", "decisions/001-x", "/docs/decisions/002-y"),
        ("decisions/002-y.md", "index", "/docs/decisions/002-y"),
    ],
)
def test_a_link_to_a_file_becomes_the_address_of_its_page(link, folder, address):
    assert _finish(f'<a href="{link}">x</a>', folder) == f'<a href="{address}">x</a>'


@pytest.mark.parametrize(
    "link", ["https://example.org/a.md", "/docs/hosts", "#here", "mailto:a@b.c", "data.csv"]
)
def test_any_other_link_stays(link):
    text = f'<a href="{link}">x</a>'

    assert _finish(text, "index") == text


def test_a_table_scrolls_in_a_frame_of_its_own():
    assert _finish("<table></table>", "index") == ('<div class="table-wrap"><table></table></div>')


def test_code_can_be_reached_by_the_keyboard():
    assert 'tabindex="0"' in _finish("<pre>x</pre>", "index")


@given(st.text(max_size=60))
def test_no_name_finds_anything_but_a_listed_page(name):
    found = find_page(name)

    assert found is None or found.path in PATHS


@pytest.mark.parametrize(
    "name",
    ["index.md", "INDEX", "../page", "decisions", "decisions/", "page.html", "a//b", ".", "\x00"],
)
def test_what_is_no_page_name_finds_nothing(name):
    assert find_page(name) is None


@pytest.mark.parametrize("name", ["", "/", "index", "/index/", "hosts/"])
def test_slashes_around_a_name_do_not_matter(name):
    assert find_page(name) is not None


@pytest.mark.parametrize("path", PATHS)
def test_every_heading_of_the_contents_is_an_anchor_of_the_page(path):
    page = find_page(path)

    assert [anchor for anchor, _ in page.contents if f'id="{anchor}"' not in page.html] == []


@pytest.mark.parametrize("path", PATHS)
def test_every_page_begins_with_its_title(path):
    first = (DOCS_ROOT / f"{path}.md").read_text("utf-8").splitlines()[0]

    assert first == f"# {page_title(path)}"


@pytest.mark.parametrize("path", PATHS)
def test_no_markdown_is_left_in_a_page(path):
    prose = re.sub(r"<pre.*?</pre>|<code>.*?</code>", "", find_page(path).html, flags=re.DOTALL)

    assert re.findall(r"\]\(|\[\[|^#{1,6} |\*\*", prose, re.MULTILINE) == []


@pytest.mark.parametrize("path", PATHS)
def test_no_page_loads_anything_from_elsewhere(path):
    html = find_page(path).html

    assert re.findall(r'(?:src|data)="https?:', html) == []
    assert "<script" not in html


@pytest.mark.parametrize("path", PATHS)
def test_every_file_that_a_page_names_is_there(path):
    text = (DOCS_ROOT / f"{path}.md").read_text("utf-8")
    named = re.findall(r"`((?:webapp|runners|planner)/[\w/]+\.(?:py|toml|json|csv))`", text)
    root = DOCS_ROOT.parent.parent

    assert [name for name in named if not (root / name).exists()] == []


def test_the_index_comes_first_and_decisions_last():
    kinds = ["/" in path for path in PATHS]

    assert PATHS[0] == "index"
    assert kinds == sorted(kinds)


@pytest.mark.django_db
def test_the_list_of_pages_is_on_every_page(alice):
    html = client_of(alice).get("/docs/").content.decode()

    assert [path for path in PATHS[1:] if f"/docs/{path}" not in html] == []


@pytest.mark.django_db
def test_the_documentation_asks_for_no_write(alice):
    assert client_of(alice).post("/docs/").status_code == 405


def test_the_page_of_figures_lists_the_whole_registry():
    html = find_page("figures").html

    missing = [
        name
        for name, each in REGISTRY.items()
        if f"<code>{name}</code>" not in html or f"{each.label}<br>" not in html
    ]
    assert missing == []
    assert "without the first 2" in html

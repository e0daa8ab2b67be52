"""The documentation pages: every file renders, nothing else does, no link is dead."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.webapp.conftest import client_of
from webapp.core.figures import REGISTRY
from webapp.pages.docs import (
    DOCS_ROOT,
    READING_ORDER,
    RENAMED,
    _finish,
    find_page,
    page_paths,
    page_title,
    search_docs,
)

PATHS = page_paths()
PAGES = {path: find_page(path) for path in PATHS}
DECISIONS = [path for path in PATHS if path.startswith("decisions/")]
CODE = re.compile(r"<pre.*?</pre>|<code>.*?</code>", re.DOTALL)
NAMED_FILE = re.compile(r"`((?:webapp|runners|planner)/[\w/]+\.(?:py|toml|json|csv))`")


def text_of(path: str) -> str:
    return (DOCS_ROOT / f"{path}.md").read_text("utf-8")


@pytest.mark.django_db
def test_every_page_answers_with_its_title_and_no_link_of_a_page_is_dead(alice):
    client = client_of(alice)
    status = {}
    for path in PATHS:
        response = client.get(f"/docs/{path}/")
        status[f"/docs/{path}/"] = status[f"/docs/{path}"] = response.status_code
        assert response.status_code == 200, path
        assert f"<h1>{page_title(path)}</h1>" in response.content.decode(), path
    links = {
        link: path
        for path, page in PAGES.items()
        for link in re.findall(r'href="(/docs/[^"#]*)', page.html)
    }
    dead = {
        link: path
        for link, path in links.items()
        if (status[link] if link in status else client.get(link).status_code) != 200
    }
    assert dead == {}


@pytest.mark.django_db
def test_the_first_page_is_the_index_which_lists_every_page_and_takes_no_write(alice):
    client = client_of(alice)
    html = client.get("/docs/").content.decode()
    assert "How Slipway works" in html
    assert [path for path in PATHS[1:] if f"/docs/{path}" not in html] == []
    assert client.post("/docs/").status_code == 405


def test_every_page_belongs_to_one_task():
    guides = [path for path in PATHS if "/" not in path]
    assert sorted(READING_ORDER) == sorted(guides)


@pytest.mark.django_db
def test_pages_lead_to_the_next_ones_and_to_their_own_headings(alice):
    client, order = client_of(alice), [*READING_ORDER, *DECISIONS]
    for before, path, after in zip(["", *order[:-1]], order, [*order[1:], ""], strict=True):
        html = client.get(f"/docs/{path}").content.decode()
        turned = re.findall(r'<a rel="(prev|next)"[^>]* href="/docs/([^"]+)"', html)
        assert turned == [each for each in (("prev", before), ("next", after)) if each[1]], path
        if contents := html.partition('class="contents"')[2]:
            anchors = re.findall(r'<a href="#([^"]+)"', contents)
            assert anchors, path
            assert all(f'id="{each}"' in html for each in anchors), path


@pytest.mark.django_db
def test_a_search_finds_sections_by_all_words_and_titles_first(alice):
    client = client_of(alice)
    found = search_docs("slurm login")
    assert found
    assert found[0].url.startswith("/docs/slurm")
    for each in search_docs("heartbeat"):
        page = client.get(each.url.partition("#")[0]).content.decode()
        anchor = each.url.partition("#")[2]
        assert not anchor or f'id="{anchor}"' in page, each.url
    assert search_docs("zzzz heartbeat") == search_docs("") == []
    html = client.get("/docs/", {"q": "<b>zzzz"}).content.decode()
    assert "No page has all of these words" in html
    assert "<b>zzzz" not in html
    assert client.get("/docs/", {"page": "2"}).status_code == 400


@pytest.mark.django_db
def test_what_is_no_page_is_not_found(alice):
    client = client_of(alice)
    for path in ("../base", "page.html", "decisions/../index", "nothing", "%2e%2e"):
        assert client.get(f"/docs/{path}").status_code == 404, path


def test_a_decision_says_why_what_else_and_what_follows_and_no_number_is_missing():
    wanted = ["Context", "Choice", "Rejected", "Consequence"]
    found = {path: re.findall(r"^## (.*)$", text_of(path), re.MULTILINE) for path in DECISIONS}
    assert {path: headings for path, headings in found.items() if headings != wanted} == {}
    numbers = [int(path.split("/")[1][:3]) for path in DECISIONS]
    assert numbers == list(range(1, len(numbers) + 1))


def test_only_a_link_to_a_file_becomes_the_address_of_its_page():
    for link, folder, address in (
        ("hosts.md", "index", "/docs/hosts"),
        ("hosts.md#keys", "index", "/docs/hosts#keys"),
        ("../hosts.md", "decisions/001-x", "/docs/hosts"),
        ("002-y.md", "decisions/001-x", "/docs/decisions/002-y"),
        ("decisions/002-y.md", "index", "/docs/decisions/002-y"),
        ("https://example.org/a.md", "index", "https://example.org/a.md"),
        ("/docs/hosts", "index", "/docs/hosts"),
        ("#here", "index", "#here"),
        ("mailto:a@b.c", "index", "mailto:a@b.c"),
        ("data.csv", "index", "data.csv"),
    ):
        assert _finish(f'<a href="{link}">x</a>', folder) == f'<a href="{address}">x</a>'


def test_a_table_scrolls_in_a_frame_and_code_is_reached_by_the_keyboard():
    assert _finish("<table></table>", "index") == ('<div class="table-wrap"><table></table></div>')
    assert 'tabindex="0"' in _finish("<pre>x</pre>", "index")


@given(st.text(max_size=60))
def test_no_name_finds_anything_but_a_listed_page(name):
    found = find_page(name)
    assert found is None or found.path in PATHS


def test_slashes_around_a_name_do_not_matter_and_any_other_name_finds_nothing():
    for name in ("", "/", "index", "/index/", "hosts/"):
        assert find_page(name) is not None, name
    for name in (
        "index.md", "INDEX", "../page", "decisions", "decisions/", "page.html", "a//b", ".", "\x00",
    ):  # fmt: skip
        assert find_page(name) is None, name


@pytest.mark.django_db
def test_a_former_path_leads_to_its_page(alice):
    client = client_of(alice)
    for path, name in RENAMED.items():
        moved = client.get(f"/docs/{path}/")
        assert (moved.status_code, moved["Location"]) == (301, f"/docs/{name}"), path
        assert name in PATHS


def faults_of(path: str) -> list[str]:
    """What is wrong with a page, next to its answer and its links."""
    page, text = PAGES[path], text_of(path)
    root = DOCS_ROOT.parent.parent
    prose = CODE.sub("", page.html)
    found = [f"no anchor {a}" for a, _ in page.contents if f'id="{a}"' not in page.html]
    found += ["another title"] if text.splitlines()[0] != f"# {page_title(path)}" else []
    found += re.findall(r"\]\(|\[\[|^#{1,6} |\*\*", prose, re.MULTILINE)
    found += re.findall(r'(?:src|data)="https?:|<script', page.html)
    found += [name for name in NAMED_FILE.findall(text) if not (root / name).exists()]
    return found


def test_a_page_has_title_and_anchors_no_markdown_nothing_from_elsewhere_and_names_real_files():
    assert {path: found for path in PATHS if (found := faults_of(path))} == {}


def test_the_index_comes_first_and_decisions_last():
    kinds = ["/" in path for path in PATHS]
    assert PATHS[0] == "index"
    assert kinds == sorted(kinds)


def test_the_architecture_page_has_its_picture():
    assert '<svg viewBox="0 0 900 330" role="img"' in PAGES["architecture"].html


def test_the_page_of_figures_lists_the_whole_registry():
    html = PAGES["figures"].html
    missing = [
        name
        for name, each in REGISTRY.items()
        if f"<code>{name}</code>" not in html or f"{each.label}<br>" not in html
    ]
    assert missing == []
    assert "without the first 2" in html

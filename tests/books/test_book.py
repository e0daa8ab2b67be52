"""What counts as a difference, and how a book is compared and rewritten."""

import json

import pytest

from tests.books import book
from tests.books.book import Book, json_differences, json_text, line_differences
from tests.books.normalising import with_placeholders
from tests.books.visible_text import visible_text


@pytest.mark.parametrize(
    ("stored", "made", "found"),
    [
        ({"a": 1.0}, {"a": 1.0 + 1e-12}, []),
        ({"a": 1.0}, {"a": 1.0 + 1e-6}, ["a: 1.0 -> 1.000001"]),
        ({"a": 1}, {"a": 1.0}, ["a: 1 -> 1.0"]),
        ({"a": True}, {"a": 1}, ["a: true -> 1"]),
        ({"a": [1, 2]}, {"a": [1]}, ["a: 2 entries -> 1"]),
        ({"a": {"b": "x"}}, {"a": {"c": "x"}}, ['a.b: "x" -> absent', 'a.c: absent -> "x"']),
        ([{"key": "k", "v": 1}], [{"key": "k", "v": 2}], ["[0 k].v: 1 -> 2"]),
        ({"b": 1, "a": 2}, {"a": 2, "b": 1}, []),
    ],
)
def test_the_path_of_each_different_value_is_named(stored, made, found):
    assert list(json_differences(json.dumps(stored), json_text(made))) == found


def test_a_changed_entry_fails_with_its_lines_until_it_is_rewritten(tmp_path, monkeypatch):
    monkeypatch.setattr(book, "FOLDER", tmp_path / "tests" / "books")
    (tmp_path / "tests" / "books" / "some").mkdir(parents=True)
    some = Book("some", ".txt", line_differences)

    with pytest.raises(pytest.fail.Exception, match=r"some/one\.txt is not stored"):
        some.compare("one", "a\nb", is_rewriting=False)
    some.compare("one", "a\nb", is_rewriting=True)
    some.compare("one", "a\nb", is_rewriting=False)
    with pytest.raises(pytest.fail.Exception, match=r"some/one\.txt differs:(.|\n)*-b\n  \+c"):
        some.compare("one", "a\nc", is_rewriting=False)
    with pytest.raises(pytest.fail.Exception, match=r"without an entry: one\.txt"):
        some.compare_entries([], is_rewriting=False)
    some.compare_entries([], is_rewriting=True)

    assert not some.path("one").exists()


def test_ids_are_numbered_by_their_first_place():
    one, two = "01J" + "0" * 22 + "1", "01J" + "0" * 22 + "2"

    text = with_placeholders(f"{two} {one} {two} /tmp/x/y {'a' * 64}", {"/tmp/x": "FOLDER"})

    assert text == "ID-1 ID-2 ID-1 FOLDER/y HEX-64"


def test_a_page_is_read_as_a_person_reads_it():
    html = """<title>T</title><script>no</script><h2>Head</h2><p>One <b>two</b>
      three</p><table><tr><td>a</td><td>b</td></tr></table><pre>x\n y</pre>
      <input type="hidden" value="h"><input value="v"><input type="checkbox" checked>
      <select><option>p</option><option selected>q</option></select><button>Go</button>"""

    assert visible_text(html).splitlines() == [
        "T", "##Head", "One two three", "a | b", "x", "y", "[v] [x]", "[q; p] [Go]",
    ]  # fmt: skip

"""The page of OWASP ASVS has every requirement once, and names tests and sections that exist."""

import ast
import re
from functools import cache
from pathlib import Path

from markdown.extensions.toc import slugify_unicode

from webapp.core.site_settings import READERS

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "templates" / "docs"
PAGE = (DOCS / "asvs.md").read_text("utf-8")
# Requirements of the levels 1 and 2 of version 5.0.0, by section and number: the file
# tables of 5.0/docs_en at github.com/OWASP/ASVS.
SECTIONS = """
1.1.1-2 1.2.1-9 1.3.1-11 1.4.1-3 1.5.1-2 2.1.1-3 2.2.1-3 2.3.1-4 2.4.1 3.2.1-2 3.3.1-4 3.4.1-6
3.5.1-5 3.7.1-2 4.1.1-3 4.2.1 4.3.1-2 4.4.1-4 5.1.1 5.2.1-3 5.3.1-2 5.4.1-3 6.1.1-3 6.2.1-12
6.3.1-4 6.4.1-4 6.5.1-5 6.6.1-3 6.8.1-4 7.1.1-3 7.2.1-4 7.3.1-2 7.4.1-5 7.5.1-2 7.6.1-2 8.1.1-2
8.2.1-3 8.3.1 8.4.1 9.1.1-3 9.2.1-4 10.1.1-2 10.2.1-2 10.3.1-4 10.4.1-11 10.5.1-5 10.6.1-2
10.7.1-3 11.1.1-2 11.2.1-3 11.3.1-3 11.4.1-4 11.5.1 11.6.1 12.1.1-3 12.2.1-2 12.3.1-4 13.1.1
13.2.1-5 13.3.1-2 13.4.1-5 14.1.1-2 14.2.1-4 14.3.1-3 15.1.1-3 15.2.1-3 15.3.1-7 16.1.1 16.2.1-5
16.3.1-4 16.4.1-3 16.5.1-3 17.1.1 17.2.1-4 17.3.1-2
"""
ROW = re.compile(r"^\| ([\d., ]+) \| ([^|]+) \| \*\*([a-z ]+)\*\* \| ([^|]+) \|$", re.MULTILINE)
ROWS = ROW.findall(PAGE)
COUNTS = re.compile(
    r"\*\*(\d+) hold, (\d+) hold when a variable is set, (\d+) do not apply, (\d+) are missing\.\*\*"
)
WHEN_SET = "holds when set"
VERDICTS = ("holds", WHEN_SET, "does not apply", "missing")
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
SECTION = re.compile(r"\]\(([a-z-]+)\.md(?:#([\w-]+))?\)")


def expanded(sections: str) -> list[str]:
    """Return the numbers of requirements; ``7.3.1-2`` means 7.3.1 and 7.3.2."""
    found = []
    for each in sections.split():
        section, _, numbers = each.rpartition(".")
        first, _, last = numbers.partition("-")
        found += [f"{section}.{number}" for number in range(int(first), int(last or first) + 1)]
    return found


@cache
def functions_of(file: str) -> frozenset[str]:
    """Return the names of the functions that a file defines."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = ast.walk(ast.parse((ROOT / file).read_text("utf-8")))
    return frozenset(node.name for node in nodes if isinstance(node, kinds))


@cache
def anchors_of(page: str) -> frozenset[str]:
    """Return the anchors of a documentation page's sections."""
    headings = re.findall(r"^## (.+)$", (DOCS / f"{page}.md").read_text("utf-8"), re.MULTILINE)
    return frozenset(slugify_unicode(heading, "-") for heading in headings)


def test_every_requirement_of_both_levels_is_there_once():
    required = expanded(SECTIONS)
    assert len(required) == 253
    listed = [number for numbers, *_ in ROWS for number in numbers.split(", ")]
    assert sorted(listed) == sorted(required)
    assert len(ROWS) == len(re.findall(r"^\| \d", PAGE, re.MULTILINE))


def test_the_counts_are_those_of_the_tables_and_every_missing_one_is_named_above_them():
    found = dict.fromkeys(VERDICTS, 0)
    for numbers, _, verdict, _ in ROWS:
        found[verdict] += len(numbers.split(", "))
    (counts,) = COUNTS.findall(PAGE)
    assert tuple(found.values()) == tuple(map(int, counts))
    (summary,) = re.findall(r"^Missing: .+$", PAGE, re.MULTILINE)
    missing = {n for numbers, _, v, _ in ROWS if v == "missing" for n in numbers.split(", ")}
    assert set(re.findall(r"\d+\.\d+\.\d+", summary)) == missing


def test_what_holds_names_tests_or_sections_and_all_of_them_exist():
    for numbers, _, verdict, text in ROWS:
        tests, sections = TEST.findall(text), SECTION.findall(text)
        assert tests or sections or verdict != "holds", numbers
        if verdict == WHEN_SET:
            assert tests, numbers
            assert set(re.findall(r"`(SLIPWAY_\w+)`", text)) & set(READERS), numbers
        assert text.count("::") == len(tests), numbers
        for file, name in tests:
            assert name in functions_of(file), (numbers, file, name)
        for page, anchor in sections:
            assert not anchor or anchor in anchors_of(page), (numbers, page, anchor)

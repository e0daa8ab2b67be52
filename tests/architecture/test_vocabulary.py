"""Names of modules, types and functions are the field's words; retired ones do not come back.

The glossary of the documentation lists what the project's own terms mean.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("planner", "runners", "webapp")
GLOSSARY = ROOT / "templates" / "docs" / "glossary.md"
RETIRED = {
    "asked": "requested, request",
    "away": "offloaded",
    "beside": "the relation: background, concurrent, same machine",
    "bury": "reject, expire",
    "company": "overlap",
    "desk": "batcher, listener, pool",
    "door": "server, endpoint, listener",
    "hear": "receive, record",
    "heard": "received",
    "judge": "evaluate, evaluator, verdict",
    "judged": "evaluated, checked",
    "said": "what it holds: output, message, prediction",
    "shelf": "cache",
    "spoken": "received",
    "standing": "state, position",
    "tell": "report, print, publish",
    "told": "reported, listed",
    "wish": "request, options",
    "wishes": "requests, options",
}
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def words_of(name: str) -> set[str]:
    """Return the words of a name in snake case or in camel case."""
    return {word.lower() for word in WORD.findall(name)}


def names_in(path: Path) -> Iterator[str]:
    """Yield the names of a module and of the classes and functions that it defines."""
    yield path.stem
    kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, kinds):
            yield node.name


def product_files() -> list[Path]:
    """Return the product's modules, without migrations, which keep the names of their time."""
    found = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return sorted(path for path in found if "migrations" not in path.parts)


def test_no_definition_has_a_retired_word_in_its_name():
    found = [
        f"{path.relative_to(ROOT)}: {name}: use {RETIRED[word]}"
        for path in product_files()
        for name in names_in(path)
        for word in sorted(words_of(name) & RETIRED.keys())
    ]

    assert found == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("told_by_lead", {"told", "by", "lead"}),
        ("BeatDesk", {"beat", "desk"}),
        ("_asked", {"asked"}),
        ("OpenAIServer", {"open", "ai", "server"}),
    ],
)
def test_names_are_split_into_words(name, words):
    assert words_of(name) == words


def test_every_term_of_the_glossary_stands_in_one_row():
    rows = [line for line in GLOSSARY.read_text("utf-8").splitlines() if line.startswith("| ")]
    terms = [line.split("|")[1].strip() for line in rows if not line.startswith("| Term")]

    assert len(terms) >= 50
    assert sorted(set(terms)) == sorted(terms)

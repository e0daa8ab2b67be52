"""What nothing else resolves imports what exists: programs in strings, tests beside the gate."""

import ast
import re
import subprocess
from functools import cache
from pathlib import Path

from tests.plugins.extent import sample

ROOT = Path(__file__).resolve().parents[2]
IMPORT = re.compile(
    r"\bfrom ((?:planner|runners|webapp|tests)[\w.]*) import ([\w, ]+|\([\w,\s]+\))"
)
OURS = ("planner", "runners", "webapp", "tests")


def tracked() -> list[Path]:
    listed = subprocess.check_output(["git", "ls-files", "*.py"], cwd=ROOT, text=True).split()
    return [ROOT / path for path in listed if (ROOT / path).exists()]


@cache
def names_of(path: Path) -> frozenset[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                names.add(node.name)
            case ast.Name(ctx=ast.Store()):
                names.add(node.id)
            case ast.Import() | ast.ImportFrom():
                names |= {each.asname or each.name.split(".")[0] for each in node.names}
    return frozenset(names)


def place_of(module: str) -> Path | None:
    path = ROOT.joinpath(*module.split("."))
    places = [path.with_suffix(".py"), path / "__init__.py"]
    return next((place for place in places if place.exists()), None)


def missing(text: str) -> list[str]:
    """Modules and names that a text imports and that do not exist."""
    found = []
    for module, taken in IMPORT.findall(text):
        place = place_of(module)
        if place is None and not ROOT.joinpath(*module.split(".")).is_dir():
            found.append(module)
            continue
        names = names_of(place) if place is not None else frozenset()
        found += [
            f"{module}.{name}"
            for name in re.findall(r"\w+", re.sub(r"\bas \w+|\bas$", "", taken))
            if not names & {name, "*"} and place_of(f"{module}.{name}") is None
        ]
    return found


def test_what_a_program_in_a_string_imports_exists():
    assert missing("from runners.host import no_such; from planner.nowhere import x") == [
        "runners.host.no_such",
        "planner.nowhere",
    ]
    wrong = {}
    for path in sample(tracked()):
        if path == Path(__file__):
            continue
        texts = (
            node.value
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        )
        if found := [each for text in texts if " import " in text for each in missing(text)]:
            wrong[path.relative_to(ROOT).as_posix()] = found
    assert wrong == {}


def test_what_the_tests_beside_the_gate_import_exists():
    """The gate collects none of them, so that a name that has moved is found by nobody."""
    wrong = {}
    for path in sample([each for each in tracked() if "tests/system" in each.as_posix()]):
        taken = (
            f"from {node.module} import {', '.join(each.name for each in node.names)}"
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom) and node.module and not node.level
        )
        if found := [each for text in taken for each in missing(text)]:
            wrong[path.relative_to(ROOT).as_posix()] = found
    assert wrong == {}

"""What may import what, and what an import costs."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.metadata import packages_distributions

import pytest

from webapp.boot.suite import ROOT

OWN = {"manage", "planner", "runners", "tests", "webapp"}
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def files(*folders: str) -> list[str]:
    """Return the Python files below some folders, from the root."""
    found = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return sorted(str(path.relative_to(ROOT)) for path in found)


def loaded_by(statement: str) -> set[str]:
    """The top-level modules that a fresh Python has after the statement."""
    code = f"{statement}\nimport sys\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_planner_loads_neither_django_nor_torch():
    loaded = loaded_by(
        "import planner, planner.api, planner.specs, planner.catalog, planner.errors"
    )

    assert loaded & {"django", "torch", "celery", "redis", "transformers", "plotly"} == set()


def test_a_host_loads_neither_django_nor_torch():
    loaded = loaded_by("import runners.messages, runners.agent, runners.supervisor")

    assert loaded & {"django", "torch", "transformers"} == set()


def test_the_web_process_never_loads_torch():
    assert loaded_by("import webapp.asgi") & {"torch", "transformers"} == set()


def imported_packages(paths: list[str]) -> set[str]:
    """The top-level packages, neither ours nor Python's, that the files import."""
    names = set()
    for path in paths:
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module.split(".")[0])
    return names - OWN - set(sys.stdlib_module_names)


@cache
def installed() -> Mapping[str, list[str]]:
    """The distributions that install each top-level package."""
    return packages_distributions()


def declared(*, with_dev: bool) -> set[str]:
    """The distributions that pyproject.toml names, in normal spelling."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = list(project["project"]["dependencies"])
    for extra in project["project"]["optional-dependencies"].values():
        wanted += extra
    wanted += project["dependency-groups"]["dev"] if with_dev else []
    return {normal(need.split(";")[0]) for need in wanted}


def normal(requirement: str) -> str:
    name = requirement.strip()
    for mark in "[<>=!~ ":
        name = name.split(mark)[0]
    return name.lower().replace("_", "-")


@pytest.mark.parametrize(
    ("folders", "with_dev"),
    [
        pytest.param(("planner", "runners", "webapp"), False, id="product"),
        pytest.param(("tests",), True, id="tests"),
    ],
)
def test_every_imported_package_is_declared(folders, with_dev):
    distributions = installed()
    used = {
        name: {normal(d) for d in distributions[name]}
        for name in imported_packages(files(*folders))
    }

    names = declared(with_dev=with_dev)

    assert [name for name, owners in used.items() if not owners & names] == []


def test_every_public_function_of_the_planner_has_a_docstring():
    lacking = []
    for path in files("planner"):
        for node in ast.parse((ROOT / path).read_text()).body:
            is_public = isinstance(node, FUNCTION) and not node.name.startswith("_")
            if is_public and not ast.get_docstring(node):
                lacking.append(f"{path}:{node.lineno} {node.name}")

    assert lacking == []

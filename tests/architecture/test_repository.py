"""What the repository holds, what may import what, and which words its names have."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

from runners.host.inventory import AGENT_VERSION
from tests.plugins.extent import sample
from webapp.boot.suite import ROOT

# What the repository holds: its top level, its words, its picture.


ARCHITECTURE = ROOT / "templates" / "docs" / "architecture.md"
TOP_LEVEL = {
    "manage.py", "pyproject.toml", "webapp", "planner", "runners", "templates", "static", "tests",
    "README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "constraints.txt",
}  # fmt: skip
# Groups of changes of Keep a Changelog, and of the first release.
CHANGES = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security", "Known limits"}
# Paths of build machines; the leading slash is added below, so that they are not found here.
FOREIGN = [re.compile(rf"(?<![\w.])/{name}\b") for name in ("work/", "opt/wheels", "opt/pypi")]
SECRETS = [re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY"), re.compile(r"\bAKIA[0-9A-Z]{16}\b")]


def git(*arguments: str) -> list[str]:
    command = ["git", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def tracked() -> list[str]:
    return [path for path in git("ls-files") if (ROOT / path).is_file()]


def tracked_text() -> list[tuple[str, str]]:
    """Every tracked file that is text, vendored ones left out."""
    found = []
    for path in tracked():
        content = (ROOT / path).read_bytes()
        if "/vendor/" not in path and b"\0" not in content[:4096]:
            found.append((path, content.decode("utf-8", errors="replace")))
    return found


def test_the_top_level_holds_nothing_unexpected_and_no_large_file():
    names = {path.split("/")[0] for path in tracked()}
    assert {name for name in names if not name.startswith(".")} <= TOP_LEVEL
    sizes = {path: (ROOT / path).stat().st_size for path in tracked()}
    assert [path for path, size in sizes.items() if size > 2_000_000] == []


def test_no_file_of_code_has_more_than_a_thousand_lines():
    """A longer one has more than one subject: `resolve.py` grew to 1,022 unnoticed."""
    code = (".py", ".js", ".css", ".html")
    long = {path: text.count("\n") for path, text in tracked_text() if path.endswith(code)}
    assert {path: lines for path, lines in long.items() if lines > 1_000} == {}


def test_the_changelog_says_in_sixty_lines_what_each_release_brings():
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    _, *releases = re.split(r"^## ", text, flags=re.MULTILINE)
    assert releases[0].startswith((f"[{AGENT_VERSION}] - ", "[Unreleased]"))
    for release in releases:
        title, *lines = release.splitlines()
        assert len(lines) <= 60, title
        assert {line[4:] for line in lines if line.startswith("### ")} <= CHANGES, title


def test_no_tracked_file_holds_a_path_of_a_build_machine_or_a_secret():
    held = [
        f"{path}: {match[0]}"
        for path, text in tracked_text()
        for pattern in (*FOREIGN, *SECRETS)
        if (match := pattern.search(text))
    ]
    assert held == []


def drawn_paths() -> list[str]:
    """The paths of the tree in the architecture page: two blanks of indentation per level."""
    block = re.search(r"```tree\n(.*?)```", ARCHITECTURE.read_text(), re.DOTALL)
    parents, paths = [], []
    for line in block[1].splitlines():
        name = re.match(r"(\s*)([\w./*-]+)", line)
        if name:
            depth = len(name[1]) // 2
            parents[depth:] = [name[2].rstrip("/")]
            paths.append("/".join(parents))
    return paths


def test_every_path_and_file_of_the_architecture_page_exists():
    assert [path for path in drawn_paths() if not any(ROOT.glob(path))] == []
    named = re.findall(r"`([\w.]+/[\w./]+)`", ARCHITECTURE.read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_every_package_is_in_the_architecture_page():
    packages = {
        path.rsplit("/", 1)[0]
        for path in tracked()
        if path.endswith("/__init__.py") and path.split("/")[0] in {"planner", "runners", "webapp"}
    }
    generated = ("/migrations", "/management", "/templatetags")
    expected = {package for package in packages if not any(part in package for part in generated)}
    assert expected - set(drawn_paths()) == set()


def test_the_pre_commit_hooks_run_what_the_test_command_runs():
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    for program in (
        "ruff format",
        "ruff check",
        "mypy",
        "lint-imports",
        "djlint",
        "makemigrations",
    ):
        assert program in hooks


# What may import what, and what an import costs.


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


def test_neither_planner_hosts_nor_web_process_load_what_they_do_not_need():
    loaded = loaded_by(
        "import planner, planner.api, planner.specs, planner.catalog, planner.specs.base"
    )
    assert loaded & {"django", "torch", "celery", "redis", "transformers", "plotly"} == set()
    loaded = loaded_by(
        "import runners.shared.messages, runners.host.agent, runners.supervision.supervisor"
    )
    assert loaded & {"django", "torch", "transformers"} == set()
    assert loaded_by("import webapp.asgi") & {"torch", "transformers"} == set()


# Programs that another Python than ours runs, which has these packages.
ELSEWHERE = {"runners/launchers/ray_driver.py": {"ray"}}


def imported_packages(paths: list[str]) -> set[str]:
    """The top-level packages, neither ours nor Python's, that the files import."""
    found = set[str]()
    for path in paths:
        names = set[str]()
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module.split(".")[0])
        found |= names - ELSEWHERE.get(path, set())
    return found - OWN - set(sys.stdlib_module_names)


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


def test_every_imported_package_is_declared():
    owners = {name: {normal(d) for d in dists} for name, dists in packages_distributions().items()}
    for folders, with_dev in ((("planner", "runners", "webapp"), False), (("tests",), True)):
        names = declared(with_dev=with_dev)
        used = imported_packages(sample(files(*folders)))
        assert [name for name in used if not owners[name] & names] == [], folders


def test_every_public_function_of_the_planner_has_a_docstring():
    lacking = []
    for path in files("planner"):
        for node in ast.parse((ROOT / path).read_text()).body:
            is_public = isinstance(node, FUNCTION) and not node.name.startswith("_")
            is_overload = any(isinstance(d, ast.Name) and d.id == "overload"
                              for d in getattr(node, "decorator_list", ()))  # fmt: skip
            if is_public and not is_overload and not ast.get_docstring(node):
                lacking.append(f"{path}:{node.lineno} {node.name}")
    assert lacking == []


# ---------------------------------------------------------------------------
# Names of modules, types and functions are the field's words; retired ones do not come back.
#
# The glossary of the documentation lists what the project's own terms mean.
# ---------------------------------------------------------------------------


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
    "tend": "reap, reconcile, restart",
    "told": "reported, listed",
    "wish": "request, options",
    "wishes": "requests, options",
}
RETIRED_PHRASES = {
    "lock out": "revoke access",
    "locked out": "revoked",
    "silent host": "unreachable host",
    "reuse earlier prompts": "prefix caching",
    "no longer good": "no longer valid",
    "points of the sweep": "load levels",
    "held-out text alone": "held-out loss and perplexity only",
}
DEFINITION = re.compile(r"^[ \t]*(?:class|(?:async[ ]+)?def)[ ]+(\w+)", re.MULTILINE)
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def words_of(name: str) -> set[str]:
    """Return the words of a name in snake case or in camel case."""
    return {word.lower() for word in WORD.findall(name)}


def names_in(path: Path) -> Iterator[str]:
    """Yield the names of a module and of the classes and functions that it defines."""
    yield path.stem
    yield from DEFINITION.findall(path.read_text("utf-8"))


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


def test_two_types_of_the_same_words_have_one_order():
    # typing keeps the first of two equal literals in a union: the order of what a schema lists
    # would be that of the imports.
    orders: dict[frozenset, set[tuple]] = {}
    for path in product_files():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Subscript) and getattr(node.value, "id", "") == "Literal":
                parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
                words = tuple(getattr(part, "value", None) for part in parts)
                orders.setdefault(frozenset(words), set()).add(words)
    assert [found for found in orders.values() if len(found) > 1] == []


def test_no_page_has_a_retired_phrase():
    pages = [path for path in (ROOT / "templates").rglob("*") if path.suffix in {".html", ".md"}]
    found = [
        f"{path.relative_to(ROOT)}: {phrase}: use {instead}"
        for path in [*pages, *(ROOT / "static" / "js").glob("*.js")]
        for phrase, instead in RETIRED_PHRASES.items()
        if phrase in path.read_text("utf-8").lower()
    ]
    assert found == []


def test_names_are_split_into_words():
    for name, words in [
        ("told_by_lead", {"told", "by", "lead"}),
        ("BeatDesk", {"beat", "desk"}),
        ("_asked", {"asked"}),
        ("OpenAIServer", {"open", "ai", "server"}),
    ]:
        assert words_of(name) == words, name


def test_every_term_of_the_glossary_stands_in_one_row():
    rows = [line for line in GLOSSARY.read_text("utf-8").splitlines() if line.startswith("| ")]
    terms = [line.split("|")[1].strip() for line in rows if not line.startswith("| Term")]
    assert len(terms) >= 50
    assert sorted(set(terms)) == sorted(terms)

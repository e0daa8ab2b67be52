"""Who names whom among the files of the project, read from the syntax trees of its modules."""

import ast
import hashlib
import json
import re
import subprocess
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("planner", "runners", "webapp", "tests")  # each may use those before it
ALWAYS = ("tests/architecture/",)  # they read the whole repository
CENSUS = "webapp/boot/census.py"  # as does whoever imports this
EVERYTHING = (
    ".ci/*", ".gitignore", "constraints.txt", "hashes.csv", "manage.py", "pyproject.toml",
    "tests/conftest.py", "tests/plugins/*.py", "webapp/boot/tools.py",
)  # fmt: skip
NOTHING = (  # beyond what always runs
    "CHANGELOG.md", "LICENSE", "README.md", ".pre-commit-config.yaml",
    "tests/plugins/*.csv", "tests/plugins/*.gz",
)  # fmt: skip
AREAS = {
    "templates/docs/": ("tests/webapp/docs/",),
    "templates/": ("tests/webapp/", "tests/browser/", "tests/faults/", "tests/namespaces/"),
    "static/": ("tests/browser/", "tests/webapp/core/", "tests/boot/test_vendor.py"),
}
EVIDENCE_READERS = frozenset((  # they ask whether the tests that techniques cite exist
    "tests/webapp/core/test_kept_ratios.py", "tests/webapp/modelhub/test_techniques_command.py",
))  # fmt: skip
HARNESS = ("tests/conftest.py", "tests/plugins/*.py")
SETTINGS = "webapp/settings.py"
WITHOUT_COMMANDS = ("planner/", "runners/", "tests/planner/", "tests/runners/")
COMMANDS = "*/management/commands/*.py"
FOUND_BY_DJANGO = (
    "*/apps.py", "*/models.py", "*/models/*.py", "*/admin.py", "*/checks.py", "*/signals.py",
    "*/templatetags/*.py", "*/migrations/*.py",
)  # fmt: skip
OURS = rf"(?:{'|'.join(PACKAGES)})"
DOTTED = re.compile(rf"\b{OURS}(?:\.\w+)+")
UNFINISHED = re.compile(rf"(?:^|\b(?:from|import) ){OURS}(?:\.\w+)*\.$")  # a format string's
IMPORTED = re.compile(rf"\bfrom ({OURS}[\w.]*) import ([\w, ]+)")
FILE_NAME = re.compile(r"[\w./*{}-]*\.(?:py|html|md|toml|csv|json|jsonl|jinja|txt|js|css|svg)")
SCANNER = 1  # raise it when names_in finds other names


@dataclass(frozen=True)
class Names:
    """What one Python file names: modules, files, and words that may be commands."""

    modules: frozenset[str]
    files: frozenset[str]
    words: frozenset[str]

    def as_lists(self) -> list[list[str]]:
        """Return the names in a form that JSON can keep."""
        return [sorted(self.modules), sorted(self.files), sorted(self.words)]


def names_in(source: str, commands: Collection[str] = ()) -> Names:
    """Return what a Python file names in its imports and in its strings."""
    tree = ast.parse(source)
    docstrings = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    modules: set[str] = set()
    files: set[str] = set()
    words: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.update((node.module, *(f"{node.module}.{a.name}" for a in node.names)))
        elif isinstance(node, ast.List | ast.Tuple | ast.Call):
            modules.update(run_by_name(node.args if isinstance(node, ast.Call) else node.elts))
        elif isinstance(node, ast.Constant) and id(node) not in docstrings:
            text = node.value if isinstance(node.value, str) else ""
            modules.update(modules_in_text(text))
            files.update(FILE_NAME.findall(text))
            words.update(set(commands).intersection(text.split()))
    return Names(frozenset(modules), frozenset(files), frozenset(words))


def run_by_name(words: list[ast.expr]) -> Iterator[str]:
    """Yield the packages run with ``-m``; of what lies within them the dot in the name tells."""
    values = [word.value if isinstance(word, ast.Constant) else None for word in words]
    yield from (f"{b}.__main__" for a, b in pairwise(values) if a == "-m" and b in PACKAGES)


def modules_in_text(text: str) -> Iterator[str]:
    """Yield the dotted names of ours in a string, and what a program in it imports."""
    for name in DOTTED.findall(text):
        yield from (name, f"{name}.__main__")  # a package may be run by its name
    yield from (each.rpartition(" ")[2] for each in UNFINISHED.findall(text))
    for module, imported in IMPORTED.findall(text):
        yield from (f"{module}.{name.split()[0]}" for name in imported.split(",") if name.strip())


def is_test_file(path: str) -> bool:
    """Return whether pytest collects tests from a file."""
    name = PurePosixPath(path).name
    return path.startswith("tests/") and name.startswith("test_") and name.endswith(".py")


def matches(path: str, patterns: Iterable[str]) -> bool:
    """Return whether a path from the root is like one of the patterns."""
    return any(PurePosixPath("/" + path).match(each) for each in patterns)


def may_name(path: str, named: str) -> bool:
    """Return whether the layers let one file use another; a message may name any."""
    user, used = (each.partition("/")[0].replace("manage.py", "webapp") for each in (path, named))
    if user not in PACKAGES or used not in PACKAGES:
        return True
    return PACKAGES.index(user) >= PACKAGES.index(used)


class Graph:
    """Who names whom among the files of the project."""

    def __init__(self, names: dict[str, Names], files: Collection[str]) -> None:
        self.names = names
        self.files = frozenset(files) | names.keys()
        self.commands = {PurePosixPath(p).stem: p for p in self.files if matches(p, [COMMANDS])}
        self.by_module = {module_of(path): path for path in self.files if path.endswith(".py")}
        self.by_name: dict[str, list[str]] = defaultdict(list)
        for path in self.files:
            self.by_name[PurePosixPath(path).name].append(path)
        self.namers: dict[str, set[str]] = defaultdict(set)
        for path in names:
            for named in self.named_by(path):
                self.namers[named].add(path)

    @cached_property
    def test_files(self) -> frozenset[str]:
        """Return every file from which pytest collects tests."""
        return frozenset(filter(is_test_file, self.files))

    @cached_property
    def helpers(self) -> frozenset[str]:
        """Return the Python files of the tests that hold no tests."""
        own = {each for each in self.names if each.startswith("tests/")}
        return frozenset(own - self.test_files)

    def named_by(self, path: str) -> set[str]:
        """Return the files that a Python file imports or names."""
        return self.named(self.names[path], path)

    def named(self, own: Names, path: str) -> set[str]:
        """Return the files which some names mean that stand in a file."""
        found: set[str] = set()
        for name in own.modules:
            found.update(self.modules_under(name) if name.endswith(".") else self.module(name))
        for name in own.files:
            found.update(self.like(name))
        if not path.startswith(WITHOUT_COMMANDS) or "manage.py" in own.files:
            found.update(self.commands[word] for word in own.words if word in self.commands)
        if matches(path, HARNESS):
            return set()  # it starts every test; what it imports of ours is in EVERYTHING
        if any(name.partition(".")[0] == "django" for name in own.modules):
            found.add(SETTINGS)
        if path == SETTINGS:
            found.update(each for each in self.files if matches(each, FOUND_BY_DJANGO))
        if path.startswith("tests/"):
            found.update(f"{folder}/conftest.py" for folder in PurePosixPath(path).parents)
        return {each for each in found & self.files if each != path and may_name(path, each)}

    def module(self, name: str) -> Iterator[str]:
        """Yield the files that importing a dotted name executes."""
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            if found := self.by_module.get(".".join(parts[:length])):
                yield found

    def modules_under(self, prefix: str) -> Iterator[str]:
        """Yield the modules whose name a format string completes, as f"runners.jobs.{kind}"."""
        yield from self.module(prefix.rstrip("."))
        depth = prefix.count(".") + 1
        for module in self.by_module:
            if module.startswith(prefix) and module.count(".") < depth:
                yield from self.module(f"{module}.__main__")

    def like(self, name: str) -> list[str]:
        """Return the files whose path ends as a name in a string does."""
        found = self.by_name.get(name.rpartition("/")[2], [])
        tail = name.lstrip("./")
        return [each for each in found if f"/{each}".endswith(f"/{tail}")]

    def importers(self, paths: Iterable[str]) -> set[str]:
        """Return the files with all that import or name them, however indirectly."""
        found = set(paths)
        front = list(found)
        while front:
            fresh = self.namers[front.pop()] - found
            found |= fresh
            front += fresh
        return found

    def reached(self, path: str) -> set[str]:
        """Return the test files that a change of one file can reach."""
        if matches(path, EVERYTHING):
            return set(self.test_files)
        if matches(path, NOTHING):
            return set()
        found = self.importers([path, *self.readers(path)]) & self.test_files
        found |= self.of_area(path)
        if is_test_file(path):
            found |= self.test_files & EVIDENCE_READERS
        if not path.endswith(".py") or is_test_file(path):
            return found or set(() if is_test_file(path) else self.test_files)
        readers = {
            p for p in self.test_files if any(f.endswith("*.py") for f in self.names[p].files)
        }
        return (found or self.nearest(path)) | readers

    def readers(self, path: str) -> set[str]:
        """Return the modules that read a file which is not Python, with no name for it alone."""
        if path.endswith(".py") or path.startswith("static/"):
            return set()
        if path.startswith("templates/"):
            return set() if path.startswith("templates/docs/") else {"webapp/urls.py"}
        modules = [each for each in self.names if not is_test_file(each) or "tests/" in path]
        for folder in PurePosixPath(path).parents:
            if beside := {each for each in modules if PurePosixPath(each).parent == folder}:
                return beside
        return set()

    def of_area(self, path: str) -> set[str]:
        """Return the test files that read a file by the area which it belongs to."""
        areas = next((areas for place, areas in AREAS.items() if path.startswith(place)), None)
        return {each for each in self.test_files if areas and each.startswith(areas)}

    def nearest(self, path: str) -> set[str]:
        """Return the test files of the nearest folder that has any; those of all for a module."""
        folders = PurePosixPath(path).parents if path.startswith("tests/") else ()
        for folder in folders:
            if found := {each for each in self.test_files if each.startswith(f"{folder}/")}:
                return found
        return set(self.test_files)


def module_of(path: str) -> str:
    """Return the dotted name of a Python file, which for a package is the folder's."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def git(root: Path, *arguments: str) -> str:
    """Return what git prints, or raise UsageError with its own words."""
    command = ["git", "-C", str(root), "-c", "core.quotePath=off", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise pytest.UsageError(f"--changed-since: {done.stderr.strip()}")
    return done.stdout


def read_files(root: Path) -> dict[str, bytes]:
    """Return the content of every file of the working tree, new ones among them."""
    listed = git(root, "ls-files", "--cached", "--others", "--exclude-standard", "-z").split("\0")
    paths = [path for path in listed if path and (root / path).is_file()]
    return {path: (root / path).read_bytes() for path in sorted(paths)}


def read_graph(root: Path, deleted: Iterable[str] = (), kept: Path | None = None) -> Graph:
    """Return the graph of the working tree; what was read of a file before is kept by its digest.

    Deleted files belong to it, because whoever still names one is reached.
    """
    files = read_files(root)
    before = json.loads(kept.read_text("utf-8")) if kept and kept.exists() else {}
    commands = {PurePosixPath(path).stem for path in files if matches(path, [COMMANDS])}
    salt = f"{SCANNER} {sorted(commands)}\n".encode()
    after: dict[str, list[list[str]]] = {}
    names: dict[str, Names] = {}
    for path, source in files.items():
        if not path.endswith(".py"):
            continue
        key = hashlib.blake2b(salt + source, digest_size=16).hexdigest()
        after[key] = before.get(key) or names_in(source.decode(), commands).as_lists()
        modules, named_files, words = map(frozenset, after[key])
        names[path] = Names(modules, named_files, words)
    if kept and after != before:
        kept.write_text(json.dumps(after), "utf-8")
    return Graph(names, {*files, *deleted})

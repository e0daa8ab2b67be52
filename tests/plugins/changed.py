"""Run only the tests that a change can reach: ``--changed-since REV``.

A test file is reached by a changed file that it imports, directly or through other modules of the
project. A module that is only named counts as imported too: in a string (``"webapp.urls"``,
``python -m runners.agent``), in the text of a program handed to ``python -c``, as a file
(``"killed.py"``), or as a management command. A test file imports every conftest.py above it and
what that names in ``pytest_plugins``; what imports Django imports the settings, hence all that
these name. Names are read from the syntax trees; a changed comment or layout reaches nothing.

Files that are not Python reach whoever names them, and what lies above them (``graph.py``). Where
there is a record of what tests executed (``reach.py``), that narrows it all. A changed file
that reaches no test file at all, or that no rule knows, reaches every one of them.
"""

import ast
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.plugins import reach
from tests.plugins.graph import (
    ALWAYS,
    CENSUS,
    COMMANDS,
    EVERYTHING,
    EVIDENCE_READERS,
    FOUND_BY_DJANGO,
    HARNESS,
    ROOT,
    SETTINGS,
    Graph,
    Names,
    git,
    is_test_file,
    matches,
    read_files,
    read_graph,
)  # fmt: skip
from tests.plugins.pieces import CONSTANT, IMPORT, MODULE, Parts, mentions
from tests.plugins.reach import AT_IMPORT, WHOLE, Ran, Record, state_of


@dataclass(frozen=True)
class Change:
    """What differs from an earlier revision, and the test files which that can reach."""

    since: str
    paths: tuple[str, ...]
    test_files: frozenset[str]
    reached: frozenset[str]

    def __str__(self) -> str:
        return (
            f"changed since {self.since}: {len(self.paths)} files, "
            f"reach {len(self.reached)} of {len(self.test_files)} test files"
        )

    def leaves_out(self, path: Path, root: Path = ROOT) -> bool:
        """Return whether a test file, or a folder with all its test files, is not reached."""
        if not path.is_relative_to(root / "tests") or path == root / "tests":
            return False
        name = path.relative_to(root).as_posix()
        if path.is_dir():
            return not any(each.startswith(f"{name}/") for each in self.reached)
        return name in self.test_files - self.reached


def change(graph: Graph, since: str, paths: Collection[str]) -> Change:
    """Return what the changed files reach; tests of the whole repository always are."""
    found = {each for each in graph.test_files if each.startswith(ALWAYS)}
    found |= graph.namers[CENSUS] & graph.test_files
    for path in paths:
        found |= graph.reached(path)
    return Change(since, tuple(paths), graph.test_files, frozenset(found))


def changed_paths(root: Path, since: str) -> list[str]:
    """Return the files that differ from a revision, new and deleted ones among them."""
    found = git(root, "diff", "--name-only", "--no-renames", "-z", since, "--").split("\0")
    found += git(root, "ls-files", "--others", "--exclude-standard", "-z").split("\0")
    return [path for path in sorted(filter(None, found)) if not is_same(root, since, path)]


def is_same(root: Path, since: str, path: str) -> bool:
    """Return whether a Python file differs in comments and layout alone."""
    here = root / path
    if not path.endswith(".py") or not here.exists():
        return False
    if not git(root, "ls-tree", "--name-only", since, "--", path):
        return False
    try:
        before = ast.parse(git(root, "show", f"{since}:{path}"))
        return ast.dump(before) == ast.dump(ast.parse(here.read_text("utf-8")))
    except SyntaxError:
        return False


@dataclass
class Touched:
    """What a change reaches without the record: pieces, and files as a whole."""

    functions: set[tuple[str, str]] = field(default_factory=set)
    modules: set[str] = field(default_factory=set)
    named: set[str] = field(default_factory=set)  # files that lost a name which others may use


def differ(one: Parts | None, other: Parts | None) -> bool:
    """Return whether two states of a file differ in more than comments and layout."""
    pieces = ({k: v for k, v in (side or {"": ""}).items() if k != WHOLE} for side in (one, other))
    return next(pieces) != next(pieces)


class Spread:
    """Follows a change from the pieces of a file to all that mention them."""

    def __init__(self, graph: Graph, sources: Mapping[str, str], at_import: Ran) -> None:
        self.graph = graph
        self.sources = sources  # as they are after the change
        self.at_import = at_import.functions

    def between(self, before: Mapping[str, Parts], after: Mapping[str, Parts]) -> Touched:
        """Return what a change of these files reaches."""
        found = Touched()
        for path in before.keys() | after.keys():
            if path not in before or path not in after:
                if path in before or is_test_file(path) or self.is_found(path, before, after):
                    found.modules.add(path)
                continue
            if not differ(before[path], after[path]):
                continue
            new = after[path].keys() - before[path].keys()
            if is_test_file(path) or any(each.startswith("pytest_") for each in new):
                found.modules.add(path)
            for piece, kept in before[path].items():
                if after[path].get(piece) != kept and piece != WHOLE:
                    self.add(found, path, piece, is_gone=piece not in after[path])
        return found

    def is_found(self, path: str, before: Mapping[str, Parts], after: Mapping[str, Parts]) -> bool:
        """Return whether a new module is imported by more than what was changed to import it."""
        namers = self.graph.namers[path] - {SETTINGS}
        by_name = (*FOUND_BY_DJANGO, COMMANDS, "conftest.py", "__init__.py", "__main__.py")
        is_in_use = any(before.get(each) == after.get(each) for each in namers)
        return is_in_use or matches(path, by_name)

    def add(self, found: Touched, path: str, piece: str, *, is_gone: bool) -> None:
        """Add what a changed piece reaches; a new one reaches nobody before it is mentioned."""
        if piece == MODULE or (piece.startswith(CONSTANT) and (is_gone or path == SETTINGS)):
            found.modules.add(path)
        elif piece.startswith(IMPORT):
            found.named.add(path)
        elif piece.startswith(CONSTANT):
            self.add_users(found, path, piece.removeprefix(CONSTANT))
        else:
            self.add_function(found, path, piece)
            if is_gone:
                found.named.add(path)

    def add_function(self, found: Touched, path: str, name: str) -> None:
        """Add a function; all that import its module, if it runs when something is imported."""
        found.functions.add((path, name))
        if (path, name) in self.at_import or is_test_file(path):
            found.modules.add(path)

    def add_users(self, found: Touched, path: str, name: str) -> None:
        """Add all pieces that mention a constant, and those that mention what is made of it."""
        front, seen = [(path, name)], {(path, name)}
        while front:
            home, constant = front.pop()
            for user in (home, *self.graph.namers[home]):
                for piece in mentions(self.sources.get(user, ""), constant):
                    if piece == MODULE:
                        found.modules.add(user)
                    elif piece.startswith((CONSTANT, IMPORT)):
                        further = (user, piece.partition(" ")[2])
                        front += {further} - seen
                        seen.add(further)
                    else:
                        self.add_function(found, user, piece)


def select(graph: Graph, record: Record, touched: Touched, changed_files: set[str]) -> set[str]:
    """Return the test files of the record that a change reaches, by what they did."""
    by_module = graph.importers(touched.modules)
    by_process = graph.importers(each for each in changed_files if each.endswith(".py"))
    helpers = {each for path in touched.named for each in graph.namers[path]}
    by_name = graph.importers(helpers & graph.helpers) | helpers
    found = by_module | by_name
    for name, ran in record.tests.items():
        entries = graph.named(Names(*map(frozenset, ran.started)), name)
        if ran.functions & touched.functions or ran.read & changed_files or entries & by_process:
            found.add(name)
    return found & graph.test_files


def narrowed(
    graph: Graph, record: Record, base: Mapping[str, bytes], now: Mapping[str, bytes]
) -> set[str]:
    """Return the test files that the change from base to now reaches.

    A test file is judged by the record unless something that it executed, or imports, differs
    from the record in the base already; then it is judged by what it imports.
    """
    before = state_of(base, record.state)
    after = state_of(now, before)
    at_import = record.tests.get(AT_IMPORT, Ran())
    # How tests are started and handed out says nothing of what they execute.
    old, kept = (
        {p: s for p, s in side.items() if not matches(p, HARNESS)}
        for side in (record.state, before)
    )
    earlier = _reached(graph, record, at_import, old, kept, base)
    own = {name for name, ran in record.tests.items() if ran.is_whole}
    unknown = (graph.test_files - own) | earlier
    paths = {
        path for path in before.keys() | after.keys() if differ(before.get(path), after.get(path))
    }
    static = set().union(*(graph.reached(path) for path in paths))
    return (unknown & static) | _reached(graph, record, at_import, before, after, now) - unknown


def _reached(
    graph: Graph,
    record: Record,
    at_import: Ran,
    before: Mapping[str, Parts],
    after: Mapping[str, Parts],
    contents: Mapping[str, bytes],
) -> set[str]:
    """Return the test files that differences reach, by the record where that says it."""
    paths = {
        path for path in before.keys() | after.keys() if differ(before.get(path), after.get(path))
    }
    code = {path for path in paths if path.endswith(".py")}
    sources = {path: text.decode() for path, text in contents.items() if path.endswith(".py")}
    two = ({p: parts for p, parts in side.items() if p in code} for side in (before, after))
    touched = Spread(graph, sources, at_import).between(*two)
    found = select(graph, record, touched, paths)
    started = {name for name, ran in record.tests.items() if any(ran.started)}
    for path in paths:
        is_known = path in before and path in after and path not in at_import.read
        if matches(path, EVERYTHING):
            return set(graph.test_files)
        if path not in code:
            found |= graph.reached(path) & (started if is_known else graph.test_files)
        if is_test_file(path):
            found |= EVIDENCE_READERS & graph.test_files
    return found


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take the revision that the working tree is compared with, and the order to record."""
    words = "run only tests that what changed since this revision can reach"
    parser.addoption("--changed-since", metavar="REV", help=words)
    words = f"keep in {reach.MAP.name} what each test file executes; for a run of all of them"
    parser.addoption("--record-reach", action="store_true", help=words)


CHANGE = pytest.StashKey[Change]()


def pytest_configure(config: pytest.Config) -> None:
    """Find what changed and what that reaches; begin to record before anything is imported."""
    if config.getoption("--record-reach"):
        config.pluginmanager.register(reach.Recorder(), "reach-recorder")
    if since := config.getoption("--changed-since"):
        kept = config.cache.mkdir("changed") / "names.json" if config.cache else None
        config.stash[CHANGE] = changed_since(since, kept)


def changed_since(since: str, kept: Path | None = None) -> Change:
    """Return what changed and what that reaches; the record narrows it where there is one."""
    paths = changed_paths(ROOT, since)
    graph = read_graph(ROOT, paths, kept)
    record = reach.read(reach.MAP)
    if record is None:
        return change(graph, since, paths)
    now = read_files(ROOT)
    base = {path: content for path, content in now.items() if path not in paths}
    held = git(ROOT, "ls-tree", "-r", "--name-only", "-z", since).split("\0")
    for path in set(paths).intersection(held):
        base[path] = git(ROOT, "show", f"{since}:{path}").encode()
    found = reach.narrowed(graph, record, base, now) | change(graph, since, ()).reached
    return Change(since, tuple(paths), graph.test_files, frozenset(found))


def pytest_sessionstart(session: pytest.Session) -> None:
    """Say how much is run; also where --quiet leaves the header out."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter and CHANGE in session.config.stash:
        reporter.write_line(str(session.config.stash[CHANGE]))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what is not reached before it is imported."""
    if CHANGE in config.stash and config.stash[CHANGE].leaves_out(collection_path):
        return True
    return None

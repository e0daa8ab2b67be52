"""Record which functions each test file executes, and tell which files a change can reach.

``--record-reach`` notes, for each test file, the functions of the project that ran in it, the
files that it read and the processes that it started; a wide fixture counts for every file whose
tests use it, and caches of the project are emptied before each file. The record has a digest of
every function as it was, so that one made at an older commit still serves: a test file is judged
by it as long as nothing that it executed has changed from the record to the base of the change.

A change within a function reaches the test files that executed it. A constant reaches the
functions that mention it. What else a module does when it is imported reaches all that import it
(``changed.py``), and so does any change for a test file without a record, for one that forked,
and for the modules that a process ran which a test started.
"""

import ast
import contextlib
import functools
import gzip
import importlib
import json
import os
import shutil
import sys
import tempfile
import threading
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, MappingProxyType
from typing import Any

import pytest

from tests.plugins.graph import (
    FILE_NAME,
    NOTHING,
    PACKAGES,
    ROOT,
    is_test_file,
    matches,
    module_of,
    modules_in_text,
    read_files,
)  # fmt: skip
from tests.plugins.pieces import MODULE, Parts, digest, parts_of

MAP = Path(__file__).with_name("reach.json.gz")
WIDE = ("package", "session")
WHOLE = "whole"  # in the place of a function: the whole file, comments and layout included
NEVER_IMPORTED = ("__main__.py", "manage.py", "*/probes/*.py", "*/migrations/*.py")
AT_IMPORT = ""  # in the place of a test file: what ran while tests were collected


@dataclass
class Ran:
    """What one test file was seen to do."""

    functions: set[tuple[str, str]] = field(default_factory=set)
    read: set[str] = field(default_factory=set)
    started: list[list[str]] = field(default_factory=lambda: [[], [], []])
    is_whole: bool = True  # false if it forked or ran what cannot be seen

    def as_json(self) -> list[Any]:
        """Return it as JSON can keep it."""
        return [sorted(self.functions), sorted(self.read), self.started, self.is_whole]

    @classmethod
    def of_json(
        cls, functions: list[Any], read: list[str], started: list[list[str]], is_whole: bool
    ) -> "Ran":
        """Return what ``as_json`` was made of."""
        return cls({(path, name) for path, name in functions}, set(read), started, is_whole)


@dataclass
class Seen:
    """What happens from one switch to the next, still in the interpreter's own terms."""

    codes: set[CodeType] = field(default_factory=set)
    read: set[str] = field(default_factory=set)
    argvs: set[tuple[str, ...]] = field(default_factory=set)
    is_whole: bool = True

    def add(self, other: "Seen") -> None:
        """Take in what happened in another stretch."""
        self.codes |= other.codes
        self.read |= other.read
        self.argvs |= other.argvs
        self.is_whole = self.is_whole and other.is_whole

    def ran(self) -> Ran:
        """Return it in terms of the project's files and functions."""
        found = Ran(read={name for each in self.read if (name := own_path(each))})
        found.is_whole = self.is_whole and not any(
            "/torch/_dynamo/" in c.co_filename for c in self.codes
        )
        for code in self.codes:
            path = own_path(code.co_filename)
            if path and not is_test_file(path):
                outer = code.co_qualname.partition(".<locals>")[0]
                found.functions.add((path, MODULE if "<" in outer else outer))
        for argv in self.argvs:
            if "python" in " ".join(argv[:3]):
                names = names_of_argv(argv)
                is_known = any(names[:2]) or argv[1:2] in [("-c",), ("-m",)]
                found.is_whole = found.is_whole and is_known
                found.started = [
                    sorted({*a, *b}) for a, b in zip(found.started, names, strict=True)
                ]
        return found


def names_of_argv(argv: Iterable[str]) -> list[list[str]]:
    """Return the modules, files and words of the project that a command names."""
    text = " ".join(argv)
    modules = [*modules_in_text(text)]
    modules += [f"{name}.__main__" for name in PACKAGES if f" -m {name} " in f"{text} "]
    files = [each for each in FILE_NAME.findall(text.replace(f"{ROOT}/", "")) if each[0] != "/"]
    return [modules, files, text.split() if "manage.py" in files else []]


@functools.cache
def own_path(name: str) -> str | None:
    """Return the path of a file of the project from its root, or None for all others."""
    path = Path(name)
    if not path.is_relative_to(ROOT) or "__pycache__" in path.parts:
        return None
    inner = path.relative_to(ROOT).as_posix()
    return inner if inner.split("/")[0] in (*PACKAGES, "templates", "static") else None


def empty_caches() -> None:
    """Forget what functions of the project remember, so that the next file executes them."""
    kept = type(own_path)
    modules = [m for n, m in [*sys.modules.items()] if n.partition(".")[0] in PACKAGES[:3]]
    classes = [c for m in modules for c in vars(m).values() if isinstance(c, type)]
    for holder in (*modules, *classes):
        for each in [*vars(holder).values()]:
            cached = getattr(each, "__func__", each)
            if isinstance(cached, kept) and cached.__module__.partition(".")[0] in PACKAGES[:3]:
                cached.cache_clear()
    if engines := sys.modules.get("django.template.loader"):
        for engine in engines.engines.all():
            for loader in getattr(getattr(engine, "engine", None), "template_loaders", ()):
                loader.reset()


class Recorder:
    """Notes what executes, for whoever's turn it is."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slipway-reach-"))
        self.owner = os.getpid()
        self.now = Seen()
        self.files: dict[str, Seen] = defaultdict(Seen, {AT_IMPORT: self.now})
        self.fixtures: dict[object, Seen] = {}
        sys.addaudithook(self.note_event)
        threading.settrace(self.called)
        sys.settrace(self.called)

    def called(self, frame: FrameType, event: str, arg: object) -> None:  # noqa: ARG002 -- its shape
        """Note the function that a frame begins to execute; its lines are not followed."""
        self.now.codes.add(frame.f_code)

    def note_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Note files that are opened and processes that are started."""
        if event == "open" and isinstance(arguments[0], str | bytes):
            if sys._getframe(1).f_code.co_filename.startswith("<frozen importlib"):
                return  # a module whose compiled form is out of date
            self.now.read.add(os.path.abspath(os.fsdecode(arguments[0])))  # noqa: PTH100 -- fast
        elif event == "os.fork":
            self.now.is_whole = False
        elif event in ("subprocess.Popen", "os.posix_spawn", "os.exec", "os.system"):
            argv = arguments[0] if event == "os.system" else arguments[1]
            words = [argv] if isinstance(argv, str | bytes) else argv
            self.now.argvs.add(tuple(str(word) for word in words))

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_finish(self) -> None:
        """Import all of the product, so that no test file alone is credited with an import."""
        for path in [*read_files(ROOT)]:
            is_ours = path.endswith(".py") and path.split("/")[0] in PACKAGES[:3]
            if is_ours and not matches(path, NEVER_IMPORTED):
                with warnings.catch_warnings(action="ignore"), contextlib.suppress(Exception):
                    importlib.import_module(module_of(path))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Iterator[object]:
        """Credit a test's file with what it executes and with its wide fixtures."""
        path = item.path.relative_to(ROOT).as_posix()
        if path not in self.files:
            empty_caches()
        before, self.now = self.now, self.files[path]
        sys.settrace(self.called)
        try:
            return (yield)
        finally:
            definitions = getattr(item, "_fixtureinfo").name2fixturedefs.values()  # noqa: B009
            for definition in (each for all_of_name in definitions for each in all_of_name):
                self.now.add(self.fixtures.get(definition, Seen()))
            self.now = before
            if nextitem is None or nextitem.path != item.path:
                self.keep(path)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[object]:
        """Keep apart what a wide fixture executes, for all that use it later."""
        if fixturedef.scope not in WIDE:
            return (yield)
        before, self.now = self.now, self.fixtures.setdefault(fixturedef, Seen())
        try:
            return (yield)
        finally:
            before.add(self.now)
            self.now = before

    def keep(self, path: str) -> None:
        """Write down what a file did; a worker may end without any further word."""
        kept = self.folder / f"{digest(path)}.json"
        kept.write_text(json.dumps([path, self.files[path].ran().as_json()]), "utf-8")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        """Put together what all workers wrote down, and keep it in the repository."""
        sys.settrace(None)
        if os.getpid() != self.owner:
            return
        self.keep(AT_IMPORT)
        found = dict(json.loads(each.read_text("utf-8")) for each in self.folder.glob("*.json"))
        shutil.rmtree(self.folder)
        tests = {path: Ran.of_json(*kept) for path, kept in found.items()}
        write(MAP, Record(state_of(read_files(ROOT)), tests))


def state_of(
    contents: Mapping[str, bytes], known: Mapping[str, Parts] = MappingProxyType({})
) -> dict[str, Parts]:
    """Return the digests of all pieces; a file that is not Python is one piece."""
    found = {}
    for path, content in contents.items():
        whole = digest(repr(content))
        if path.endswith(".py"):
            before = known.get(path, {})
            is_same = before.get(WHOLE) == whole
            if is_same:
                found[path] = before
            elif is_test_file(path):  # any change of it runs it
                found[path] = {MODULE: digest(ast.parse(content)), WHOLE: whole}
            else:
                found[path] = parts_of(content.decode()) | {WHOLE: whole}
        elif not matches(path, NOTHING):
            found[path] = {MODULE: whole}
    return found


@dataclass
class Record:
    """The map: every piece of the project as it was, and what each test file did."""

    state: dict[str, Parts]
    tests: dict[str, Ran]


def write(path: Path, record: Record) -> None:
    """Keep a record in little room: each function once, and a bit for it in each test file."""
    table = sorted(set().union(*(ran.functions for ran in record.tests.values())))
    number = {function: place for place, function in enumerate(table)}
    tests = {}
    for name, ran in sorted(record.tests.items()):
        bits = sum(1 << number[each] for each in ran.functions)
        tests[name] = [f"{bits:x}", *ran.as_json()[1:]]
    text = json.dumps({"state": record.state, "functions": table, "tests": tests})
    path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def read(path: Path) -> Record | None:
    """Return the record that is kept in a file, if there is one."""
    if not path.exists():
        return None
    kept = json.loads(gzip.decompress(path.read_bytes()))
    table = [tuple(each) for each in kept["functions"]]
    tests = {}
    for name, (bits, *others) in kept["tests"].items():
        flags = reversed(f"{int(bits, 16):b}")
        ran = [each for each, flag in zip(table, flags, strict=False) if flag == "1"]
        tests[name] = Ran.of_json(ran, *others)
    return Record(kept["state"], tests)

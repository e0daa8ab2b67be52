"""Change the product in one place at a time, and count how often a test notices.

``manage.py test --mutants`` plants the mutants of ``mutants.toml`` one by one into a copy of the
project and runs the tests that each names. A mutant is killed when one of them fails, or when
they do not end in time, and the same passes without the mutant. Whatever else goes wrong is
invalid and never counts as killed.
"""

import argparse
import ast
import json
import queue
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.mutants.server import LIBRARIES, LIMIT_SECONDS, ROOT, Run, Server, servers

LIST = "tests/mutants/mutants.toml"
LEAST_SHARE = 0.9
PASSED, TESTS_FAILED = 0, 1  # pytest's exit statuses
KILLED, SURVIVED, INVALID = VERDICTS = ("killed", "survived", "invalid")
WHOLE_MODULE = "<module>"


class StaleError(Exception):
    """A mutant that does not match the code any more; the text names it."""


@dataclass(frozen=True)
class Mutant:
    """One change of the product: what is replaced where, and the tests that should notice."""

    id: str
    file: str
    function: str  # qualified; also a class, a constant of the module, or the whole module
    kind: str
    harm: str  # what would go wrong
    old: str
    new: str
    tests: tuple[str, ...]
    wider: tuple[str, ...] = ()

    @property
    def area(self) -> str:
        """Return the part of the product that it changes."""
        return self.id.rpartition("-")[0]

    @property
    def package(self) -> str:
        """Return the top-level package or module that it changes."""
        return self.file.partition("/")[0].removesuffix(".py")


@dataclass(frozen=True)
class Outcome:
    """What became of one mutant."""

    mutant: Mutant
    verdict: str
    words: str
    seconds: float


# The list


def read_list(path: Path) -> list[Mutant]:
    """Return the mutants of a list in its order."""
    rows = tomllib.loads(path.read_text("utf-8"))["mutant"]
    lists = ("tests", "wider")
    return [
        Mutant(**{name: tuple(value) if name in lists else value for name, value in row.items()})
        for row in rows
    ]


def chosen(mutants: Sequence[Mutant], names: Sequence[str]) -> list[Mutant]:
    """Return the mutants of these ids and areas, all of them without names.

    Raises:
        StaleError: a name is neither.
    """
    known = {mutant.id for mutant in mutants} | {mutant.area for mutant in mutants}
    if unknown := sorted(set(names) - known):
        raise StaleError(f"No mutant and no area is called {', '.join(unknown)}.")
    return [one for one in mutants if not names or {one.id, one.area} & set(names)]


def planted(source: str, mutant: Mutant) -> str:
    """Return a module's source with the mutant in it.

    Raises:
        StaleError: the function or the fragment is not there exactly once, or the result is no
            Python.
    """
    start, end = _span(source, mutant)
    body = source[start:end]
    if (count := body.count(mutant.old)) != 1:
        where = f"{mutant.function} of {mutant.file}"
        raise StaleError(f"{mutant.id}: {where} holds its fragment {count} times, not once.")
    changed = source[:start] + body.replace(mutant.old, mutant.new) + source[end:]
    try:
        ast.parse(changed)
    except SyntaxError as error:
        raise StaleError(f"{mutant.id}: {mutant.file} does not parse with it: {error}") from None
    return changed


def _span(source: str, mutant: Mutant) -> tuple[int, int]:
    """Return where the mutant's function begins and ends, as places in the text."""
    if mutant.function == WHOLE_MODULE:
        return 0, len(source)
    nodes: list[Any] = [ast.parse(source)]
    for name in mutant.function.split("."):
        nodes = [one for node in nodes for one in node.body if name in _names(one)]
    if len(nodes) != 1:
        raise StaleError(
            f"{mutant.id}: {mutant.file} has {len(nodes)} of {mutant.function}, not one."
        )
    lines = source.splitlines(keepends=True)
    first, last = nodes[0].lineno - 1, nodes[0].end_lineno
    return sum(map(len, lines[:first])), sum(map(len, lines[:last]))


def _names(node: ast.stmt) -> set[str]:
    """Return the names that a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {one.id for one in targets if isinstance(one, ast.Name)}


def check(mutants: Sequence[Mutant], root: Path) -> None:
    """Refuse a list of which any mutant cannot be planted.

    Raises:
        StaleError: with every mutant that cannot.
    """
    stale = []
    for mutant in mutants:
        try:
            planted((root / mutant.file).read_text("utf-8"), mutant)
        except FileNotFoundError:
            stale.append(f"{mutant.id}: there is no {mutant.file}.")
        except StaleError as error:
            stale.append(str(error))
    if stale:
        raise StaleError("\n".join(stale))


# One mutant after the other


def judge(mutant: Mutant, server: Server) -> Outcome:
    """Return whether a test notices the mutant; the copy is afterwards as it was before."""
    started = time.monotonic()
    path = server.copy / mutant.file
    original = path.read_text("utf-8")
    verdict, words = SURVIVED, mutant.harm
    for targets in filter(None, (mutant.tests, mutant.wider)):
        path.write_text(planted(original, mutant), "utf-8")
        try:
            run = server.run(targets)
        finally:
            path.write_text(original, "utf-8")
        if run.status != PASSED:
            verdict, words = _cause(run, server, targets)
            break
    return Outcome(mutant, verdict, words, time.monotonic() - started)


def _cause(run: Run, server: Server, targets: Sequence[str]) -> tuple[str, str]:
    """Return whether it was the mutant that failed, by the same tests without it."""
    if run.status not in {TESTS_FAILED, None}:
        return INVALID, f"pytest ended with {run.status}: {run.tail[-600:]}"
    noticed = run.failed or f"no end of {', '.join(targets)} in {LIMIT_SECONDS:.0f} s"
    without = server.run([run.failed] if run.failed else targets)
    if without.status != PASSED:
        return INVALID, f"it is the same without the mutant: {noticed}"
    return KILLED, noticed


def run_all(
    root: Path, mutants: Sequence[Mutant], *, jobs: int, libraries: Sequence[str] = LIBRARIES
) -> list[Outcome]:
    """Return what became of each mutant, as many at a time as there are jobs."""
    packages = sorted({mutant.package for mutant in mutants})
    with servers(root, packages, libraries, jobs) as started, ThreadPoolExecutor(jobs) as pool:
        idle: queue.SimpleQueue[Server] = queue.SimpleQueue()
        for server in started:
            idle.put(server)

        def one(mutant: Mutant) -> Outcome:
            server = idle.get()
            try:
                found = judge(mutant, server)
            finally:
                idle.put(server)
            say(f"  {found.verdict:8} {mutant.id:15} {found.seconds:6.1f} s  {found.words}")
            return found

        return list(pool.map(one, mutants))


# What is told


def say(text: str) -> None:
    """Print one line at once, also into a pipe."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def killed_share(outcomes: Sequence[Outcome]) -> float:
    """Return the share of the mutants that were killed."""
    return sum(one.verdict == KILLED for one in outcomes) / max(1, len(outcomes))


def table(outcomes: Sequence[Outcome]) -> str:
    """Return how many of each area were killed, survived or were invalid, a line each."""
    lines = [f"{'area':14}" + "".join(f"{name:>10}" for name in (*VERDICTS, "seconds"))]
    for area in (*dict.fromkeys(one.mutant.area for one in outcomes), "all"):
        own = [one for one in outcomes if area in {"all", one.mutant.area}]
        counts = Counter(one.verdict for one in own)
        seconds = sum(one.seconds for one in own)
        numbers = "".join(f"{counts[name]:10}" for name in VERDICTS)
        lines.append(f"{area:14}{numbers}{seconds:10.0f}")
    return "\n".join(lines)


def as_json(outcomes: Sequence[Outcome]) -> str:
    """Return the outcomes as a document, by which two runs are compared."""
    rows = [
        {"id": one.mutant.id, "area": one.mutant.area, "verdict": one.verdict,
         "seconds": round(one.seconds, 1), "words": one.words}
        for one in outcomes
    ]  # fmt: skip
    return json.dumps({"killed_share": killed_share(outcomes), "mutants": rows}, indent=1)


def main(arguments: Sequence[str], *, root: Path = ROOT) -> int:
    """Return 0 if enough of the chosen mutants were killed and none was invalid."""
    parser = argparse.ArgumentParser(prog="manage.py test --mutants")
    parser.add_argument("--only", nargs="+", default=[], metavar="ID|AREA")
    parser.add_argument("--list", action="store_true", help="print the mutants and run none")
    parser.add_argument("--jobs", type=int, default=2, help="how many run at a time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes there")
    asked = parser.parse_args(arguments)
    try:
        mutants = chosen(read_list(root / LIST), asked.only)
        check(mutants, root)
    except StaleError as error:
        say(str(error))
        return 2
    if asked.list:
        for one in mutants:
            say(f"{one.id:15} {one.kind:14} {one.file}:{one.function}: {one.harm}")
        return 0
    outcomes = run_all(root, mutants, jobs=max(1, asked.jobs))
    if asked.json:
        asked.json.write_text(as_json(outcomes), "utf-8")
    say(table(outcomes))
    is_clean = all(one.verdict != INVALID for one in outcomes)
    return 0 if is_clean and killed_share(outcomes) >= LEAST_SHARE else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Measure the code rules' figures: files, functions, types, tests."""

import ast
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE_FOLDERS = ("planner", "runners", "webapp")
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Function:
    """One function of the project: location, length, and whether it is fully typed."""

    path: str
    name: str
    line: int
    num_lines: int
    is_typed: bool


@dataclass(frozen=True)
class Census:
    """The tracked Python files, split into product code and tests."""

    root: Path
    files: tuple[str, ...]

    @cached_property
    def code(self) -> list[str]:
        """Return the product's files without migrations, which are generated."""
        own = [path for path in self.files if path.split("/")[0] in CODE_FOLDERS]
        return ["manage.py", *(path for path in own if "/migrations/" not in path)]

    @cached_property
    def tests(self) -> list[str]:
        """Return the files below tests/."""
        return [path for path in self.files if path.startswith("tests/")]

    def num_lines(self, path: str) -> int:
        """Return the number of lines of a file."""
        return len((self.root / path).read_text("utf-8").splitlines())

    def num_filled_lines(self, path: str) -> int:
        """Return the number of lines of a file that are neither blank nor only a comment."""
        lines = (line.strip() for line in (self.root / path).read_text("utf-8").splitlines())
        return sum(1 for line in lines if line and not line.startswith("#"))

    def functions(self, paths: Sequence[str]) -> list[Function]:
        """Return every function and method of the files, including nested ones."""
        return [function for path in paths for function in self._functions_of(path)]

    @cached_property
    def test_functions(self) -> list[Function]:
        """Return the functions that pytest collects by their name."""
        return [each for each in self.functions(self.tests) if each.name.startswith("test_")]

    def _functions_of(self, path: str) -> Iterator[Function]:
        tree = ast.parse((self.root / path).read_text("utf-8"), path)
        for node in ast.walk(tree):
            if isinstance(node, FunctionNode):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                yield Function(path, node.name, node.lineno, length, _is_typed(node))


def take(root: Path = ROOT) -> Census:
    """Return the census of the files that git tracks or would track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    paths = sorted(set(listed.stdout.splitlines()))
    return Census(root, tuple(path for path in paths if (root / path).is_file()))


def quantile(numbers: Sequence[int], share: float) -> int:
    """Return the quantile of the numbers (nearest rank)."""
    ordered = sorted(numbers)
    rank = -(-share * len(ordered) // 1)  # ceiling
    return ordered[max(0, int(rank) - 1)]


def report(census: Census) -> dict[str, float]:
    """Return the figures that the code rules set goals for.

    Lengths are from the first line to the last. The amounts of code and tests exclude blank lines
    and comments, because tests have more blank lines.
    """
    functions = census.functions(census.code)
    lengths = [function.num_lines for function in functions]
    files = [census.num_lines(path) for path in census.code]
    code_lines = sum(census.num_filled_lines(path) for path in census.code)
    test_lines = sum(census.num_filled_lines(path) for path in census.tests)
    return {
        "test functions": len(census.test_functions),
        "test function median lines": quantile([t.num_lines for t in census.test_functions], 0.5),
        "code files": len(files),
        "code lines": code_lines,
        "test lines": test_lines,
        "test/code ratio": round(test_lines / code_lines, 2),
        "functions": len(functions),
        "function median lines": quantile(lengths, 0.5),
        "function p90 lines": quantile(lengths, 0.9),
        "function longest lines": max(lengths),
        "file p90 lines": quantile(files, 0.9),
        "file longest lines": max(files),
        "typed functions %": round(100 * sum(f.is_typed for f in functions) / len(functions), 1),
    }


def _is_typed(node: FunctionNode) -> bool:
    """Return whether every argument except self or cls, and the result, has a type."""
    arguments = node.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    starred = [argument for argument in (arguments.vararg, arguments.kwarg) if argument]
    needed = [argument for argument in named if argument.arg not in ("self", "cls")]
    return node.returns is not None and all(a.annotation for a in [*needed, *starred])

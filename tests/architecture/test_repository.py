"""What the repository holds: its top level, its words, its picture."""

import re
import subprocess

import pytest

from webapp.boot.suite import ROOT

ARCHITECTURE = ROOT / "templates" / "docs" / "architecture.md"
TOP_LEVEL = {
    "manage.py", "pyproject.toml", "webapp", "planner", "runners", "templates", "static", "tests",
    "README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "constraints.txt",
}  # fmt: skip
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


def test_the_top_level_holds_nothing_unexpected():
    names = {path.split("/")[0] for path in tracked()}

    assert {name for name in names if not name.startswith(".")} <= TOP_LEVEL


@pytest.mark.parametrize("patterns", [FOREIGN, SECRETS], ids=["foreign-paths", "secrets"])
def test_no_tracked_file_holds(patterns):
    held = [
        f"{path}: {match[0]}"
        for path, text in tracked_text()
        for pattern in patterns
        if (match := pattern.search(text))
    ]

    assert held == []


def test_no_tracked_file_is_larger_than_two_megabytes():
    sizes = {path: (ROOT / path).stat().st_size for path in tracked()}

    assert [path for path, size in sizes.items() if size > 2_000_000] == []


def drawn_paths() -> list[str]:
    """The paths of the tree in the architecture page: two blanks of indentation per level."""
    block = re.search(r"```(?:text|tree)?\n(.*?)```", ARCHITECTURE.read_text(), re.DOTALL)
    parents, paths = [], []
    for line in block[1].splitlines():
        name = re.match(r"(\s*)([\w./*-]+)", line)
        if name:
            depth = len(name[1]) // 2
            parents[depth:] = [name[2].rstrip("/")]
            paths.append("/".join(parents))
    return paths


def test_every_path_of_the_architecture_page_exists():
    assert [path for path in drawn_paths() if not any(ROOT.glob(path))] == []


def test_every_file_that_the_architecture_page_names_exists():
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

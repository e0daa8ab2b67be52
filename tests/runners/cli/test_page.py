"""The examples of the documentation page are run, and print the lines that it shows."""

import re
import shlex
from pathlib import Path

import pytest

from runners.cli.main import COMMANDS
from runners.cli.plan_options import GOALS
from tests.runners.cli.endpoint import serving

PAGE = Path(__file__).parents[3] / "templates" / "docs" / "command-line.md"
BLOCK = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
# Commands that need no server; the others have a page of their own.
MODULES = {"plan", "plans", "catalog", "bench", "doctor", "completion"}
LOCAL = {name for name, lazy in COMMANDS.items() if lazy.module in MODULES}
PLAN_ID = re.compile(r"^Plan ([0-9a-f]{10})", re.MULTILINE)


def examples():
    """Return each command of the page with the lines of output below it, in order."""
    found: list[tuple[str, list[str]]] = []
    for block in BLOCK.findall(PAGE.read_text("utf-8")):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            elif line.strip() not in {"", "…"}:
                found[-1][1].append(line)
    return found


@pytest.fixture
def endpoint():
    with serving(ttft_seconds=0.01, itl_seconds=0.002) as started:
        yield started


def loosely(line):
    """Return a line without its figures and the width of its columns."""
    return re.sub(r"[\d.,]*\d", "#", re.sub(r"\b[0-9a-f]{10}\b", "PLAN", " ".join(line.split())))


def test_every_example_runs_and_prints_the_lines_that_the_page_shows(
    slipway, folders, endpoint, monkeypatch
):
    monkeypatch.chdir(folders)
    monkeypatch.setenv("COLUMNS", "200")  # lines of the page are not wrapped
    plan_id = "PLAN"
    for command, expected in examples():
        named = command.replace("PLAN", plan_id).replace("ENDPOINT", endpoint.url)
        program, *arguments = shlex.split(named)
        arguments, redirect = ([*arguments, ""], None)
        assert program == "slipway", command
        if ">" in arguments:
            redirect = arguments[arguments.index(">") + 1]
            arguments = arguments[: arguments.index(">")]
        done = slipway(*(each for each in arguments if each))
        assert done.code == 0, (command, done.err)
        printed = "\n".join(loosely(line) for line in done.out.splitlines())
        shown = [loosely(line.replace("ENDPOINT", endpoint.url)) for line in expected]
        assert [line for line in shown if line not in printed] == [], command
        if redirect:
            (folders / redirect).write_text(done.out)
        if match := PLAN_ID.search(done.out):
            plan_id = match[1]


def test_the_page_has_an_example_of_every_command_and_goal():
    commands = [shlex.split(command) for command, _ in examples()]
    assert {words[1] for words in commands} == LOCAL
    assert {words[2] for words in commands if words[1] == "plan"} == {*GOALS}

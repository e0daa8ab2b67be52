"""The examples of the page on the command line and a server are run against the site."""

import json
import re
import shlex
from pathlib import Path

import pytest

from runners.cli.main import COMMANDS
from tests.runners.cli.test_page import BLOCK, LOCAL
from tests.webapp.api.test_cli import CONFIG, own_folders, run  # noqa: F401 (fixtures)
from tests.webapp.conftest import EXIT_OK, STARTED, batch_of, claim
from webapp.accounts.models import Membership
from webapp.accounts.tokens import token_make
from webapp.agents.ingest import events_accept
from webapp.jobs.models import Attempt, Job

pytestmark = pytest.mark.django_db(databases="__all__")
PAGE = Path(__file__).parents[3] / "templates" / "docs" / "command-line-server.md"
FILE = re.compile(r"^```yaml\n(# yaml-language-server: .*?)^```", re.MULTILINE | re.DOTALL)


def ended_well() -> None:
    """Let the host report that it ran what it was given."""
    for attempt in Attempt.objects.filter(ended_at=None):
        claim(attempt)
        log = ("log", {"stream": "stdout", "text": "step 1\nstep 2\n"})
        batch = batch_of(attempt, ("started", STARTED), log, ("exited", EXIT_OK))
        events_accept(host=attempt.host, batch=batch)


def begun() -> None:
    """Let the host report that it began what it was given."""
    for attempt in Attempt.objects.filter(ended_at=None, claimed_at=None):
        claim(attempt)
        events_accept(host=attempt.host, batch=batch_of(attempt, ("started", STARTED)))


def stopped() -> None:
    """Let the host report that it stopped what it was told to."""
    record = {**EXIT_OK, "exit_code": None, "signal": 15, "reason": "stopped_by_user"}
    for attempt in Attempt.objects.filter(job__state="stopping"):
        batch = batch_of(attempt, ("exited", record), first=2)  # after it has begun
        events_accept(host=attempt.host, batch=batch)


AFTER = {"launch": ended_well, "rerun": begun, "stop": stopped}


def named(text: str, host: str) -> str:
    """Return text with what the page's words stand for: the first and the last job, and so on."""
    jobs = list(Job.objects.order_by("created_at", "pk").values_list("pk", flat=True))
    known = {"SERVER": "http://testserver", "HOST": host}
    known |= {"JOB": jobs[0], "COPY": jobs[-1]} if jobs else {}
    return re.sub(r"\b(SERVER|HOST|JOB|COPY)\b", lambda found: known[found[1]], text)


def test_every_example_prints_the_lines_that_the_page_shows(
    run, alice, team, host, tmp_path, monkeypatch  # noqa: F811
):  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    Membership.objects.filter(user=alice).update(role="admin")
    text = PAGE.read_text()
    (tmp_path / "job.yaml").write_text(FILE.search(text)[1].replace("HOST", host.slug))
    (tmp_path / "my-model").mkdir()
    (tmp_path / "my-model" / "config.json").write_text(json.dumps(CONFIG))
    token = token_make(team=team, by=alice, name="cli", scope="admin")[1]
    called = set()
    for block in BLOCK.findall(text):
        for example in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, *expected = example.splitlines()
            words = shlex.split(named(command, host.slug))
            code, out, err = run(*words[1:], stdin=f"{token}\n")
            has_no_redis = words[1:3] == ["hosts", "check"]  # which that check finds
            assert code == has_no_redis, (command, out, err)
            AFTER.get(words[1], lambda: None)()
            for line in expected:
                assert named(line, host.slug) in out + err, (command, out, err)
            called.add(words[1])
    assert called - LOCAL == set(COMMANDS) - LOCAL - {"verify", "mcp", "tune"}
    assert called & LOCAL == {"models", "plan"}  # which also have a half of the server

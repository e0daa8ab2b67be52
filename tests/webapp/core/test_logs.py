"""What is logged of a failure names it, and holds nothing of what variables held."""

import io
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import structlog
from django.db import OperationalError

from tests.stack import ROOT


def fail(credential: str) -> None:
    raise ValueError(f"refused a credential of {len(credential)} letters")


def test_a_traceback_names_the_failure_and_no_variables(capsys):
    try:
        fail("canary-credential")
    except ValueError:
        structlog.get_logger("test").warning("round failed", exc_info=True)

    told = capsys.readouterr().out
    assert "ValueError: refused a credential of 17 letters" in told
    assert "canary-credential" not in told.replace('fail("canary-credential")', "")


LOGS = """
import structlog, sys
from webapp.core.logs import configure_logs
configure_logs()
for _ in range(3):
    structlog.get_logger("test").warning("round failed")
sys.stderr.write("still alive")
"""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_a_full_disk_behind_the_log_ends_no_process():
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", LOGS],
            env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )

    assert (done.returncode, done.stderr) == (0, "still alive")


@pytest.fixture
def told_of_requests(monkeypatch) -> io.StringIO:
    """What the web process writes of requests that it could not answer."""
    text = io.StringIO()
    for handler in logging.getLogger("django.request").handlers:
        monkeypatch.setattr(handler, "stream", text)
    return text


@pytest.mark.parametrize(
    ("error", "is_traced"),
    [(ZeroDivisionError("no such speed"), True), (OperationalError("database is locked"), False)],
    ids=["fault", "outage"],
)
def test_a_page_that_fails_leaves_its_traceback_and_an_outage_one_line(
    client, alice, monkeypatch, told_of_requests, error, is_traced
):
    def failing(*_args: object, **_kwargs: object) -> None:
        raise error

    client.force_login(alice)
    client.raise_request_exception = False
    monkeypatch.setattr("webapp.home.views.render", failing)

    answer = client.get("/")

    told = told_of_requests.getvalue()
    assert answer.status_code == (500 if is_traced else 503)
    assert ("Internal Server Error: /" if is_traced else "Service Unavailable: /") in told
    assert ("Traceback" in told, "ZeroDivisionError: no such speed" in told) == (is_traced,) * 2
    assert is_traced or len(told.splitlines()) == 1

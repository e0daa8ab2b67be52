"""PostgreSQL is killed while jobs run on an installation that keeps everything in it."""

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stack import StackError, free_port, wait_for
from tests.system.faults.site import Site

PROGRAMS = Path(shutil.which("postgres") or "/nowhere").resolve().parent
pytestmark = [
    pytest.mark.faults,
    pytest.mark.slow,
    pytest.mark.skipif(not (PROGRAMS / "initdb").exists(), reason="no PostgreSQL is installed"),
]
STRAIGHT = ["queued", "preflight", "starting", "running", "succeeded"]
OFF = 2.0


class Postgres:
    """A real server of this test's own, which does not run as root."""

    def __init__(self) -> None:
        # Not below pytest's own folder: that one is closed to other users.
        self.folder, self.port = Path(tempfile.mkdtemp(prefix="slipway-pg-")), free_port()
        self.user = "postgres" if os.getuid() == 0 else None
        if self.user:
            os.chown(self.folder, pwd.getpwnam(self.user).pw_uid, -1)
        command = [
            PROGRAMS / "initdb",
            "-D",
            self.folder / "data",
            "-U",
            "slipway",
            "-A",
            "trust",
            "-N",
        ]
        subprocess.run(command, user=self.user, check=True, capture_output=True)
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"postgres://slipway@127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        self.process = subprocess.Popen(
            [PROGRAMS / "postgres", "-D", self.folder / "data", "-p", str(self.port),
             "-k", self.folder, "-h", "127.0.0.1"],
            user=self.user, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        ask = [PROGRAMS / "pg_isready", "-h", "127.0.0.1", "-p", str(self.port), "-q"]
        wait_for(lambda: subprocess.run(ask, check=False).returncode == 0, "PostgreSQL")

    def kill(self) -> None:
        """End it as a crash would: its back ends follow at once."""
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            (self.folder / "data" / "postmaster.pid").unlink(missing_ok=True)


@contextlib.contextmanager
def serving() -> Iterator[Postgres]:
    """Have a server while a block runs."""
    made = Postgres()
    made.start()
    try:
        yield made
    finally:
        made.kill()
        shutil.rmtree(made.folder, ignore_errors=True)


@pytest.fixture
def postgres() -> Iterator[Postgres]:
    with serving() as made:
        yield made


@pytest.fixture
def site(postgres, tmp_path) -> Iterator[Site]:
    made = Site(tmp_path / "site", "ada", "bea", DATABASE_URL=postgres.url)
    try:
        made.start()
        yield made
    finally:
        made.stop()


def is_answering(site: Site) -> bool:
    """Tell whether the database takes questions again: after a crash it first recovers."""
    try:
        return bool(site.desk.states())
    except StackError:
        return False


def test_jobs_outlive_two_kills_of_the_database(site, postgres):
    site.begin_case()
    jobs = [site.running("ada", steps=60), site.submit("bea", steps=20)]
    for _ in range(2):
        postgres.kill()
        time.sleep(OFF)
        postgres.start()
        time.sleep(0.5)
    wait_for(site.web_answers, "the web process")
    wait_for(lambda: is_answering(site), "the database behind it")
    ended = [site.wait(job) for job in jobs]
    site.mend()

    assert [view["states"] for view in ended] == [STRAIGHT, STRAIGHT]
    assert site.broken_promises() == {}

"""A backup is taken while jobs run, the site goes on, and later it starts from that backup.

On SQLite and, where it is installed, on PostgreSQL; Redis, web, workers and hosts are real.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from tests.stack import StackError, wait_for
from tests.system.faults import test_postgres_killed as killed
from tests.system.faults.parts import Desk
from tests.system.faults.site import Site

pytestmark = [pytest.mark.faults, pytest.mark.slow]
ENDLESS = 100_000  # steps of a drill: more than an hour
SERVER = ("web", "control", "ticker")
DATABASES = [
    "sqlite",
    pytest.param(
        "postgresql",
        marks=pytest.mark.skipif(
            not (killed.PROGRAMS / "initdb").exists(), reason="no PostgreSQL is installed"
        ),
    ),
]


@pytest.fixture(params=DATABASES, scope="module")
def story(request, tmp_path_factory) -> Iterator[SimpleNamespace]:
    """Two jobs run while the backup is taken; one ends before it is restored, the other after.

    Neither ends by itself: how long a backup takes is the machine's affair.
    """
    serving = killed.serving() if request.param == "postgresql" else nullcontext()
    with serving as postgres:
        url = {"DATABASE_URL": postgres.url} if postgres else {}
        site = Site(tmp_path_factory.mktemp("site"), "ada", "bea", **url)
        try:
            site.start()
            yield tell(site, request.param)
        finally:
            site.stop()


def tell(site: Site, kind: str) -> SimpleNamespace:
    site.begin_case()
    long, short = site.running("ada", steps=ENDLESS), site.running("bea", steps=ENDLESS)
    folder = site.folder / "backup"
    written = site.run("manage.py", "backup", str(folder))
    before = site.attempt(long)["acked_seq"]
    site.desk.stop(job=short)
    site.wait(short)
    later = site.submit("bea", steps=2)
    site.wait(later)
    with pytest.raises(StackError) as while_running:
        site.run("manage.py", "restore", str(folder), "--overwrite")
    for name in SERVER:
        site.kill_tree(name)
    site.desk.close()
    restored = site.run("manage.py", "restore", str(folder), "--overwrite")
    site.restart(*SERVER)
    site.desk = Desk(site.environment, site.logs / "desk.log")
    wait_for(lambda: site.attempt(long)["acked_seq"] > before, f"newer events of {long}")
    site.desk.stop(job=long)
    return SimpleNamespace(
        site=site, kind=kind, written=written, restored=restored, while_running=str(while_running.value),
        long=site.wait(long), short=site.wait(short), later=later, before=before,
        acked=site.attempt(long)["acked_seq"],
    )  # fmt: skip


def test_a_site_that_runs_is_backed_up_and_not_written_over(story):
    assert f"({story.kind})" in story.written
    assert "all read again and found whole" in story.written
    assert "in use" in story.while_running
    assert "Restored the backup of" in story.restored


def test_a_job_that_still_runs_goes_on_from_what_the_backup_knew(story):
    (attempt,) = story.long["attempts"]

    assert (story.long["state"], story.long["reason"]) == ("stopped", "stopped_by_user")
    assert (attempt["num_started"], attempt["num_exited"]) == (1, 1)
    assert story.acked > story.before


def test_a_job_that_ended_since_is_shown_as_one_whose_end_was_not_seen(story):
    assert (story.short["state"], story.short["reason"]) == ("error", "supervisor_lost")


def test_a_job_that_was_launched_since_is_unknown_and_its_host_takes_new_ones(story):
    rows = story.site.desk.sql(statement="SELECT id FROM jobs_job")
    assert [story.later] not in rows
    again = story.site.submit("bea", steps=2)

    assert story.site.wait(again)["state"] == "succeeded"
    wait_for(story.site.web_answers, "the web process")

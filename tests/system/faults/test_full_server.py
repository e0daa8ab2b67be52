"""The server's own disk is full while a job runs: pages say so, no part ends, nothing is lost."""

import http.client
import sqlite3
import subprocess
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.stack import ApiClient, wait_for
from tests.system.faults.site import SERVER, Site

pytestmark = [pytest.mark.faults, pytest.mark.slow]
ROOMY = "6G"  # a preflight wants some; memory is taken as it is written
SPARE_KIB = 1024  # what may be written until the filler has taken it
FULL_SECONDS = 6.0
PAGES = ("/", "/jobs/", "/hosts/", "/queue/", "/plans/")


@pytest.fixture(scope="module")
def disk(tmp_path_factory) -> Iterator[Path]:
    """A disk of the site's own, which a test may shrink to what is on it."""
    folder = tmp_path_factory.mktemp("disk")
    if mount(folder, "-t", "tmpfs", "-o", f"size={ROOMY}", "tmpfs").returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def mount(folder: Path, *options: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["mount", *options, str(folder)], capture_output=True, check=False)


@pytest.fixture(scope="module")
def story(disk, tmp_path_factory) -> Iterator[SimpleNamespace]:
    site = Site(disk / "site", "ada")
    site.hosts = {"ada": tmp_path_factory.mktemp("host") / "ada"}  # its disk has room
    try:
        site.start()
        site.begin_case()
        job = site.running("ada", steps=400)
        before = site.attempt(job)["acked_seq"]
        reader = ApiClient(site.port, "olga")
        fill(site, disk)
        until = time.monotonic() + FULL_SECONDS
        pages = {path: reader.request("GET", path)[0] for path in PAGES}
        login, answer = status(site, "GET", "/login/"), log_in(site)
        time.sleep(max(0.0, until - time.monotonic()))
        alive = {name: site.is_alive(name) for name in (*SERVER, "ada")}
        (disk / "filler").unlink()
        mount(disk, "-o", f"remount,size={ROOMY}")
        yield SimpleNamespace(
            site=site, job=job, before=before, pages=pages, login=login, answer=answer,
            alive=alive, view=site.wait(job),
        )  # fmt: skip
    finally:
        site.stop()


def fill(site: Site, disk: Path) -> None:
    """Leave no free byte, and no room for another write in a log that the database uses anew."""
    with closing(sqlite3.connect(site.folder / "slipway.sqlite3", timeout=60)) as database:
        wait_for(lambda: is_truncated(database), "an empty log of the database", every_s=0.01)
    used = subprocess.check_output(["df", "--output=used", str(disk)]).split()[1].decode()
    mount(disk, "-o", f"remount,size={int(used) + SPARE_KIB}k")
    with (disk / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while file.write(b"x" * 4096):
            pass


def is_truncated(database: sqlite3.Connection) -> bool:
    (is_busy, *_), *_ = database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return not is_busy


def status(site: Site, method: str, path: str, body: str = "", **headers: str):
    connection = http.client.HTTPConnection("127.0.0.1", site.port, timeout=120)
    connection.request(method, path, body or None, headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return SimpleNamespace(status=answer.status, headers=answer.headers, text=text)


def log_in(site: Site):
    page = status(site, "GET", "/login/")
    cookie = page.headers["Set-Cookie"].split(";")[0]
    token = page.text.split('csrfmiddlewaretoken" value="')[1].split('"')[0]
    form = {"username": "alice", "password": "x", "csrfmiddlewaretoken": token}
    return status(
        site, "POST", "/login/", urllib.parse.urlencode(form), Cookie=cookie,
        **{"Content-Type": "application/x-www-form-urlencoded"},
    )  # fmt: skip


def test_pages_are_shown_and_a_login_is_refused_in_words(story):
    assert story.pages == dict.fromkeys(PAGES, 200)
    assert story.login.status == 200
    assert (story.answer.status, story.answer.headers["Retry-After"]) == (503, "30")
    assert "disk is full" in story.answer.text


def test_no_part_of_the_site_ends(story):
    assert story.alive == dict.fromkeys((*SERVER, "ada"), True)


def test_the_job_and_every_event_of_it_arrive_afterwards(story):
    (attempt,) = story.view["attempts"]

    assert story.view["state"] == "succeeded"
    assert (attempt["num_started"], attempt["num_exited"]) == (1, 1)
    wait_for(lambda: story.site.attempt(story.job)["acked_seq"] > story.before, "the rest")

"""`manage.py up` with all its real parts, from an empty data folder to Ctrl-C.

One start from nothing, kills of its parts, a kill of `up` itself, the start after it, and its end:
one story, told by the fixtures in turn; each test looks at one moment of it.
"""

import os
import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import httpx
import psutil
import pytest

from tests.stack import PASSWORD, copy_migrated
from tests.system.running_up import START_LIMIT_S, RunningUp, spare_the_benchmark
from tests.webapp.boot.conftest import eventually, free_port, is_alive
from webapp.boot import up

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
PARTS = ["webapp.asgi", "webapp.gateway.asgi", "redis.sock", "manage.py control", "runners work"]


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """An `up` that began with nothing; its parts end with the module."""
    found = RunningUp(tmp_path_factory.mktemp("u") / "data", free_port())
    try:
        spare_the_benchmark(found.wait_until_ready())
        yield found
    finally:
        found.end_by_force()


@pytest.fixture(scope="module")
def seen(running) -> SimpleNamespace:
    """What it shows while it runs: its pages, its words, its files, and a second `up`."""
    (password,) = re.findall(r"password[: ]+(\S{12,})", running.words)
    with httpx.Client(base_url=running.url, follow_redirects=True) as browser:
        page = browser.get("/")
        token = re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', page.text)[1]
        chosen = browser.post(
            page.url,
            data={"username": "admin", "password": password, "csrfmiddlewaretoken": token},
            headers={"Referer": str(page.url)},
        )
        token = re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', chosen.text)[1]
        own = {"old_password": password, "new_password1": PASSWORD, "new_password2": PASSWORD}
        home = browser.post(
            chosen.url,
            data={**own, "csrfmiddlewaretoken": token},
            headers={"Referer": str(chosen.url)},
        )
    secrets = [running.data / "host" / "credential.json", running.data / "secret_key"]
    second = subprocess.run(
        [sys.executable, "manage.py", "up"],
        cwd=up.ROOT,
        env=os.environ | {"SLIPWAY_DATA_DIR": str(running.data)},
        capture_output=True,
        text=True,
        check=False,
    )
    return SimpleNamespace(
        page=page, chosen=chosen, home=home, words=running.words, second=second,
        open_to_others=[path for path in [running.data, *secrets] if path.stat().st_mode & 0o077],
    )  # fmt: skip


@pytest.fixture(scope="module")
def relieved(running, seen) -> set[int]:
    """What the gateway answers from the kill of the process that `up` started until its relief."""
    pid = running.pid_of("webapp.gateway.asgi")
    (fork,) = psutil.Process(pid).children()
    os.kill(pid, signal.SIGKILL)
    statuses: set[int] = set()

    def is_over() -> bool:
        statuses.add(httpx.get(f"{running.url}/v1/models", timeout=60).status_code)
        return not is_alive(fork.pid)

    eventually(is_over)
    return statuses


@pytest.fixture(scope="module")
def restarted(running, relieved) -> dict[str, bool]:
    """Of each part whether another took its place, and the site answered, once it was killed."""
    found = {}
    for words in PARTS:
        pid = running.pid_of(words)
        os.kill(pid, signal.SIGKILL)
        eventually(lambda words=words, pid=pid: running.pid_of(words) not in (pid, None))
        found[words] = eventually(running.answers)
    return found


@pytest.fixture(scope="module")
def after_kill_9(running, restarted) -> SimpleNamespace:
    """The next `up` on the same data, and what the killed one had left."""
    running.process.kill()
    running.process.wait()
    orphans = {process.pid for process in running.members()}
    second = RunningUp(running.data, free_port()).wait_until_ready()
    living = {process.pid for process in second.members()}
    return SimpleNamespace(up=second, orphans=orphans, living=living)


@pytest.fixture(scope="module")
def after_ctrl_c(after_kill_9) -> SimpleNamespace:
    """Who is left once that one was interrupted, and how it ended."""
    after_kill_9.up.stop()
    left, returncode = after_kill_9.up.members(), after_kill_9.up.process.returncode
    return SimpleNamespace(left=left, returncode=returncode)


def test_the_first_page_asks_to_sign_in(seen):
    assert seen.page.status_code == 200
    assert 'type="password"' in seen.page.text


def test_the_admin_password_is_printed_once_and_replaced_at_the_first_login(seen):
    assert seen.chosen.url.path == "/settings/password/"
    assert seen.home.status_code == 200
    assert 'type="password"' not in seen.home.text


def test_every_long_step_shows_its_seconds(seen):
    for step in ("Starting Redis", "Bringing the database up to date", "Enrolling this machine"):
        assert re.search(rf"✓ {step}.* \(\d+\.\d s\)", seen.words)


def test_a_second_up_says_that_one_runs_and_where(running, seen):
    assert seen.second.returncode == 1
    assert f"Slipway already runs at {running.url}" in seen.second.stderr


def test_the_data_folder_and_its_secrets_are_for_the_owner_only(seen):
    assert seen.open_to_others == []


@pytest.mark.faults
def test_the_gateway_answers_while_another_one_takes_its_place(relieved):
    assert relieved == {401}  # no key was sent


@pytest.mark.faults
def test_each_killed_part_comes_back(restarted):
    assert restarted == dict.fromkeys(PARTS, True)


@pytest.mark.faults
def test_a_start_after_kill_9_of_up_ends_what_it_left_and_goes_on(after_kill_9):
    assert re.search(r"Ended \d+ processes", after_kill_9.up.words)
    assert after_kill_9.orphans
    assert after_kill_9.orphans.isdisjoint(after_kill_9.living)
    assert "password" not in after_kill_9.up.words


@pytest.mark.faults
def test_ctrl_c_stops_everything_and_leaves_no_process(after_kill_9, after_ctrl_c):
    assert len(after_kill_9.living) >= 6
    assert after_ctrl_c.left == []
    assert after_ctrl_c.returncode == 0


@pytest.mark.faults
def test_ctrl_c_during_the_start_leaves_no_process(tmp_path):
    (tmp_path / "d").mkdir(mode=0o700)
    copy_migrated(tmp_path / "d")
    found = RunningUp(tmp_path / "d", free_port())
    try:
        eventually(lambda: "Starting the web process" in found.words, START_LIMIT_S)

        found.stop()

        assert found.members() == []
        assert "Traceback" not in found.words
    finally:
        found.end_by_force()

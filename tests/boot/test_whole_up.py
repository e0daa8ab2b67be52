"""`manage.py up` with all its real parts, from an empty data folder."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from tests.boot.conftest import eventually, free_port
from webapp.boot import up

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
START_LIMIT_S = 600.0


def _command_of(process: psutil.Process) -> str:
    """The command line of a process, empty when it ended since it was listed."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


class RunningUp:
    """One real `manage.py up` and what it printed."""

    def __init__(self, data: Path, port: int) -> None:
        self.data, self.port = data, port
        self.url = f"http://127.0.0.1:{port}"
        self.log = data.with_name("up.log")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "manage.py", "up", "--port", str(port)],
                cwd=up.ROOT,
                env=os.environ | {"SLIPWAY_DATA_DIR": str(data)},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def words(self) -> str:
        return self.log.read_text()

    def wait_until_ready(self) -> "RunningUp":
        eventually(lambda: self.process.poll() is not None or self.is_ready, START_LIMIT_S)
        assert self.is_ready, self.words
        return self

    @property
    def is_ready(self) -> bool:
        return "Slipway is ready" in self.words

    def answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/healthz", timeout=5).is_success
        except httpx.HTTPError:
            return False

    def members(self) -> list[psutil.Process]:
        """Every process that works on this data folder, `up` itself included."""
        return [process for process in psutil.process_iter() if self._is_member(process)]

    def _is_member(self, process: psutil.Process) -> bool:
        try:
            is_told = process.environ().get("SLIPWAY_DATA_DIR") == str(self.data)
            is_redis = f"unixsocket:{self.data}" in " ".join(process.cmdline())  # hides its own
            return (is_told or is_redis) and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    def pid_of(self, words: str) -> int | None:
        """The number of the first started process whose command holds the words."""
        found = [p for p in self.members() if words in _command_of(p)]
        return min(found, key=psutil.Process.create_time).pid if found else None

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        self.process.wait(60)

    def end_by_force(self) -> None:
        for process in self.members():
            process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tmp_path_factory.mktemp("u") / "data"


@pytest.fixture(scope="module")
def running(data):
    found = RunningUp(data, free_port())
    try:
        yield found.wait_until_ready()
    finally:
        found.stop()
        found.end_by_force()


def test_the_first_page_asks_to_sign_in(running):
    page = httpx.get(running.url, follow_redirects=True)

    assert page.status_code == 200
    assert 'type="password"' in page.text


def test_the_admin_password_is_printed_once_and_opens_the_door(running):
    (password,) = re.findall(r"password[: ]+(\S{12,})", running.words)
    with httpx.Client(base_url=running.url, follow_redirects=True) as browser:
        page = browser.get("/")
        token = re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', page.text)[1]

        home = browser.post(
            page.url,
            data={"username": "admin", "password": password, "csrfmiddlewaretoken": token},
            headers={"Referer": str(page.url)},
        )

    assert home.status_code == 200
    assert 'type="password"' not in home.text


def test_every_long_step_shows_its_seconds(running):
    for step in ("Starting Redis", "Bringing the database up to date", "Enrolling this machine"):
        assert re.search(rf"✓ {step}.* \(\d+\.\d s\)", running.words)


def test_a_second_up_says_that_one_runs_and_where(running):
    second = subprocess.run(
        [sys.executable, "manage.py", "up"],
        cwd=up.ROOT,
        env=os.environ | {"SLIPWAY_DATA_DIR": str(running.data)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert second.returncode == 1
    assert f"Slipway already runs at {running.url}" in second.stderr


def test_the_data_folder_and_its_secrets_are_for_the_owner_only(running):
    secrets = [running.data / "host" / "credential.json", running.data / "secret_key"]

    assert running.data.stat().st_mode & 0o077 == 0
    assert [path for path in secrets if path.stat().st_mode & 0o077] == []


@pytest.mark.faults
@pytest.mark.parametrize("words", ["uvicorn", "redis.sock", "manage.py control", "runners work"])
def test_a_killed_part_comes_back(running, words):
    pid = running.pid_of(words)

    os.kill(pid, signal.SIGKILL)

    eventually(lambda: running.pid_of(words) not in (pid, None))
    eventually(running.answers)


@pytest.mark.faults
def test_ctrl_c_stops_everything_and_leaves_no_process(tmp_path):
    found = RunningUp(tmp_path / "d", free_port())
    try:
        found.wait_until_ready()
        num_running = len(found.members())

        found.stop()

        assert num_running >= 6
        assert found.members() == []
        assert found.process.returncode == 0
    finally:
        found.end_by_force()


@pytest.mark.faults
def test_a_start_after_kill_9_of_up_ends_what_it_left_and_goes_on(tmp_path):
    first = RunningUp(tmp_path / "d", free_port())
    second = None
    try:
        first.wait_until_ready()
        first.process.kill()
        first.process.wait()
        orphans = {process.pid for process in first.members()}

        second = RunningUp(tmp_path / "d", free_port()).wait_until_ready()

        assert re.search(r"Ended \d+ processes", second.words)
        assert orphans.isdisjoint(process.pid for process in second.members())
        assert "password" not in second.words
        second.stop()
        assert second.members() == []
    finally:
        (second or first).end_by_force()


@pytest.mark.faults
def test_ctrl_c_during_the_start_leaves_no_process(tmp_path):
    found = RunningUp(tmp_path / "d", free_port())
    try:
        eventually(lambda: "Starting the web process" in found.words, START_LIMIT_S)

        found.stop()

        assert found.members() == []
        assert "Traceback" not in found.words
    finally:
        found.end_by_force()

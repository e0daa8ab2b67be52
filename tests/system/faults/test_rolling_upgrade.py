"""A site on PostgreSQL is upgraded under load: old web process and agent beside the new ones.

The old ones are those of an earlier commit, from the checkout's history.
"""

import http.client
import logging
import os
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import pytest

from tests.stack import MAKE_PEOPLE, MAKE_TOKEN, PREPARE, ROOT, ApiClient, free_port, wait_for
from tests.system.faults.switch import Switch
from tests.system.faults.test_postgres_killed import PROGRAMS, Postgres, serving
from webapp.boot import broker

# operations: Serve web and gateway by a command, and read secrets from files
PREVIOUS = "1468c4813d292cdbeba5b6d9486506551b5ac23b"
KNOWN = subprocess.run(
    ["git", "cat-file", "-e", f"{PREVIOUS}^{{commit}}"], cwd=ROOT, capture_output=True, check=False
)
pytestmark = [
    pytest.mark.faults,
    pytest.mark.slow,
    pytest.mark.skipif(not (PROGRAMS / "initdb").exists(), reason="no PostgreSQL is installed"),
    pytest.mark.skipif(
        KNOWN.returncode != 0, reason=f"the checkout's history does not reach {PREVIOUS[:8]}"
    ),
]
PER_SECOND = 20
log = logging.getLogger(__name__)
MOST_TRIES = 3  # of a request
DEMO_SECONDS = 120
BESIDE_SECONDS = 10.0  # both web processes behind the switch


@pytest.fixture
def postgres() -> Iterator[Postgres]:
    with serving() as made:
        yield made


class Release:
    """The processes of one release, each on its own."""

    def __init__(self, root: Path, environment: dict[str, str], logs: Path) -> None:
        self.root, self.logs = root, logs
        self.environment = environment | {"PYTHONPATH": str(root)}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def run(self, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=self.root, env=self.environment,
            capture_output=True, text=True, check=False, timeout=600,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    def start(self, name: str, *arguments: str) -> None:
        with (self.logs / f"{self.root.name}-{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, *arguments], cwd=self.root, env=self.environment,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    def start_web(self, port: int) -> None:
        self.start("web", "manage.py", "serve", "web", "--port", str(port))
        wait_for(lambda: answers(port, "/readyz"), f"web of {self.root.name}")

    def stop(self, name: str) -> None:
        """End a process as systemd and Kubernetes do: SIGTERM, and time to finish."""
        if (process := self.processes.pop(name, None)) is not None:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def answers(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == http.client.OK
    except OSError:
        return False
    finally:
        connection.close()


class Load(threading.Thread):
    """A client's requests at a steady rate; what fails is tried again a few times."""

    def __init__(self, client: ApiClient, paths: list[str]) -> None:
        super().__init__(daemon=True)
        self.client, self.paths = client, paths
        self.answered = self.retries = 0
        self.failed: list[str] = []
        self.is_over = threading.Event()
        self._lock = threading.Lock()

    def run(self) -> None:
        threads: list[threading.Thread] = []
        due = time.monotonic()
        while not self.is_over.is_set():
            path = self.paths[len(threads) % len(self.paths)]
            threads.append(threading.Thread(target=self._ask, args=(path,), daemon=True))
            threads[-1].start()
            due += 1 / PER_SECOND
            time.sleep(max(0.0, due - time.monotonic()))
        for each in threads:
            each.join(300)

    def _ask(self, path: str) -> None:
        problems = []
        for _ in range(MOST_TRIES):
            try:
                status, _, _ = self.client.request("GET", path)
            except (OSError, http.client.HTTPException) as error:
                problems.append(f"{path}: {error!r}")
            else:
                if status == http.client.OK:
                    with self._lock:
                        self.answered += 1
                        self.retries += len(problems)
                    return
                problems.append(f"{path}: {status}")
            time.sleep(0.5)
        with self._lock:
            self.failed.append("; ".join(problems))


@pytest.fixture
def releases(tmp_path: Path, postgres: Postgres) -> Iterator[tuple[Release, Release]]:
    """The previous release and this one, on the same databases and Redis."""
    earlier = tmp_path / "previous"
    archive = ["git", "archive", "--format=tar", PREVIOUS]
    packed = subprocess.run(archive, cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=BytesIO(packed)) as files:
        files.extractall(earlier, filter="data")
    data, logs = tmp_path / "data", tmp_path / "logs"
    data.mkdir()
    logs.mkdir()
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLIPWAY_", "DJANGO_")) and name != "REDIS_URL"
    } | {
        "SLIPWAY_DATA_DIR": str(data),
        "SLIPWAY_DEMO_SECONDS": str(DEMO_SECONDS),
        "DATABASE_URL": postgres.url,
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
    }
    chosen = broker.choose(data, environment)
    environment["REDIS_URL"] = chosen.url
    redis = subprocess.Popen(chosen.command, start_new_session=True) if chosen.command else None
    if chosen.socket:
        broker.wait_until_up(chosen.socket)
    made = (Release(earlier, environment, logs), Release(ROOT, environment, logs))
    try:
        yield made
    finally:
        made[0].run("-m", "runners", "stop-all", "--dir", str(tmp_path / "host"))
        for each in made:
            for name in list(each.processes):
                each.stop(name)
        if redis is not None:
            redis.terminate()
            redis.wait(30)


def test_no_request_and_no_event_is_lost_while_a_site_is_upgraded(releases, tmp_path):
    old, new = releases
    ports, host_dir = (free_port(), free_port()), tmp_path / "host"
    token = old.run("manage.py", "shell", "-c", f"{PREPARE}{MAKE_PEOPLE}{MAKE_TOKEN}").split()[-1]
    old.start_web(ports[0])
    with Switch(ports[0]) as switch:
        old.start("control", "manage.py", "control")
        old.start("ticker", "manage.py", "ticker")
        enrol = "import sys; from pathlib import Path; from runners.host.enrolment import enroll; "
        enrol += "from runners.shared.config import HostDir; "
        enrol += "enroll(HostDir(Path(sys.argv[1])), sys.argv[2], sys.argv[3])"
        old.run("-c", enrol, str(host_dir), f"http://127.0.0.1:{switch.port}", token)
        old.start("host", "-m", "runners", "work", "--dir", str(host_dir))
        client = ApiClient(switch.port, "alice")
        wait_for(lambda: "Ready" in client.get("/hosts/this-machine/"), "a ready host")
        job = client.launch_demo()
        client.wait_for_state(job, "running")
        wait_for(lambda: any(each["kind"] == "metric" for each in client.events(job)), "metrics")
        load = Load(client, [f"/jobs/{job}/", f"/api/v1/jobs/{job}", "/api/v1/hosts", "/jobs/"])
        load.start()
        new.run("manage.py", "shell", "-c", PREPARE)  # the old ones go on
        new.start_web(ports[1])
        switch.targets = ports
        time.sleep(BESIDE_SECONDS)
        during = client.state_of(job)
        switch.targets = ports[1:]
        for name in ("web", "control", "ticker"):
            old.stop(name)
        new.start("control", "manage.py", "control")
        new.start("ticker", "manage.py", "ticker")
        ended = client.wait_for_state(job, "succeeded")
        load.is_over.set()
        load.join(600)
        events = client.events(job)
    assert (during, ended) == ("running", "succeeded")
    assert list(old.processes) == ["host"]  # the old agent served both
    assert [each["seq"] for each in events] == list(range(1, len(events) + 1))
    assert events[-1]["kind"] == "exited"
    steps = [
        each["body"]["step"]
        for each in events
        if each["kind"] == "metric" and "loss" in each["body"]["values"]
    ]
    assert steps == sorted(set(steps))
    assert min(switch.taken.values()) > PER_SECOND, switch.taken
    assert load.failed == []
    log.info(
        "%d requests answered, %d tried again, none failed; %d events, %d steps; by port %s",
        *(load.answered, load.retries, len(events), len(steps), switch.taken),
    )

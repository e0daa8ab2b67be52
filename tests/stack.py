"""The real product in a folder of its own: what ``manage.py up`` starts, one process at a time.

Tests and the screenshot script drive it from outside; a test of faults may kill any part by
name and start it again. Nothing here stands in for anything: Redis, the web process, the control
worker, the ticker and the host's agent are the ones that a user runs.
"""

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Callable
from functools import cached_property
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any, TypeVar

from runners.host.enrolment import enroll
from runners.shared.config import HostDir
from tests.plugins.databases import FILES, migrated_folder
from webapp.boot import broker
from webapp.boot.front import GATEWAY, WEB, Front

ROOT = Path(__file__).resolve().parents[1]
PASSWORD = "a-long-test-password"
HOST_SLUG = "this-machine"
PARTS = ("redis", "web", "gateway", "control", "ticker", "host")
FINAL = {"succeeded", "failed", "error", "stopped", "expired"}
GRACE_S = 12.0
CSRF_FIELD = re.compile(r'name="csrfmiddlewaretoken" value="([^"]+)"')
SLOW_S = 600.0  # a loaded machine of two cores; only what never comes takes it all
LONGEST_PAUSE_S = 0.5
Found = TypeVar("Found")

PREPARE = """
from django.core.management import call_command
call_command("prepare")
"""
MAKE_PEOPLE = f"""
from django.contrib.auth.models import User
from webapp.accounts.models import Membership, Team
team = Team.objects.order_by("created_at").first()
for name, role in (("alice", "practitioner"), ("olga", "operator"), ("vera", "viewer")):
    user, _ = User.objects.get_or_create(username=name)
    user.set_password({PASSWORD!r})
    user.save()
    Membership.objects.get_or_create(user=user, team=team, defaults={{"role": role}})
"""


MAKE_TOKEN = """
from webapp.hosts.services import token_create
print(token_create(team=team, by=None, name="This machine", pool="default")[1])
"""


def of_run(name: str) -> Path:
    """Return a path in the run's temporary folder, the same for all its processes."""
    return Path(tempfile.gettempdir()) / name


def copy_migrated(folder: Path) -> None:
    """Let a product begin with databases that this run has migrated once."""
    folder.mkdir(parents=True, exist_ok=True)
    with migrated_folder() as made:
        for name in FILES.values():
            shutil.copyfile(made / name, folder / name)


class StackError(Exception):
    """A part did not come up, with the last lines of its log."""


def free_port() -> int:
    """Return a port that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(
    ask: Callable[[], Found | None], what: str, timeout_s: float = SLOW_S, every_s: float = 0.2
) -> Found:
    """Ask until the answer is true, and return it.

    What is long in coming is asked for less often: to ask may take more of a core than to do.

    Raises:
        StackError: it never became true.
    """
    started = time.monotonic()
    while (waited := time.monotonic() - started) < timeout_s:
        if found := ask():
            return found
        time.sleep(max(every_s, min(waited / 20, LONGEST_PAUSE_S)))
    raise StackError(f"waited {timeout_s:.0f} s in vain for {what}")


class Stack:
    """One Slipway on a free port; use it as a context manager."""

    bound = "127.0.0.1"

    def __init__(self, folder: Path, *, demo_seconds: float = 20.0, **environment: str) -> None:
        """Name its parts; nothing starts before ``start``."""
        self.folder = folder
        self.port = free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self.host_dir = folder / "host"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.logs = folder / "logs"
        self.environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLIPWAY_", "DJANGO_")) and name not in {"REDIS_URL", "DATABASE_URL"}
        } | {
            "SLIPWAY_DATA_DIR": str(folder),
            "SLIPWAY_DEMO_SECONDS": str(demo_seconds),
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            **environment,
        }  # fmt: skip

    def __enter__(self) -> "Stack":
        """Start everything."""
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Leave no process behind."""
        self.stop()

    def start(self) -> None:
        """Bring every part up, enrol this machine, and return once it takes jobs."""
        self.logs.mkdir(parents=True, exist_ok=True)
        chosen = broker.choose(self.folder, self.environment)
        self.environment["REDIS_URL"] = chosen.url
        self.redis = chosen
        if chosen.command:
            self.restart("redis")
        copy_migrated(self.folder)
        is_new = not (self.host_dir / "credential.json").exists()
        make_token = MAKE_TOKEN if is_new else ""
        said = self.run("manage.py", "shell", "-c", f"{PREPARE}{MAKE_PEOPLE}{make_token}")
        for name in (WEB, GATEWAY, "control", "ticker"):
            self.restart(name)
        if is_new:
            enroll(HostDir(self.host_dir), self.base_url, said.split()[-1])
            self.take_measurement()
        self.restart("host")
        alice = self.client("alice")
        wait_for(lambda: "Ready" in alice.get(f"/hosts/{HOST_SLUG}/"), "a ready host", every_s=1.0)
        self._keep_measurement()

    def take_measurement(self) -> None:
        """Spare new hosts their micro-benchmark where a product of the run has made it."""
        kept = of_run("measured.json")
        if kept.exists():
            with contextlib.closing(self._database()) as rows, rows:
                rows.execute(
                    "update hosts_host set microbench = ? where microbench = '{}'",
                    [kept.read_text()],
                )

    def _keep_measurement(self) -> None:
        kept = of_run("measured.json")
        if not kept.exists():
            with contextlib.closing(self._database()) as rows:
                (found,) = rows.execute("select microbench from hosts_host").fetchone()
            unfinished = kept.with_suffix(f".{os.getpid()}")
            unfinished.write_text(found)
            unfinished.rename(kept)

    def _database(self) -> sqlite3.Connection:
        return sqlite3.connect(self.folder / "slipway.sqlite3", timeout=60)

    def stop(self) -> None:
        """Stop running attempts, then every part, Redis last."""
        if any(self.host_dir.glob("attempts/*")):
            self.run("-m", "runners", "stop-all", "--dir", str(self.host_dir), must_work=False)
        for name in reversed(PARTS):
            self._end(name)
        if "front" in self.__dict__:
            self.front.close()

    @cached_property
    def front(self) -> Front:
        """The address, at which web process and gateway answer."""
        return Front(self.bound, self.port)

    def command_of(self, name: str) -> list[str]:
        """Return the command line of a part, the same as ``manage.py up`` uses."""
        python = sys.executable
        if name in {WEB, GATEWAY}:
            return self.front.command(name)
        return {
            "redis": self.redis.command or [],
            "control": [python, "manage.py", "control"],
            "ticker": [python, "manage.py", "ticker"],
            "host": [python, "-m", "runners", "work", "--dir", str(self.host_dir)],
        }[name]  # fmt: skip

    def restart(self, name: str) -> None:
        """Start a part that does not run, and wait until it answers."""
        self._end(name)
        with (self.logs / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                self.command_of(name), cwd=ROOT, env=self.environment,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                pass_fds=self.front.descriptors(name) if name in {WEB, GATEWAY} else (),
            )  # fmt: skip
        if name == "redis" and self.redis.socket:
            broker.wait_until_up(self.redis.socket)
        if name == "web":
            wait_for(lambda: self._is_up(name), f"the web process\n{self.tail(name)}")

    def kill(self, name: str) -> None:
        """End a part as a crash would: no warning, no last word; what it started lives on."""
        process = self.processes[name]
        os.kill(process.pid, signal.SIGKILL)
        process.wait()

    def tail(self, name: str, num_lines: int = 15) -> str:
        """Return the last lines that a part wrote."""
        text = (self.logs / f"{name}.log").read_text("utf-8", errors="replace")
        return "\n".join(text.splitlines()[-num_lines:])

    def run(self, *arguments: str, must_work: bool = True) -> str:
        """Run a Python program of the product to its end and return what it printed."""
        done = subprocess.run(
            [sys.executable, *arguments], cwd=ROOT, env=self.environment,
            capture_output=True, text=True, check=False, timeout=600,
        )  # fmt: skip
        if must_work and done.returncode:
            raise StackError(
                f"{' '.join(arguments[:3])}: {done.stderr[-1500:]}{done.stdout[-500:]}"
            )
        return done.stdout

    def client(self, name: str = "alice") -> "ApiClient":
        """Return a logged-in client without a browser."""
        return ApiClient(self.port, name)

    def _is_up(self, name: str) -> bool:
        if self.processes[name].poll() is not None:
            raise StackError(f"{name} ended at once:\n{self.tail(name)}")
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/healthz")
            return connection.getresponse().status == http.client.OK
        except OSError:
            return False
        finally:
            connection.close()

    def _end(self, name: str) -> None:
        process = self.processes.pop(name, None)
        if process is None:
            return
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class ApiClient:
    """What a script does with the product: log in, read pages and JSON, press buttons."""

    def __init__(self, port: int, name: str, password: str = PASSWORD) -> None:
        """Log in as ``name``."""
        self.port = port
        self.cookies: dict[str, str] = {}
        self.csrf_token = ""  # of the last page with a form
        self.get("/login/")
        status, _ = self.post("/login/", {"username": name, "password": password})
        if status not in {302, 303}:
            raise StackError(f"{name} could not log in: status {status}")
        self.get("/settings/sessions/")  # logging in made a new token

    def choose_password(self, initial: str, own: str = PASSWORD) -> None:
        """Replace an initial password, which opens nothing else, as a person does."""
        self.get("/settings/password/")
        fields = {"old_password": initial, "new_password1": own, "new_password2": own}
        status, where = self.post("/settings/password/", fields)
        if (status, where) != (302, "/"):
            raise StackError(f"the initial password was not replaced: status {status}")
        self.get("/settings/sessions/")  # the new session has a new token

    def request(
        self, method: str, path: str, body: str = "", **headers: str
    ) -> tuple[int, http.client.HTTPMessage, str]:
        """Return status, headers and body of one exchange; cookies are kept."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        sent["Cookie"] = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        try:
            connection.request(method, path, body or None, sent)
            answer = connection.getresponse()
            for header in answer.msg.get_all("Set-Cookie") or []:
                for key, morsel in SimpleCookie(header).items():
                    self.cookies[key] = morsel.value
            text = answer.read().decode("utf-8", "replace")
            if found := CSRF_FIELD.search(text):
                self.csrf_token = found[1]
            return answer.status, answer.headers, text
        finally:
            connection.close()

    def get(self, path: str) -> str:
        """Return the body of a page, following at most one redirect."""
        status, headers, text = self.request("GET", path)
        if status in {301, 302, 303}:
            _, _, text = self.request("GET", urllib.parse.urlsplit(headers["Location"]).path)
        return text

    def json(self, path: str) -> Any:
        """Return what an address of the API answers."""
        return json.loads(self.get(path))

    def post(self, path: str, fields: dict[str, str]) -> tuple[int, str]:
        """Send a form as a browser would; return the status and where it leads."""
        form = {**fields, "csrfmiddlewaretoken": self.csrf_token}
        status, headers, _ = self.request(
            "POST", path, urllib.parse.urlencode(form),
            Content_Type="application/x-www-form-urlencoded",
            Referer=f"http://127.0.0.1:{self.port}/",
        )  # fmt: skip
        return status, headers.get("Location", "")

    def launch_demo(self) -> str:
        """Launch the demo with the wizard's defaults and return the id of its job."""
        status, headers, text = self.request("GET", "/plans/new/?preset=demo")
        plan_id = re.search(r"/plans/([0-9A-Za-z]+)/", headers.get("Location", ""))
        if plan_id is None:
            raise StackError(f"the demo preset made no plan: status {status}, {text[-800:]}")
        _, where = self.post(f"/plans/{plan_id[1]}/launch/", {"run": "job"})
        job_id = re.search(r"/jobs/([0-9A-Za-z]+)/", where)
        if job_id is None:
            raise StackError(f"the launch led to {where!r}: {self.get(where)[-3000:]}")
        return job_id[1]

    def state_of(self, job_id: str) -> str:
        """Return the state that the job's page shows."""
        found = re.search(r'data-state-now="([a-z]+)"', self.get(f"/jobs/{job_id}/"))
        return found[1] if found else ""

    def wait_for_state(self, job_id: str, *states: str, timeout_s: float = 600.0) -> str:
        """Wait until the job is in one of ``states`` (default: any final one)."""
        wanted = set(states) or FINAL

        def ask() -> str | None:
            state = self.state_of(job_id)
            if state in FINAL - wanted:
                raise StackError(
                    f"the job ended as {state}: {self.get(f'/jobs/{job_id}/')[-3000:]}"
                )
            return state if state in wanted else None

        return wait_for(ask, f"{' or '.join(sorted(wanted))} of job {job_id}", timeout_s)

    def events(self, job_id: str) -> list[dict[str, Any]]:
        """Return every stored event of the job's current attempt."""
        found: list[dict[str, Any]] = []
        while True:
            last = found[-1]["seq"] if found else 0
            more = self.json(f"/api/v1/jobs/{job_id}/events?after={last}")["events"]
            if not more:
                return found
            found += more

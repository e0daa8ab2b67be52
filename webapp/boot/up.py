"""``manage.py up``: from a fresh machine to a page that answers, and back to nothing.

The order is environment, data folder, lock, port, Redis, database, web, workers, this machine
as the first host. Ctrl-C (or TERM) stops all of it in the opposite order.
"""

import argparse
import hashlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from runners.redis_address import bare
from webapp.boot import broker, environment, preflight, processes, say

ROOT = Path(__file__).resolve().parents[2]
ANSWER_WAIT_S = 60.0
ROUND_S = 0.2
HOST_NAME = "This machine"


def main(arguments: list[str]) -> int:
    """Start everything, keep it alive, and return 0 after an orderly stop."""
    options = _parse(arguments)
    data = Path(os.environ.get("SLIPWAY_DATA_DIR") or ROOT / "var").resolve()
    preflight.check_public_url(os.environ.get("SLIPWAY_PUBLIC_URL", ""))
    preflight.check_port(options.host, options.port, running=preflight.running_elsewhere(data))
    environment.ensure(["up", *arguments], with_tests=False)
    say.line("Starting Slipway")
    preflight.make_data_folder(data)
    with (data / "up.lock").open("a+") as lock:
        preflight.take_lock(lock, data, preflight.address(options.host, options.port))
        return Site(options.host, options.port, data).live()


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="manage.py up",
        description="Make the environment if needed, start every part of Slipway, "
        "and stop it all on Ctrl-C.",
        epilog="Honours SLIPWAY_DATA_DIR (default ./var), DATABASE_URL and REDIS_URL.",
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to bind (default %(default)s)"
    )
    parser.add_argument("--port", type=int, default=8000, help="port (default %(default)s)")
    return parser.parse_args(arguments)


class Stopped(BaseException):
    """A person or the system asked ``up`` to stop."""


class Site:
    """One running Slipway: its broker, its web process, its workers and its first host."""

    def __init__(self, host: str, port: int, data: Path) -> None:
        """Name the parts; nothing starts before ``live``."""
        self.host, self.port, self.data = host, port, data
        self.url = preflight.address(host, port)
        self.environment = os.environ | {
            "SLIPWAY_DATA_DIR": str(data),
            "SLIPWAY_ALLOWED_HOSTS": ",".join(preflight.allowed_hosts(host, os.environ)),
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
        }
        self.crew = processes.Crew(data, self.environment)
        self.account = ""  # of the admin, between its making and its telling
        self.num_signals = 0
        self.holds_signals = False

    def live(self) -> int:
        """Start, tend until a signal comes, stop; nothing is left behind either way."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        try:
            self.start()
            while True:
                with self._signals_held():
                    events = self.crew.tend()
                for event in events:
                    say.line(f"  ! {event}")
                time.sleep(ROUND_S)
        except Stopped:
            return 0
        finally:
            self.stop()

    def start(self) -> None:
        """Bring the parts up in the order in which they need each other."""
        if num_ended := processes.end_leftovers(self.data / "processes.json"):
            say.line(f"  ✓ Ended {num_ended} processes that an interrupted start had left")
        self._start_broker()
        python = sys.executable
        web = processes.Child("web", self._web_command())
        state, stamp = schema_state(self.environment), self.data / "prepared"
        if stamp.exists() and stamp.read_text("utf-8") == state:
            self._start(web)  # no migration is due: the two may load side by side
        with say.step("Bringing the database up to date"):
            self.account = ", ".join(self._manage("prepare").strip().splitlines())
            stamp.write_text(state, "utf-8")
        if web.process is None:
            self._start(web)
        with say.step("Starting the web process"):
            self._wait_for_web(web)
        self._start(processes.Child("control", [python, "manage.py", "control"]))
        self._start(processes.Child("ticker", [python, "manage.py", "ticker"]))
        self._start_host()
        say.line()
        say.line(f"  Slipway is ready: {self.url}")
        self._tell_account()
        say.line(f"  Ctrl-C stops everything. Data and logs are in {self.data}")

    def stop(self) -> None:
        """Stop running jobs, then every part, the broker last; a second Ctrl-C hurries."""
        self.holds_signals = True
        self._tell_account()
        if not self.crew.children:
            return
        say.line("\n  Stopping (Ctrl-C again to hurry)")
        if (self.data / "host").exists():
            self._run("-m", "runners", "stop-all", "--dir", str(self.data / "host"))
        self.crew.stop(hurry=lambda: self.num_signals > 1)
        say.line("  Stopped; nothing is left running.")

    def _tell_account(self) -> None:
        """Say the new account once, also when the start fails after it was made."""
        if self.account:
            say.line(f"  Sign in with {self.account} (the password is shown only now)")
        self.account = ""

    def _start_broker(self) -> None:
        with say.step("Starting Redis"):
            chosen = broker.choose(self.data, self.environment)
            self.environment["REDIS_URL"] = chosen.url
            if chosen.command and chosen.socket:
                child = processes.Child("redis", chosen.command, stage=0)
                self._start(child)
                if not broker.wait_until_up(chosen.socket):
                    raise say.Problem("Redis did not start.", self.crew.tail(child))
        say.line(f"    {chosen.words}")

    def _web_command(self) -> list[str]:
        command = [sys.executable, "-m", "uvicorn", "webapp.asgi:application", "--no-access-log"]
        command += ["--host", self.host, "--port", str(self.port)]
        return [*command, "--timeout-graceful-shutdown", "5"]

    def _wait_for_web(self, web: processes.Child) -> None:
        """Return when the site answers; raise its last words when it cannot."""
        deadline = time.monotonic() + ANSWER_WAIT_S
        while (status := self.health()) != http.client.OK:
            fault = None
            if status == http.client.INTERNAL_SERVER_ERROR:
                fault = "answers with an error"
            elif web.process is None or web.process.poll() is not None:
                fault = "did not start"
            elif time.monotonic() > deadline:
                fault = "does not answer"
            if fault:
                raise say.Problem(f"The web process {fault}.", self.crew.tail(web))
            time.sleep(0.05)

    def health(self) -> int | None:
        """Return the status with which the site's health page answers; None without an answer."""
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=5)
        try:
            connection.request("GET", "/healthz")
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def _start_host(self) -> None:
        """Enrol this machine like any other host if it is not yet one, and start its worker."""
        folder = self.data / "host"
        if not (folder / "credential.json").exists():
            with say.step("Enrolling this machine as a host (measures its speed)"):
                token = self._manage("enrol_token", "--name", HOST_NAME).strip()
                options = {"--server": self.url, "--token": token, "--name": HOST_NAME}
                words = [word for pair in options.items() for word in pair]
                self._checked("-m", "runners", "enroll", "--dir", str(folder), *words)
        readdress(folder / "credential.json", self.url, self.environment["REDIS_URL"])
        if lacks_redis_user(folder / "credential.json"):
            self._run("-m", "runners", "rotate", "--dir", str(folder))
        command = [sys.executable, "-m", "runners", "work", "--dir", str(folder)]
        self._start(processes.Child("host", command, stage=2))

    def _manage(self, *arguments: str) -> str:
        return self._checked("manage.py", *arguments)

    def _checked(self, *arguments: str) -> str:
        """Run a Python program to its end; return its output or raise its last words."""
        done = self._run(*arguments)
        if done.returncode != 0:
            words = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
            log = self.crew.logs / "set-up.log"
            log.write_text(done.stdout + done.stderr, "utf-8")
            name = " ".join(arguments[:2]) if arguments[0] != "-m" else " ".join(arguments[1:3])
            raise say.Problem(f"`{name}` failed: {words[-1]}", f"All its words: {log}")
        return done.stdout

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        return subprocess.run(
            command,
            env=self.environment,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
            check=False,
            start_new_session=True,
        )

    def _start(self, child: processes.Child) -> None:
        with self._signals_held():
            self.crew.start(child)

    @contextmanager
    def _signals_held(self) -> Iterator[None]:
        """Let no signal fall between the start of a child and the note that it exists."""
        self.holds_signals = True
        yield
        self.holds_signals = False
        if self.num_signals:
            raise Stopped

    def _on_signal(self, _number: int, _frame: object) -> None:
        self.num_signals += 1
        if not self.holds_signals:
            self.holds_signals = True
            raise Stopped


def readdress(credential: Path, url: str, redis_url: str) -> None:
    """Tell this machine's host where the site is now: its port or broker may have changed."""
    told = json.loads(credential.read_text("utf-8"))
    fresh = told | {"server": url}
    if told.get("redis_url") is not None:
        fresh["redis_url"] = bare(redis_url)
    if fresh != told:
        new = credential.with_suffix(".new")
        new.touch(mode=0o600)
        new.write_text(json.dumps(fresh, indent=2), "utf-8")
        new.replace(credential)


def lacks_redis_user(credential: Path) -> bool:
    """Return whether this machine's host comes from a version whose Redis was open to all."""
    told = json.loads(credential.read_text("utf-8"))
    return told.get("redis_url") is not None and told.get("redis_secret") is None


def schema_state(variables: Mapping[str, str]) -> str:
    """Return a digest of the database's address and of every migration of this version."""
    content = hashlib.sha256(variables.get("DATABASE_URL", "").encode())
    for path in sorted((ROOT / "webapp").glob("*/migrations/*.py")):
        content.update(path.name.encode() + path.read_bytes())
    return content.hexdigest()

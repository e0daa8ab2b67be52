"""``manage.py up``: start the whole site on a fresh machine, and stop it again.

The order is environment, data folder, lock, port, Redis, database, web, workers, and this machine
as the first host. Ctrl-C (or SIGTERM) stops everything in reverse order.
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
from webapp.boot import broker, console, environment, preflight, processes, stopping

ROOT = Path(__file__).resolve().parents[2]
ANSWER_WAIT_S = 60.0
ROUND_S = 0.2
HOST_NAME = "This machine"


def main(arguments: list[str]) -> int:
    """Start everything, supervise it, and return 0 after an orderly stop."""
    options = _parse(arguments)
    data = Path(os.environ.get("SLIPWAY_DATA_DIR") or ROOT / "var").resolve()
    preflight.check_public_url(os.environ.get("SLIPWAY_PUBLIC_URL", ""))
    preflight.check_port(options.host, options.port, running=preflight.running_elsewhere(data))
    environment.ensure(["up", *arguments], with_tests=False)
    console.line("Starting Slipway")
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
    """A signal requested the stop of ``up``."""


class Site:
    """One running site: broker, web process, workers and first host."""

    def __init__(self, host: str, port: int, data: Path) -> None:
        """Set up the state; ``live`` starts the parts."""
        self.host, self.port, self.data = host, port, data
        self.url = preflight.address(host, port)
        self.environment = os.environ | {
            "SLIPWAY_DATA_DIR": str(data),
            "SLIPWAY_ALLOWED_HOSTS": ",".join(preflight.allowed_hosts(host, os.environ)),
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
        }
        self.crew = processes.Crew(data, self.environment)
        self.account = ""  # the new admin's user and password, until printed
        self.num_signals = 0
        self.holds_signals = False

    def live(self) -> int:
        """Start all parts, supervise them until a signal, and stop them in any case."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        is_requested = False
        try:
            self.start()
            while True:
                with self._signals_held():
                    events = self.crew.tend()
                for event in events:
                    console.line(f"  ! {event}")
                time.sleep(ROUND_S)
        except Stopped:
            is_requested = True
            return 0
        finally:
            self.stop(ends_jobs=is_requested)

    def start(self) -> None:
        """Start the parts in the order of their dependencies."""
        if num_ended := processes.end_leftovers(self.data / "processes.json"):
            console.line(f"  ✓ Ended {num_ended} processes that an interrupted start had left")
        self._start_broker()
        python = sys.executable
        web = processes.Child("web", self._web_command())
        state, stamp = schema_state(self.environment), self.data / "prepared"
        if stamp.exists() and stamp.read_text("utf-8") == state:
            self._start(web)  # no migration is due, so both may load in parallel
        with console.step("Bringing the database up to date"):
            self.account = ", ".join(self._manage("prepare").strip().splitlines())
            stamp.write_text(state, "utf-8")
        if web.process is None:
            self._start(web)
        with console.step("Starting the web process"):
            self._wait_for_web(web)
        self._start(processes.Child("control", [python, "manage.py", "control"]))
        self._start(processes.Child("ticker", [python, "manage.py", "ticker"]))
        self._start_host()
        console.line()
        console.line(f"  Slipway is ready: {self.url}")
        self._print_account()
        console.line(f"  Ctrl-C stops everything. Data and logs are in {self.data}")

    def stop(self, *, ends_jobs: bool) -> None:
        """Stop every part, the broker last; a second Ctrl-C skips the waiting.

        This machine's jobs are ended on a requested stop, not after a failed start.
        """
        self.holds_signals = True
        self._print_account()
        if not self.crew.children:
            return
        console.line("\n  Stopping (Ctrl-C again to hurry)")
        host, hurries = self.data / "host", lambda: self.num_signals > 1
        stopping.Stopping(self.crew, host, self.environment, hurries).stop(ends_jobs=ends_jobs)

    def _print_account(self) -> None:
        """Print the new account once, also if the start fails after its creation."""
        if self.account:
            console.line(f"  Sign in with {self.account} (the password is shown only now)")
        self.account = ""

    def _start_broker(self) -> None:
        with console.step("Starting Redis"):
            chosen = broker.choose(self.data, self.environment)
            self.environment["REDIS_URL"] = chosen.url
            if chosen.command and chosen.socket:
                child = processes.Child("redis", chosen.command, stage=0, prepare=chosen.prepare)
                self._start(child)
                if not broker.wait_until_up(chosen.socket):
                    raise console.Problem("Redis did not start.", self.crew.tail(child))
        console.line(f"    {chosen.words}")

    def _web_command(self) -> list[str]:
        command = [sys.executable, "-m", "uvicorn", "webapp.asgi:application", "--no-access-log"]
        command += ["--host", self.host, "--port", str(self.port)]
        command += [] if is_behind_proxy(self.environment) else ["--no-proxy-headers"]
        return [*command, "--timeout-graceful-shutdown", "5"]

    def _wait_for_web(self, web: processes.Child) -> None:
        """Wait until the site answers; raise a problem with the end of its log if it fails."""
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
                raise console.Problem(f"The web process {fault}.", self.crew.tail(web))
            time.sleep(0.05)

    def health(self) -> int | None:
        """Return the HTTP status of the site's health page, or None without a response."""
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=5)
        try:
            connection.request("GET", "/healthz")
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def _start_host(self) -> None:
        """Enrol this machine as a host if it is not one yet, and start its agent."""
        folder = self.data / "host"
        if not (folder / "credential.json").exists():
            with console.step("Enrolling this machine as a host (measures its speed)"):
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
        """Run a Python program; return its output, or raise a problem with its last line."""
        done = self._run(*arguments)
        if done.returncode != 0:
            words = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
            log = self.crew.logs / "set-up.log"
            log.write_text(done.stdout + done.stderr, "utf-8")
            name = " ".join(arguments[:2]) if arguments[0] != "-m" else " ".join(arguments[1:3])
            raise console.Problem(f"`{name}` failed: {words[-1]}", f"All its words: {log}")
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
        """Defer signals, so that none arrives between a child's start and its registration."""
        self.holds_signals = True
        try:
            yield
        finally:
            self.holds_signals = False
        if self.num_signals:
            raise Stopped

    def _on_signal(self, _number: int, _frame: object) -> None:
        self.num_signals += 1
        if not self.holds_signals:
            self.holds_signals = True
            raise Stopped


def is_behind_proxy(variables: Mapping[str, str]) -> bool:
    """Return whether to trust a proxy's ``X-Forwarded-For`` header.

    Without a proxy, any program on this machine could send another address with every password
    attempt. A site with a public URL has a proxy on this machine, because it has no TLS itself.
    """
    return bool(variables.get("SLIPWAY_PUBLIC_URL") or variables.get("FORWARDED_ALLOW_IPS"))


def readdress(credential: Path, url: str, redis_url: str) -> None:
    """Update the site's URL and Redis URL in this machine's host credential."""
    stored = json.loads(credential.read_text("utf-8"))
    fresh = stored | {"server": url}
    if stored.get("redis_url") is not None:
        fresh["redis_url"] = bare(redis_url)
    if fresh != stored:
        new = credential.with_suffix(".new")
        new.touch(mode=0o600)
        new.write_text(json.dumps(fresh, indent=2), "utf-8")
        new.replace(credential)


def lacks_redis_user(credential: Path) -> bool:
    """Return whether this machine's host was enrolled before hosts had Redis users."""
    stored = json.loads(credential.read_text("utf-8"))
    return stored.get("redis_url") is not None and stored.get("redis_secret") is None


def schema_state(variables: Mapping[str, str]) -> str:
    """Return a digest of the database URL and of every migration of this version."""
    content = hashlib.sha256(variables.get("DATABASE_URL", "").encode())
    for path in sorted((ROOT / "webapp").glob("*/migrations/*.py")):
        content.update(path.name.encode() + path.read_bytes())
    return content.hexdigest()

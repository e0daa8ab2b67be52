"""``manage.py up``: from a fresh machine to a page that answers, and back to nothing.

The order is environment, data folder, lock, port, Redis, database, web, workers, this machine
as the first host. Ctrl-C (or TERM) stops all of it in the opposite order.
"""

import argparse
import fcntl
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from webapp.boot import broker, environment, processes, say

ROOT = Path(__file__).resolve().parents[2]
NEEDED_BYTES = 500_000_000  # databases, logs and the first artefacts
ANSWER_WAIT_S = 60.0
ROUND_S = 0.2
HOST_NAME = "This machine"


def main(arguments: list[str]) -> int:
    """Start everything, keep it alive, and return 0 after an orderly stop."""
    options = _parse(arguments)
    data = Path(os.environ.get("SLIPWAY_DATA_DIR") or ROOT / "var").resolve()
    say.line("Slipway")
    check_port(options.host, options.port, running=running_elsewhere(data))
    environment.ensure(["up", *arguments], with_tests=False)
    make_data_folder(data)
    with (data / "up.lock").open("a+") as lock:
        take_lock(lock, data, address(options.host, options.port))
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


def address(host: str, port: int) -> str:
    """Return the URL under which a browser on this machine finds the site."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 -- compared only
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


def running_elsewhere(data: Path) -> str | None:
    """Return what the running ``up`` of this data folder says about itself, if there is one."""
    try:
        with (data / "up.lock").open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _who(data)
    except OSError:
        return None
    return None


def check_port(host: str, port: int, *, running: str | None) -> None:
    """Raise a sentence if Slipway already runs here or another program has the port."""
    if running:
        raise say.Problem(running, "Stop it with Ctrl-C there, or set another SLIPWAY_DATA_DIR.")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise say.Problem(
                f"Port {port} on {host} cannot be used: {error.strerror or error}.",
                f"Try `python3 manage.py up --port {port + 1}`, or stop the program that has it.",
            ) from error


def make_data_folder(data: Path) -> None:
    """Create the data folder for its owner only, and refuse a disk that is nearly full."""
    try:
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
        (data / "up.lock").touch(mode=0o600)
    except OSError as error:
        raise say.Problem(
            f"The data folder {data} cannot be written: {error.strerror}.",
            "Correct its owner, or set SLIPWAY_DATA_DIR to another folder.",
        ) from error
    free = shutil.disk_usage(data).free
    if free < NEEDED_BYTES:
        raise say.Problem(
            f"The data folder {data} has {free / 1e6:.0f} MB free; "
            f"Slipway needs at least {NEEDED_BYTES / 1e6:.0f} MB.",
            "Free some space, or set SLIPWAY_DATA_DIR to a folder on a larger disk.",
        )


def take_lock(lock: IO[str], data: Path, url: str) -> None:
    """Claim the data folder for this process until it ends, however it ends."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise say.Problem(
            _who(data), "Stop it with Ctrl-C there, or set another SLIPWAY_DATA_DIR."
        ) from error
    lock.truncate(0)
    json.dump({"pid": os.getpid(), "url": url}, lock)
    lock.flush()


def _who(data: Path) -> str:
    try:
        told = json.loads((data / "up.lock").read_text("utf-8"))
    except (OSError, ValueError):
        told = {"pid": "?", "url": "an address not yet known"}
    return f"Slipway already runs at {told['url']} (process {told['pid']}, data in {data})."


class Stopped(BaseException):
    """A person or the system asked ``up`` to stop."""


class Site:
    """One running Slipway: its broker, its web process, its workers and its first host."""

    def __init__(self, host: str, port: int, data: Path) -> None:
        """Name the parts; nothing starts before ``live``."""
        self.host, self.port, self.data = host, port, data
        self.url = address(host, port)
        self.environment = os.environ | {
            "SLIPWAY_DATA_DIR": str(data),
            "SLIPWAY_ALLOWED_HOSTS": ",".join(allowed_hosts(host, os.environ)),
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
        }
        self.crew = processes.Crew(data, self.environment)
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
        with say.step("Bringing the database up to date"):
            told = self._manage("prepare")
        self._start_web()
        python = sys.executable
        self._start(processes.Child("control", [python, "manage.py", "control"]))
        self._start(processes.Child("ticker", [python, "manage.py", "ticker"]))
        self._start_host()
        say.line()
        say.line(f"  Slipway is ready: {self.url}")
        for words in filter(None, told.splitlines()):
            say.line(f"  {words}")
        say.line(f"  Ctrl-C stops everything. Data and logs are in {self.data}")

    def stop(self) -> None:
        """Stop running jobs, then every part, the broker last; a second Ctrl-C hurries."""
        self.holds_signals = True
        if not self.crew.children:
            return
        say.line("\n  Stopping (Ctrl-C again to hurry)")
        if (self.data / "host").exists():
            self._run("-m", "runners", "stop-all", "--dir", str(self.data / "host"))
        self.crew.stop(hurry=lambda: self.num_signals > 1)
        say.line("  Stopped; nothing is left running.")

    def _start_broker(self) -> None:
        with say.step("Starting Redis"):
            chosen = broker.choose(self.data, self.environment)
            self.environment["REDIS_URL"] = chosen.url
            if chosen.command and chosen.socket:
                child = processes.Child("redis", chosen.command)
                self._start(child)
                if not broker.wait_until_up(chosen.socket):
                    raise say.Problem("Redis did not start.", self.crew.tail(child))
        say.line(f"    {chosen.words}")

    def _start_web(self) -> None:
        command = [sys.executable, "-m", "uvicorn", "webapp.asgi:application", "--no-access-log"]
        command += ["--host", self.host, "--port", str(self.port)]
        web = processes.Child("web", [*command, "--timeout-graceful-shutdown", "5"])
        with say.step("Starting the web process"):
            self._start(web)
            deadline = time.monotonic() + ANSWER_WAIT_S
            while not self._answers():
                if web.process is None or web.process.poll() is not None:
                    raise say.Problem("The web process did not start.", self.crew.tail(web))
                if time.monotonic() > deadline:
                    raise say.Problem("The web process does not answer.", self.crew.tail(web))
                time.sleep(0.05)

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=5)
        try:
            connection.request("GET", "/healthz")
            return connection.getresponse().status == http.client.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _start_host(self) -> None:
        """Enrol this machine like any other host if it is not yet one, and start its worker."""
        folder = self.data / "host"
        if not (folder / "credential.json").exists():
            with say.step("Enrolling this machine as a host (measures its speed)"):
                token = self._manage("enrol_token", "--name", HOST_NAME).strip()
                self._checked("-m", "runners", "enroll", "--server", self.url, "--token", token,
                              "--dir", str(folder))  # fmt: skip
        command = [sys.executable, "-m", "runners", "work", "--dir", str(folder)]
        self._start(processes.Child("host", command))

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


def allowed_hosts(host: str, variables: "os._Environ[str]") -> list[str]:
    """Return the names under which the site may be asked for, given the bound address."""
    names = [variables.get("SLIPWAY_ALLOWED_HOSTS", "")]
    if host in ("0.0.0.0", "::"):  # noqa: S104 -- compared, not bound
        names += [socket.gethostname(), socket.getfqdn(), *_own_addresses()]
    else:
        names.append(f"[{host}]" if ":" in host else host)
    return list(dict.fromkeys(filter(None, names)))


def _own_addresses() -> list[str]:
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, family=socket.AF_INET)
    except OSError:
        return []
    return [str(entry[4][0]) for entry in found]

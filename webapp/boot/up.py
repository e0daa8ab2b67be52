"""``manage.py up``: start the whole site on a fresh machine, and stop it again."""

import argparse
import contextlib
import fcntl
import hashlib
import http.client
import ipaddress
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from runners.shared.addresses import (
    ANY_ADDRESS,
    in_url,
    is_loopback,
    own_addresses,
)
from runners.shared.environment import environment_lines
from runners.shared.log_text import last_line, lines_of
from runners.shared.redis_address import bare
from webapp.boot import broker, console, environment, processes
from webapp.boot.front import GATEWAY, WEB, Front
from webapp.core import site_settings, time_zones
from webapp.core.site_settings import (
    PROXIES_VARIABLE,
    SettingError,
    is_behind_proxy,
    trusted_proxies,
)

# Checks before the start: port, variables, data folder, lock, host names.


LAST_PORT = 65_535
NEEDED_BYTES = 500_000_000  # databases, logs and the first artefacts


def address(host: str, port: int) -> str:
    """Return the URL of the site for a browser on this machine."""
    reachable = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 -- compared only
    return f"http://{in_url(reachable)}:{port}"


def addresses_for_others(host: str, port: int, own: Sequence[str]) -> list[str]:
    """Return the URLs of the site for browsers and hosts on other machines; none on loopback."""
    if host in ANY_ADDRESS:  # of IPv4, of IPv6, or of both
        family = {"0.0.0.0": (4,), "::": (6,), "": (4, 6)}[host]  # noqa: S104 -- compared only
        own = [each for each in own if ipaddress.ip_address(each).version in family]
        return [f"http://{in_url(each)}:{port}" for each in own]
    return [] if is_loopback(host) else [address(host, port)]


def running_elsewhere(data: Path) -> str | None:
    """Return a sentence on the ``up`` that runs in this data folder, or None."""
    try:
        with (data / "up.lock").open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _owner_sentence(data)
    except OSError:
        return None
    return None


def check_port(host: str, port: int, *, running: str | None) -> None:
    """Raise a problem if Slipway already runs here or another program uses the port."""
    if running:
        raise console.Problem(
            running, "Stop it with Ctrl-C there, or set another SLIPWAY_DATA_DIR."
        )
    if not 0 < port <= LAST_PORT:
        raise console.Problem(
            f"--port is {port}; it can be 1 to {LAST_PORT}.",
            "Choose another port, or leave --port out for port 8000.",
        )
    try:
        _bind(host, port)
    except OSError as error:
        raise console.Problem(
            f"Port {port} on {host} cannot be used: {error.strerror or error}.",
            f"Try `python3 manage.py up --port {port + 1}`, or stop the program that uses the "
            "port.",
        ) from error


def _bind(host: str, port: int) -> None:
    """Bind an address for a moment.

    Raises:
        OSError: another program uses the port, or this machine has no such address.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if probe.family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        probe.bind((host, port))


def bound_host(host: str, port: int) -> str:
    """Return what the web process binds; "" is every address, of IPv4 and IPv6.

    Without IPv6 (or IPv4) on this machine it is the other alone.
    """
    if host not in ANY_ADDRESS:
        return host
    for each, other in (("0.0.0.0", "::"), ("::", "0.0.0.0")):  # noqa: S104 -- asked for by --host
        try:
            _bind(each, port)
        except OSError:
            return other
    return ""


def check_variables(variables: MutableMapping[str, str]) -> None:
    """Read secrets in files; raise a problem if a variable of the site cannot be used."""
    try:
        site_settings.read_secret_files(variables)
        site_settings.check(variables)
    except SettingError as error:
        raise console.Problem(f"{error}", "Correct the variable and start again.") from error


def make_data_folder(data: Path) -> None:
    """Create the data folder with mode 0700; raise a problem if the disk is nearly full."""
    try:
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
        (data / "up.lock").touch(mode=0o600)
    except OSError as error:
        raise console.Problem(
            f"The data folder {data} cannot be written: {error.strerror}.",
            "Correct its owner, or set SLIPWAY_DATA_DIR to another folder.",
        ) from error
    free = shutil.disk_usage(data).free
    if free < NEEDED_BYTES:
        raise console.Problem(
            f"The data folder {data} has {free / 1e6:.0f} MB free; "
            f"Slipway needs at least {NEEDED_BYTES / 1e6:.0f} MB.",
            "Free some space, or set SLIPWAY_DATA_DIR to a folder on a larger disk.",
        )


def take_lock(lock: IO[str], data: Path, url: str) -> None:
    """Lock the data folder until this process ends."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise console.Problem(
            _owner_sentence(data), "Stop it with Ctrl-C there, or set another SLIPWAY_DATA_DIR."
        ) from error
    with contextlib.suppress(OSError):  # the lock works without its content
        lock.truncate(0)
        json.dump({"pid": os.getpid(), "url": url}, lock)
        lock.flush()


def _owner_sentence(data: Path) -> str:
    try:
        owner = json.loads((data / "up.lock").read_text("utf-8"))
    except (OSError, ValueError):
        owner = {"pid": "?", "url": "an address not yet known"}
    return f"Slipway already runs at {owner['url']} (process {owner['pid']}, data in {data})."


def allowed_hosts(host: str, variables: Mapping[str, str]) -> list[str]:
    """Return the allowed host names of the site, given the bound address."""
    names = site_settings.allowed_hosts(variables.get("SLIPWAY_ALLOWED_HOSTS", ""))
    if host in ANY_ADDRESS:
        machine = [socket.gethostname(), socket.getfqdn(), *own_addresses()]
    else:
        machine = [host]
    for each in machine:
        with contextlib.suppress(SettingError):  # a machine may be named as no site can be
            names += site_settings.allowed_hosts(each)
    return list(dict.fromkeys(names))


def understood(variables: Mapping[str, str]) -> list[str]:
    """Return what the site takes from the environment, a line each, where it is set."""
    lines = []
    if public := site_settings.public_url(variables.get("SLIPWAY_PUBLIC_URL", "")):
        lines.append(f"Public address: {public.url}")
    if named := variables.get("SLIPWAY_ALLOWED_HOSTS", "").strip():
        lines.append(
            f"Names of SLIPWAY_ALLOWED_HOSTS: {', '.join(site_settings.allowed_hosts(named))}"
        )
    if proxies := trusted_proxies(variables):
        words = f"Trusted proxies: {', '.join(proxies)}"
        if not variables.get(PROXIES_VARIABLE, "").strip():
            words += f" (for one on another machine set {PROXIES_VARIABLE} to its address)"
        lines.append(words)
    return [*lines, *(line[:1].upper() + line[1:] for line in environment_lines(variables))]


# The stop of ``up``: stop allocation, end this machine's jobs, report what remains.
#
# The order matters. First web process, gateway and ticker stop, which allocate jobs and let hosts
# claim them; the control worker stops dispatching but still stores reports. Then the jobs of this
# machine are ended, which its agent reports over Redis. Everything else stops last.


REPORT_SECONDS = 10.0
LOOK_S = 0.1
IMPATIENT = "the second Ctrl-C ended the wait"


class Stopping:
    """The stop of one ``up``; ``hurries`` returns whether the user wants no more waiting."""

    def __init__(
        self,
        group: processes.ProcessGroup,
        host: Path,
        environment: Mapping[str, str],
        hurries: Callable[[], bool],
    ) -> None:
        self._group, self._host, self._hurries = group, host, hurries
        self._environment = dict(environment)
        self._untold = False

    def stop(self, *, ends_jobs: bool) -> None:
        """Stop every part; with ``ends_jobs``, end this machine's jobs first."""
        lines = self._end_jobs() if ends_jobs and self._host.exists() else []
        self._group.stop(hurry=self._hurries)
        for line in lines:
            console.line(f"  {line}")
        if running := self._running():
            how = ", which are stopping" if ends_jobs and not self._untold else ""
            console.line(f"  Stopped. Still running on this machine{how}: {', '.join(running)}")
        else:
            console.line("  Stopped; nothing is left running on this machine.")

    def _end_jobs(self) -> list[str]:
        """End this machine's jobs while their exits can still be stored; return report lines."""
        since = time.time()
        self._group.signal("control", signal.SIGUSR1)
        self._group.stop(WEB, GATEWAY, "ticker", hurry=self._hurries)
        stop_all = ["-m", "runners", "stop-all", "--with-site", "--dir", str(self._host)]
        ended = self._run(*stop_all)
        if self._hurries():
            ended = self._run(*stop_all, "--no-wait", is_patient=True)
        self._untold = ended.returncode != 0
        options = ["--since", str(since), "--wait", str(REPORT_SECONDS)]
        report = self._run("manage.py", "remaining", *options)
        lines = lines_of(report.stdout)
        if report.returncode != 0:
            words = last_line(report.stderr, IMPATIENT)
            lines = [f"Jobs on other hosts and waiting jobs could not be listed: {words}"]
        return [*lines_of(ended.stderr), *lines]

    def _running(self) -> list[str]:
        """Return the ids of attempts that are still running on this machine."""
        if not self._host.exists():
            return []
        done = self._run("-m", "runners", "status", "--dir", str(self._host), is_patient=True)
        rows = [line.split() for line in lines_of(done.stdout)]
        return [row[0] for row in rows if row[1:2] == ["running"]]

    def _run(
        self, *arguments: str, is_patient: bool = False
    ) -> "subprocess.CompletedProcess[str]":
        """Run a Python program to its end, or kill it if the user hurries."""
        process = subprocess.Popen(
            [sys.executable, *arguments],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        while True:
            try:
                output, errors = process.communicate(timeout=LOOK_S)
            except subprocess.TimeoutExpired:
                if self._hurries() and not is_patient:
                    process.kill()
                continue
            return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


ROOT = Path(__file__).resolve().parents[2]
ANSWER_WAIT_S = 600.0  # a busy machine needs minutes; a start that failed ends at once
ROUND_S = 0.2
HOST_NAME = "This machine"


def main(arguments: list[str]) -> int:
    """Start everything, supervise it, and return 0 after an orderly stop."""
    options = _parse(arguments)
    check_variables(os.environ)
    data = site_settings.data_path(os.environ, ROOT / "var")
    check_port(options.host, options.port, running=running_elsewhere(data))
    environment.ensure(["up", *arguments], with_tests=False)
    os.umask(0o077)  # whatever the shell's is: the site's files are for its user alone
    console.line("Starting Slipway")
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
        "--host",
        default="127.0.0.1",
        type=lambda text: text.strip().removeprefix("[").removesuffix("]"),
        help="address to bind (default %(default)s); 0.0.0.0 is every address of the machine",
    )
    parser.add_argument("--port", type=int, default=8000, help="port (default %(default)s)")
    return parser.parse_args(arguments)


class StopRequested(BaseException):
    """A signal requested the stop of ``up``."""


class Site:
    """One running site: broker, web process, gateway, workers and first host."""

    def __init__(self, host: str, port: int, data: Path) -> None:
        """Set up the state; ``live`` starts the parts."""
        self.host, self.port, self.data = host, port, data
        self.bound = bound_host(host, port)
        self.url = address(self.bound or host, port)
        self.environment = os.environ | {
            "SLIPWAY_DATA_DIR": str(data),
            "SLIPWAY_ALLOWED_HOSTS": ",".join(allowed_hosts(host, os.environ)),
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
        }
        for name in ("DATABASE_URL", "REDIS_URL"):
            if name in self.environment:
                self.environment[name] = self.environment[name].strip()
        self.group = processes.ProcessGroup(data, self.environment)
        self.front: Front | None = None  # from the start on
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
                    events = self.group.restart_dead()
                for event in events:
                    console.line(f"  ! {event}")
                time.sleep(ROUND_S)
        except StopRequested:
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
        self.front = front = self._listen()
        web = self._child_at(front, WEB)
        state, stamp = state_to_prepare(self.environment), self.data / "prepared"
        if stamp.exists() and stamp.read_text("utf-8") == state:
            self._start(web)  # nothing is to be prepared, so both may load in parallel
        with console.step("Bringing the database up to date"):
            self.account = ", ".join(lines_of(self._manage("prepare").strip()))
            stamp.write_text(state, "utf-8")
        if web.process is None:
            self._start(web)
        with console.step("Starting the web process"):
            self._wait_for_web(web)
        self._start(self._child_at(front, GATEWAY))
        self._start(processes.Child("control", [python, "manage.py", "control"]))
        self._start(processes.Child("ticker", [python, "manage.py", "ticker"]))
        self._start_host()
        others = addresses_for_others(self.bound, self.port, own_addresses())
        zone = time_zones.time_zone(os.environ)
        lines = [
            f"Slipway is ready: {self.url}",
            *([f"Other machines reach it at {', '.join(others)}"] if others else ()),
            *self._account_lines(),
            *understood(os.environ),
            zone.words or f"Time zone: {zone.name}",
            f"Ctrl-C stops everything. Data and logs are in {self.data}",
        ]
        console.line("\n" + "\n".join(f"  {line}" for line in lines))  # read as a whole

    def stop(self, *, ends_jobs: bool) -> None:
        """Stop every part, the broker last; a second Ctrl-C skips the waiting.

        This machine's jobs are ended on a requested stop, not after a failed start.
        """
        self.holds_signals = True
        for line in self._account_lines():  # the start failed after its creation
            console.line(f"  {line}")
        if self.front is not None:
            self.front.close()
        if not self.group.children:
            return
        console.line("\n  Stopping (Ctrl-C again to hurry)")
        host, hurries = self.data / "host", lambda: self.num_signals > 1
        Stopping(self.group, host, self.environment, hurries).stop(ends_jobs=ends_jobs)

    def _account_lines(self) -> list[str]:
        """Return how to sign in with the new account, once."""
        account, self.account = self.account, ""
        if not account:
            return []
        return [
            f"Sign in with {account}",
            "This password is shown only now and works for seven days, until you choose your own",
        ]

    def _start_broker(self) -> None:
        with console.step("Starting Redis"):
            chosen = broker.choose(self.data, self.environment)
            self.environment["REDIS_URL"] = chosen.url
            if chosen.command and chosen.socket:
                child = processes.Child("redis", chosen.command, stage=0, prepare=chosen.prepare)
                self._start(child)
                if not broker.wait_until_up(chosen.socket):
                    raise console.Problem("Redis did not start.", self.group.tail(child))
        console.line(f"    {chosen.words}")

    def _child_at(self, front: Front, name: str) -> processes.Child:
        """Return the web process or the gateway, which answer at the site's address."""
        proxies = trusted_proxies(os.environ) if is_behind_proxy(os.environ) else ()
        own = {"OPENBLAS_NUM_THREADS": "1"} if name == GATEWAY else {}  # it forks
        return processes.Child(
            name,
            front.command(name, proxies),
            environment=own,
            descriptors=front.descriptors(name),
            is_relieved=name == GATEWAY,
        )

    def _listen(self) -> Front:
        """Return the site's address; raise a problem if something else took it meanwhile."""
        try:
            return Front(self.bound, self.port)
        except OSError as error:
            raise console.Problem(
                f"Port {self.port} on {self.host} cannot be used: {error.strerror or error}.",
                "Stop the program that uses the port, or choose another one with --port.",
            ) from error

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
                raise console.Problem(f"The web process {fault}.", self.group.tail(web))
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
            words = last_line(done.stderr or done.stdout, "no message")
            log = self.group.logs / "set-up.log"
            log.write_text(done.stdout + done.stderr, "utf-8")
            name = " ".join(arguments[:2]) if arguments[0] != "-m" else " ".join(arguments[1:3])
            raise console.Problem(f"`{name}` failed: {words}", f"All its words: {log}")
        return done.stdout

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        return subprocess.run(
            command,
            env=self.environment,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            check=False,
            start_new_session=True,
        )

    def _start(self, child: processes.Child) -> None:
        with self._signals_held():
            self.group.start(child)

    @contextmanager
    def _signals_held(self) -> Iterator[None]:
        """Defer signals, so that none arrives between a child's start and its registration."""
        self.holds_signals = True
        try:
            yield
        finally:
            self.holds_signals = False
        if self.num_signals:
            raise StopRequested

    def _on_signal(self, _number: int, _frame: object) -> None:
        self.num_signals += 1
        if not self.holds_signals:
            self.holds_signals = True
            raise StopRequested


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


def state_to_prepare(variables: Mapping[str, str]) -> str:
    """Return a digest of what the web process needs done before it loads.

    That is the database's URL, every migration, and the static files, whose names with digests it
    reads once: those of this version, and of the pinned packages.
    """
    content = hashlib.sha256(variables.get("DATABASE_URL", "").encode())
    static = sorted((ROOT / "static").rglob("*"))
    migrations = sorted((ROOT / "webapp").glob("*/migrations/*.py"))
    for path in [*migrations, *static, ROOT / "constraints.txt"]:
        if path.is_file():
            content.update(path.name.encode() + path.read_bytes())
    return content.hexdigest()

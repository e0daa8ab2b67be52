"""The processes of an installation under test: start, kill, freeze, and leave none behind."""

import contextlib
import http.client
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from runners.supervision.procfs import is_running, read_process
from tests.stack import ROOT, StackError, free_port, wait_for
from webapp.boot import broker

# The kernel ends a part with the process that runs the tests, however that one ends.
BIND = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9, 0, 0, 0); os.execvp(sys.argv[1], sys.argv[1:])"
BOUND = (sys.executable, "-S", "-c", BIND)


class Desk:
    """A process that speaks with the product's services, one call a line (``desk.py``)."""

    def __init__(
        self, environment: dict[str, str], log: Path, calls: str = "tests.system.faults.calls"
    ) -> None:
        self._log = log.open("ab")
        self._lock = threading.Lock()  # one question and its answer at a time
        self._process = subprocess.Popen(
            [*BOUND, sys.executable, "-m", "tests.system.faults.desk", calls], cwd=ROOT, env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
            start_new_session=True, text=True, bufsize=1,
        )  # fmt: skip
        self._answers = select.poll()  # any descriptor: select() takes none beyond 1,023
        self._answers.register(self._process.stdout, select.POLLIN)

    def __getattr__(self, name: str) -> Any:
        return lambda **arguments: self._call(name, arguments)

    def _call(self, name: str, arguments: dict[str, Any]) -> Any:
        with self._lock:
            self._process.stdin.write(json.dumps([name, arguments]) + "\n")
            if not self._answers.poll(90_000):
                raise StackError(f"the desk did not answer {name}")
            answer = json.loads(self._process.stdout.readline() or '{"error": "the desk is gone"}')
        if "error" in answer:
            raise StackError(f"{name}: {answer['error']}")
        return answer["answer"]

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.close()


class Parts:
    """Named processes with one environment, a log each, and a session each."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder = folder
        self.port = free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self.logs = folder / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.commands: dict[str, list[str]] = {}
        self.own: dict[str, dict[str, str]] = {}  # what a part's environment has besides
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLIPWAY_", "DJANGO_")) and name not in {"REDIS_URL", "DATABASE_URL"}
        }  # fmt: skip
        ours = {"SLIPWAY_DATA_DIR": str(folder), "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        self.environment = kept | ours | {"OMP_NUM_THREADS": "1"} | environment
        self.redis = broker.choose(folder, self.environment)
        self.environment["REDIS_URL"] = self.redis.url
        python, manage = sys.executable, str(ROOT / "manage.py")
        self.commands |= {
            "redis": self.redis.command or [],
            "web": [python, "-m", "uvicorn", "webapp.asgi:application", "--no-access-log",
                    "--host", "127.0.0.1", "--port", str(self.port)],
            "control": [python, manage, "control"],
            "ticker": [python, manage, "ticker"],
        }  # fmt: skip
        self._frozen: dict[int, int] = {}  # pid -> start ticks

    def begin(self, name: str) -> None:
        """Start a part; it need not answer yet."""
        self.kill(name)
        with (self.logs / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [*BOUND, *self.commands[name]], cwd=ROOT, env=self.environment | self.own.get(name, {}),
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    def restart(self, *names: str) -> None:
        """Start parts anew and return when those that answer do."""
        for name in names:
            self.begin(name)
        for name in names:
            if name == "redis" and not broker.wait_until_up(self.redis.socket):
                raise StackError(f"redis did not start\n{self.tail(name)}")
            if name == "web":
                wait_for(self.web_answers, f"the web process\n{self.tail(name)}", every_s=0.05)

    def kill(self, *names: str) -> None:
        """End parts as a crash would; what they started lives on."""
        for name in names:
            process = self.processes.pop(name, None)
            if process is not None:
                process.kill()
                process.wait()

    def kill_tree(self, name: str) -> None:
        """End a part and all that is below it, at once: supervisors left long ago."""
        process = self.processes.get(name)
        if process is None:
            return
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    child.kill()
        self.kill(name)

    def is_alive(self, name: str) -> bool:
        process = self.processes.get(name)
        return process is not None and process.poll() is None

    def below(self, name: str, words: str) -> list[psutil.Process]:
        """Return the processes below a part whose command line holds ``words``."""
        found = []
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.processes[name].pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if words in " ".join(child.cmdline()):
                        found.append(child)
        return found

    def freeze(self, *pids: int) -> None:
        """Stop processes from running until ``thaw``."""
        for pid in pids:
            process = read_process(pid)
            if process is not None:
                os.kill(pid, signal.SIGSTOP)
                self._frozen[pid] = process.start_ticks

    def thaw(self, *pids: int) -> None:
        """Let the given frozen processes go on; all of them where none is given."""
        for pid in pids or tuple(self._frozen):
            if is_running(pid, self._frozen.pop(pid)):
                os.kill(pid, signal.SIGCONT)

    def run(self, *arguments: str) -> str:
        """Run a Python program of the product to its end and return what it printed."""
        done = subprocess.run(
            [sys.executable, *arguments], cwd=ROOT, env=self.environment,
            capture_output=True, text=True, check=False, timeout=600,
        )  # fmt: skip
        if done.returncode:
            raise StackError(f"{arguments[:3]}: {done.stderr[-1500:]}{done.stdout[-500:]}")
        return done.stdout

    def tail(self, name: str, num_lines: int = 15) -> str:
        return "\n".join(self.log(name).splitlines()[-num_lines:])

    def log(self, name: str) -> str:
        path = self.logs / f"{name}.log"
        return path.read_text("utf-8", errors="replace") if path.exists() else ""

    def web_answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/healthz")
            return connection.getresponse().status == http.client.OK
        except OSError:
            return False
        finally:
            connection.close()

    def page_seconds(self, path: str = "/healthz") -> float:
        """Return how long a page took to come; raise when it did not come well."""
        started = time.monotonic()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        try:
            connection.request("GET", path)
            status = connection.getresponse().status
        finally:
            connection.close()
        if status >= http.client.INTERNAL_SERVER_ERROR:
            raise StackError(f"{path} answered {status}")
        return time.monotonic() - started

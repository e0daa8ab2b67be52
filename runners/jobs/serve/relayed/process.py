"""Start an engine that serves HTTP on a loopback port, and wait until it says that it can."""

import os
import re
import secrets
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple

import httpx

from runners.endpoint_spec import LOOPBACK
from runners.jobs.runtime import BadInputError
from runners.jobs.serve.contract import EngineLostError
from runners.jobs.serve.process import OwnProcess

START_SECONDS = 1800.0  # hundreds of GB from a slow disk, then kernels are compiled
LOOK_SECONDS = 0.1
ASK_SECONDS = 10.0
PORT_TRIES = 50
TRIES = 3  # of a port: somebody may take it between the choice and the start
HEALTH, METRICS, MODELS = "/health", "/metrics", "/v1/models"
_TAKEN = "address already in use"
# How Python and argparse say what is wrong, after whatever a logger puts before it.
_CAUSE = re.compile(r"(?:^|[\s:)\]])((?:[A-Za-z_.]*(?:Error|Exception)|error): .+)")


class Command(NamedTuple):
    """How an engine is started: its words, and what its environment has besides."""

    argv: Sequence[str]
    env: Mapping[str, str]


class Door(NamedTuple):
    """Where an engine is to listen, and the key that it is to ask for."""

    port: int
    key: str


class ServerProcess(OwnProcess):
    """One life of an engine that serves HTTP; nobody but this process knows its key."""

    def __init__(self, title: str, command: Command, door: Door) -> None:
        self.key = door.key
        self.address = f"http://{LOOPBACK}:{door.port}"
        module = ("-m", "runners.jobs.serve.relayed.child", str(os.getpid()))
        super().__init__(
            title, [sys.executable, *module, *command.argv], {**os.environ, **command.env}
        )
        self.stdin.close()
        self._begun_at = time.monotonic()

    @property
    def headers(self) -> dict[str, str]:
        """Return what a request to it carries."""
        return {"Authorization": f"Bearer {self.key}"}

    def get(self, path: str) -> httpx.Response | None:
        """Return its answer to a GET, or None where it gives none."""
        with suppress(httpx.HTTPError):
            address, headers = f"{self.address}{path}", self.headers
            return httpx.get(address, headers=headers, timeout=ASK_SECONDS, trust_env=False)
        return None

    def is_healthy(self) -> bool:
        """Return whether it can be asked.

        Raises:
            BadInputError: it refuses the model or an argument, in its own words.
            EngineLostError: it was killed, or did not come up in time.
        """
        if not self.has_ended:
            found = self.get(HEALTH)
            if found is not None and found.is_success:
                return True
            if time.monotonic() - self._begun_at > START_SECONDS:
                self.kill()
                msg = f"{self.title} did not become healthy within {START_SECONDS:g} s"
                raise EngineLostError(msg)
            return False
        said = self.last_words()
        self.kill()  # what it started may live on
        if (self.code or 0) < 0:
            raise EngineLostError(f"{self.title} did not start: {self.how()}")
        raise BadInputError(f"{self.title} does not start with this model: {_cause(said)}")

    @property
    def lost_its_port(self) -> bool:
        """Return whether somebody else took the port first."""
        return any(_TAKEN in line.lower() for line in self.last)


def _cause(lines: Sequence[str]) -> str:
    """Return the line that says why, without what a logger puts before it."""
    found = [match[1] for line in lines if (match := _CAUSE.search(line))]
    return (found[-1] if found else " / ".join(lines[-3:]) or "it said nothing")[:400]


Starting = Callable[[Door], Command]


class _Start:
    """An engine on its way up, tried again on another port where somebody took its own."""

    def __init__(self, title: str, command: Starting) -> None:
        self._title = title
        self._command = command
        self._tries = 0
        self._is_up = False
        self.process = self._begun()

    def _begun(self) -> ServerProcess:
        self._tries += 1
        door = Door(free_ports(1), secrets.token_urlsafe(24))
        return ServerProcess(self._title, self._command(door), door)

    def is_up(self) -> bool:
        """Return whether it can be asked; see ``ServerProcess.is_healthy``."""
        try:
            self._is_up = self._is_up or self.process.is_healthy()
        except BadInputError:
            if self._tries == TRIES or not self.process.lost_its_port:
                raise
            self.process = self._begun()
        return self._is_up


def started(title: str, command: Starting) -> ServerProcess:
    """Return a healthy engine on a free port.

    Raises:
        BadInputError: it refuses the model or an argument.
        EngineLostError: it was killed, or did not come up in time.
    """
    return started_together([(title, command)])[0]


def started_together(wanted: Sequence[tuple[str, Starting]]) -> list[ServerProcess]:
    """Return several healthy engines, by title and command; where one fails, none is left.

    All begin in this thread: an engine ends with the thread that began it.

    Raises:
        BadInputError: one refuses the model or an argument.
        EngineLostError: one was killed, or did not come up in time.
    """
    begun: list[_Start] = []
    try:
        begun += [_Start(title, command) for title, command in wanted]
        while waiting := [each for each in begun if not each.is_up()]:
            waiting[0].process.wait(LOOK_SECONDS)
    except BaseException:
        for each in begun:
            each.process.kill()
        raise
    return [each.process for each in begun]


def free_ports(count: int, apart_from: int = 0) -> int:
    """Return the first of so many free ports in a row, none of them ``apart_from``.

    Raises:
        EngineLostError: no such row was found.
    """
    for _ in range(PORT_TRIES):
        with ExitStack() as held, suppress(OSError, OverflowError):
            first = _bound(held, 0)
            for port in range(first + 1, first + count):
                _bound(held, port)
            if not first <= apart_from < first + count:
                return first
    raise EngineLostError(f"{count} free ports in a row were not found in {PORT_TRIES} tries")


def _bound(held: ExitStack, port: int) -> int:
    asked = held.enter_context(socket.socket())
    asked.bind((LOOPBACK, port))
    return int(asked.getsockname()[1])

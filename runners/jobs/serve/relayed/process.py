"""Start an engine that serves HTTP on a loopback port, and wait until it says that it can."""

import os
import re
import secrets
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import httpx

from runners.endpoint_spec import LOOPBACK
from runners.jobs.runtime import BadInputError
from runners.jobs.serve.contract import EngineLostError
from runners.jobs.serve.process import OwnProcess

START_SECONDS = 1800.0  # hundreds of GB from a slow disk, then kernels are compiled
LOOK_SECONDS = 0.1
ASK_SECONDS = 10.0
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

    def wait_until_healthy(self) -> None:
        """Wait until it can be asked.

        Raises:
            BadInputError: it refuses the model or an argument, in its own words.
            EngineLostError: it was killed, or did not come up in time.
        """
        deadline = time.monotonic() + START_SECONDS
        while not self.has_ended:
            found = self.get(HEALTH)
            if found is not None and found.is_success:
                return
            if time.monotonic() > deadline:
                self.kill()
                msg = f"{self.title} did not become healthy within {START_SECONDS:g} s"
                raise EngineLostError(msg)
            self.wait(LOOK_SECONDS)
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


def started(title: str, command: Callable[[Door], Command]) -> ServerProcess:
    """Return a healthy engine on a free port.

    Raises:
        BadInputError: it refuses the model or an argument.
        EngineLostError: it was killed, or did not come up in time.
    """
    for attempt in range(TRIES):
        door = Door(_free_port(), secrets.token_urlsafe(24))
        process = ServerProcess(title, command(door), door)
        try:
            process.wait_until_healthy()
        except BadInputError:
            if attempt + 1 < TRIES and process.lost_its_port:
                continue
            raise
        return process
    raise EngineLostError(f"{title} found no free port in {TRIES} tries")


def _free_port() -> int:
    with socket.socket() as asked:
        asked.bind((LOOPBACK, 0))
        return int(asked.getsockname()[1])

"""A real endpoint as a process of the host, and the official client on it."""

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from openai import APIError, OpenAI

from runners.jobs.events import read_events
from runners.jobspec import ServeSpec
from tests.system.jobs.harness import Finished, Host

PATIENCE_SECONDS = 600.0
KEY = "sk-of-the-tests"
PROMPT = "import os\n"


def until(condition: Callable[[], Any], what: str) -> Any:
    """Return what the condition returns once it is true; fail after a generous while."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
    return found


@dataclass
class Endpoint:
    """One running endpoint."""

    host: Host
    folder: Path
    process: subprocess.Popen[str]
    key: str = ""
    clients: list[OpenAI] = field(default_factory=list)  # closed when it has ended

    def said(self, kind: str) -> list[dict[str, Any]]:
        """Return the bodies of its events of a kind, as far as they are written."""
        lines = (self.folder / "events.jsonl").read_bytes().rpartition(b"\n")[0]
        (whole := self.folder / "whole.jsonl").write_bytes(lines)
        return [each["body"] for each in read_events(whole) if each["kind"] == kind]

    def address(self) -> str:
        """Return where it answers, once it says so."""

        def told() -> list[dict[str, Any]]:
            assert self.process.poll() is None, self.process.communicate()[1]
            return self.said("endpoint")

        body = until(told, "the endpoint did not come up")[-1]
        return f"http://{body['host']}:{body['port']}"

    def client(self, key: str | None = None, retries: int = 0) -> OpenAI:
        """Return the official client on it."""
        key = self.key or "none" if key is None else key
        base_url = f"{self.address()}/v1"
        made = OpenAI(base_url=base_url, api_key=key, max_retries=retries, timeout=300.0)
        self.clients.append(made)
        return made

    def get(self, path: str) -> httpx.Response:
        """Return what it answers to a plain GET."""
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        return httpx.get(f"{self.address()}{path}", headers=headers, timeout=300.0)

    def figure(self, name: str) -> float:
        """Return a figure of the metrics page."""
        lines = self.get("/metrics").text.splitlines()
        return next(float(each.split()[1]) for each in lines if each.startswith(f"{name} "))

    def end(self) -> Finished:
        """Return what it left when it has ended."""
        return self.host.finish(self.folder, self.process)


Start = Callable[..., contextlib.AbstractContextManager[Endpoint]]


@contextlib.contextmanager
def serving(host: Host, name: str, spec: ServeSpec, key: str = "") -> Iterator[Endpoint]:
    """Run an endpoint while the block runs."""
    folder = host.attempt(name, spec)
    with ended(Endpoint(host, folder, host.start(folder), key)) as endpoint:
        yield endpoint


@contextlib.contextmanager
def serving_by(
    host: Host, module: str, name: str, spec: ServeSpec, env: Mapping[str, str]
) -> Iterator[Endpoint]:
    """Run a module's endpoint with this interpreter, whatever environment its engine has."""
    folder = host.attempt(name, spec)
    with (folder / "events.jsonl").open("ab") as events:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(folder)],
            env={**host.environment(), **env, "SLIPWAY_EVENT_FD": str(events.fileno())},
            pass_fds=[events.fileno()],
            stderr=subprocess.PIPE,
            text=True,
        )
    with ended(Endpoint(host, folder, process, KEY)) as endpoint:
        yield endpoint


def starter(host: Host, module: str, env: Mapping[str, str]) -> Start:
    """Return a way to run a module's endpoints while a block runs, each as it asks."""

    def start(
        name: str, spec: ServeSpec, **changes: str
    ) -> contextlib.AbstractContextManager[Endpoint]:
        return serving_by(host, module, name, spec, {**env, **changes})

    return start


@contextlib.contextmanager
def ended(endpoint: Endpoint) -> Iterator[Endpoint]:
    """End an endpoint after the block, where it did not end itself."""
    try:
        yield endpoint
    finally:
        if endpoint.process.poll() is None:
            endpoint.process.send_signal(signal.SIGKILL)
        if not endpoint.process.stderr.closed:
            endpoint.process.communicate()
        for client in endpoint.clients:
            client.close()


def complete(client: OpenAI, prompt: Any = PROMPT, **changes: Any) -> Any:
    """Return the answer to a prompt, greedy and short unless told otherwise."""
    asked = {"model": "model", "prompt": prompt, "max_tokens": 12, "temperature": 0}
    return client.completions.create(**{**asked, **changes})


def outcome(client: OpenAI, **asked: Any) -> str:
    """Ask for an answer as ``complete`` does, and return how that ended."""
    try:
        return str(complete(client, **asked).choices[0].finish_reason)
    except APIError as error:
        return type(error).__name__


def kill_until_given_up(endpoint: Endpoint) -> Finished:
    """Kill each life of a running endpoint's engine; return what the job left when it gave up."""
    endpoint.address()
    killed: set[int] = set()

    def kill_next() -> bool:
        is_over = endpoint.process.poll() is not None
        for each in () if is_over else psutil.Process(endpoint.process.pid).children():
            if each.pid not in killed:
                killed.add(each.pid)
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
        return is_over

    until(kill_next, "it does not give up")
    return endpoint.end()


def engine_of(endpoint: Endpoint) -> psutil.Process:
    """Return the process of the engine behind an endpoint."""
    (child,) = psutil.Process(endpoint.process.pid).children()
    return child

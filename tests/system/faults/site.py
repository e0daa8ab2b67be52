"""A whole Slipway at a thirtieth of its time, with as many hosts as a case wants.

Real Redis, web, control worker and ticker; each host is an agent with a folder of its own and a
doorbell's Celery worker. Jobs are drills. After a case, ``broken_promises`` says what does not
hold.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import redis

from runners.host import enrolment
from runners.host.companions import HOST_DIR_VARIABLE
from runners.host.redis_access import ack_key, events_key
from runners.launchers.attempts import AttemptFolder
from runners.shared.config import HostDir
from runners.shared.spool import SpoolReader
from runners.supervision import child, procfs
from tests.stack import FINAL, SLOW_S, StackError, copy_migrated, wait_for
from tests.system.faults import watch
from tests.system.faults.parts import Desk, Parts

SCALE = 1 / 30
DEGRADED_SECONDS, UNREACHABLE_SECONDS = 30 * SCALE, 90 * SCALE
ENDLESS = 100_000  # steps of a job that the case ends, however slow the machine is
SERVER = ("redis", "web", "control", "ticker")
CANARIES = {
    "the site's key": "canary-of-the-site-key-0123456789-abcdefghijklmnopqrstuvwxyz",
    "a hub's token": "canary-of-a-hub-token-0123456789",
}
SECRET_FILES = frozenset({"credential.json", "secret_key"})
SURVIVE_SECONDS = 60.0  # a busy machine takes a while to reap what was killed
MORE_DESCRIPTORS = 24  # connections and shippers' locks come and go; a leak grows without end
View = dict[str, Any]


class Site(Parts):
    """One installation; its hosts are parts beside ``web``, ``redis`` and so on."""

    def __init__(self, folder: Path, *hosts: str, **environment: str) -> None:
        super().__init__(
            folder,
            SLIPWAY_TIME_SCALE=str(SCALE),
            SLIPWAY_DRILLS="1",
            SLIPWAY_SECRET_KEY=CANARIES["the site's key"],
            HF_TOKEN=CANARIES["a hub's token"],
            **environment,
        )
        self.hosts: dict[str, Path] = {name: folder / "hosts" / name for name in hosts}
        self.trees = watch.TreeWatcher()
        self.secrets = watch.SecretWatcher(dict(CANARIES))
        self.jobs: list[str] = []  # of the case that runs
        self.mending: list[Callable[[], object]] = []  # what undoes the case's faults
        self._descriptors: dict[str, tuple[int, int]] = {}  # part -> pid, files open then

    # Start and end

    def start(self) -> None:
        """Bring everything up and return when every host takes jobs."""
        self.restart("redis")
        copy_migrated(self.folder)
        self.run("manage.py", "prepare")
        self.desk = Desk(self.environment, self.logs / "desk.log")
        self.desk.people()
        self.restart("control", "ticker", "web")
        self.trees.start()
        for name, folder in self.hosts.items():
            self.enrol(name, folder)
        for name in self.hosts:
            self.wait_for_contact(name, "live")

    def stop(self) -> None:
        """Leave no process behind: parts, Celery workers, supervisors and jobs."""
        self.thaw()
        self.trees.stop()
        for name in list(self.processes):
            self.kill_tree(name)
        for folder in self.hosts.values():
            for path in folder.glob("attempts/*"):
                kill_supervisor(AttemptFolder(path))
                procfs.sweep(path.name)
        self.desk.close()

    def enrol(self, name: str, folder: Path) -> None:
        """Make a host as ``python -m runners enroll`` does, and start its agent."""
        self.hosts[name] = folder
        self.commands[name] = [sys.executable, "-m", "runners", "work", "--dir", str(folder)]
        enrolment.enroll(HostDir(folder), self.base_url, self.desk.token(name=name), name)
        self.desk.measured(slug=name)
        credential = self.credential(name)
        self.secrets.secrets |= {
            f"the credential of {name}": credential["credential"],
            f"the command key of {name}": credential["command_key"],
        }
        self.begin(name)

    def credential(self, name: str) -> dict[str, Any]:
        return dict(json.loads((self.hosts[name] / "credential.json").read_text()))

    # Jobs

    def submit(self, host: str, **spec: Any) -> str:
        """Launch a drill on a host and return its id."""
        job = str(self.desk.submit(slug=host, spec={"step_seconds": 0.05, **spec}))
        self.jobs.append(job)
        return job

    def train(self, host: str, spec: dict[str, Any], retries: int) -> str:
        """Launch a training on a host and return its id."""
        job = str(self.desk.train(slug=host, spec=spec, retries=retries))
        self.jobs.append(job)
        return job

    def running(self, host: str, **spec: Any) -> str:
        """Launch a drill and return its id once its first figures are stored."""
        job = self.submit(host, **spec)
        self.wait(job, "running")
        wait_for(lambda: self.view(job)["num_steps"], f"the first step of {job}", every_s=0.05)
        return job

    def halted(self, host: str, **spec: Any) -> tuple[str, list[int]]:
        """Launch a drill that stands still after its first figures, until its pids are thawed."""
        job = self.running(host, **spec)
        pids = [process.pid for process in procfs.processes_of_attempt(self.attempt(job)["id"])]
        self.freeze(*pids)
        return job, pids

    def view(self, job: str) -> View:
        return dict(self.desk.view(job=job))

    def attempt_of_silent(self, host: str, job: str) -> View:
        """Return the newest attempt of a job whose host's agent is frozen, as soon as it has one.

        Heartbeats are sent in the agent's place: the server gives an unreachable host nothing.
        """
        heartbeat = {
            "boot_id": "b", "agent_version": "0.1", "cpu_utilization": 0.1,
            "memory_available_bytes": 2**33, "disk_free_bytes": 2**36,
        }  # fmt: skip

        def ask() -> bool:
            sent = heartbeat | {"sent_at_ms": time.time_ns() // 10**6}
            self.call(host, "/hosts/beat", sent).raise_for_status()
            return bool(self.view(job)["attempts"])

        wait_for(ask, f"an attempt of {job} on {host}", every_s=0.2)
        return dict(self.view(job)["attempts"][-1])

    def attempt(self, job: str) -> View:
        """Return the newest attempt of a job, as soon as it has one."""
        wait_for(lambda: self.view(job)["attempts"], f"an attempt of {job}", SLOW_S, 0.05)
        return dict(self.view(job)["attempts"][-1])

    def wait(self, job: str, *states: str, timeout_s: float = SLOW_S) -> View:
        """Wait until a job is in one of ``states`` (default: a final one) and return it."""
        wanted = set(states) or FINAL

        def ask() -> View | None:
            found = self.view(job)
            if found["state"] in FINAL - wanted:
                raise StackError(f"{job} ended: {found}")
            return found if found["state"] in wanted else None

        return wait_for(ask, f"{sorted(wanted)} of {job}: {self.view(job)}", timeout_s, 0.05)

    def attempt_folder(self, job: str) -> AttemptFolder:
        """Return the newest attempt's folder on its host."""
        attempt = self.attempt(job)
        return AttemptFolder(self.hosts[attempt["host"]] / "attempts" / attempt["id"])

    def identity(self, job: str) -> dict[str, Any]:
        """Return what an attempt's supervisor wrote about itself."""
        path = self.attempt_folder(job).path / child.SUPERVISOR
        return wait_for(lambda: child.read_json(path), f"the supervisor of {job}", every_s=0.02)

    # Hosts

    def contact(self, host: str) -> str:
        return str(self.desk.host(slug=host)["contact"])

    def wait_for_contact(self, host: str, *contacts: str) -> str:
        """Wait for a contact, as the server judges it, and return it."""
        words = f"{contacts} of {host}\n{self.tail(host)}"
        wait_for(lambda: self.contact(host) in contacts, words, every_s=0.05)
        return self.contact(host)

    def workers(self, *hosts: str) -> list[int]:
        """Return the processes of hosts' Celery workers, main processes first."""
        return [process.pid for host in hosts for process in self.below(host, "runners.host.app")]

    def agents(self, *hosts: str) -> list[int]:
        """Return the pids of hosts' agents and of all that they started but supervisors."""
        return [self.processes[host].pid for host in hosts] + self.workers(*hosts)

    def call(self, host: str, path: str, body: object) -> httpx.Response:
        """Call the server as a host does, with its credential and whatever it says."""
        return httpx.post(
            f"{self.base_url}/api/v1{path}", json=body, timeout=120, trust_env=False,
            headers={"Authorization": f"Bearer {self.credential(host)['credential']}"},
        )  # fmt: skip

    def broker(self) -> "redis.Redis[Any]":
        return redis.Redis.from_url(self.redis.url, socket_timeout=30)

    def keys(self, host: str) -> tuple[str, str]:
        """Return the names of a host's stream and of its acknowledgements."""
        host_id = self.desk.host(slug=host)["id"]
        return events_key(host_id), ack_key(host_id)

    # Between two cases

    def begin_case(self) -> None:
        """Forget the case before; remember what long-lived parts hold open."""
        self.jobs.clear()
        self.trees.doubled.clear()
        self._descriptors = {
            name: (process.pid, watch.descriptors(process.pid))
            for name, process in self.processes.items()
            if name != "redis"  # what it holds open is others' connections
        }

    def mend(self, *, patience_s: float = SLOW_S, stops_jobs: bool = True) -> None:
        """Undo the faults of a case, end what is left, and wait until all is told."""
        self.thaw()
        while self.mending:
            self.mending.pop()()
        self.restart(*(name for name in (*SERVER, *self.hosts) if not self.is_alive(name)))
        for host in self.hosts:
            self.wait_for_contact(host, "live")
        for job in self._open_jobs() if stops_jobs else []:
            self.desk.stop(job=job)
        wait_for(lambda: not self._open_jobs(), "the end of every job", patience_s, 0.1)
        wait_for(self._is_told, "the rest of every spool", patience_s, 0.1)

    def _open_jobs(self) -> list[str]:
        return list(self.desk.open_jobs(slugs=list(self.hosts)))

    def _is_told(self) -> bool:
        stored = {each["id"]: each for job in self.jobs for each in self.view(job)["attempts"]}
        for folder in self.hosts.values():
            for path in folder.glob("attempts/*"):
                held = SpoolReader(path / "spool").last_seq()
                if path.name in stored and held > stored[path.name]["acked_seq"]:
                    return False
        return True

    def broken_promises(self) -> dict[str, Any]:
        """Return everything that does not hold now that the case's faults are over."""
        parts = {process.pid for process in self.processes.values()}
        found = {
            **self.desk.broken(),
            "P1 two trees": [one for one in self.trees.doubled if self._is_ours(one)],
            "P1 survivors": self._survivors(),
            "P1 workers": self._workers_left(),
            "P2 spools behind": self._behind(),
            "P3 secrets": self._secrets(parts),
            "P4 zombies": self._zombies(),
            "P4 descriptors": self._leaks(),
            "P4 connections": self._crowds(),
        }
        return {name: one for name, one in found.items() if one}

    def _is_ours(self, attempt: str) -> bool:
        """Tell an attempt of this installation from those of others on the same machine."""
        return any((folder / "attempts" / attempt).exists() for folder in self.hosts.values())

    def _survivors(self) -> dict[str, list[int]]:
        ended = [each["id"] for job in self.jobs for each in self.view(job)["attempts"]]
        deadline = time.monotonic() + SURVIVE_SECONDS
        while left := {
            attempt: pids
            for attempt in ended
            if (pids := [process.pid for process in procfs.processes_of_attempt(attempt)])
        }:
            if time.monotonic() > deadline:
                return left
            time.sleep(0.1)
        return {}

    def _workers_left(self) -> list[int]:
        """Return the Celery workers of these hosts whose agent is no more."""
        ours = {f"{HOST_DIR_VARIABLE}={folder}" for folder in self.hosts.values()}
        deadline = time.monotonic() + SURVIVE_SECONDS
        while left := watch.workers(ours) - set(self.workers(*self.hosts)):
            if time.monotonic() > deadline:
                return sorted(left)
            time.sleep(0.1)
        return []

    def _behind(self) -> dict[str, tuple[int, int]]:
        acked = {
            each["id"]: each["acked_seq"]
            for job in self.jobs
            for each in self.view(job)["attempts"]
        }
        behind: dict[str, tuple[int, int]] = {}
        for folder in self.hosts.values():
            behind |= watch.spools_behind(folder / "attempts", acked)
        return behind

    def _secrets(self, parts: set[int]) -> list[str]:
        places = [self.logs, *self.folder.glob("*.sqlite3*"), *self.hosts.values()]
        return self.secrets.find(places, SECRET_FILES) + self.secrets.in_processes(parts)

    def _zombies(self) -> list[int]:
        """Return dead children that are still there after a while: a busy parent takes one."""
        deadline = time.monotonic() + SURVIVE_SECONDS
        parents = {pid for host in self.hosts for pid in self.agents(host)}
        while found := watch.zombies_below(parents):
            if time.monotonic() > deadline:
                return found
            time.sleep(0.1)
        return []

    def _leaks(self) -> dict[str, int]:
        more = {}
        for name, (pid, before) in self._descriptors.items():
            process = self.processes.get(name)
            if process is not None and process.pid == pid:
                grown = watch.descriptors(pid) - before
                if grown > MORE_DESCRIPTORS:
                    more[name] = grown
        return more

    def _crowds(self) -> dict[str, int]:
        """Return the users of Redis that hold more connections than all their parts need."""
        with self.broker() as client:
            return watch.crowds(str(each["user"]) for each in client.client_list())


def kill_supervisor(folder: AttemptFolder) -> None:
    """End an attempt's supervisor as a crash would."""
    if identity := child.read_json(folder.path / child.SUPERVISOR):
        ticks = int(identity["start_ticks"])
        procfs.send_signal(int(identity["pid"]), ticks, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    """Tell whether a process runs, zombies not counted."""
    process = procfs.read_process(pid)
    return process is not None and process.is_alive and os.getpid() != pid

"""The product on several machines: a server in one namespace, an enrolled host in each other."""

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runners.jobspec import DataParallel, TrainSpec
from runners.supervision.procfs import marked
from tests.namespaces.lab import SERVER_ADDRESS, Lab
from tests.runners.jobs.harness import TINY
from tests.stack import (
    FINAL,
    MAKE_PEOPLE,
    PREPARE,
    ROOT,
    Found,
    Stack,
    StackError,
    copy_migrated,
    wait_for,
)
from webapp.boot import broker

TIME_SCALE = 0.4  # beats every 4 s, a host out of contact after 36 s, a start given up after 48
RANK_SECONDS = 60  # longer than that, and than a busy machine keeps a rank from its step
ALL_SECONDS = 780.0  # one story, told within the 900 that its tests have
WAIT_SECONDS = 420.0  # five programs beside it on two cores, and cold files: half of that
MEASURED = {
    "measured_at_ms": 1, "duration_seconds": 1.0, "torch_version": "2.13.0", "num_threads": 1,
    "devices": [], "disk_write_bytes_per_second": 1e8,
}  # fmt: skip
READY = f"""
from webapp.hosts.models import Host
Host.objects.update(microbench={MEASURED!r}, state="ready")
"""
LAUNCH = """
from django.contrib.auth.models import User
from runners.jobspec import TrainSpec
from webapp.hosts.models import Pool
from webapp.jobs.services import job_create, job_submit
alice = User.objects.get(username="alice")
pool = Pool.objects.get()
job = job_create(
    team=pool.team, owner=alice, pool=pool, num_hosts={num_hosts}, name="Train together",
    model_name="demo", spec=TrainSpec.model_validate_json({spec!r}),
)
print("JOB", job_submit(job=job, by="alice").pk)
"""
ASK = """
import json
from webapp.hosts.contact import contact_of
from webapp.jobs.models import Allocation, Attempt, Event, Job
job = Job.objects.get(pk={job!r})
members = Attempt.objects.filter(job=job).order_by("number", "node_rank")
print("SAID", json.dumps({{
    "state": job.state, "reason": job.reason, "progress": job.progress_done, "result": job.result,
    "attempts": max((each.number for each in members), default=0),
    "members": {{each.host.name: each.exit_record.get("reason", "") for each in members}},
    "contact": {{each.host.name: contact_of(each.host) for each in members}},
    "held": Allocation.objects.filter(released_at=None).count(),
    "ends": Event.objects.filter(subject=job.pk, kind="job.state", to_state__in=
        ["succeeded", "failed", "error", "stopped"]).count(),
    "events": [[each.kind, each.to_state, each.detail.get("sentence", "")] for each in
        Event.objects.filter(subject=job.pk)],
}}))
"""
STATES = """
from webapp.hosts.models import Host
from webapp.jobs.models import Attempt, Job
jobs = list(Job.objects.values_list("pk", "state", "reason"))
members = list(Attempt.objects.values_list("job", "host__name", "stop_reason", "exit_record"))
hosts = list(Host.objects.values_list("name", "state", "last_seen_at"))
print("SAID", jobs, members, [(name, state, str(seen)) for name, state, seen in hosts])
"""


def training(**changes: Any) -> TrainSpec:
    """Return a training of two micro-batches or more a step, whose ranks are patient a minute."""
    policy = {"rank_timeout_seconds": RANK_SECONDS, **changes.pop("parallel", {})}
    fields = {
        "model": TINY, "sequence_length": 64, "micro_batch_size": 4, "max_steps": None,
        "gradient_accumulation_steps": 6, "compute_dtype": "fp32",
        "checkpoint_every_seconds": 2.0, "parallel": DataParallel(**policy),
    }  # fmt: skip
    return TrainSpec(**{**fields, **changes})


class Site(Stack):
    """Everything but the hosts' agents lives where the test itself lives: on the server."""

    def __init__(self, folder: Path, lab: Lab) -> None:
        """Name its parts; nothing starts before ``start``."""
        super().__init__(
            folder, SLIPWAY_ALLOWED_HOSTS=SERVER_ADDRESS, SLIPWAY_TIME_SCALE=str(TIME_SCALE)
        )
        self.lab = lab
        self.server_url = f"http://{SERVER_ADDRESS}:{self.port}"
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.job = ""  # the newest
        self._until = time.monotonic() + ALL_SECONDS

    def start(self) -> None:
        """Bring the server up and enrol every host."""
        self.logs.mkdir(parents=True, exist_ok=True)
        chosen = broker.choose(self.folder, self.environment)
        self.environment["REDIS_URL"] = chosen.url
        self.redis = chosen
        if chosen.command:
            self.restart("redis")
        copy_migrated(self.folder)
        self.run("manage.py", "shell", "-c", f"{PREPARE}{MAKE_PEOPLE}")
        for name in ("web", "control", "ticker"):
            self.restart(name)
        for name in self.lab.hosts:
            self._enrol(name)
        self.run("manage.py", "shell", "-c", READY)
        for name in self.lab.hosts:
            self._work(name)

    def command_of(self, name: str) -> list[str]:
        """Return the command line of a part; the web process listens to the hosts too."""
        command = super().command_of(name)
        return ["0.0.0.0" if part == "127.0.0.1" and name == "web" else part for part in command]

    def _enrol(self, name: str) -> None:
        token = self.run("manage.py", "enrol_token", "--name", name).strip()
        command = self.lab.command(
            name, sys.executable, "-m", "runners", "enroll", "--server", self.server_url, "--token",
            token, "--dir", str(self.folder / name), "--address", self.lab.address(name),
        )  # fmt: skip
        subprocess.run(
            command, cwd=ROOT, env=self.environment, check=True, capture_output=True, timeout=240
        )

    def _work(self, name: str) -> None:
        command = self.lab.command(
            name, sys.executable, "-m", "runners", "work", "--dir", str(self.folder / name)
        )
        with (self.logs / f"{name}.log").open("ab") as log:
            self.agents[name] = subprocess.Popen(
                command, cwd=ROOT, env=self.environment, stdin=subprocess.DEVNULL,
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def stop(self) -> None:
        """End every attempt and every part."""
        for name, agent in self.agents.items():
            self.lab.heal(name)
            os.killpg(agent.pid, signal.SIGTERM)
            agent.wait(120)
            self.run(
                "-m", "runners", "stop-all", "--dir", str(self.folder / name), must_work=False
            )
        super().stop()

    # What a test asks

    def launch(self, spec: TrainSpec) -> str:
        """Queue one job over all hosts and return its id."""
        code = LAUNCH.format(num_hosts=len(self.lab.hosts), spec=spec.model_dump_json())
        self.job = self._said("JOB", code)
        return self.job

    def ask(self, job: str) -> dict[str, Any]:
        """Return what the server knows of a job."""
        return json.loads(self._said("SAID", ASK.format(job=job)))

    def glance(self, job: str) -> dict[str, Any]:
        """Return a job's state and how many devices are held, read in place: it costs nothing."""
        rows = sqlite3.connect(
            f"file:{self.folder / 'slipway.sqlite3'}?mode=ro", uri=True, timeout=60
        )
        with contextlib.closing(rows):
            (state,) = rows.execute("select state from jobs_job where id = ?", [job]).fetchone()
            held = "select count(*) from jobs_allocation where released_at is null"
            return {"state": state, "held": rows.execute(held).fetchone()[0]}

    def _said(self, word: str, code: str) -> str:
        lines = self.run("manage.py", "shell", "-c", code).splitlines()
        return next(line.removeprefix(f"{word} ") for line in lines if line.startswith(f"{word} "))

    def steps(self, name: str) -> int:
        """Return how many steps of the newest job a host's ranks have said, by its disk."""
        said = [line for line in self.output(name).splitlines() if "step " in line]
        return max((int(line.split("step ")[1].split()[0]) for line in said), default=0)

    def output(self, name: str) -> str:
        """Return what a host's ranks of the newest job wrote, by its disk."""
        logs = [folder / "stdout.log" for folder in self._attempts(name)]
        return "".join(log.read_text() for log in logs if log.exists())

    def _attempts(self, name: str) -> list[Path]:
        """Return the folders of the newest job's attempts on a host."""
        specs = (self.folder / name / "attempts").glob("*/spec.json")
        return [
            spec.parent for spec in specs if json.loads(spec.read_text())["job_id"] == self.job
        ]

    def wait_for_steps(self, name: str, more_than: int) -> int:
        """Wait until a host's ranks are past a step, and return where they are."""

        def ask() -> int | None:
            if (found := self.steps(name)) > more_than:
                return found
            if (state := self.glance(self.job)["state"]) in FINAL:
                raise StackError(f"the job ended as {state}")
            return None

        return self._wait(ask, f"step {more_than} on {name}")

    def wait_for_checkpoint(self) -> None:
        """Wait until the newest job could be resumed."""

        def ask() -> bool:
            folders = [folder for name in self.lab.hosts for folder in self._attempts(name)]
            return any(any(folder.glob("checkpoint/step-*")) for folder in folders)

        self._wait(ask, "a checkpoint")

    def wait_for(self, job: str, **wanted: Any) -> dict[str, Any]:
        """Wait until a glance at a job shows these values; return all that the server knows."""

        def ask() -> dict[str, Any] | None:
            found = self.glance(job)
            if {key: found[key] for key in wanted} == wanted:
                return found
            if found["state"] in FINAL - {wanted.get("state", found["state"])}:
                raise StackError(f"the job ended as {found['state']}")
            return None

        self._wait(ask, f"{wanted} of job {job}")
        return self.ask(job)

    def _wait(self, ask: Callable[[], Found | None], what: str) -> Found:
        """Wait as long as a slow machine may take, but not longer than the whole story may.

        Raises:
            StackError: it never became true, with what everybody said.
        """
        left_s = max(1.0, min(WAIT_SECONDS, self._until - time.monotonic()))
        try:
            return wait_for(ask, what, left_s, every_s=0.5)
        except StackError as error:
            raise StackError(f"{what}: {error}\n{self.explain()}") from error

    def explain(self) -> str:
        """Return the end of what the hosts, their attempts and the server said."""
        logs = [self.logs / f"{name}.log" for name in (*self.lab.hosts, "control", "ticker")]
        for name in self.lab.hosts:
            logs += sorted((self.folder / name / "attempts").glob("*/std*.log"))
        ends = [f"{log}:\n{log.read_text()[-4000:]}" for log in logs if log.exists()]
        return "\n".join([*ends, self._said("SAID", STATES)])

    def page(self, path: str) -> str:
        """Return a page as alice reads it, with plain spaces and apostrophes."""
        text = self.client("alice").get(path)
        return text.replace("\N{NO-BREAK SPACE}", " ").replace("&#x27;", "'")

    def kill_a_rank(self, name: str) -> int:
        """Kill a training process of a host, not torchrun, and return its number."""
        rank = self._wait(lambda: next(iter(self._ranks(name)), None), f"a rank on {name}")
        os.kill(rank, signal.SIGKILL)
        return rank

    def _ranks(self, name: str) -> list[int]:
        found = [process.pid for folder in self._attempts(name) for process in marked(folder.name)]
        return [pid for pid in found if b"\0LOCAL_RANK=" in _environment(pid)]

    def marked_processes(self) -> list[int]:
        """Return the processes that carry the marker of an attempt of these hosts."""
        folders = self.folder.glob("*/attempts/*")
        return [process.pid for folder in folders for process in marked(folder.name)]


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # it has ended meanwhile
        return b""

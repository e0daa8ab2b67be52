"""The product on several machines: a server in one namespace, an enrolled host in each other."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from runners.jobspec import DataParallel, TrainSpec
from runners.supervision.procfs import marked
from tests.namespaces.lab import SERVER_ADDRESS, Lab
from tests.runners.jobs.harness import TINY
from tests.stack import MAKE_PEOPLE, ROOT, Stack, wait_for
from webapp.boot import broker

TIME_SCALE = 0.2  # beats every 2 s, a host out of contact after 18 s
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
from webapp.jobs.models import Allocation, Attempt, Event, Job
job = Job.objects.get(pk={job!r})
members = Attempt.objects.filter(job=job).order_by("number", "node_rank")
print("SAID", json.dumps({{
    "state": job.state, "reason": job.reason, "progress": job.progress_done, "result": job.result,
    "attempts": max((each.number for each in members), default=0),
    "members": {{each.host.name: each.exit_record.get("reason", "") for each in members}},
    "held": Allocation.objects.filter(released_at=None).count(),
    "ends": Event.objects.filter(subject=job.pk, kind="job.state", to_state__in=
        ["succeeded", "failed", "error", "stopped"]).count(),
    "events": [[each.kind, each.to_state, each.detail.get("sentence", "")] for each in
        Event.objects.filter(subject=job.pk)],
}}))
"""


def training(**changes: Any) -> TrainSpec:
    """Return a training of two micro-batches or more a step, whose ranks are patient for 30 s."""
    policy = {"rank_timeout_seconds": 30, **changes.pop("parallel", {})}
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

    def start(self) -> None:
        """Bring the server up and enrol every host."""
        self.logs.mkdir(parents=True, exist_ok=True)
        chosen = broker.choose(self.folder, self.environment)
        self.environment["REDIS_URL"] = chosen.url
        self.redis = chosen
        if chosen.command:
            self.restart("redis")
        self.run("manage.py", "prepare")
        self.run("manage.py", "shell", "-c", MAKE_PEOPLE)
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
            command, cwd=ROOT, env=self.environment, check=True, capture_output=True, timeout=120
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
            agent.wait(30)
            self.run(
                "-m", "runners", "stop-all", "--dir", str(self.folder / name), must_work=False
            )
        super().stop()

    # What a test asks

    def launch(self, spec: TrainSpec) -> str:
        """Queue one job over all hosts and return its id."""
        code = LAUNCH.format(num_hosts=len(self.lab.hosts), spec=spec.model_dump_json())
        return self._said("JOB", code)

    def ask(self, job: str) -> dict[str, Any]:
        """Return what the server knows of a job."""
        return json.loads(self._said("SAID", ASK.format(job=job)))

    def _said(self, word: str, code: str) -> str:
        lines = self.run("manage.py", "shell", "-c", code).splitlines()
        return next(line.removeprefix(f"{word} ") for line in lines if line.startswith(f"{word} "))

    def steps(self, name: str) -> int:
        """Return how many steps a host's ranks have said so far, from what lies on its disk."""
        logs = (self.folder / name / "attempts").glob("*/stdout.log")
        said = [line for log in logs for line in log.read_text().splitlines() if "step " in line]
        return max((int(line.split("step ")[1].split()[0]) for line in said), default=0)

    def wait_for_steps(self, name: str, more_than: int, timeout_s: float = 150.0) -> int:
        """Wait until a host's ranks are past a step, and return where they are."""

        def ask() -> int | None:
            return self.steps(name) if self.steps(name) > more_than else None

        return wait_for(ask, f"step {more_than} on {name}\n{self.explain(name)}", timeout_s)

    def wait_for(self, job: str, timeout_s: float = 150.0, **wanted: Any) -> dict[str, Any]:
        """Wait until what the server knows of a job has these values."""

        def ask() -> dict[str, Any] | None:
            found = self.ask(job)
            return found if {key: found[key] for key in wanted} == wanted else None

        return wait_for(ask, f"{wanted} of job {job}", timeout_s, every_s=1.0)

    def wait_for_progress(self, job: str, timeout_s: float = 150.0) -> None:
        """Wait until a job has said that it made a step."""
        wait_for(lambda: self.ask(job)["progress"], f"a step of job {job}", timeout_s, every_s=1.0)

    def explain(self, name: str) -> str:
        """Return the end of a host's own words."""
        return (self.logs / f"{name}.log").read_text()[-600:]

    def page(self, path: str) -> str:
        """Return a page as alice reads it, with plain spaces and apostrophes."""
        text = self.client("alice").get(path)
        return text.replace("\N{NO-BREAK SPACE}", " ").replace("&#x27;", "'")

    def kill_a_rank(self, name: str, timeout_s: float = 60.0) -> int:
        """Kill a training process of a host, not torchrun, and return its number."""
        rank = wait_for(
            lambda: next(iter(self._ranks(name)), None), f"a rank on {name}", timeout_s
        )
        os.kill(rank, signal.SIGKILL)
        return rank

    def _ranks(self, name: str) -> list[int]:
        folders = (self.folder / name / "attempts").glob("*")
        found = [process.pid for folder in folders for process in marked(folder.name)]
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

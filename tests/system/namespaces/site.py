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
from runners.supervision.procfs import processes_of_attempt
from tests.runners.jobs.tiny import TINY
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
from tests.system.faults.parts import Desk
from tests.system.namespaces.lab import SERVER_ADDRESS, Lab
from webapp.boot import broker

TIME_SCALE = 0.4  # beats every 4 s, a host out of contact after 36 s, a start given up after 48
RANK_SECONDS = 40  # more than a host needs to be out of contact, or a busy machine for a step
ALL_SECONDS = 780.0  # one story, told within the 900 that its tests have
WAIT_SECONDS = 420.0  # five programs beside it on two cores, and cold files: half of that


def training(**changes: Any) -> TrainSpec:
    """Return a training of two micro-batches or more a step, whose ranks wait 40 s for another."""
    policy = {"rank_timeout_seconds": RANK_SECONDS, **changes.pop("parallel", {})}
    fields = {
        "model": TINY, "sequence_length": 64, "micro_batch_size": 4, "max_steps": None,
        "gradient_accumulation_steps": 6, "compute_dtype": "fp32",
        "checkpoint_every_seconds": 0.5, "parallel": DataParallel(**policy),
    }  # fmt: skip
    return TrainSpec(**{**fields, **changes})


class Site(Stack):
    """Everything but the hosts' agents lives where the test itself lives: on the server."""

    bound = "0.0.0.0"  # the hosts reach it too

    def __init__(self, folder: Path, lab: Lab) -> None:
        """Name its parts; nothing starts before ``start``."""
        super().__init__(
            folder, SLIPWAY_ALLOWED_HOSTS=SERVER_ADDRESS, SLIPWAY_TIME_SCALE=str(TIME_SCALE)
        )
        self.lab = lab
        self.server_url = f"http://{SERVER_ADDRESS}:{self.port}"
        self.desk: Desk | None = None
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
        self.desk = Desk(self.environment, self.logs / "desk.log", "tests.system.namespaces.calls")
        for name in ("web", "control", "ticker"):
            self.restart(name)
        for name in self.lab.hosts:
            self._enrol(name)
        self.desk.all_measured()
        for name in self.lab.hosts:
            self._work(name)

    def _enrol(self, name: str) -> None:
        token = self.desk.token(name=name)
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
        if self.desk is not None:
            self.desk.close()

    # What a test asks

    def launch(self, spec: TrainSpec, num_hosts: int | None = None) -> str:
        """Queue one job over the first hosts, without a number over all, and return its id."""
        self.job = self.desk.train_together(
            spec=spec.model_dump(mode="json"), num_hosts=num_hosts or len(self.lab.hosts)
        )
        return self.job

    def stop_job(self, job: str) -> str:
        """Stop a job and wait until its hosts hold nothing; return its id."""
        self.desk.stop(job=job)
        self.wait_for(job, state="stopped", held=0)
        return job

    def resume(self, job: str, num_hosts: int | None = None) -> str:
        """Resume a job, and return the new one's id."""
        self.job = self.desk.resume(job=job, num_hosts=num_hosts)
        return self.job

    def wait_for_silence(self, job: str, name: str) -> None:
        """Wait until the server calls a host of a job unreachable."""
        self._wait(lambda: self.ask(job)["contact"][name] == "unreachable", f"silence of {name}")

    def wait_until(self, ask: Callable[[], Found | None], what: str) -> Found:
        """Wait until the newest job shows something."""
        return self._wait(ask, what)

    def ask(self, job: str) -> dict[str, Any]:
        """Return what the server knows of a job."""
        return dict(self.desk.told(job=job))

    def glance(self, job: str) -> dict[str, Any]:
        """Return a job's state and how many devices are held, read in place: it costs nothing."""
        rows = sqlite3.connect(
            f"file:{self.folder / 'slipway.sqlite3'}?mode=ro", uri=True, timeout=60
        )
        with contextlib.closing(rows):
            (state,) = rows.execute("select state from jobs_job where id = ?", [job]).fetchone()
            held = "select count(*) from jobs_allocation where released_at is null"
            return {"state": state, "held": rows.execute(held).fetchone()[0]}

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
            return wait_for(ask, what, left_s, every_s=0.2)
        except StackError as error:
            raise StackError(f"{what}: {error}\n{self.explain()}") from error

    def explain(self) -> str:
        """Return the end of what the hosts, their attempts and the server said."""
        logs = [self.logs / f"{name}.log" for name in (*self.lab.hosts, "control", "ticker")]
        for name in self.lab.hosts:
            logs += sorted((self.folder / name / "attempts").glob("*/std*.log"))
        ends = [f"{log}:\n{log.read_text()[-4000:]}" for log in logs if log.exists()]
        return "\n".join([*ends, json.dumps(self.desk.everything())])

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
        found = [
            process.pid
            for folder in self._attempts(name)
            for process in processes_of_attempt(folder.name)
        ]
        return [pid for pid in found if b"\0LOCAL_RANK=" in _environment(pid)]

    def marked_processes(self) -> list[int]:
        """Return the processes that carry the marker of an attempt of these hosts."""
        folders = self.folder.glob("*/attempts/*")
        return [process.pid for folder in folders for process in processes_of_attempt(folder.name)]


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # it has ended meanwhile
        return b""

"""Launches attempts as Ray jobs: a driver on the head node places the supervisor on a node.

How an attempt is tracked is the same for every scheduler (``runners.launchers.scheduler``). Each
attempt has a placement group: one bundle on one node, or of a training that holds several of this
host's slots a bundle for each on nodes apart (``runners.launchers.ray_driver``). A job's own
resources are not used: a job that waits for them fails after 15 minutes (Ray 2.60,
RAY_JOB_START_TIMEOUT_SECONDS), and a placement group waits.
"""

import logging
import math
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from runners.launchers import ray_driver, ray_nodes
from runners.launchers.attempts import AttemptFolder
from runners.launchers.ray_api import Api, RayError
from runners.launchers.scheduler import (
    PREFIX,
    Phase,
    SchedulerError,
    SchedulerLauncher,
    read_or_note,
)
from runners.shared.facts import PartitionFacts, SchedulerFacts
from runners.shared.log_text import lines_of, shortened
from runners.shared.ray import ACCELERATOR, RayConfig
from runners.shared.reasons import Reason
from runners.shared.timing import SCHEDULER_KILL_MARGIN_SECONDS, STOP_GRACE_SECONDS
from runners.supervision import child

log = logging.getLogger(__name__)

SCRIPT = "ray_driver.py"
MAX_LISTED = 256
DETAIL_CHARACTERS = 300
LOGS = ", last available logs"  # of a failed job's message: the driver's output follows
KEPT_SECONDS = 24 * 60 * 60  # Ray itself forgets no job
STOP_WAIT = "RAY_JOB_STOP_WAIT_TIME_S"  # between a stop's SIGTERM and SIGKILL; Ray's own is 3 s
LOST_STATES = {
    ray_driver.NODE_LOST: "NODE_LOST",
    ray_driver.WORKER_LOST: "WORKER_LOST",
    ray_driver.OUT_OF_MEMORY: "OUT_OF_MEMORY",
}
REASONS = {
    "NODE_LOST": Reason.HOST_REBOOTED,
    "WORKER_LOST": Reason.KILLED_EXTERNALLY,
    "OUT_OF_MEMORY": Reason.OOM_HOST,
    "STOPPED": Reason.KILLED_EXTERNALLY,
}


class RayJob(NamedTuple):
    """One job as Ray and its driver report it."""

    job_id: str  # Ray's submission id, which we choose
    state: str
    phase: Phase
    detail: str = ""
    nodes: str = ""
    end_words: str = ""  # what its driver says of the end

    @property
    def name(self) -> str:
        """Return the name that we gave it."""
        return self.job_id


class Work(NamedTuple):
    """What one job is to do."""

    name: str
    folder: Path  # where it runs; every node sees it
    first: Sequence[str]  # the command of the first node
    others: Sequence[str] = ()
    nodes: int = 1
    restarts: bool = False  # placed again after a lost node

    def order(self, config: RayConfig) -> dict[str, Any]:
        """Return what the driver reads."""
        return {
            "name": self.name,
            "folder": str(self.folder),
            "first": list(self.first),
            "others": list(self.others),
            "nodes": self.nodes,
            "restarts": self.restarts,
            "bundle": config.bundle,
            "grace_seconds": STOP_GRACE_SECONDS + SCHEDULER_KILL_MARGIN_SECONDS,
        }


def submit_work(api: Api, work: Work, config: RayConfig) -> None:
    """Write the driver and its order into the folder, and submit the job.

    Raises:
        SchedulerError: Ray rejects the job, or does not answer.
    """
    shutil.copyfile(ray_driver.__file__, work.folder / SCRIPT)
    child.write_json(work.folder / ray_driver.ORDER, work.order(config))
    driver = [config.python, str(work.folder / SCRIPT), str(work.folder)]
    wait = math.ceil(STOP_GRACE_SECONDS + SCHEDULER_KILL_MARGIN_SECONDS)
    api.submit(
        {
            "submission_id": work.name,
            "entrypoint": f"exec {shlex.join(driver)}",
            "runtime_env": {"env_vars": {STOP_WAIT: str(wait)}},
            "metadata": {"slipway": str(work.folder)},
        }
    )


def read_job(job: Mapping[str, Any], folder: Path | None) -> RayJob:
    """Return a job's state from Ray's document of it and what its driver wrote."""
    told = (child.read_json(folder / ray_driver.STATE) if folder else None) or {}
    name, state = str(job["submission_id"]), str(job["status"])
    where, detail = ", ".join(told.get("nodes", ())), str(told.get("detail", ""))
    if state == "PENDING":
        message = shortened(str(job.get("message") or ""), DETAIL_CHARACTERS)
        return RayJob(name, state, Phase.WAITING, message)
    if state == "RUNNING":
        is_placed = told.get("phase") == ray_driver.RUNNING
        phase = Phase.ACTIVE if is_placed else Phase.WAITING
        return RayJob(name, state, phase, detail, where)
    if lost := LOST_STATES.get(str(told.get("phase"))):
        return RayJob(name, lost, Phase.ENDED, nodes=where, end_words=detail)
    words = _why_failed(str(job.get("message") or "")) if state == "FAILED" else ""
    return RayJob(name, state, Phase.ENDED, nodes=where, end_words=words)


def _why_failed(message: str) -> str:
    r"""Return Ray's sentence of a failed job, with the last line of the driver's output.

    >>> _why_failed("Job entrypoint command failed with exit code 1, last available logs "
    ...     "(truncated to 20,000 chars):\nTraceback:\nImportError: no ray\n")
    'Job entrypoint command failed with exit code 1: ImportError: no ray'
    """
    first, *others = [each.strip() for each in lines_of(message) if each.strip()] or [""]
    last = shortened(others[-1], DETAIL_CHARACTERS) if others else ""
    words = shortened(first.partition(LOGS)[0], DETAIL_CHARACTERS)
    return f"{words}: {last}" if last else words


class RayLauncher(SchedulerLauncher):
    """Submits attempts to Ray and tracks them."""

    KIND = "ray"
    TICKET = "ray.json"
    REASONS = REASONS

    def __init__(self, config: RayConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(config, clock)
        self._config = config
        self._api = Api(config)
        self._folders: dict[str, Path] = {}

    def nodes_program(self, folder: Path, num_nodes: int, num_processes: int) -> list[str]:
        """Return the program of the first node, which the others meet."""
        return [ray_nodes.__name__, str(folder), str(num_nodes), str(num_processes)]

    def explain_kill(self) -> list[str]:
        """Return no program: while a job still ends, Ray says of none why."""
        return []

    def inherited(self, document: Mapping[str, Any]) -> Sequence[str]:  # noqa: ARG002 - interface
        """Return the variables of the bundle that the job gets."""
        return ray_nodes.OF_BUNDLE

    def refresh(self, folders: Sequence[AttemptFolder]) -> None:
        """Query Ray if due; what a job's driver says of it lies in the attempt's folder."""
        self._folders = {self.job_name(each): each.path for each in folders}
        super().refresh(folders)

    def list_jobs(self) -> Mapping[str, RayJob]:
        """Return our jobs by name, and let Ray forget those that ended a day ago."""
        jobs = [each for each in self._api.jobs() if each["submission_id"].startswith(PREFIX)]
        found = [read_job(each, self._folders.get(each["submission_id"])) for each in jobs]
        for job in jobs:
            self._forget_old(job)
        return {each.name: each for each in found}

    def _forget_old(self, job: Mapping[str, Any]) -> None:
        """Let Ray forget an old job; on failure it is asked again after the next list."""
        ended = job["end_time"]
        if ended and time.time() - ended / 1000 > KEPT_SECONDS:
            try:
                self._api.delete(job["submission_id"])
            except SchedulerError as error:  # also if another agent of this cluster was first
                log.info("Ray does not forget job %s: %s", job["submission_id"], error)

    def submit(self, folder: AttemptFolder) -> str:
        """Submit an attempt and return its job's id."""
        request, name = folder.request(), self.job_name(folder)
        nodes = max(1, len(request.devices)) if request and request.gang else 1
        command = [sys.executable, "-m", ray_nodes.__name__, str(folder.path)]
        work = Work(name, folder.path, command, command, nodes, restarts=nodes > 1)
        options = request.spec.scheduler_options if request else {}
        submit_work(self._api, work, self._config.with_options(options))
        return name

    def ended_job(self, job_id: str) -> RayJob | None:
        """Return a job that was not in the last list."""
        job = self._api.job(job_id)
        return read_job(job, self._folders.get(job_id)) if job else None

    def cancel_waiting(self, job_id: str) -> None:
        """Stop a job's driver, which gives its placement group back."""
        self._api.stop(job_id)

    def interrupt(self, job_id: str, grace_seconds: float) -> None:  # noqa: ARG002 - the folder has it
        """Stop a job's driver, which passes SIGTERM on to the supervisor."""
        self._api.stop(job_id)

    def kill(self, job_id: str) -> None:
        """Stop a job's driver again: Ray kills it when its time is over."""
        self._api.stop(job_id)


# The facts about its cluster that a host reports.


def scheduler_facts(config: RayConfig) -> SchedulerFacts:
    """Return the cluster's release and its kinds of nodes; on failure the problem."""
    api = Api(config)
    facts = SchedulerFacts(
        kind="ray",
        options=config.options,
        time_limit_minutes=config.time_limit_minutes,
        max_jobs=config.max_jobs,
        autoscaling=config.autoscaling,
    )
    try:
        release = api.version()
        api.jobs()  # whether it has the Jobs API, and takes our token
    except RayError as error:
        return facts.model_copy(update={"problem": str(error)})
    unread: list[str] = []
    nodes = read_or_note(unread, "nodes", api.nodes) or ()
    if config.autoscaling:
        unread.append(
            "nodes that the autoscaler may add: a launch may ask for more than there are"
        )
    found = {"version": release, "partitions": node_kinds(nodes, config)}
    return facts.model_copy(update={**found, "unread": tuple(unread)})


def node_kinds(
    nodes: Sequence[Mapping[str, Any]], config: RayConfig
) -> tuple[PartitionFacts, ...]:
    """Return the cluster's nodes, counted by accelerator, size and whether a job fits on one.

    The kinds on which a launch runs that names none are the default ones.
    """
    sizes: dict[PartitionFacts, list[int]] = {}  # each node's memory is a little different
    for node in nodes:
        resources = node["resources_total"]
        sizes.setdefault(_kind(resources, config), []).append(int(resources.get("memory", 0)))
    found = [
        kind.model_copy(update={"nodes": len(memory), "memory_mib": str(min(memory) // 2**20)})
        for kind, memory in sizes.items()
    ]
    return tuple(sorted(found, key=lambda fact: (fact.name, not fact.is_up))[:MAX_LISTED])


def _kind(resources: Mapping[str, float], config: RayConfig) -> PartitionFacts:
    types = sorted(name for name in resources if name.startswith(ACCELERATOR))
    fits = {name: size for name, size in config.bundle.items() if not name.startswith(ACCELERATOR)}
    has_room = all(resources.get(name, 0) >= size for name, size in fits.items())
    name = types[0].removeprefix(ACCELERATOR) if types else ""
    gpus = resources.get("GPU", 0)
    is_chosen = config.accelerator_type in (None, name)
    return PartitionFacts(
        name=name,
        is_up=has_room,
        time_limit="",
        nodes=1,
        cpus_per_node=f"{resources.get('CPU', 0):g}",
        gres=f"gpu:{gpus:g}" if gpus else "",
        is_default=has_room and is_chosen,
    )

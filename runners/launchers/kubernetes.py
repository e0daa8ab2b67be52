"""Launches attempts as Jobs of a Kubernetes cluster: the supervisor is the first pod's process.

How an attempt is tracked is the same for every scheduler (``runners.launchers.scheduler``). A
training that holds several of this host's slots runs as an Indexed Job, one pod for each node.
"""

import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from runners.launchers import kubernetes_nodes
from runners.launchers.attempts import AttemptFolder
from runners.launchers.kubernetes_api import Api, KubernetesError, KubernetesUnreachableError
from runners.launchers.kubernetes_objects import (
    APP,
    NO_POD,
    OF_JOB,
    OURS,
    REASONS,
    PodJob,
    Work,
    job_object,
    read_job,
)
from runners.launchers.other_jobs import as_facts, pods
from runners.launchers.scheduler import SchedulerLauncher, read_or_note
from runners.shared.facts import PartitionFacts, SchedulerFacts
from runners.shared.kubernetes import KubernetesConfig
from runners.shared.timing import SCHEDULER_KILL_MARGIN_SECONDS, STOP_GRACE_SECONDS
from runners.supervision import child, supervisor

MAX_LISTED = 256
# Labels that name what a node is, the most telling first.
KINDS = (
    "nvidia.com/gpu.product", "amd.com/gpu.product-name", "cloud.google.com/gke-accelerator",
    "node.kubernetes.io/instance-type",
)  # fmt: skip


class KubernetesLauncher(SchedulerLauncher):
    """Creates Jobs for attempts and tracks them."""

    KIND = "kubernetes"
    TICKET = "kubernetes.json"
    REASONS = REASONS

    def __init__(
        self, config: KubernetesConfig, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(config, clock)
        self._config = config
        self._api = Api(config)

    def nodes_program(self, folder: Path, num_nodes: int, num_processes: int) -> list[str]:
        """Return the program of the first pod, which the others meet."""
        return [kubernetes_nodes.__name__, str(folder), str(num_nodes), str(num_processes)]

    def inherited(self, document: Mapping[str, Any]) -> Sequence[str]:  # noqa: ARG002 - interface
        """Return the variables of the pod that the job gets."""
        return kubernetes_nodes.OF_POD

    @staticmethod
    def job_name(folder: AttemptFolder) -> str:
        """Return the name of an attempt's Job: names in Kubernetes have no capitals."""
        return SchedulerLauncher.job_name(folder).lower().replace("_", "-")

    def list_jobs(self) -> Mapping[str, PodJob]:
        """Return our Jobs by name."""
        labels = f"{APP}={OURS}"
        by_job: dict[str, list[dict[str, Any]]] = {}
        for pod in self._api.pods(labels):
            by_job.setdefault(pod["metadata"]["labels"].get(OF_JOB, ""), []).append(pod)
        jobs = {job["metadata"]["name"]: job for job in self._api.jobs(labels)}
        found = {name: read_job(job, by_job.get(name, ())) for name, job in jobs.items()}
        return {name: self._with_reason(job) for name, job in found.items()}

    def _with_reason(self, job: PodJob) -> PodJob:
        """Return a Job without a pod with the cluster's last word on it: a quota, a policy."""
        if job.detail != NO_POD:
            return job
        try:
            said = self._api.last_event(job.job_id)
        except KubernetesUnreachableError:
            raise
        except KubernetesError:  # the account may not read events
            said = ""
        return job._replace(detail=said or NO_POD)

    def submit(self, folder: AttemptFolder) -> str:
        """Create the Job of an attempt and return its name."""
        document = child.read_json(folder.path / child.LAUNCH) or {}
        request, name = folder.request(), self.job_name(folder)
        nodes = max(1, len(request.devices)) if request and request.gang else 1
        order = [str(folder.path), supervisor.STAY]
        command = [sys.executable, "-S", "-E", supervisor.__file__, *order]
        if nodes > 1:
            command = [sys.executable, "-m", kubernetes_nodes.__name__, str(folder.path)]
        work = Work(
            name,
            command,
            str(folder.path),
            60 * self.limit_minutes(document),
            math.ceil(STOP_GRACE_SECONDS + SCHEDULER_KILL_MARGIN_SECONDS),
            (os.getuid(), os.getgid()),
            folder.attempt_id,
            nodes,
        )
        options = request.spec.scheduler_options if request else {}
        self._api.create_job(job_object(work, self._config.with_options(options)))
        return name

    def ended_job(self, job_id: str) -> PodJob | None:
        """Return a Job that was not in the last list."""
        job = self._api.job(job_id)
        if job is None:
            return None
        return read_job(job, self._api.pods(f"{OF_JOB}={job_id}"))

    def cancel_waiting(self, job_id: str) -> None:
        """Delete a Job none of whose pods runs."""
        self._api.delete_job(job_id)

    def interrupt(self, job_id: str, grace_seconds: float) -> None:
        """Delete a Job: its supervisor gets SIGTERM, and this time.

        The pods come first: those that a Job's deletion ends get their usual grace.
        """
        seconds = math.ceil(grace_seconds + SCHEDULER_KILL_MARGIN_SECONDS)
        self._api.end_pods(f"{OF_JOB}={job_id}", seconds)
        self._api.delete_job(job_id)

    def kill(self, job_id: str) -> None:
        """Delete the pods of a Job at once."""
        self._api.end_pods(f"{OF_JOB}={job_id}", 0)


# The facts about its cluster that a host reports.


def scheduler_facts(config: KubernetesConfig) -> SchedulerFacts:
    """Return the cluster's release, kinds of nodes, queues and classes; on failure the problem."""
    api = Api(config)
    facts = SchedulerFacts(
        kind="kubernetes",
        options=config.options,
        time_limit_minutes=config.time_limit_minutes,
        max_jobs=config.max_jobs,
    )
    try:
        release = api.version()
        api.jobs(f"{APP}={OURS}")  # whether its account may do what a launch needs
    except KubernetesError as error:
        return facts.model_copy(update={"problem": str(error)})
    unread: list[str] = []
    nodes = read_or_note(unread, "nodes", api.nodes) or ()
    queues = read_or_note(unread, "queues of Kueue", api.local_queues) or ()
    classes = read_or_note(unread, "priority classes", api.priority_classes) or ()
    others = read_or_note(unread, "pods of others", lambda: api.pods(f"{APP}!={OURS}")) or ()
    found = {
        **as_facts(pods(others, config.gpu_resource, time.time())),
        "version": release,
        "partitions": node_kinds(nodes, config.gpu_resource),
        "queues": _names(each for each in queues if _takes_jobs(each)),
        "priority_classes": _names(each for each in classes if not _is_of_the_cluster(each)),
    }
    return facts.model_copy(update={**found, "unread": tuple(unread)})


def _names(objects: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    return tuple(sorted(str(each["metadata"]["name"]) for each in objects)[:MAX_LISTED])


def _is_of_the_cluster(priority_class: Mapping[str, Any]) -> bool:
    """Return whether a class is for the cluster's own pods; no other may have this prefix.

    https://kubernetes.io/docs/concepts/scheduling-eviction/pod-priority-preemption/#priorityclass
    """
    return str(priority_class["metadata"]["name"]).startswith("system-")


def _takes_jobs(queue: Mapping[str, Any]) -> bool:
    """Return whether a LocalQueue is not known as stopped, or without a queue that backs it."""
    conditions = (queue.get("status") or {}).get("conditions") or ()
    return not any(each["type"] == "Active" and each["status"] == "False" for each in conditions)


def node_kinds(nodes: Sequence[Mapping[str, Any]], resource: str) -> tuple[PartitionFacts, ...]:
    """Return the cluster's nodes, counted by kind, capacity and whether they take pods."""
    counted = Counter(_kind(node, resource) for node in nodes)
    found = [fact.model_copy(update={"nodes": number}) for fact, number in counted.items()]
    return tuple(sorted(found, key=lambda fact: fact.name)[:MAX_LISTED])


def _kind(node: Mapping[str, Any], resource: str) -> PartitionFacts:
    labels, status = node["metadata"].get("labels") or {}, node.get("status") or {}
    capacity = status.get("allocatable") or {}
    ready = any(
        each["type"] == "Ready" and each["status"] == "True"
        for each in status.get("conditions") or ()
    )
    gpus = str(capacity.get(resource, "0"))
    return PartitionFacts(
        name=next((labels[key] for key in KINDS if key in labels), "nodes"),
        is_up=ready and not (node.get("spec") or {}).get("unschedulable"),
        time_limit="",
        nodes=1,
        cpus_per_node=str(capacity.get("cpu", "")),
        memory_mib=mebibytes(str(capacity.get("memory", ""))),
        gres="" if gpus == "0" else f"{resource}:{gpus}",
    )


def mebibytes(quantity: str) -> str:
    """Return a quantity of memory in MiB, or "" if it has another form.

    >>> mebibytes("515940152Ki"), mebibytes("64Gi"), mebibytes("1073741824"), mebibytes("?")
    ('503847', '65536', '1024', '')
    """
    units = {
        "Ki": 2**10,
        "Mi": 2**20,
        "Gi": 2**30,
        "Ti": 2**40,
        "k": 10**3,
        "M": 10**6,
        "G": 10**9,
    }
    unit = next((each for each in units if quantity.endswith(each)), "")
    number = quantity.removesuffix(unit)
    return str(int(number) * units.get(unit, 1) // 2**20) if number.isdigit() else ""

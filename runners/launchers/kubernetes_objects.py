"""The Kubernetes objects of our jobs, as dictionaries, and what the cluster says of them.

One attempt is one Job. Its pods mount the volume that holds the host's folder, at the same path,
so that the supervisor writes the attempt's folder as it does on a machine. A training over
several nodes is an Indexed Job with one pod for each node.

Fields: https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/job-v1/ and
.../pod-v1/; Kueue's label: https://kueue.sigs.k8s.io/docs/tasks/run/jobs/.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from runners.launchers.kubernetes_api import KUEUE
from runners.launchers.kubernetes_nodes import ADDRESS
from runners.launchers.scheduler import Phase
from runners.shared.kubernetes import KubernetesConfig
from runners.shared.log_text import shortened
from runners.shared.reasons import Reason

APP = "app.kubernetes.io/managed-by"
OURS = "slipway"
ATTEMPT = "slipway/attempt"
OF_JOB = "job-name"  # of a Job's pods, set by Kubernetes
QUEUE = f"{KUEUE}/queue-name"  # Kueue suspends a Job with it until its quota admits it
VOLUME, SHM = "slipway", "shm"
SHM_PATH = "/dev/shm"  # noqa: S108 - the pod's own
KEPT_SECONDS = 24 * 60 * 60  # an ended Job stays so long, for its reason
DETAIL_CHARACTERS = 300
NO_POD = "no pod yet"
# Reasons of a Job, a pod or a container that ended by itself.
REASONS = {
    "DeadlineExceeded": Reason.MAX_DURATION,
    "OOMKilled": Reason.OOM_HOST,
    "NodeLost": Reason.HOST_REBOOTED,
    "DeletionByTaintManager": Reason.HOST_REBOOTED,
    "DeletionByPodGC": Reason.HOST_REBOOTED,
    "TerminationByKubelet": Reason.HOST_REBOOTED,
    "Evicted": Reason.KILLED_EXTERNALLY,
    "EvictionByEvictionAPI": Reason.KILLED_EXTERNALLY,
    "PreemptionByScheduler": Reason.KILLED_EXTERNALLY,
    "Deleted": Reason.KILLED_EXTERNALLY,
}


class PodJob(NamedTuple):
    """One Job as the cluster reports it."""

    job_id: str  # the Job's name: its uid is no argument of any request
    state: str
    phase: Phase
    detail: str = ""
    nodes: str = ""
    end_words: str = ""  # what the cluster says of the end of its pod

    @property
    def name(self) -> str:
        """Return the name that we gave it."""
        return self.job_id


class Work(NamedTuple):
    """What one Job is to do."""

    name: str  # of the Job, at most 63 characters
    command: Sequence[str]  # of every pod
    folder: str  # where it runs, on the volume
    limit_seconds: int  # from a pod's start, after which Kubernetes ends it
    grace_seconds: int  # from SIGTERM until it kills a pod
    user: tuple[int, int]  # user and group id of the agent, who owns the folder
    attempt_id: str = ""  # "": no attempt's
    nodes: int = 1  # pods, each on a node of its own

    @property
    def labels(self) -> dict[str, str]:
        """Return the labels by which the launcher finds an attempt's Job and pods."""
        return {APP: OURS, ATTEMPT: self.attempt_id} if self.attempt_id else {}


def job_object(work: Work, config: KubernetesConfig) -> dict[str, Any]:
    """Return a Job, which runs once: retries are the server's decision."""
    spec: dict[str, Any] = {
        "backoffLimit": 0,
        "ttlSecondsAfterFinished": KEPT_SECONDS,
        "template": {"metadata": {"labels": work.labels}, "spec": _pod(work, config)},
    }
    if work.nodes > 1:
        spec |= {"completionMode": "Indexed", "completions": work.nodes, "parallelism": work.nodes}
    if config.queue:
        spec["suspend"] = True
    queue = {QUEUE: config.queue} if config.queue else {}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": work.name, "labels": work.labels | queue},
        "spec": spec,
    }


def _pod(work: Work, config: KubernetesConfig) -> dict[str, Any]:
    user, group = work.user
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        # The pod's, which counts from its start: the Job's would count its wait for a node, too.
        "activeDeadlineSeconds": work.limit_seconds,
        "terminationGracePeriodSeconds": work.grace_seconds,
        "automountServiceAccountToken": False,
        "shareProcessNamespace": True,  # the pause container reaps what a job leaves
        "securityContext": {
            "runAsUser": user,
            "runAsGroup": group,
            "fsGroup": group,
            "fsGroupChangePolicy": "OnRootMismatch",
            "runAsNonRoot": user != 0,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(work, config)],
        "volumes": [
            {"name": VOLUME, "persistentVolumeClaim": {"claimName": config.volume_claim}},
            {"name": SHM, "emptyDir": {"medium": "Memory"}},  # of 64 MiB, NCCL and vLLM fail
        ],
    }
    if work.nodes > 1:
        own = {"labelSelector": {"matchLabels": {ATTEMPT: work.attempt_id}}}
        apart = [own | {"topologyKey": "kubernetes.io/hostname"}]
        pod["affinity"] = {
            "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": apart}
        }
    chosen = {
        "nodeSelector": dict(config.node_selector),
        "tolerations": [{"key": key, "operator": "Exists"} for key in sorted(config.tolerations)],
        "priorityClassName": config.priority_class,
        "runtimeClassName": config.runtime_class,
        "serviceAccountName": config.service_account,
        "imagePullSecrets": [{"name": config.image_pull_secret}]
        if config.image_pull_secret
        else [],
    }
    return pod | {name: value for name, value in chosen.items() if value}


def _container(work: Work, config: KubernetesConfig) -> dict[str, Any]:
    limits = {config.gpu_resource: str(config.gpus)} if config.gpus else {}
    if config.cpus:
        limits["cpu"] = str(config.cpus)
    if config.memory:
        limits["memory"] = config.memory
    return {
        "name": OURS,
        "image": config.image,
        "command": list(work.command),
        "workingDir": work.folder,
        "env": [
            {"name": "OMP_NUM_THREADS", "value": str(config.cpus or 1)},
            {"name": ADDRESS, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        ],
        "resources": {"limits": limits, "requests": dict(limits)},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": VOLUME, "mountPath": str(config.mount_path)},
            {"name": SHM, "mountPath": SHM_PATH},
        ],
    }


# What the cluster says of a Job and its pods.


def read_job(job: Mapping[str, Any], pods: Sequence[Mapping[str, Any]]) -> PodJob:
    """Return a Job's state from the API's objects of it and of its pods."""
    metadata, status = job["metadata"], job.get("status") or {}
    nodes = sorted({pod["spec"]["nodeName"] for pod in pods if pod["spec"].get("nodeName")})
    where = ", ".join(nodes)
    said = next(
        (words for tell in (_end_words, _deletion) for words in map(tell, pods) if words), ""
    )
    state = _ended(metadata, status, pods)
    if state:
        return PodJob(metadata["name"], state, Phase.ENDED, nodes=where, end_words=said)
    if any(_phase(pod) in {"Running", "Failed", "Succeeded"} for pod in pods):
        return PodJob(metadata["name"], "Running", Phase.ACTIVE, nodes=where, end_words=said)
    words = shortened(waits_for(job, pods), DETAIL_CHARACTERS)
    return PodJob(metadata["name"], "Pending", Phase.WAITING, words, where)


def _phase(pod: Mapping[str, Any]) -> str:
    return str((pod.get("status") or {}).get("phase") or "Pending")


def _conditions(status: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the conditions that hold, by type."""
    found = status.get("conditions") or ()
    return {each["type"]: each for each in found if each.get("status") == "True"}


def _ended(
    metadata: Mapping[str, Any], status: Mapping[str, Any], pods: Sequence[Mapping[str, Any]]
) -> str:
    """Return why a Job has ended, or "" while it has not: a pod's reason says most."""
    alive = any(_phase(pod) in {"Pending", "Running", "Unknown"} for pod in pods)
    conditions = _conditions(status)
    if metadata.get("deletionTimestamp"):
        return "" if alive else "Deleted"
    if "Complete" in conditions:
        return "Complete"
    failed = conditions.get("Failed") or conditions.get("FailureTarget")
    if failed is None or alive:
        return ""
    own = str(failed.get("reason") or "Failed")
    return own if own in REASONS else next(filter(None, map(_pod_reason, pods)), own)


def _pod_reason(pod: Mapping[str, Any]) -> str:
    """Return the reason of a pod's end that is one of ``REASONS``, or ""."""
    status = pod.get("status") or {}
    disrupted = _conditions(status).get("DisruptionTarget") or {}
    states = [each.get("state") or {} for each in status.get("containerStatuses") or ()]
    ended = [str((each.get("terminated") or {}).get("reason") or "") for each in states]
    named = [str(status.get("reason") or ""), str(disrupted.get("reason") or ""), *ended]
    return next((each for each in named if each in REASONS), "")


def _end_words(pod: Mapping[str, Any]) -> str:
    """Return why the cluster ends or ended a pod, or "" if it says nothing of it.

    ``DisruptionTarget`` is set before the pod's processes get SIGTERM:
    https://kubernetes.io/docs/concepts/workloads/pods/disruptions/#pod-disruption-conditions
    """
    status = pod.get("status") or {}
    disrupted = _conditions(status).get("DisruptionTarget")
    for each in filter(None, (disrupted, status)):
        if reason := str(each.get("reason") or ""):
            message = f": {each['message']}" if each.get("message") else ""
            return shortened(f"{_place(pod)}: {reason}{message}", DETAIL_CHARACTERS)
    for container in status.get("containerStatuses") or ():
        ended = (container.get("state") or {}).get("terminated") or {}
        if (reason := str(ended.get("reason") or "")) in REASONS:
            return f"{_place(pod)}: {reason}"
    return ""


def _deletion(pod: Mapping[str, Any]) -> str:
    """Return that a pod was deleted, by whomever: with its Job, or by a person."""
    is_deleted = (pod.get("metadata") or {}).get("deletionTimestamp")
    return f"{_place(pod)}: deleted" if is_deleted else ""


def _place(pod: Mapping[str, Any]) -> str:
    name = (pod.get("metadata") or {}).get("name", "")
    return f"pod {name} on {pod['spec'].get('nodeName') or 'no node'}"


def waits_for(job: Mapping[str, Any], pods: Sequence[Mapping[str, Any]]) -> str:
    """Return why no pod of a Job runs yet, in the cluster's words."""
    if (job.get("spec") or {}).get("suspend"):
        return "suspended until its queue admits it"
    for pod in pods:
        status = pod.get("status") or {}
        for each in status.get("containerStatuses") or ():
            waiting = (each.get("state") or {}).get("waiting") or {}
            if waiting:
                reason, message = waiting.get("reason") or "", waiting.get("message") or ""
                return f"{reason}: {message}" if message else str(reason)
        for each in status.get("conditions") or ():
            if each.get("type") == "PodScheduled" and each.get("status") == "False":
                return str(each.get("message") or each.get("reason") or "")
    return NO_POD if not pods else "its pod starts"

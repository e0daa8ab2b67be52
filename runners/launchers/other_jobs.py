"""Reads the jobs of a scheduler that Slipway did not submit, as facts; it never changes one."""

from collections.abc import Iterable, Mapping
from datetime import datetime
from heapq import nsmallest
from typing import Any

from runners.launchers.kubernetes_objects import waits_for
from runners.launchers.scheduler import PREFIX
from runners.launchers.slurm_arrays import bounds_of
from runners.launchers.slurm_commands import plain, plain_number, state_of
from runners.launchers.slurm_end import ENDED
from runners.shared.facts import MOST_OTHER_JOBS, OtherJobFacts

TASKS_CHARACTERS = 40  # of an array's tasks, shown
RUNNING = frozenset({"RUNNING", "Running"})


def as_facts(found: Iterable[OtherJobFacts]) -> dict[str, object]:
    """Return the fields of ``SchedulerFacts`` of others' jobs: those that run first."""
    jobs = sorted(found, key=lambda each: (each.state not in RUNNING, each.job_id))
    return {"other_jobs": tuple(jobs[:MOST_OTHER_JOBS]), "num_other_jobs": len(jobs)}


# Slurm


def slurm_jobs(document: Mapping[str, Any], now: float) -> dict[str, object]:
    """Return the fields of ``SchedulerFacts`` of the jobs of ``squeue --json``.

    Those that run come first; those that ended and ours are left out. The waiting tasks of an
    array are one job there, as in the document, and each counts. ``now`` is in seconds since 1970,
    as the times of the document; limits there are in minutes.
    """
    others = [
        job
        for job in document.get("jobs", ())
        if not str(job.get("name") or "").startswith(PREFIX)
        and state_of(job.get("job_state")) not in ENDED
    ]
    first = nsmallest(MOST_OTHER_JOBS, others, key=_slurm_order)
    return {
        "other_jobs": tuple(slurm_facts_of(job, now) for job in first),
        "num_other_jobs": sum(map(_num_tasks, others)),
    }


def _slurm_order(job: Mapping[str, Any]) -> tuple[bool, str]:
    return state_of(job.get("job_state")) not in RUNNING, _slurm_id(job)


def _slurm_id(job: Mapping[str, Any]) -> str:
    """Return a job's id as squeue prints it: of an array ``17_3``, or ``17_[0-99]``."""
    array, own = plain_number(job.get("array_job_id")), plain_number(job.get("array_task_id"))
    if not array:
        return str(plain_number(job.get("job_id")))
    if waiting := str(job.get("array_task_string") or ""):
        cut = "..." if len(waiting) > TASKS_CHARACTERS else ""
        return f"{array}_[{waiting[:TASKS_CHARACTERS]}{cut}]"
    return f"{array}_{own}"


def _num_tasks(job: Mapping[str, Any]) -> int:
    tasks = bounds_of(str(job.get("array_task_string") or ""))
    return sum(len(range(first, last + 1, step)) for first, last, step in tasks) or 1


def slurm_facts_of(job: Mapping[str, Any], now: float) -> OtherJobFacts:
    """Return the facts of one job of ``squeue --json``."""
    state = state_of(job.get("job_state"))
    started = whole(job.get("start_time")) if state in RUNNING else None
    limit = whole(job.get("time_limit"))
    nodes = whole(job.get("node_count"))
    return OtherJobFacts(
        job_id=_slurm_id(job),
        name=str(job.get("name") or ""),
        user=str(job.get("user_name") or ""),
        state=state,
        detail="" if state in RUNNING else plain(str(job.get("state_reason") or "")),
        place=str(job.get("partition") or ""),
        nodes=str(job.get("nodes") or ""),
        num_nodes=nodes,
        devices=gpus_of_tres(str(job.get("tres_alloc_str") or job.get("tres_req_str") or "")),
        elapsed_seconds=max(0, int(now) - started) if started else None,
        time_limit_seconds=60 * limit if limit else None,
    )


def gpus_of_tres(text: str) -> int | None:
    """Return the GPUs of Slurm's trackable resources, None if they are not told.

    A type may be counted beside the sum: https://slurm.schedmd.com/tres.html

    >>> gpus_of_tres("cpu=4,mem=1G,node=1,billing=4,gres/gpu=8,gres/gpu:h100=8"), gpus_of_tres("")
    (8, None)
    >>> gpus_of_tres("cpu=1,gres/gpu:h100=2,gres/gpu:l4=1"), gpus_of_tres("cpu=1,node=1")
    (3, 0)
    """
    pairs = [each.partition("=")[::2] for each in text.split(",") if each]
    counts = {name: int(number) for name, number in pairs if number.isdigit()}
    typed = sum(number for name, number in counts.items() if name.startswith("gres/gpu:"))
    return counts.get("gres/gpu", typed) if counts else None


def whole(value: object) -> int | None:
    """Return a whole number of Slurm's JSON, None if it is not set or has no end."""
    if isinstance(value, dict) and (value.get("infinite") or not value.get("set", True)):
        return None
    number = plain_number(value)
    return int(number) if isinstance(number, int | float) and number >= 0 else None


# Kubernetes


def pods(found: Iterable[Mapping[str, Any]], resource: str, now: float) -> list[OtherJobFacts]:
    """Return the pods of a namespace that have not ended; ``resource`` is that of its GPUs."""
    return [
        pod_facts(each, resource, now) for each in found if _phase(each) in {"Pending", "Running"}
    ]


def _phase(pod: Mapping[str, Any]) -> str:
    return str((pod.get("status") or {}).get("phase") or "Pending")


def pod_facts(pod: Mapping[str, Any], resource: str, now: float) -> OtherJobFacts:
    """Return the facts of one pod."""
    metadata, spec, status = pod["metadata"], pod["spec"], pod.get("status") or {}
    owner: Mapping[str, Any] = next(iter(metadata.get("ownerReferences") or ()), {})
    asked = [
        ((each.get("resources") or {}).get("limits") or {}).get(resource, "0")
        for each in spec.get("containers") or ()
    ]
    began = str(status.get("startTime") or "")
    started = datetime.fromisoformat(began).timestamp() if began else None
    is_running = _phase(pod) in RUNNING
    return OtherJobFacts(
        job_id=metadata["name"],
        user=f"{owner['kind']}/{owner['name']}" if owner else "",
        state=_phase(pod),
        detail="" if is_running else waits_for({}, [pod]),
        place=str(metadata.get("namespace") or ""),
        nodes=str(spec.get("nodeName") or ""),
        num_nodes=1 if spec.get("nodeName") else 0,
        devices=sum(int(each) for each in asked if str(each).isdigit()),
        elapsed_seconds=max(0, int(now - started)) if started and is_running else None,
        time_limit_seconds=spec.get("activeDeadlineSeconds"),
    )

"""Reads one job that somebody else gave to the scheduler, by its id; it never changes one.

Slurm: ``squeue --json`` has what a job is and, for some minutes, how it ended; then
accounting has. Kubernetes: the pod, and its log. Of a job with several nodes, the first is where
its batch script runs.
"""

import re
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from runners.launchers import slurm_commands
from runners.launchers.job_logs import (
    LogUnreadableError,
    addresses_of,
    figures_of,
    last_lines,
    read_tail,
)
from runners.launchers.kubernetes_api import NOT_FOUND, Api, KubernetesError
from runners.launchers.kubernetes_objects import APP, OURS
from runners.launchers.other_jobs import pod_facts, slurm_facts_of, whole
from runners.launchers.scheduler import PREFIX
from runners.launchers.slurm_commands import plain_number
from runners.launchers.slurm_end import ENDED
from runners.shared.facts import OtherJobFacts
from runners.shared.kubernetes import KubernetesConfig
from runners.shared.observed import MOST_LINES, ObservedJobReport
from runners.shared.slurm import SlurmConfig

OWN = "this is a job of Slipway's own: its page is under Jobs"
_JOB_ID = re.compile(r"[0-9]{1,18}(_[0-9]{1,18})?\Z")
_POD_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?\Z")
_PATTERN = re.compile(r"%([0-9]*)([%AajJuxN])")
_FIRST_NODE = re.compile(r"[^,\[]+(?:\[([0-9]+))?")


def unknown(job_id: str, problem: str) -> ObservedJobReport:
    """Return the report of a job of which the scheduler says nothing."""
    return ObservedJobReport(job_id=job_id, problem=problem)


# Slurm


def observe_slurm(_config: SlurmConfig, job_ids: Sequence[str]) -> list[ObservedJobReport]:
    """Return what Slurm says of jobs, of an array of a task such as 17_3.

    Raises:
        SchedulerError: Slurm does not answer, or not in JSON.
    """
    asked = [each for each in job_ids if _JOB_ID.match(each)]
    found = {_slurm_id(job): job for job in _slurm_jobs(asked)} if asked else {}
    now = time.time()
    return [
        _slurm_report(job_id, found[job_id], now) if job_id in found else _slurm_ended(job_id)
        for job_id in job_ids
    ]


def _slurm_jobs(job_ids: Sequence[str]) -> list[Mapping[str, Any]]:
    """Return the jobs of ``squeue --json`` that it still has; releases before 23.02 list all.

    Raises:
        SchedulerError: there is no answer, or this release has no JSON.
    """
    try:
        return slurm_commands.jobs_in_json(job_ids)
    except slurm_commands.SlurmUnreachableError:
        raise
    except slurm_commands.SlurmError as error:
        if "invalid job id" in str(error).lower():  # it no longer has any of them
            return []
        raise


def _slurm_id(job: Mapping[str, Any]) -> str:
    array, task = plain_number(job.get("array_job_id")), _set(job.get("array_task_id"))
    return f"{array}_{task}" if array and task is not None else str(plain_number(job["job_id"]))


def _set(value: object) -> object:
    is_unset = isinstance(value, Mapping) and not value.get("set", True)
    return None if is_unset else plain_number(value)


def _slurm_ended(job_id: str) -> ObservedJobReport:
    """Return how a job ended that squeue no longer has, by Slurm's accounting."""
    if not _JOB_ID.match(job_id):
        return unknown(job_id, f"{job_id[:40]!r} is no id of a Slurm job, such as 17 or 17_3")
    job = slurm_commands.ended_job(job_id)
    if job is None:
        return unknown(job_id, f"Slurm has no job {job_id}, or no longer")
    if job.name.startswith(PREFIX):
        return unknown(job_id, OWN)
    code, _, number = job.detail.partition(":")
    has_ended = job.state in ENDED
    return ObservedJobReport(
        job_id=job_id,
        facts=OtherJobFacts(job_id=job_id, name=job.name, state=job.state, nodes=job.nodes),
        has_ended=has_ended,
        exit_code=int(code) if has_ended and code.isdigit() else None,
        signal=int(number) or None if has_ended and number.isdigit() else None,
    )


def _slurm_report(job_id: str, job: Mapping[str, Any], now: float) -> ObservedJobReport:
    if str(job.get("name") or "").startswith(PREFIX):
        return unknown(job_id, OWN)
    facts = slurm_facts_of(job, now).model_copy(update={"job_id": job_id})
    has_ended = facts.state in ENDED
    started, ended = whole(job.get("start_time")), whole(job.get("end_time"))
    code, number = _slurm_exit(job.get("exit_code")) if has_ended else (None, None)
    path = _output_path(job)
    log: Sequence[str] = ()
    problem = "" if path else "Slurm does not say where its output is"
    if path and (facts.elapsed_seconds is not None or has_ended):
        try:
            log = read_tail(path, whole(job.get("user_id")))
        except LogUnreadableError as error:
            problem = str(error)
    if has_ended and started and ended:
        facts = facts.model_copy(update={"elapsed_seconds": max(0, ended - started)})
    return ObservedJobReport(
        job_id=job_id,
        facts=facts,
        has_ended=has_ended,
        started_at_ms=1000 * started if started and facts.elapsed_seconds is not None else None,
        ended_at_ms=1000 * ended if ended and has_ended else None,
        exit_code=code,
        signal=number,
        log_path=path,
        log=tuple(log),
        log_problem=problem,
        figures=figures_of(log),
        addresses=addresses_of(log, "" if has_ended else _first_node(facts.nodes)),
    )


def _slurm_exit(value: object) -> tuple[int | None, int | None]:
    """Return the exit code and the signal: a status of wait in 22.05, an object from 23.02 on.

    >>> _slurm_exit(256), _slurm_exit(9)
    ((1, None), (0, 9))
    >>> _slurm_exit({"return_code": {"set": True, "number": 3}, "signal": {"id": {"number": 0}}})
    (3, None)
    """
    if isinstance(value, Mapping):
        signal = value.get("signal") or {}
        number = whole(signal.get("id", signal.get("signal_id")))
        return whole(value.get("return_code")), number or None
    status = whole(value)
    return (None, None) if status is None else (status >> 8 & 0xFF, status & 0x7F or None)


def _output_path(job: Mapping[str, Any]) -> str:
    """Return the path of a job's output, with sbatch's patterns filled in.

    https://slurm.schedmd.com/sbatch.html#SECTION_%3CB%3Efilename-pattern%3C/B%3E

    >>> _output_path({"job_id": 7, "name": "a", "standard_output": "/x/%x-%5j.out"})
    '/x/a-00007.out'
    """
    text = str(job.get("stdout_expanded") or job.get("standard_output") or "")
    number = str(plain_number(job.get("job_id")))
    values = {
        "%": "%", "j": number, "J": number, "N": _first_node(str(job.get("nodes") or "")),
        "A": str(plain_number(job.get("array_job_id")) or number),
        "a": str(_set(job.get("array_task_id")) or 0),
        "u": str(job.get("user_name") or ""), "x": str(job.get("name") or ""),
    }  # fmt: skip
    path = _PATTERN.sub(lambda at: values[at[2]].rjust(int(at[1] or 0) % 11, "0"), text)
    folder = str(job.get("current_working_directory") or "")
    return path if not path or path.startswith("/") or not folder else f"{folder}/{path}"


def _first_node(nodes: str) -> str:
    """Return the first machine of Slurm's list.

    >>> _first_node("n[1-2],m3"), _first_node("vm"), _first_node("")
    ('n1', 'vm', '')
    """
    found = _FIRST_NODE.match(nodes)
    return "" if found is None else found[0].replace("[", "")


# Kubernetes


def observe_pods(config: KubernetesConfig, names: Sequence[str]) -> list[ObservedJobReport]:
    """Return what the cluster says of pods of the host's namespace.

    Raises:
        SchedulerError: the cluster does not answer.
    """
    api = Api(config)
    return [_pod_report(api, name, config.gpu_resource) for name in names]


def _pod_report(api: Api, name: str, resource: str) -> ObservedJobReport:
    if not _POD_NAME.match(name):
        return unknown(name, f"{name[:40]!r} is no name of a pod")
    try:
        pod = api.pod(name)
    except KubernetesError as error:
        if error.status == NOT_FOUND:
            return unknown(name, f"the namespace has no pod {name}, or no longer")
        if error.status:
            return unknown(name, f"the account may not read the pod: {error}")
        raise
    if (pod["metadata"].get("labels") or {}).get(APP) == OURS:
        return unknown(name, OWN)
    status = pod.get("status") or {}
    facts = pod_facts(pod, resource, time.time())
    has_ended = facts.state in {"Succeeded", "Failed"}
    ends = [
        (each.get("state") or {}).get("terminated") or {}
        for each in status.get("containerStatuses") or ()
    ]
    worst = max(ends, key=lambda each: bool(each.get("exitCode")), default={})
    ended = max((str(each.get("finishedAt") or "") for each in ends), default="")
    log, problem = _pod_log(api, name, pod)
    started_ms, ended_ms = _instant_ms(status.get("startTime")), _instant_ms(ended)
    if has_ended:
        spent = (ended_ms - started_ms) // 1000 if started_ms and ended_ms else None
        update = {"elapsed_seconds": spent, "detail": str(worst.get("reason") or "")}
        facts = facts.model_copy(update=update)
    machine = "" if has_ended else str(status.get("podIP") or "")
    return ObservedJobReport(
        job_id=name,
        facts=facts,
        has_ended=has_ended,
        started_at_ms=started_ms,
        ended_at_ms=ended_ms if has_ended else None,
        exit_code=worst.get("exitCode") if has_ended else None,
        signal=worst.get("signal") or None if has_ended else None,
        log=log,
        log_problem=problem,
        figures=figures_of(log),
        addresses=addresses_of(log, machine),
    )


def _pod_log(api: Api, name: str, pod: Mapping[str, Any]) -> tuple[tuple[str, ...], str]:
    """Return the last lines of a pod's first container, or none and why."""
    first: Mapping[str, Any] = next(iter(pod["spec"].get("containers") or ()), {})
    try:
        return last_lines(api.pod_log(name, str(first.get("name") or ""), MOST_LINES)), ""
    except KubernetesError as error:
        return (), str(error)


def _instant_ms(text: object) -> int | None:
    """Return an instant of the API in ms since 1970."""
    return int(1000 * datetime.fromisoformat(str(text)).timestamp()) if text else None

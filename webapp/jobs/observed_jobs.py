"""Jobs that somebody else gave to a host's scheduler, read by their ids: operators name them.

The host of a job is told its id with every heartbeat, until the job's end is known here, and
reports what the scheduler and the job's log say (``runners.host.observed_jobs``). Nothing here or
on the host changes such a job: there is no order that could.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence

from django.contrib.auth.models import User
from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.http import HttpRequest

from runners.shared.observed import MOST_OBSERVED, ObservedJobReport
from webapp.accounts.models import Role
from webapp.accounts.services import has_role, visible_or_404
from webapp.audit.models import event_record
from webapp.core.clock import now
from webapp.core.problems import ConflictProblem, InvalidProblem, NotFoundProblem
from webapp.hosts.models import Host
from webapp.jobs.models import MOST_JOB_ID, ObservedJob
from webapp.plans.models import Plan, PlanState

OBSERVED_ON = ("slurm", "kubernetes")  # kinds of hosts
MOST_OF_HOST = 200  # with those that ended


def _invalid(field: str, message: str) -> InvalidProblem:
    return InvalidProblem(field, message, errors=[{"field": field, "message": message}])


def _checked_id(job_id: str) -> str:
    given = job_id.strip()
    if not given or len(given) > MOST_JOB_ID or not given.isascii() or not given.isprintable():
        raise _invalid(
            "job_id",
            f"{given[:40]!r} is no id of a job. Give the scheduler's own: 17 or 17_3 of Slurm, a "
            "pod's name of Kubernetes.",
        )
    if "[" in given:
        raise _invalid(
            "job_id",
            f"{given[:40]} are several tasks of an array. Give one of them, such as 17_3.",
        )
    return given


def job_observe(*, host: Host, by: User, job_id: str, plan: Plan | None) -> ObservedJob:
    """Observe a job of a host's scheduler from now on; named again, it gets that plan.

    Raises:
        InvalidProblem: the host has no such jobs, the id is none, or the plan is not the team's.
        ConflictProblem: the host is asked for too many already.
    """
    if host.kind not in OBSERVED_ON:
        raise _invalid(
            "host",
            f"{host.name} hands its jobs to no Slurm and no Kubernetes. A server that runs there "
            "is watched by its address.",
        )
    if plan is not None and (plan.team_id != host.team_id or plan.deleted_at is not None):
        raise _invalid("plan", "Your team has no such plan.")
    if plan is not None and plan.state != PlanState.COMPUTED:
        raise _invalid("plan", "Name a saved plan: a draft may still change.")
    named = _checked_id(job_id)
    with transaction.atomic():
        Host.objects.select_for_update(no_key=True).only("pk").get(pk=host.pk)
        rows = ObservedJob.objects.filter(host=host)
        found = rows.filter(job_id=named).first()
        if found is None:
            _check_room(host, rows.count(), rows.filter(has_ended=False).count())
            found = ObservedJob.objects.create(
                team=host.team, host=host, owner=by, job_id=named, plan=plan
            )
            kind = "observed.added"
        elif found.plan_id == (plan.pk if plan else None):
            return found
        else:
            found.plan = plan
            found.save(update_fields=["plan"])
            kind = "observed.changed"
        detail = {"host": host.slug, "job": named, "plan": plan.pk if plan else ""}
        event_record(found, kind, by.get_username(), detail=detail)
    return found


def _check_room(host: Host, num_rows: int, num_open: int) -> None:
    if num_open >= MOST_OBSERVED or num_rows >= MOST_OF_HOST:
        raise ConflictProblem(
            "too_many",
            f"{host.name} is asked for {num_open} jobs of others, and {num_rows} are kept with "
            f"those that ended; {MOST_OBSERVED} and {MOST_OF_HOST} are the most. Remove one.",
        )


def job_forget(*, job: ObservedJob, by: User) -> None:
    """Observe a job no longer, and delete what was read of it; the job itself runs on.

    Raises:
        NotFoundProblem: another call has removed it.
    """
    with transaction.atomic():
        deleted, _ = ObservedJob.objects.filter(pk=job.pk).delete()
        if not deleted:
            raise NotFoundProblem("gone", f"{job} is removed already.")
        detail = {"host": job.host.slug, "job": job.job_id}
        event_record(job, "observed.removed", by.get_username(), detail=detail)


def visible_job(request: HttpRequest, observed_id: str) -> ObservedJob:
    """Return an observed job of the person's teams, else raise Http404."""
    return visible_or_404(ObservedJob, request.user, pk=observed_id)


def job_for_operator(request: HttpRequest, observed_id: str) -> ObservedJob:
    """Return an observed job for one of its team's operators.

    Raises:
        PermissionDenied: the person is not an operator.
    """
    row = visible_job(request, observed_id)
    if not has_role(request.user, row.team, Role.OPERATOR):
        raise PermissionDenied(
            "Only operators change observed jobs. An admin of your team can give you the role."
        )
    return row


def orders_of(host_ids: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Return, by host, the jobs whose end is not known yet."""
    rows = ObservedJob.objects.filter(host__in=host_ids, has_ended=False)
    found = defaultdict(list)
    for host_id, job_id in rows.order_by("created_at", "pk").values_list("host", "job_id"):
        found[host_id].append(job_id)
    return {host_id: tuple(job_ids[:MOST_OBSERVED]) for host_id, job_ids in found.items()}


def reports_store(host: Host, reports: Sequence[ObservedJobReport]) -> None:
    """Store what a host reports of jobs that it was asked for; others are left out.

    A job that the scheduler forgot keeps what was known of it, with the reason.
    """
    by_id = {each.job_id: each for each in reports}
    for row in ObservedJob.objects.filter(host=host, job_id__in=by_id, has_ended=False):
        new = by_id[row.job_id]
        told = new.model_dump(mode="json")
        if new.facts is None and row.report:
            told = {**row.report, "problem": new.problem, "addresses": []}
        ObservedJob.objects.filter(pk=row.pk).update(
            report=told, reported_at=now(), has_ended=new.has_ended
        )


def report_of(job: ObservedJob) -> ObservedJobReport:
    """Return what is known of a job; an empty report before the first one."""
    return ObservedJobReport.model_validate(job.report or {"job_id": job.job_id})

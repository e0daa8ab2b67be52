"""Operations on observed jobs: those that somebody else gave to a host's scheduler."""

from typing import Annotated, Any

from django.http import HttpRequest
from django.urls import reverse
from ninja import Query, Router, Status
from pydantic import Field

from runners.client.replies.observed_jobs import (
    ObservedFigure,
    ObservedJobDetail,
    ObservedJobPage,
    ObservedJobReply,
)
from webapp.accounts.models import Role, team_ids_of
from webapp.accounts.services import check_role, current_membership, signed_in
from webapp.api.auth import ADMIN, READ
from webapp.api.requests import Paging, Sent, page_keys
from webapp.core.problems import REFUSALS, InvalidProblem
from webapp.core.queries import in_order
from webapp.hosts.models import Host
from webapp.jobs.models import MOST_JOB_ID, ObservedJob
from webapp.jobs.observed_figures import rows_of
from webapp.jobs.observed_jobs import (
    job_for_operator,
    job_forget,
    job_observe,
    report_of,
    visible_job,
)
from webapp.plans.models import Plan
from webapp.servers.observed_jobs import server_of

router = Router(tags=["servers"], auth=READ)


class NewObservedJob(Sent):
    """A job of somebody else to observe; one that is observed already gets this plan."""

    host: Annotated[str, Field(max_length=80, description="Slug of a Slurm or Kubernetes host")]
    job_id: Annotated[
        str, Field(max_length=MOST_JOB_ID, description="Such as 17 or 17_3, or a pod's name")
    ]
    plan: Annotated[str | None, Field(description="Id of a saved plan; null: none")] = None


def _reply(row: ObservedJob) -> dict[str, Any]:
    report = report_of(row)
    facts, server = report.facts, server_of(row)
    return {
        "id": row.pk,
        "job_id": row.job_id,
        "name": facts.name if facts else "",
        "host": row.host.slug,
        "team": row.team_id,
        "owner": row.owner.get_username() if row.owner else "",
        "plan": row.plan_id,
        "created_at": row.created_at,
        "reported_at": row.reported_at,
        "state": facts.state if facts else "",
        "detail": facts.detail if facts else "",
        "problem": report.problem,
        "user": facts.user if facts else "",
        "nodes": facts.nodes if facts else "",
        "devices": facts.devices if facts else None,
        "elapsed_seconds": facts.elapsed_seconds if facts else None,
        "time_limit_seconds": facts.time_limit_seconds if facts else None,
        "started_at_ms": report.started_at_ms,
        "ended_at_ms": report.ended_at_ms,
        "has_ended": report.has_ended,
        "exit_code": report.exit_code,
        "signal": report.signal,
        "addresses": list(report.addresses),
        "server": server.pk if server else None,
        "url": reverse("observed-job", args=[row.pk]),
    }


def _detail(row: ObservedJob) -> ObservedJobDetail:
    report = report_of(row)
    return ObservedJobDetail(
        **_reply(row),
        figures=[
            ObservedFigure(
                name=each.name,
                measured=each.measured,
                predicted=each.predicted.value if each.predicted else None,
                low=each.predicted.low if each.predicted else None,
                high=each.predicted.high if each.predicted else None,
            )
            for each in rows_of(row)
        ],
        log=list(report.log),
        log_path=report.log_path,
        log_problem=report.log_problem,
    )


def _unknown(field: str, named: str) -> InvalidProblem:
    message = f"Your team has no {field} {named[:40]!r}."
    return InvalidProblem(field, message, errors=[{"field": field, "message": message}])


@router.get(
    "/observed-jobs",
    response={200: ObservedJobPage, **REFUSALS},
    operation_id="list_observed_jobs",
)
def job_list(request: HttpRequest, paging: Query[Paging]) -> ObservedJobPage:
    """Return the teams' observed jobs, the newest first."""
    teams = team_ids_of(request.user)
    rows = ObservedJob.objects.filter(team__in=teams)
    listed = page_keys(rows, "created_at", teams, paging)
    found = in_order(ObservedJob.objects.select_related("owner", "host"), listed.keys)
    return ObservedJobPage(
        items=[ObservedJobReply(**_reply(each)) for each in found], next_cursor=listed.next_cursor
    )


@router.post(
    "/observed-jobs",
    auth=ADMIN,
    response={201: ObservedJobDetail, **REFUSALS},
    operation_id="observe_job",
)
def job_add(request: HttpRequest, body: NewObservedJob) -> Status[ObservedJobDetail]:
    """Observe a job that somebody else gave to a host's scheduler; nothing of it is changed.

    Sent again, it changes the plan beside the job.
    """
    membership = current_membership(request)
    check_role(Role(membership.role), Role.OPERATOR)
    host = Host.objects.filter(team=membership.team, slug=body.host).first()
    if host is None:
        raise _unknown("host", body.host)
    plan = None
    if body.plan:
        plans = Plan.objects.visible_to(request.user).filter(team=membership.team)
        plan = plans.filter(pk=body.plan).first()
        if plan is None:
            raise _unknown("plan", body.plan)
    row = job_observe(host=host, by=signed_in(request), job_id=body.job_id, plan=plan)
    return Status(201, _detail(row))


@router.get(
    "/observed-jobs/{observed_id}",
    response={200: ObservedJobDetail, **REFUSALS},
    operation_id="get_observed_job",
)
def job_get(request: HttpRequest, observed_id: str) -> ObservedJobDetail:
    """Return an observed job as its host read it last, with what its plan says."""
    return _detail(visible_job(request, observed_id))


@router.delete(
    "/observed-jobs/{observed_id}",
    auth=ADMIN,
    response={204: None, **REFUSALS},
    operation_id="remove_observed_job",
)
def job_remove(request: HttpRequest, observed_id: str) -> Status[None]:
    """Observe a job no longer; the job runs on."""
    job_forget(job=job_for_operator(request, observed_id), by=signed_in(request))
    return Status(204, None)
